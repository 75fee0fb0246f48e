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
fn said(machine: &Path, pair: Option<&str>, names_a_service: bool) -> Option<String> {
    let source = Source::open_recording(machine).expect("a recording");
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

fn on(machine: &str, pair: Option<&str>) -> String {
    let path = folder().join(machine).with_extension("machine");
    said(&path, pair, false).expect("it lacks something")
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
        for (pair, service) in
            [(None, false), (None, true), (Some("0:1"), false), (Some("0:1"), true)]
        {
            let Some(text) = said(&path, pair, service) else { continue };
            seen += 1;
            assert!(text.lines().count() <= LINES, "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
            for (_, label) in NEEDS {
                let answers = ["yes", "no"].map(|answer| format!("\n{answer:5}{label:11}"));
                assert!(answers.iter().any(|answer| text.contains(answer)), "{label}: {text}");
            }
            let (_, step) = text.split_once("\nnext: ").expect("a step");
            assert!(step.len() > LAST.len() && !step.starts_with('\n'), "{text}");
        }
    }
    assert!(seen >= 10, "{seen}");
}

/// Goal: the step is one that helps on that machine. Method: machines without a
/// signal, each for another reason.
#[test]
fn the_step_is_one_that_helps() {
    let cases = [
        ("desktop-user", "next: have root add this user to the group"),
        ("lockdown", "next: boot with lockdown=integrity or none"),
        ("container", "next: boot Linux 5.15 or newer"),
        ("bare", "next: name a service that publishes its requests"),
    ];
    for (machine, step) in cases {
        let text = on(machine, Some("0:1"));
        assert!(text.contains(step), "{machine}: {text}");
    }
}

/// Goal: a run that names a service is not told that it needs more. Method: a machine
/// whose one signal is the page.
#[test]
fn the_page_is_enough_for_who_names_a_service() {
    let bare = folder().join("bare.machine");
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
