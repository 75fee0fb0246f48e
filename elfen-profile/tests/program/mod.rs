//! Programs that tests record: compiles and starts them, and finds their functions in profiles.

#![allow(dead_code, reason = "each test program uses some of these functions")]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use elfen_instrument::symbols::FunctionTable;
use elfen_profile::profile::{Place, Profile, What};
use elfen_profile::recording::Subject;
use elfen_stream::counts::EdgeKind;

pub(crate) const EDGES: What = What {
    stacks: false,
    paths: false,
    values: false,
    streams: false,
    stream_burst: 0,
    rules: &[],
};
pub(crate) const ALL: What = What { stacks: true, paths: true, ..EDGES };

/// Compiles a file of `tests/c`.
pub(crate) fn compile(folder: &Path, source: &str, options: &[&str]) -> PathBuf {
    let name = Path::new(source).file_stem().unwrap().to_str().unwrap();
    compile_as(folder, source, name, options)
}

pub(crate) fn compile_as(folder: &Path, source: &str, name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
    let program = folder.join(name);
    let compiler = if source.extension().unwrap() == "cpp" { "c++" } else { "cc" };
    let mut command = Command::new(compiler);
    command.args(["-O2", "-g", "-w", "-o"]).args([&program, &source]).args(options);
    assert!(command.status().expect("needs a C compiler").success());
    program
}

/// The words of a shell that executes a program, and the file that the program writes its output
/// to: otherwise it would write to the output of the test.
pub(crate) fn in_shell<Word: AsRef<OsStr>>(
    folder: &Path,
    words: &[Word],
) -> (PathBuf, Vec<OsString>) {
    let output = folder.join("output");
    let mut shell: Vec<OsString> = ["sh", "-c", "exec \"$@\" > \"$0\""].map(OsString::from).into();
    shell.push(output.clone().into());
    shell.extend(words.iter().map(Into::into));
    (output, shell)
}

pub(crate) fn natively(words: &[OsString]) -> Output {
    Command::new(&words[0]).args(&words[1..]).output().unwrap()
}

pub(crate) fn program_subject(words: Vec<OsString>) -> Subject {
    Subject { program: words, ..Subject::default() }
}

/// A process, for some milliseconds at most.
pub(crate) fn process_subject(id: u32, milliseconds: u64) -> Subject {
    let duration = Some(Duration::from_millis(milliseconds));
    Subject { process: Some(id), duration, ..Subject::default() }
}

/// The words of a command as a shell would split them; TEXT and SOURCE stand for files, `|` for a
/// blank.
pub(crate) fn words_of(command: &str, text: &Path) -> Vec<OsString> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/signals.c");
    let word = |word: &str| match word {
        "TEXT" => text.into(),
        "SOURCE" => source.clone().into(),
        _ => word.replace('|', " ").into(),
    };
    command.split(' ').map(word).collect()
}

/// A program that ends when this value drops.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    /// A shell that computes, and may open nothing of ours.
    pub(crate) fn as_another_user() -> Self {
        Self::start(busy_shell().uid(65534).gid(65534))
    }

    /// Reads a file of its folder in /proc.
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.0.id())).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

pub(crate) fn busy_shell() -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "while :; do :; done"]);
    command
}

/// Looks up counts by the names of functions.
pub(crate) struct Counts<'a> {
    profile: &'a Profile,
    pub(crate) file: u32,
    pub(crate) table: FunctionTable,
}

impl<'a> Counts<'a> {
    pub(crate) fn of(profile: &'a Profile, program: &Path) -> Self {
        let name = program.to_str().unwrap();
        let file = profile.files.iter().position(|file| file.path == name).unwrap();
        let table = FunctionTable::read(program).unwrap();
        Self { profile, file: u32::try_from(file).unwrap(), table }
    }

    pub(crate) fn is_in(&self, place: Place, function: &str) -> bool {
        let address = self.table.address_of(place.offset).filter(|_| place.file == self.file);
        address.and_then(|address| self.table.at(address)).is_some_and(|one| one.name == function)
    }

    pub(crate) fn edges(&self, from: &str, to: &str, kind: EdgeKind) -> u64 {
        let edges = self.profile.edges.iter().filter(|(edge, _)| {
            edge.kind == kind && self.is_in(edge.from, from) && self.is_in(edge.to, to)
        });
        edges.map(|(_, count)| count.count).sum()
    }

    /// How often the first block of a function ran.
    pub(crate) fn begun(&self, function: &str) -> u64 {
        let blocks = self.profile.blocks.iter();
        let mut inside = blocks.filter(|(start, _)| self.is_in(**start, function));
        inside.next().unwrap().1.count
    }

    /// The part of all instructions that a function executes.
    pub(crate) fn share(&self, function: &str) -> f64 {
        let (mut part, mut all) = (0, 0);
        for (&start, block) in &self.profile.blocks {
            let executed = block.count * u64::from(block.instructions);
            all += executed;
            part += if self.is_in(start, function) { executed } else { 0 };
        }
        part as f64 / all as f64
    }
}

/// Compares the shares of the functions of `shares.c` with what it has printed, the shares of its
/// branches. Its loops all have the same instructions.
pub(crate) fn assert_shares(profile: &Profile, program: &Path, printed: &str) {
    let counts = Counts::of(profile, program);
    // A loop runs for longer than a burst or a shadow, so each of them sees only one loop.
    let error = 4.0 / (profile.bursts as f64).sqrt();
    for (function, expected) in ["first", "second", "third"].iter().zip(printed.split_whitespace())
    {
        let (found, expected) = (counts.share(function), expected.parse::<f64>().unwrap());
        assert!((found - expected).abs() < error, "{function}: {found}, not {expected} ± {error}");
    }
}
