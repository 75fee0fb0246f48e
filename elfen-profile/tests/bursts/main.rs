//! Goal: a program does in bursts what it does without, and the bursts show what it does. Method:
//! a program that looks at itself, programs with known shares, and what can go wrong around them.

mod intact;
#[path = "../program/mod.rs"]
mod program;

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_profile::bursts::{BurstError, Order, record};
use elfen_profile::profile::{Profile, What};
use elfen_profile::recording::{Recorded, RecordingError};
use program::{
    ALL, Running, assert_shares, compile, compile_as, in_shell, natively, process_subject,
    program_subject,
};

const ORDER: Order = Order { cost: 0.5, events: 500, what: ALL, until: None };

fn all_ways_are_found(profile: &Profile) -> bool {
    !profile.left.iter().any(|left| left.contains("whose way was not found"))
}

fn recorded(folder: &Path, words: &[OsString]) -> (String, Recorded) {
    recorded_with(folder, words, ALL)
}

fn recorded_with(folder: &Path, words: &[OsString], what: What) -> (String, Recorded) {
    let (output, shell) = in_shell(folder, words);
    let recorded = record(&program_subject(shell), &Order { what, ..ORDER }, |_| {}).unwrap();
    (fs::read_to_string(output).unwrap(), recorded)
}

/// How often a test tries what goes wrong seldom.
fn rounds() -> u32 {
    std::env::var("BURST_ROUNDS").map_or(3, |text| text.parse().unwrap())
}

/// Goal: signals, faults, threads, children, vector registers and flags are as ever. Method: the
/// program checks them itself; it prints and returns the same.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn a_program_notices_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "bursts.c", &["-pthread"]);
    let native = Command::new(&program).arg("100").output().unwrap();
    let expected = String::from_utf8(native.stdout).unwrap();
    assert!(expected.contains("outside 0, masks 0") && expected.contains("gs 0"), "{expected}");
    let rounds = rounds();
    let mut bursts = 0;
    for round in 0..rounds {
        let words = [program.clone().into(), "100".into()];
        let what = What { streams: round % 2 > 0, ..ALL };
        let (found, recorded) = recorded_with(folder.path(), &words, what);
        assert_eq!(found, expected);
        assert_eq!(recorded.ended.unwrap().code(), native.status.code());
        assert!(all_ways_are_found(&recorded.profile), "{:?}", recorded.profile.left);
        bursts += recorded.profile.bursts;
    }
    assert!(bursts > 5 * u64::from(rounds), "{bursts} bursts");
}

/// Goal: shares are those of the program. Method: a loop whose functions execute known numbers of
/// instructions.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn shares_are_those_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "shares.c", &[]);
    let (text, recorded) = recorded(folder.path(), &[program.clone().into(), "1500".into()]);
    let profile = recorded.profile;
    assert_shares(&profile, &program, &text);
    assert!(profile.bursts > 20 && all_ways_are_found(&profile), "{} bursts", profile.bursts);
}

/// Goal: streams are found in bursts. Method: a program that walks a list of 40 nodes of two words,
/// and uses other memory at random in between.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn the_walk_of_a_list_is_a_stream() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "chase.c", &[]);
    let words = [program.into(), "20000000".into(), "40".into()];
    let what = What { streams: true, ..ALL };
    let (_, recorded) = recorded_with(folder.path(), &words, what);
    let profile = recorded.profile;
    let heat = |length: usize, times: u64| length as u64 * times;
    let streams = profile.streams.iter().map(|(one, count)| (one.references.len(), count.times));
    let (length, times) = streams.max_by_key(|&(length, times)| heat(length, times)).unwrap();
    assert!((80..=90).contains(&length), "{length} references");
    let share = heat(length, times) as f64 / profile.references as f64;
    assert!(share > 0.5 && share < 0.95, "{share} of {} references", profile.references);
    assert!(profile.bursts > 20 && all_ways_are_found(&profile), "{} bursts", profile.bursts);
}

/// Goal: code that is unloaded never runs again. Method: two libraries are loaded in turn at the
/// same address, and each is called often.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn libraries_at_the_same_address_are_not_confused() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = ["1", "2"].map(|value| {
        let options = ["-shared", "-fPIC", &format!("-DVALUE={value}")];
        compile_as(folder.path(), "library.c", &format!("lib{value}.so"), &options)
    });
    let program = compile(folder.path(), "swap.c", &[]);
    let [first, second] = libraries.map(OsString::from);
    let words = [program.into(), "300".into(), first, second];
    let (text, recorded) = recorded(folder.path(), &words);
    assert_eq!(
        (&*text, recorded.ended.unwrap().code()),
        ("wrong 0, same address 1\n", Some(0)),
        "{:?}",
        recorded.ended
    );
    assert_eq!(recorded.ended.unwrap().code(), Some(0));
    assert!(recorded.profile.bursts > 5, "{} bursts", recorded.profile.bursts);
}

/// Goal: a program that executes another one at any moment goes on. Method: one that executes
/// itself about a thousand times a second.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn a_program_that_executes_itself_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "executes.c", &[]);
    let words = [program.into(), "2000".into(), "1".into()];
    let native = natively(&words);
    assert_eq!(native.status.code(), Some(7));
    let expected = String::from_utf8(native.stdout).unwrap();
    let (found, recorded) = recorded(folder.path(), &words);
    assert_eq!((found, recorded.ended.unwrap().code()), (expected, Some(7)));
}

