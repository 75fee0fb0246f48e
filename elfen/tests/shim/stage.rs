//! Shared parts of the tests: building programs, running the command, and processes under test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use elfen_rt::memory::Memory;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::thread::ThreadSlot;
use serde_json::Value;

use crate::alone::command_with_its_library;
use crate::preload::library;

/// Space at the entries of functions, for the code by which functions report that they run.
pub(crate) const ROOM: &str = "-fpatchable-function-entry=43";

/// Builds a C program, which may include `elfen_tag.h`.
pub(crate) fn build(folder: &Path, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let (file, program) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elfen-rt/include");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-g", "-pthread", "-I"]).arg(include).args(options);
    compiler.arg("-o").arg(&program).arg(&file).arg("-L").arg(library());
    if options.contains(&"-mfunction-return=thunk-extern") {
        compiler.arg("-lelfen_return");
    }
    assert!(compiler.status().unwrap().success(), "{name}");
    program
}

/// Runs `elfen shim` with these words.
pub(crate) fn shim(words: &[&str]) -> Output {
    let mut command = command_with_its_library();
    command.arg("shim").args(words).stdin(Stdio::null()).output().unwrap()
}

/// Starts and observes a program with `elfen shim`.
pub(crate) fn observe(words: &[&str], program: &Path) -> Output {
    shim(&[words, &["--", program.to_str().unwrap()]].concat())
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The standard output of a command that succeeded.
pub(crate) fn text(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn json(output: &Output) -> Value {
    let parsed = serde_json::from_slice(&output.stdout);
    parsed.unwrap_or_else(|error| panic!("{error}: {}", said(output)))
}

/// Draws a recording with `elfen lab report`. cargo builds `elfen-lab` into the same folder as the
/// command.
pub(crate) fn report_page(recording: &Path) -> String {
    let page = recording.with_extension("html");
    let mut lab = Command::new(env!("CARGO_BIN_EXE_elfen"));
    text(lab.args(["lab", "report"]).arg(recording).arg("--html").arg(&page).output().unwrap());
    fs::read_to_string(page).unwrap()
}

/// Creates a page of threads, as `elfen shim` does, and runs a program with it and the preload
/// library. `order` is the rest of the library's instructions, after the segment and the process.
pub(crate) fn run_preloaded(program: &mut Command, order: &str) -> (Output, Page<ThreadSlot>) {
    let bytes = Page::<ThreadSlot>::bytes(8);
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
    let page = Page::<ThreadSlot>::format(memory, 8, 0, &[0; 32]).unwrap();
    let segment = page.memory().segment_id().unwrap();
    program.env("ELFEN_SHIM", format!("1 {segment} {} {order}", std::process::id()));
    program.env("LD_PRELOAD", library().join("libelfen_preload.so"));
    let ended = program.stdin(Stdio::null()).output().unwrap();
    page.memory().remove_name().unwrap();
    (ended, page)
}

/// A process that is killed when this value drops, also if the test fails.
pub(crate) struct KilledOnDrop(pub(crate) Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Sends a signal to a process of the test.
pub(crate) fn kill(process: u32, signal: i32) {
    // SAFETY: kill takes numbers. The process belongs to the test, and has not been waited for.
    unsafe { libc::kill(process.cast_signed(), signal) };
}

pub(crate) fn status_line(process: u32, key: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim().to_owned())
}

/// The process that traces another process; 0 if no process does.
pub(crate) fn tracer_of(process: u32) -> u32 {
    status_line(process, "TracerPid:").map_or(0, |tracer| tracer.parse().unwrap())
}

/// Whether `--share` currently shares pages of a process.
pub(crate) fn is_shared(process: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.contains("memfd:elfen-shared")
}

/// Whether a command has an observer thread.
pub(crate) fn has_observer(command: u32) -> bool {
    let Ok(tasks) = fs::read_dir(format!("/proc/{command}/task")) else { return false };
    let names = tasks.flatten().map(|task| fs::read_to_string(task.path().join("comm")));
    names.flatten().any(|name| name.starts_with("elfen-observer"))
}

/// Waits for a condition, for a limited time.
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    let so = (0..30_000).any(|_| {
        thread::sleep(Duration::from_millis(1));
        is_so()
    });
    assert!(so, "timeout while waiting for {what}");
}
