//! The screen on recorded machines: two of them in full, all of them for general properties.

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

/// What `elfen run` prints on a machine that lacks something.
fn printed(machine: &Path, pair: Option<&str>, names_a_service: bool) -> Option<String> {
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
    match explain(&machine, names_a_service)? {
        Failure::WithScreen { failure, screen } => Some(format!("elfen: {failure}\n{screen}")),
        other => panic!("{other:?}"),
    }
}

fn screen_on(machine: &str, pair: Option<&str>) -> String {
    let path = folder().join(machine).with_extension("machine");
    printed(&path, pair, false).expect("it lacks something")
}

#[test]
fn a_machine_without_any_mechanism_gets_this_screen() {
    assert_data_eq!(screen_on("bare", None), snapbox::file!["bare.txt"].raw());
}

#[test]
fn the_same_machine_with_a_pair_given_by_hand_gets_this_screen() {
    assert_data_eq!(screen_on("bare", Some("0:1")), snapbox::file!["bare-by-hand.txt"].raw());
}

/// Goal: every failure fits one screen and ends with one step. Method: every recording, with its
/// own pairs and one given by hand, with a service named and without.
#[test]
fn every_failure_fits_one_screen() {
    let mut screens = 0;
    for entry in fs::read_dir(folder()).expect("recordings") {
        let path = entry.expect("a file").path();
        if path.extension().is_none_or(|extension| extension != "machine") {
            continue;
        }
        for (pair, service) in
            [(None, false), (None, true), (Some("0:1"), false), (Some("0:1"), true)]
        {
            let Some(text) = printed(&path, pair, service) else { continue };
            screens += 1;
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
    assert!(screens >= 10, "{screens}");
}

/// Goal: the step helps on that machine. Method: machines without a signal, each for another
/// reason.
#[test]
fn the_step_fits_the_machine() {
    let cases = [
        ("desktop-user", "next: have root add this user to the group"),
        ("lockdown", "next: boot with lockdown=integrity or none"),
        ("container", "next: boot Linux 5.15 or newer"),
        ("bare", "next: name a service that publishes its requests"),
    ];
    for (machine, step) in cases {
        let text = screen_on(machine, Some("0:1"));
        assert!(text.contains(step), "{machine}: {text}");
    }
}

/// Goal: a run that names a service lacks no signal. Method: a machine whose only signal is the
/// page of a service.
#[test]
fn a_page_is_enough_for_a_run_that_names_a_service() {
    let bare = folder().join("bare.machine");
    assert_eq!(printed(&bare, Some("0:1"), true), None);
    let text = printed(&bare, None, true).expect("no lanes");
    assert!(text.contains("\nyes  signal     service-page: "), "{text}");
}

/// Goal: a cut text ends with dots, and stays in its columns. Method: more words than fit.
#[test]
fn long_reasons_are_cut() {
    let lines = cut(&"word ".repeat(60), 40, 2);
    assert_eq!(lines.len(), 2);
    assert!(lines[1].ends_with(MORE) && lines.iter().all(|line| line.len() <= 40), "{lines:?}");
    assert_eq!(cut("word", 40, 2), ["word"]);
}
