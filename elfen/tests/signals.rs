//! Goal: `elfen signals` gives a group the task map, and takes it back without a trace. Method: the
//! real command and the real kernel, each test under a `/run` of its own, so that a machine where
//! signals are up is left alone; and a C program that includes `elfen.h` only, as a user without
//! privileges. Needs root; skipped without, in so many words.

use std::ffi::CStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// User ids that only these tests use: the reader's, and one outside its group.
const READER: u32 = 64_901;
const STRANGER: u32 = 64_902;

/// The tests share the machine's one program.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A `/run` that this thread and its children alone see, empty but for copies of programs.
struct PrivateRun;

impl PrivateRun {
    fn enter(test: &str) -> Option<Self> {
        let skip = |why: String| {
            let mut terminal = std::io::stderr();
            writeln!(terminal, "skipped: {test}: {why}").unwrap();
            None
        };
        if let Err(why) = Self::mount() {
            return skip(format!("a private /run: {why}"));
        }
        // A program of the last test may be on its way out; one that stays belongs to a user who
        // works here.
        if program_goes_away() { Some(Self) } else { skip("others hold the program".to_owned()) }
    }

    fn mount() -> std::io::Result<()> {
        let succeeded = |result: i32| match result {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        };
        // SAFETY: unshare takes a number; it concerns this thread and what it starts.
        succeeded(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
        let mount = |source: &CStr, target: &CStr, kind: &CStr, flags| {
            // SAFETY: all strings are NUL-terminated and outlive the call; no data is passed.
            unsafe {
                libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null())
            }
        };
        succeeded(mount(c"none", c"/", c"", libc::MS_REC | libc::MS_PRIVATE))?;
        succeeded(mount(c"test", c"/run", c"tmpfs", 0))?;
        fs::create_dir("/run/copies")?;
        ["/run", "/run/copies"]
            .iter()
            .try_for_each(|folder| fs::set_permissions(folder, fs::Permissions::from_mode(0o755)))
    }

    /// A copy that every user can run, wherever this checkout lies.
    fn copy(&self, program: &Path) -> PathBuf {
        let copy = Path::new("/run/copies").join(program.file_name().unwrap());
        fs::copy(program, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        copy
    }
}

fn elfen(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen")).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn up(group: u32) -> String {
    said(&elfen(&["signals", "up", "--group", &group.to_string()]))
}

fn status() -> serde_json::Value {
    serde_json::from_slice(&elfen(&["signals", "status", "--json"]).stdout).unwrap()
}

fn who_runs() -> PathBuf {
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("elfen-rt");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("who-runs");
    let compiled = Command::new("cc")
        .arg(format!("-I{}", runtime.join("include").display()))
        .arg(runtime.join("examples/who-runs.c"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", said(&compiled));
    program
}

fn run_as(user: u32, program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).uid(user).gid(user).output().unwrap()
}

/// Whether the kernel still holds the program. It frees one a moment after its last holder went.
fn program_goes_away() -> bool {
    (0..200).any(|_| {
        let gone = status()["program"].is_null();
        std::thread::sleep(std::time::Duration::from_millis(if gone { 0 } else { 25 }));
        gone
    })
}

#[test]
fn a_c_program_of_the_group_reads_the_pinned_map_and_a_stranger_does_not() {
    let _alone = alone();
    let name = "a_c_program_of_the_group_reads_the_pinned_map_and_a_stranger_does_not";
    let Some(run) = PrivateRun::enter(name) else { return };
    let reader = run.copy(&who_runs());
    let early = run_as(READER, &reader, &[]);
    assert_eq!(early.status.code(), Some(1));
    assert!(said(&early).contains("cannot open the task map"), "{}", said(&early));

    let expected = format!("up: group {READER} can read the task map under /run/elfen/bpf\n");
    assert_eq!(up(READER), expected);
    let seen = run_as(READER, &reader, &["0"]);
    assert!(seen.status.success(), "{}", said(&seen));
    let lines = said(&seen);
    assert_eq!(lines.lines().count(), 10, "{lines}");
    assert!(lines.lines().all(|line| line.starts_with("cpu 0: ")), "{lines}");

    let refused = run_as(STRANGER, &reader, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(elfen(&["signals", "down"]).status.success());
    assert!(program_goes_away());
    assert!(!Path::new("/run/elfen").exists());
}

#[test]
fn up_and_down_can_be_said_twice() {
    let _alone = alone();
    let Some(_run) = PrivateRun::enter("up_and_down_can_be_said_twice") else { return };
    assert!(up(READER).starts_with("up: "));
    assert!(up(STRANGER).starts_with("was up already; group 64902 "));
    assert_eq!(status()["group"], STRANGER.to_string());
    assert_eq!(said(&elfen(&["signals", "down"])), "down\n");
    assert_eq!(said(&elfen(&["signals", "down"])), "was not up\n");
    assert_eq!(said(&elfen(&["signals", "status"])).lines().next(), Some("not up"));
    assert!(program_goes_away());
}

#[test]
fn status_names_the_process_that_holds_the_program() {
    let _alone = alone();
    let name = "status_names_the_process_that_holds_the_program";
    let Some(_run) = PrivateRun::enter(name) else { return };
    up(READER);
    let map = elfen_rt::signal::task::TaskMap::open_pinned().unwrap();
    elfen(&["signals", "down"]);
    let holders = &status()["program"]["holders"];
    assert_eq!(holders[0]["pid"], std::process::id(), "{holders}");
    drop(map);
    assert!(program_goes_away());
}

#[test]
fn without_root_each_action_says_what_it_needs() {
    let _alone = alone();
    let name = "without_root_each_action_says_what_it_needs";
    let Some(run) = PrivateRun::enter(name) else { return };
    let elfen = run.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let refused = run_as(STRANGER, &elfen, &["signals", "up", "--group", "1"]);
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(said(&refused), "elfen: pinning the task map: not permitted; run it as root\n");
    let hidden = run_as(STRANGER, &elfen, &["signals", "status"]);
    assert_eq!(said(&hidden), "not up\na program may be attached: seeing it needs root\n");
}

#[test]
fn a_group_that_does_not_exist_is_refused_before_anything_is_done() {
    let refused = elfen(&["signals", "up", "--group", "no-such-group"]);
    assert_eq!(refused.status.code(), Some(2));
    let expected = "elfen: group \"no-such-group\": there is no such group; \
                    name one with --group, or make it (as root: `groupadd no-such-group`)\n";
    assert_eq!(said(&refused), expected);
}
