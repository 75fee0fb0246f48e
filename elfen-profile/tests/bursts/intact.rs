//! Goal: a program that filters its system calls, sets handlers, forks, faults or is stopped goes
//! on as ever, and nothing is left in it. Method: programs that do little else.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_profile::bursts::{BurstError, record};
use elfen_profile::recording::Recorded;

use super::program::{Counts, Running, compile, compile_as, process_subject, program_subject};
use super::{ORDER, recorded, rounds};

/// Starts a program, and waits until it does what it was started for.
fn started(program: &Path, words: &[&str]) -> Running {
    let child = Command::new(program).args(words).stdout(Stdio::piped()).spawn().unwrap();
    let mut running = Running(child);
    let mut line = String::new();
    BufReader::new(running.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    running
}

fn recorded_for(process: u32, milliseconds: u64) -> Recorded {
    record(&process_subject(process, milliseconds), &ORDER, |_| {}).unwrap()
}

fn status(process: u32) -> String {
    fs::read_to_string(format!("/proc/{process}/status")).unwrap()
}

fn assert_clean(process: u32) {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    assert!(!maps.contains("elfen-profile"), "{process}: {maps}");
    let status = status(process);
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).unwrap();
    let caught = u64::from_str_radix(caught, 16).unwrap();
    assert_eq!(caught & 1 << (libc::SIGURG - 1), 0, "{process}");
}

/// Goal: a burst that begins right after a program has set a filter does not kill it. Method: a
/// filter that allows only rt_sigreturn(2) and exit(2), and the strict mode of the kernel.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn a_filter_that_is_set_later_does_not_kill() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "confined.c", &[]);
    for round in 0..6 {
        let mut words: Vec<OsString> = vec![program.clone().into()];
        words.extend((round % 2 > 0).then(|| "strict".into()));
        let recorded = record(&program_subject(words), &ORDER, |_| {}).unwrap();
        assert_eq!(recorded.ended.unwrap().code(), Some(0), "{round}: {:?}", recorded.ended);
        assert!(recorded.profile.bursts > 5);
        let left = &recorded.profile.left;
        assert!(left.iter().any(|left| left.contains("filters its system calls")), "{left:?}");
    }
}

/// Goal: a program has the handlers that it sets, and never ours. Method: it asks for its handlers,
/// sets new ones while it is recorded, and puts the old ones back after that.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn handlers_that_are_set_later_are_those_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    for (name, options) in [("handlers", &[][..]), ("static", &["-static"])] {
        let program = compile_as(folder.path(), "handlers.c", name, options);
        let running = started(&program, &[]);
        let recorded = recorded_for(running.0.id(), 1500);
        assert!(recorded.profile.bursts > 20, "{name}: {} bursts", recorded.profile.bursts);
        assert!(!running.read("maps").contains("elfen-profile"));
        assert_only_own_handlers(running, name);
    }
}

/// Goal: handlers that are set by a library for threads, which some C libraries have, are treated
/// alike; a C library that sets them in an unknown way is refused. Method: libraries of such names.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn each_c_library_is_known_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let started_with = |name: &str, options: &[&str], words: &[&str]| {
        let shared = [&["-shared", "-fPIC"], options].concat();
        let library = compile_as(folder.path(), "sigaction.c", name, &shared);
        let search = format!("-Wl,-rpath,{}", folder.path().display());
        let linked = ["-Wl,--no-as-needed", library.to_str().unwrap(), &search];
        started(&compile_as(folder.path(), "handlers.c", "handlers", &linked), words)
    };
    let running = started_with("libpthread-2.31.so", &[], &[]);
    let recorded = recorded_for(running.0.id(), 1500);
    assert!(recorded.profile.bursts > 20, "{} bursts", recorded.profile.bursts);
    assert_only_own_handlers(running, "a library for threads");

    let running = started_with("libc-2.27.so", &["-DOTHER"], &["often"]);
    let subject = process_subject(running.0.id(), 5000);
    let Err(BurstError::Refused(why)) = record(&subject, &ORDER, |_| {}) else {
        panic!("recorded")
    };
    assert_eq!(why, "it has no C library of a known kind");
    assert_only_own_handlers(running, "an unknown C library");
}

/// Ends `handlers.c`, which prints what it saw.
fn assert_only_own_handlers(mut running: Running, name: &str) {
    // SAFETY: takes numbers. The process is our child, which has not been waited for.
    unsafe { libc::kill(running.0.id().cast_signed(), libc::SIGUSR1) };
    let mut output = String::new();
    running.0.stdout.as_mut().unwrap().read_to_string(&mut output).unwrap();
    assert_eq!(output, "strange 0, outside 0, not urgent 0\n", "{name}");
    assert_eq!(running.0.wait().unwrap().code(), Some(3), "{name}");
}