/// Goal: nothing is left in a process after its recording, and it can be recorded again.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn a_running_process_is_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "shares.c", &[]);
    let running = Running::start(Command::new(&program).arg("1000000"));
    sleep(Duration::from_millis(100));
    let files = |maps: &str| -> Vec<String> {
        maps.lines().filter(|line| line.contains("r-xp")).map(str::to_owned).collect()
    };
    let before = files(&running.read("maps"));
    for _ in 0..2 {
        let recorded = record(&process_subject(running.0.id(), 1500), &ORDER, |_| {}).unwrap();
        assert!(recorded.profile.bursts > 5, "{} bursts", recorded.profile.bursts);
        assert!(recorded.ended.is_none());
        let maps = running.read("maps");
        assert!(!maps.contains("elfen-profile"), "{maps}");
        assert_eq!(files(&maps), before);
    }
    let status = running.read("status");
    assert!(status.contains("SigCgt:\t0000000000000000"), "{status}");
}

/// Goal: a program that may have no more descriptors keeps its own. Method: a limit that leaves
/// room for two, where the recording needs three.
#[test]
#[ignore = "needs root: the process is not a descendant"]
fn a_program_without_room_for_descriptors_keeps_its_own() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 5; while :; do :; done"]);
    let running = Running::start(&mut command);
    sleep(Duration::from_millis(100));
    let opened = || {
        let entries = fs::read_dir(format!("/proc/{}/fd", running.0.id())).unwrap();
        let mut found: Vec<_> = entries
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.clone(), fs::read_link(path).unwrap()))
            .collect();
        found.sort();
        found
    };
    let before = opened();
    match record(&process_subject(running.0.id(), 1500), &ORDER, |_| {}) {
        Err(BurstError::Refused(why)) => assert!(why.contains("Too many open files"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(opened(), before);
    assert!(!running.read("maps").contains("elfen-profile"));
}

/// Goal: root records a process that has become another user, as servers do. Method: a shell.
#[test]
#[ignore = "needs root: it starts a process as another user"]
fn a_process_of_another_user_is_sampled() {
    let running = Running::as_another_user();
    sleep(Duration::from_millis(100));
    let recorded = record(&process_subject(running.0.id(), 1500), &ORDER, |_| {}).unwrap();
    let Profile { bursts, left, .. } = &recorded.profile;
    assert!(*bursts > 5 && left.is_empty(), "{bursts}, {left:?}");
    assert!(!running.read("maps").contains("elfen-profile"));
}

/// Goal: what cannot be recorded is refused with a reason, and goes on unharmed.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn processes_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "unfit.c", &[]);
    for (kind, reason) in [
        ("urgent", "it handles SIGURG itself"),
        ("filtered", "it filters its system calls"),
        ("locked", "it locks its memory"),
        ("traced", "already traced"),
    ] {
        let mut running = Running::start(Command::new(&program).arg(kind));
        sleep(Duration::from_millis(100));
        match record(&process_subject(running.0.id(), 1500), &ORDER, |_| {}) {
            Err(BurstError::Refused(why) | BurstError::Closed(why)) => {
                assert!(why.contains(reason), "{kind}: {why}");
            }
            other => panic!("{kind}: {other:?}"),
        }
        assert!(running.0.try_wait().unwrap().is_none(), "{kind} ended");
    }
    let mut running = Running::start(Command::new(&program).arg("filtered later"));
    let recorded = record(&process_subject(running.0.id(), 4000), &ORDER, |_| {}).unwrap();
    let left = recorded.profile.left.join("; ");
    assert!(left.contains("it filters its system calls since then"), "{left}");
    let bursts = recorded.profile.bursts;
    assert!(bursts > 5, "{bursts} bursts, {left}");
    assert!(running.0.try_wait().unwrap().is_none());
    let gone = record(&process_subject(0x3fff_ffff, 4000), &ORDER, |_| {});
    assert!(matches!(gone, Err(BurstError::Recording(RecordingError::Gone))));
}

/// Goal: the end of a program is reported as it was, however it ends.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn the_end_of_a_program_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "shares.c", &[]);
    let words = vec![program.into_os_string(), "1000000".into()];
    let began = Instant::now();
    let killed = record(&program_subject(words), &ORDER, |process| {
        if process > 0 {
            std::thread::spawn(move || {
                sleep(Duration::from_millis(1500));
                // SAFETY: takes numbers. The process is our child, which has not been waited for.
                unsafe { libc::kill(process, libc::SIGKILL) };
            });
        }
    });
    let recorded = killed.unwrap();
    assert_eq!(recorded.ended.unwrap().signal(), Some(libc::SIGKILL));
    assert!(recorded.profile.bursts > 5 && began.elapsed() < Duration::from_secs(30));
    let missing = record(&program_subject(vec!["/no/such/program".into()]), &ORDER, |_| {});
    assert!(matches!(missing, Err(BurstError::Recording(RecordingError::Program(_)))));
}
