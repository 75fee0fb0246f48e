//! Goal: a program in the code cache does what it does without, and its counts are exact. Method:
//! C programs with known counts, programs that look at themselves, and programs of Debian.

#[path = "../program/mod.rs"]
mod program;
mod programs;
mod rules;
mod streams;
mod traces;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus};

use elfen_profile::everything::{Ended, Recorded, record};
use elfen_profile::profile::What;
use elfen_stream::counts::EdgeKind;
use program::{ALL, Counts, EDGES, compile, in_shell, natively};

/// Runs a program in the cache.
fn counted(folder: &Path, words: &[OsString], what: What) -> (Vec<u8>, Recorded) {
    let (output, shell) = in_shell(folder, words);
    let recorded = record(&shell, what, |_| {}).unwrap();
    (fs::read(output).unwrap(), recorded)
}

fn ended(status: ExitStatus) -> Ended {
    status.code().map_or(Ended::Killed(0), Ended::Exited)
}

/// Runs a program natively, with counters, and with events. Returns the last two.
fn assert_same(folder: &Path, words: &[OsString]) -> [Recorded; 2] {
    let native = natively(words);
    [EDGES, ALL].map(|what| {
        let (found, recorded) = counted(folder, words, what);
        // Not printed: it may be long and binary.
        assert!(found == native.stdout, "{words:?} prints something else, {what:?}");
        assert_eq!(recorded.ended, ended(native.status), "{words:?}, {what:?}");
        assert_eq!(recorded.profile.left, [] as [String; 0], "{words:?}, {what:?}");
        recorded
    })
}

#[test]
fn counts_are_exact() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "counts.c", &[]);
    let both = assert_same(folder.path(), &[program.clone().into()]);
    for recorded in &both {
        let counts = Counts::of(&recorded.profile, &program);
        // Its child calls `leaf` 100 times. The compiler may call it by a jump.
        assert_eq!(counts.begun("leaf"), 3000 + 100);
        assert_eq!(counts.begun("branches"), 9000);
        assert_eq!(counts.begun("by_pointer"), 5000);
        assert_eq!(counts.edges("main", "branches", EdgeKind::Call), 9000);
        assert_eq!(counts.edges("main", "by_pointer", EdgeKind::ComputedCall), 5000);
        let returns = counts.edges("main", "main", EdgeKind::Return);
        assert!((9000 + 5000 + 100..9000 + 5000 + 110).contains(&returns), "{returns}");
        // The shell, the program, and its child.
        assert_eq!(recorded.profile.programs, 3);
    }
    let [counted, traced] = both.map(|recorded| recorded.profile);
    assert!(counted.instructions.abs_diff(traced.instructions) * 1000 < counted.instructions);
    let stacks = traced.stacks.values().map(|one| one.instructions).sum::<u64>();
    assert!(stacks.abs_diff(traced.instructions) * 1000 < stacks, "{stacks}");
    let paths = traced.paths.values().map(|one| one.instructions).sum::<u64>();
    assert!((stacks * 9 / 10..=stacks).contains(&paths), "{paths} of {stacks}");
    // 9,000 calls of `branches` come from `main`, which is called by the C library.
    let counts = Counts::of(&traced, &program);
    let inside = traced.stacks.iter().filter(|(end, _)| counts.is_in(end.block, "branches"));
    for (end, _) in inside {
        let call = traced.caller(end.caller).unwrap();
        assert!(counts.is_in(call.call, "main"));
        assert_ne!(traced.caller(call.caller).unwrap().call.file, call.call.file);
    }
    // A path leads from `main` through `branches` alone for 6,000 of them.
    let times = traced.paths.iter().filter(|(last, _)| {
        let mut blocks = Vec::new();
        let mut number = **last;
        while let Some(one) = traced.path_block(number) {
            blocks.push(one.block);
            number = one.before;
        }
        let has = |function| blocks.iter().any(|&block| counts.is_in(block, function));
        has("branches") && !has("leaf")
    });
    let times: u64 = times.map(|(_, path)| path.count).sum();
    assert!((6000..=9000).contains(&times), "{times}");
}

#[test]
fn a_program_that_looks_at_itself_sees_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for options in [&["-pthread"][..], &["-pthread", "-static"]] {
        let program = compile(folder.path(), "signals.c", options);
        assert_same(folder.path(), &[program.into()]);
    }
}

#[test]
#[ignore = "needs a C++ compiler"]
fn exceptions_pass_through_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "throws.cpp", &[]);
    assert_same(folder.path(), &[program.into()]);
}

#[test]
fn code_of_an_unloaded_library_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let mut words = vec![compile(folder.path(), "reload.c", &["-ldl"]).into()];
    for (name, value) in [("one", "x + 1"), ("two", "x * 2")] {
        let source = folder.path().join(name).with_extension("c");
        fs::write(&source, format!("long value(long x) {{ return {value}; }}")).unwrap();
        let library = folder.path().join(name).with_extension("so");
        let mut command = Command::new("cc");
        command.args(["-O2", "-shared", "-fPIC", "-o"]).args([&library, &source]);
        assert!(command.status().unwrap().success());
        words.push(OsString::from(library));
    }
    let [recorded, traced] = assert_same(folder.path(), &words);
    for name in ["one.so", "two.so"] {
        let counts = Counts::of(&recorded.profile, &folder.path().join(name));
        assert_eq!(counts.begun("value"), 1000, "{name}");
        let counts = Counts::of(&traced.profile, &folder.path().join(name));
        assert_eq!(counts.begun("value"), 1000, "{name}");
    }
}
