//! Goal: `elfen profile` changes nothing of what a program does, also if it is killed or has few
//! rights. Method: the commands, as root and as another user.

mod process;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use process::KilledOnDrop;

fn elfen(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen")).arg("profile").args(words).output().unwrap()
}

fn error(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A process that is busy, and its id.
fn looping() -> (KilledOnDrop, String) {
    let loops = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let process = loops.id().to_string();
    (KilledOnDrop(loops), process)
}

fn maps_of(process: &str) -> String {
    fs::read_to_string(format!("/proc/{process}/maps")).unwrap()
}

/// Starts a recording, and waits until the process has bursts.
fn recording_of(process: &str, file: &str) -> KilledOnDrop {
    let words = ["record", "--by", "bursts", "-p", process, "-o", file];
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    let recording = command.arg("profile").args(words).stderr(Stdio::null()).spawn().unwrap();
    let mut recording = KilledOnDrop(recording);
    let until = Instant::now() + Duration::from_secs(20);
    while !maps_of(process).contains("elfen-profile") {
        assert!(Instant::now() < until && recording.0.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(10));
    }
    recording
}

/// Goal: a recording that is killed harms nothing, and the next one takes out what it left; but not
/// while it still runs. Method: a recording of a process, another one beside it, SIGKILL, and a
/// third one.
#[test]
#[ignore = "needs root: the process is not a descendant"]
fn what_a_killed_recording_left_is_taken_out() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.elfprof").to_str().unwrap().to_owned();
    let (mut loops, process) = looping();
    let maps = || maps_of(&process);
    let recording = recording_of(&process, &file);
    sleep(Duration::from_millis(500));
    let other = folder.path().join("b.elfprof");
    let beside =
        elfen(&["record", "--by", "bursts", "-p", &process, "-o", other.to_str().unwrap()]);
    assert_eq!(beside.status.code(), Some(3));
    assert!(error(&beside).contains("another recording watches it"), "{}", error(&beside));
    drop(recording);
    assert!(maps().contains("elfen-profile") && loops.0.try_wait().unwrap().is_none());
    let next = elfen(&["record", "--by", "bursts", "-p", &process, "-o", &file, "-d", "1s"]);
    assert!(next.status.success(), "{}", error(&next));
    assert!(!error(&next).contains("warning"), "{}", error(&next));
    assert!(!maps().contains("elfen-profile") && loops.0.try_wait().unwrap().is_none());
}

/// Goal: a signal that ends a recording leaves nothing in the process. Method: signals that a
/// command seldom expects.
#[test]
#[ignore = "needs root: the process is not a descendant"]
fn nothing_is_left_after_any_signal() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.elfprof").to_str().unwrap().to_owned();
    let (mut loops, process) = looping();
    let maps = || maps_of(&process);
    for signal in [libc::SIGUSR1, libc::SIGALRM, libc::SIGXCPU, libc::SIGPWR] {
        let mut recording = recording_of(&process, &file);
        // SAFETY: takes numbers. The process is our child, which has not been waited for.
        unsafe { libc::kill(recording.0.id().cast_signed(), signal) };
        assert_eq!(recording.0.wait().unwrap().code(), Some(0), "signal {signal}");
        assert!(!maps().contains("elfen-profile"), "signal {signal}");
        assert!(loops.0.try_wait().unwrap().is_none(), "signal {signal}");
    }
}

/// Goal: a program that can have no bursts is recorded by shadows, and started once. Method: one
/// that handles SIGURG, as Go does, and prints when it starts and ends.
#[test]
#[ignore = "needs root: shadows trace the program"]
fn a_program_without_bursts_is_recorded_by_shadows() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("urgent.c");
    fs::write(&source, URGENT).unwrap();
    let program = folder.path().join("urgent").to_str().unwrap().to_owned();
    let built = Command::new("cc").args(["-O1", "-o", &program]).arg(&source).status().unwrap();
    assert!(built.success());
    let recorded = elfen(&["record", "--", &program]);
    assert_eq!(recorded.status.code(), Some(7));
    assert_eq!(String::from_utf8_lossy(&recorded.stdout), "starts\nends\n");
    let why = "profile by shadows: bursts are not possible: it handles SIGURG itself";
    let said = error(&recorded);
    assert!(said.contains(why) && said.contains("compute"), "{said}");
}