/// Goal: a program never sees our handlers, not even while they are taken out. Method: recordings
/// of one that does little else than to set and ask for its handlers.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn handlers_that_are_set_while_a_recording_ends_are_those_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "handlers.c", &[]);
    let running = started(&program, &["often"]);
    for _ in 0..rounds() {
        recorded_for(running.0.id(), 100);
        assert!(!running.read("maps").contains("elfen-profile"));
    }
    assert_only_own_handlers(running, "often");
}

/// Goal: children that are forked while a program is recorded are recorded, and have nothing of
/// ours afterwards. Method: children that compute, of which one leaves the family.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn forked_children_are_recorded_and_left_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "forks.c", &[]);
    // A loaded machine may give children too little time for their share.
    let is_enough = |doubled: u32| children_are_recorded(&program, 2500 << doubled);
    assert!((0..5).any(is_enough), "children got no time");
}

/// Returns whether they ran for long enough.
fn children_are_recorded(program: &Path, milliseconds: u64) -> bool {
    let mut running = started(program, &[]);
    let process = running.0.id();
    let recorded = recorded_for(process, milliseconds);
    let of_parent = utime(process) as f64;
    assert_clean(process);
    let mut lines = BufReader::new(running.0.stdout.as_mut().unwrap()).lines();
    let children: Vec<u32> =
        (0..3).map(|_| lines.next().unwrap().unwrap().parse().unwrap()).collect();
    let mut of_children = 0.0;
    for (number, &child) in (0..).zip(&children) {
        // The one that leaves the family is not recorded.
        of_children += if number == 1 { 0.0 } else { utime(child) as f64 };
        assert_clean(child);
        assert!(!status(child).contains("zombie"), "{child} ended");
    }
    assert!(recorded.profile.left.is_empty(), "{:?}", recorded.profile.left);
    let found = Counts::of(&recorded.profile, program).share("of_child");
    let share = of_children / (of_parent + of_children);
    let ran_long = of_children > 80.0;
    assert!(!ran_long || found > 0.6 * share, "{found} of {share} in children");
    ran_long
}

/// Goal: a stack without room for a signal does not overflow. Method: a coroutine and a thread.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn small_stacks_do_not_overflow() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "stacks.c", &["-pthread"]);
    for kind in ["coroutine", "thread"] {
        let (text, recorded) = recorded(folder.path(), &[program.clone().into(), kind.into()]);
        let ended = recorded.ended.unwrap().code();
        assert_eq!((&*text, ended), ("changed 0\n", Some(5)), "{kind}: {:?}", recorded.ended);
        let left = recorded.profile.left;
        assert!(left.iter().any(|left| left.contains("small stacks")), "{kind}: {left:?}");
    }
}

/// Goal: nothing is left in a program that is hardly ever outside of a handler or the kernel, or
/// that is stopped. Method: loops of faults, of mprotect(2) and of signals; SIGSTOP.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn nothing_is_left_in_a_program_that_is_hard_to_stop() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "busy.c", &["-pthread"]);
    for kind in ["faults", "protects", "signals", "threads", "stopped"] {
        let mut running = started(&program, &[kind]);
        let process = running.0.id();
        let stops = kind == "stopped";
        let stopper = std::thread::spawn(move || {
            sleep(Duration::from_millis(500));
            // SAFETY: takes numbers. The process is our child, which has not been waited for.
            stops.then(|| unsafe { libc::kill(process.cast_signed(), libc::SIGSTOP) });
        });
        let recorded = recorded_for(process, 1000);
        stopper.join().unwrap();
        // Threads in handlers of ours have their signals blocked, which is noted too.
        let left = recorded.profile.left;
        assert!(!left.iter().any(|left| left.starts_with("process")), "{kind}: {left:?}");
        assert_clean(process);
        assert_eq!(status(process).contains("T (stopped)"), stops, "{kind}");
        // SAFETY: as above.
        unsafe { libc::kill(process.cast_signed(), libc::SIGCONT) };
        let (before, until) = (utime(process), Instant::now() + Duration::from_secs(10));
        while utime(process) < before + 5 {
            assert!(Instant::now() < until, "{kind} does not go on");
            sleep(Duration::from_millis(20));
        }
        assert!(running.0.try_wait().unwrap().is_none(), "{kind} ended");
    }
}

fn utime(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}
