//! The screen on recorded machines: two of them word for word, all of them for what must hold.

use std::fs;
use std::path::{Path, PathBuf};

use elfen_machine::doctor::answers::Answers;
use elfen_machine::lanes::{self, Lanes};
use elfen_machine::topology::Topology;
use snapbox::assert_data_eq;

use super::*;

const LINES: usize = 24;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doctor")
}

/// What `elfen run` would say there, if anything.
fn said(machine: &str, pair: Option<&str>, names_a_service: bool) -> Option<String> {
    let source = Source::parse_recording(machine).expect("a recording");
    let topology = Topology::read(&source).expect("a topology");
    let lanes = match pair {
        Some(pair) => lanes::by_hand(pair, &topology).ok()?,
        None => Lanes { pairs: lanes::default_pairs(&topology), warnings: Vec::new() },
    };
    let answers = Answers::recorded(&source).expect("answers");
    let machine = Machine {
        source: &source,
        topology: &topology,
        lanes: &lanes,
        by_hand: pair.is_some(),
        answers: &answers,
    };
    match explained(&machine, names_a_service)? {
        Failure::WithScreen { failure, screen } => Some(format!("elfen: {failure}\n{screen}")),
        other => panic!("{other:?}"),
    }
}

fn machine(name: &str) -> String {
    fs::read_to_string(folder().join(name).with_extension("machine")).expect("UTF-8")
}

fn on(name: &str, pair: Option<&str>) -> String {
    said(&machine(name), pair, false).expect("it lacks something")
}

#[test]
fn a_machine_without_anything() {
    assert_data_eq!(on("bare", None), snapbox::file!["bare.txt"].raw());
}

#[test]
fn the_same_with_a_pair_by_hand() {
    assert_data_eq!(on("bare", Some("0:1")), snapbox::file!["bare-by-hand.txt"].raw());
}

/// Goal: whatever a machine lacks, it is one screen, and ends with one step. Method: every
/// recording, as found and by hand, with a service named and without.
#[test]
fn every_machine_fits_a_screen() {
    let mut seen = 0;
    for entry in fs::read_dir(folder()).expect("recordings") {
        let path = entry.expect("a file").path();
        if path.extension().is_none_or(|extension| extension != "machine") {
            continue;
        }
        let text = fs::read_to_string(path).expect("UTF-8");
        for (pair, service) in
            [(None, false), (None, true), (Some("0:1"), false), (Some("0:1"), true)]
        {
            let Some(text) = said(&text, pair, service) else { continue };
            seen += 1;
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
    assert!(seen >= 10, "{seen}");
}

/// Goal: the step is one that helps on that machine. Method: machines without a signal, each for
/// another reason.
#[test]
fn the_step_is_one_that_helps() {
    let locked = machine("server-root")
        .replace("[none] integrity confidentiality", "none integrity [confidentiality]")
        .replace(r#""attach": "attached""#, r#""attach": "not-permitted""#)
        .replace(r#""handed": "mapped""#, r#""handed": "not-up""#)
        .replace(r#"{"opened": {"waits": true, "ties": 8}}"#, r#""absent""#);
    let cases = [
        (machine("desktop-user"), "next: have root add this user to the group"),
        (locked, "next: boot with lockdown=integrity or none"),
        (machine("container"), "next: boot Linux 5.15 or newer"),
        (machine("bare"), "next: name a service that publishes its requests"),
    ];
    for (machine, step) in cases {
        let text =
            said(&machine, Some("4:0"), false).or_else(|| said(&machine, Some("0:1"), false));
        let text = text.expect("it lacks something");
        assert!(text.contains(step), "{machine}: {text}");
    }
}

/// Goal: a run that names a service is not told that it needs more. Method: a machine
/// whose one signal is the page.
#[test]
fn the_page_is_enough_for_a_run_that_names_a_service() {
    let bare = machine("bare");
    assert_eq!(said(&bare, Some("0:1"), true), None);
    let text = said(&bare, None, true).expect("no lanes");
    assert!(text.contains("\nyes  signal     service-page: "), "{text}");
}

/// Goal: what is cut says so, and stays in its columns. Method: more words than fit.
#[test]
fn long_reasons_are_cut() {
    let lines = cut(&"word ".repeat(60), 40, 2);
    assert_eq!(lines.len(), 2);
    assert!(lines[1].ends_with(MORE) && lines.iter().all(|line| line.len() <= 40), "{lines:?}");
    assert_eq!(cut("word", 40, 2), ["word"]);
}