const URGENT: &str = r#"
#include <signal.h>
#include <unistd.h>
static void on_urgent(int signal) {}
__attribute__((noipa)) void compute(void) {
    static volatile unsigned sum = 1;
    for (int i = 0; i < 500000000; i++)
        sum = sum * 1664525 + 1013904223;
}
int main(void) {
    signal(SIGURG, on_urgent);
    write(1, "starts\n", 7);
    compute();
    write(1, "ends\n", 5);
    return 7;
}
"#;

/// Goal: a program with a set-user-ID bit has its rights although its caller is traced, and is
/// refused if it would be traced itself. Method: another user runs one.
#[test]
#[ignore = "needs root: it makes a program with rights, and becomes another user"]
fn rights_are_not_lost() {
    let folder = tempfile::tempdir().unwrap();
    let [command, program] = ["elfen", "who"].map(|name| folder.path().join(name));
    fs::copy(env!("CARGO_BIN_EXE_elfen"), &command).unwrap();
    let source = "#include <stdio.h>\n#include <unistd.h>\n\
                  int main(void) { printf(\"%d\\n\", geteuid()); return 2; }";
    fs::write(folder.path().join("who.c"), source).unwrap();
    let mut compiler = Command::new("cc");
    assert!(
        compiler
            .arg("-o")
            .arg(&program)
            .arg("who.c")
            .current_dir(&folder)
            .status()
            .unwrap()
            .success()
    );
    chown(&program, Some(0), Some(0)).unwrap();
    for (file, mode) in [(folder.path(), 0o755), (&*command, 0o755), (&*program, 0o4755)] {
        fs::set_permissions(file, PermissionsExt::from_mode(mode)).unwrap();
    }
    let run = |words: &[&str]| {
        let mut other = Command::new(&command);
        other.args(["profile", "record", "--by", "everything", "--"]).args(words);
        other.current_dir(&folder).uid(65534).gid(65534).output().unwrap()
    };
    let shell = run(&["sh", "-c", "./who; exec ./who"]);
    assert_eq!((&*shell.stdout, shell.status.code()), (&b"0\n0\n"[..], Some(2)), "{shell:?}");
    assert!(error(&shell).contains("it executes who"), "{}", error(&shell));
    let itself = run(&["./who"]);
    assert_eq!(itself.status.code(), Some(3));
    assert!(error(&itself).contains("set-user-ID"), "{}", error(&itself));
}

/// Goal: signals that the caller ignores stay ignored, also those of children. Method: a caller
/// that ignores some, and a program that prints which ones it ignores.
#[test]
fn ignored_signals_stay_ignored() {
    for by in ["everything", "shadows"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
        command.args(["profile", "record", "-q", "--by", by, "--"]);
        command.args(["grep", "SigIgn", "/proc/self/status"]);
        let ignore = || {
            for signal in [libc::SIGHUP, libc::SIGCHLD] {
                // SAFETY: it has no handler.
                unsafe { libc::signal(signal, libc::SIG_IGN) };
            }
            Ok(())
        };
        // SAFETY: the closure makes system calls only.
        let output = unsafe { command.pre_exec(ignore) }.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{by}: {}", error(&output));
        let ignored = u64::from_str_radix(text.trim().rsplit('\t').next().unwrap(), 16).unwrap();
        let wanted =
            [libc::SIGHUP, libc::SIGCHLD].map(|signal| 1 << (signal - 1)).iter().sum::<u64>();
        assert_eq!(ignored & wanted, wanted, "{by}: {text}");
    }
}
