//! Goal: functions with NOPs at their entries, and with the `ret` of `libelfen_return.a`, tag their
//! thread and otherwise behave as before. Method: programs built for that, the release build of the
//! preload library, and the page and order that `elfen shim` gives a program.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::signal::page::Page;
use elfen_rt::signal::thread::{THREADS, ThreadSlot, of_thread_word};

use crate::programs::{output_of, plain};
use crate::stage::{RETURNS, Run, Toggle, compile, library, page, until};

/// Room for all code, room only for a jump, and room for a tag next to the check of one pair.
const WAYS: [(&str, &[&str]); 7] = [
    ("tags", &["-fpatchable-function-entry=43", RETURNS]),
    ("tags-no-pie", &["-fpatchable-function-entry=39", RETURNS, "-fno-pie", "-no-pie"]),
    ("tags-jump", &["-fpatchable-function-entry=5", RETURNS]),
    ("tags-cet", &["-fpatchable-function-entry=20", RETURNS, "-fcf-protection=full"]),
    ("tags-lto", &["-fpatchable-function-entry=43", RETURNS, "-flto"]),
    ("tags-o0", &["-fpatchable-function-entry=43", RETURNS, "-O0"]),
    ("tags-entries", &["-fpatchable-function-entry=43"]),
];

/// The page and order that an `elfen shim` would give to a command.
struct Shim(Page<ThreadSlot>);

impl Shim {
    fn new() -> Self {
        Self(page(THREADS))
    }

    fn order<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let segment = self.0.memory().segment_id().unwrap();
        let order = format!("1 {segment} {} entries -", std::process::id());
        command.env("ELFEN_SHIM", order).env("LD_PRELOAD", library())
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        self.order(&mut command).current_dir(env!("CARGO_TARGET_TMPDIR"));
        command
    }

    /// The number of tagged functions, of ambiguous ones, and of files whose returns are tagged.
    fn counts(&self) -> [u64; 3] {
        let first = self.0.slot(0).unwrap();
        [&first.entries, &first.ambiguous, &first.returns].map(|word| word.load(Relaxed))
    }
}

#[test]
#[ignore = "needs GCC"]
fn tagged_programs_behave_as_before() {
    let ways =
        [&["threads"][..], &["forks"], &["signals"], &["contexts"], &["cancel"], &["masked"]];
    for (way, flags) in WAYS {
        let program = compile("programs.c", &format!("programs-{way}"), flags);
        for arguments in ways {
            let expected = output_of(Command::new(plain()).args(arguments));
            let alone = output_of(Command::new(&program).args(arguments));
            assert_eq!(alone, expected, "{way}, started by hand");
            let shim = Shim::new();
            let found = output_of(shim.command(&program).args(arguments));
            assert_eq!(found, expected, "{way}");
            let [entries, ambiguous, returns] = shim.counts();
            assert!(entries > 10 && ambiguous == 0, "{way}: {entries} {ambiguous}");
            assert_eq!(returns, u64::from(flags.contains(&RETURNS)), "{way}");
            let calls = shim.0.slots().map(|slot| slot.words.calls.load(Relaxed)).sum::<u64>();
            assert!(calls > 0, "{way} {arguments:?}: no call was counted");
        }
    }
}

/// Goal: tags do not disturb exceptions, longjmp, and threads that end within a function. Method: a
/// program that counts the objects destroyed on the way out.
#[test]
#[ignore = "needs GCC and a C++ compiler"]
fn exceptions_and_thread_exits_work_in_tagged_functions() {
    let cplusplus = ["-x", "c++", "-std=c++17"];
    let plain = compile("unwinds.cc", "unwinds-plain", &cplusplus);
    let expected = output_of(&mut Command::new(plain));
    assert!(expected.0.starts_with("unwinds: ") && expected.1 == Some(0), "{expected:?}");
    for (way, flags) in WAYS {
        let flags: Vec<&str> = cplusplus.iter().chain(flags).copied().collect();
        let program = compile("unwinds.cc", &format!("unwinds-{way}"), &flags);
        let shim = Shim::new();
        assert_eq!(output_of(&mut shim.command(&program)), expected, "{way}");
        assert!(shim.counts()[0] > 3, "{way}");
    }
}

/// Goal: the code at entries and returns changes no live register. Method: arguments in all
/// registers, together with checks in a lane that alternates between busy and idle.
#[test]
#[ignore = "needs GCC"]
fn tags_preserve_all_arguments() {
    for (way, flags) in WAYS {
        let flags: Vec<&str> = flags.iter().copied().chain(["-Wno-psabi"]).collect();
        let program = compile("registers.c", &format!("registers-{way}"), &flags);
        let (run, worker) = Run::new();
        let _toggle = Toggle::start(worker);
        let shim = Shim::new();
        let found = output_of(shim.order(&mut run.batch(&program)).arg("0.3"));
        assert_eq!(found, ("0 wrong\n".to_owned(), Some(0)), "{way}");
        assert!(run.lane().naps.load(Relaxed) > 0, "{way}: it never napped");
        assert!(shim.counts()[0] > 5, "{way}");
    }
}

/// Goal: each thread has a slot from its first step on, and its function's tag there. Method: a
/// program whose threads each stop in a function of their own.
#[test]
#[ignore = "needs GCC"]
fn each_thread_is_tagged_from_its_first_step() {
    let flags = ["-fpatchable-function-entry=43"];
    let program = compile("function_tags.c", "tags-threads", &flags);
    let shim = Shim::new();
    let mut command = shim.command(&program);
    let command = command.arg("wait").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let half = |text: &str| u32::from_str_radix(text, 16).unwrap();
    let expected: BTreeSet<u32> = line.split_whitespace().map(half).collect();
    let claimed = || shim.0.slots().filter(|slot| slot.thread.load(Relaxed) != 0);
    let tags = || -> BTreeSet<u32> {
        // The tag is the address after `endbr64`, if the compiler emits one.
        claimed().map(|slot| slot.words.function.load(Relaxed) & !7).collect()
    };
    until("both threads are in their functions", || expected.is_subset(&tags()));
    let ours = |slot: &ThreadSlot| of_thread_word(slot.thread.load(Relaxed)).0 == child.id();
    assert_eq!((claimed().count(), claimed().filter(|slot| ours(slot)).count()), (3, 3));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// Goal: of two functions with the same lower half, the second gets no tag and is counted. Method:
/// a library that is linked to lie four gigabytes after the program.
#[test]
#[ignore = "needs GCC"]
fn the_second_function_with_the_same_lower_half_gets_no_tag() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = crate::stage::root().join("tests/c/function_tags.c");
    let build = |flags: &[&str], libraries: &[&str]| {
        let mut command = Command::new("cc");
        command.args(["-O1", "-fpatchable-function-entry=43"]).args(flags).arg(&source);
        let built = command.args(libraries).current_dir(folder).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    };
    let place = "-Wl,-Ttext-segment=0x100400000";
    build(&["-DLIBRARY", "-shared", "-fPIC", place, "-o", "libtwin.so"], &[]);
    let program = ["-DTWINS", "-fno-pie", "-no-pie", "-o", "tags-twins"];
    build(&program, &["-L.", "-ltwin", "-Wl,-rpath,$ORIGIN"]);
    let shim = Shim::new();
    let (text, status) = output_of(&mut shim.command(&folder.join("tags-twins")));
    assert_eq!(text, "tags: 6, twins 1\n", "the library lies elsewhere: {status:?}");
    let [entries, ambiguous, _] = shim.counts();
    assert!(ambiguous > 0 && entries + ambiguous == 4, "{entries} {ambiguous}");
}
