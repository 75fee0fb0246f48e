//! Tests the screen on recorded machines: two machines word for word, and properties on all
//! machines.

use std::fs;
use std::path::Path;

use elfen_machine::lanes::{self, Lanes};
use elfen_machine::topology::Topology;
use snapbox::assert_data_eq;

use super::*;

const LINES: usize = 24;
const MACHINES: [&str; 6] = ["bare", "container", "desktop-user", "server-root", "smt-off", "vm"];

fn recording(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor");
    fs::read_to_string(folder.join(name).with_extension("machine")).expect("UTF-8")
}

/// The message of `elfen run` on a recorded machine; `None` if the machine lacks nothing.
fn message(recording: &str, pair: Option<&str>, names_a_service: bool) -> Option<String> {
    let source = Source::parse_recording(recording).expect("a recording");
    let topology = Topology::read(&source).expect("a topology");
    let lanes = match pair {
        Some(pair) => lanes::by_hand(pair, &topology).ok()?,
        None => Lanes { pairs: lanes::default_pairs(&topology), warnings: Vec::new() },
    };
    let by_hand = pair.is_some();
    let machine = Machine { source: &source, topology: &topology, lanes: &lanes, by_hand };
    let checks = doctor::examine(&machine).expect("a whole recording");
    match lacking(checks, names_a_service)? {
        Failure::WithScreen { failure, screen } => Some(format!("elfen: {failure}\n{screen}")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_machine_without_anything() {
    let on = |pair| message(&recording("bare"), pair, false).expect("it lacks something");
    assert_data_eq!(on(None), snapbox::file!["bare.txt"].raw());
    assert_data_eq!(on(Some("0:1")), snapbox::file!["bare-by-hand.txt"].raw());
}

/// Goal: on every machine the message is one screen, and ends with one step. Method: every
/// recording, with its own pairs and with a given pair, with a named service and without.
#[test]
fn every_machine_fits_a_screen() {
    let mut printed = 0;
    for name in MACHINES {
        for (pair, service) in
            [(None, false), (None, true), (Some("0:1"), false), (Some("0:1"), true)]
        {
            let Some(text) = message(&recording(name), pair, service) else { continue };
            printed += 1;
            assert!(text.lines().count() <= LINES, "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
            for label in LABELS {
                let answers = ["yes", "no"].map(|answer| format!("\n{answer:5}{label:11}"));
                assert!(answers.iter().any(|answer| text.contains(answer)), "{label}: {text}");
            }
            let (_, step) = text.split_once("\nnext: ").expect("a step");
            assert!(step.len() > LAST.len() && !step.starts_with('\n'), "{text}");
        }
    }
    assert!(printed >= 10, "{printed}");
}

/// Goal: the step helps on the machine. Method: machines without a signal, for different reasons.
#[test]
fn the_step_fits_the_reason() {
    let locked = recording("server-root")
        .replace("[none] integrity confidentiality", "none integrity [confidentiality]")
        .replace("attach: attached", "attach: not-permitted")
        .replace("elfend: mapped", "elfend: absent")
        .replace("nanonap: opened: 8", "nanonap: absent");
    let cases = [
        (recording("desktop-user"), "next: have root add this user to the group"),
        (locked, "next: boot with lockdown=integrity or none"),
        (recording("container"), "next: boot Linux 5.15 or newer"),
        (recording("bare"), "next: name a service that publishes its requests"),
    ];
    for (machine, step) in cases {
        let text =
            message(&machine, Some("4:0"), false).or_else(|| message(&machine, Some("0:1"), false));
        let text = text.expect("it lacks something");
        assert!(text.contains(step), "{machine}: {text}");
    }
}

/// Goal: a run that names a service needs no other source of signals. Method: a machine whose only
/// source is the page.
#[test]
fn the_page_is_enough_for_a_run_that_names_a_service() {
    let bare = recording("bare");
    assert_eq!(message(&bare, Some("0:1"), true), None);
    let text = message(&bare, None, true).expect("no lanes");
    assert!(text.contains("\nyes  source     service-page: "), "{text}");
}

/// Goal: a shortened text has a mark and keeps within its columns. Method: more words than fit.
#[test]
fn long_reasons_are_cut() {
    let lines = cut(&"word ".repeat(60), 40, 2);
    assert_eq!(lines.len(), 2);
    assert!(lines[1].ends_with(MORE) && lines.iter().all(|line| line.len() <= 40), "{lines:?}");
    assert_eq!(cut("word", 40, 2), ["word"]);
}
