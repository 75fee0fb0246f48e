//! Goal: a program in the code cache does what it does without, and its counts are exact. Method:
//! C programs with known counts, programs that look at themselves, and programs of Debian.

mod programs;
mod rules;
mod streams;
mod traces;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use elfen_instrument::symbols::FunctionTable;
use elfen_profile::everything::{Ended, Recorded, record};
use elfen_profile::profile::{Place, Profile, What};
use elfen_stream::counts::EdgeKind;

/// Compiles a file of `tests/c`.
fn compile(folder: &Path, source: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
    let program = folder.join(source.file_stem().unwrap());
    let compiler = if source.extension().unwrap() == "cpp" { "c++" } else { "cc" };
    let mut command = Command::new(compiler);
    command.args(["-O2", "-g", "-w", "-o"]).args([&program, &source]).args(options);
    assert!(command.status().expect("needs a C compiler").success());
    program
}

/// Runs a program in the cache in a process of its own, because it writes to our output.
fn counted(folder: &Path, words: &[OsString], what: What) -> (Vec<u8>, Recorded) {
    let output = folder.join("output");
    let mut shell: Vec<OsString> = ["sh", "-c", "exec \"$@\" > \"$0\""].map(OsString::from).into();
    shell.push(output.clone().into());
    shell.extend_from_slice(words);
    let recorded = record(&shell, what, |_| {}).unwrap();
    (fs::read(output).unwrap(), recorded)
}

fn natively(words: &[OsString]) -> (Vec<u8>, Ended) {
    let output = Command::new(&words[0]).args(&words[1..]).output().unwrap();
    let ended = output.status.code().map_or(Ended::Killed(0), Ended::Exited);
    (output.stdout, ended)
}

/// Runs a program natively, with counters, and with events. Returns the last two.
fn assert_same(folder: &Path, words: &[OsString]) -> [Recorded; 2] {
    let (expected, ended) = natively(words);
    [EDGES, ALL].map(|what| {
        let (found, recorded) = counted(folder, words, what);
        // Not printed: it may be long and binary.
        assert!(found == expected, "{words:?} prints something else, {what:?}");
        assert_eq!(recorded.ended, ended, "{words:?}, {what:?}");
        assert_eq!(recorded.profile.left, [] as [String; 0], "{words:?}, {what:?}");
        recorded
    })
}

const EDGES: What = What {
    stacks: false,
    paths: false,
    values: false,
    streams: false,
    stream_burst: 0,
    rules: &[],
};
const ALL: What =
    What { stacks: true, paths: true, values: false, streams: false, stream_burst: 0, rules: &[] };

/// Looks up counts by the names of functions.
struct Counts<'a> {
    profile: &'a Profile,
    file: u32,
    table: FunctionTable,
}

impl<'a> Counts<'a> {
    fn of(profile: &'a Profile, program: &Path) -> Self {
        let name = program.to_str().unwrap();
        let file = profile.files.iter().position(|file| file.path == name).unwrap();
        let table = FunctionTable::read(program).unwrap();
        Self { profile, file: u32::try_from(file).unwrap(), table }
    }

    fn is_in(&self, place: Place, function: &str) -> bool {
        let address = self.table.address_of(place.offset).filter(|_| place.file == self.file);
        address.and_then(|address| self.table.at(address)).is_some_and(|one| one.name == function)
    }

    fn edges(&self, from: &str, to: &str, kind: EdgeKind) -> u64 {
        let edges = self.profile.edges.iter().filter(|(edge, _)| {
            edge.kind == kind && self.is_in(edge.from, from) && self.is_in(edge.to, to)
        });
        edges.map(|(_, count)| count.count).sum()
    }

    /// How often the first block of a function ran.
    fn begun(&self, function: &str) -> u64 {
        let blocks = self.profile.blocks.iter();
        let mut inside = blocks.filter(|(start, _)| self.is_in(**start, function));
        inside.next().unwrap().1.count
    }
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
