//! Runs `elfen-batch` as a user does. No test depends on how long anything takes.

use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const BATCH: &str = env!("CARGO_BIN_EXE_elfen-batch");
const BATCH_C: &str = env!("CARGO_BIN_EXE_elfen-batch-c");

fn batch(args: &[&str]) -> Output {
    Command::new(BATCH).args(args).output().expect("elfen-batch was built")
}

fn json(args: &[&str]) -> Value {
    let output = batch(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Goal: each program's checksum depends only on the seed. Method: each program with another number
/// of iterations, and with another seed.
#[test]
fn checksums_depend_on_the_seed() {
    for program in ["loop", "matrix", "flush", "stall", "spin", "compress"] {
        let one = json(&[program, "--iterations", "1", "--seed", "3"]);
        let two = json(&[program, "--iterations", "2", "--seed", "3"]);
        let other = json(&[program, "--iterations", "1", "--seed", "4"]);
        assert_eq!(one["checksum"], two["checksum"], "{program}");
        assert_ne!(one["checksum"], other["checksum"], "{program}");
        assert_eq!(one["program"], program);
        assert_eq!((&one["iterations"], &two["iterations"]), (&1.into(), &2.into()));
        assert_eq!(one["work"].as_u64().map(|work| work * 2), two["work"].as_u64(), "{program}");
        assert!(one["per_second"].as_f64().is_some_and(|rate| rate > 0.0));
    }
}

/// Goal: the C binary contains no checks of its own. If it did, `elfen` would not add checks at
/// `mcount`. Method: search for the marks in both files.
#[test]
fn c_and_rust_are_kept_apart() {
    let output = Command::new(BATCH_C).args(["loop", "--iterations", "1", "--json"]).output();
    let report: Value =
        serde_json::from_slice(&output.expect("elfen-batch-c was built").stdout).expect("JSON");
    assert_eq!(report["lang"], "c");
    let has = |file: &str, mark: &[u8]| {
        let bytes = std::fs::read(file).expect("readable");
        bytes.windows(mark.len()).any(|window| window == mark)
    };
    assert!(has(BATCH, b".note.elfen.check\0"));
    assert!(!has(BATCH_C, b".note.elfen.check\0"));
    assert!(has(BATCH_C, b"\0mcount"));
}

/// Goal: a program that receives SIGTERM ends and prints its report. Method: SIGTERM to a program
/// that would run for an hour.
#[test]
fn terminated_programs_report() {
    use nix::sys::signal::{Signal, kill};
    let child = Command::new(BATCH)
        .args(["compress", "--duration", "3600s", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("elfen-batch was built");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    // When the process catches the signal, its start is over.
    while !catches_sigterm(child.id()) {
        std::thread::yield_now();
    }
    kill(pid, Signal::SIGTERM).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["checksum"], json(&["compress", "--iterations", "1"])["checksum"]);
}

fn catches_sigterm(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("a mask");
    let mask = u64::from_str_radix(caught.trim(), 16).expect("hexadecimal");
    mask & 1 << (15 - 1) != 0
}

/// Goal: wrong arguments give a one-line error and status 2. Method: each kind of wrong argument.
#[test]
fn errors_are_one_line() {
    for args in
        [&[][..], &["frobnicate"], &["spin", "--iterations", "0"], &["spin", "--duration", "5"]]
    {
        let output = batch(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.starts_with("elfen: "), "{stderr}");
        assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{stderr}");
    }
}

/// Goal: invalid pairs and factors are usage errors. Without the task map, the error names it and
/// says what to do. Method: each kind of invalid argument; a user without access to the task map.
#[test]
fn what_cannot_be_emulated_is_said() {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    for args in [
        &["--beside-slowdown", "1.5"][..],
        &["--beside", "0:1"],
        &["--beside-slowdown", "0.5", "--beside", "0:1"],
        &["--beside-slowdown", "1.5", "--beside", "0"],
    ] {
        let output = batch(&[&["spin"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    // A copy that every user may execute.
    let folder = tempfile::tempdir().expect("a scratch folder");
    let copy = folder.path().join("elfen-batch");
    std::fs::copy(BATCH, &copy).expect("elfen-batch was built");
    for path in [folder.path(), &copy] {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).expect("it is ours");
    }
    let mut command = Command::new(&copy);
    command.args(["spin", "--iterations", "1", "--beside-slowdown", "1.5", "--beside", "0:1"]);
    if nix::unistd::geteuid().is_root() {
        command.uid(65_534);
    }
    let output = command.output().expect("every user may run it");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("task map") && stderr.contains("run this as root"), "{stderr}");
    assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{stderr}");
}

/// Goal: a program that was started without `elfen run` has itself counted. It takes longer in
/// proportion to the time that it shares with a busy request lane. Method: the real kernel, a
/// thread that spins on CPU 0, and the program on CPU 1, until some time was shared.
#[test]
#[ignore = "needs root and eBPF"]
fn batches_beside_requests_are_slowed() {
    let args = ["--iterations", "1", "--beside-slowdown", "1", "--beside", "0:1"];
    let output = batch(&[&["spin"], &args[..]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "needs root, eBPF and two CPUs: {stderr}");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            core_affinity::set_for_current(core_affinity::CoreId { id: 0 });
            while !stop.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        let start = Instant::now();
        loop {
            let output = Command::new("taskset")
                .args(["-c", "1", BATCH, "spin", "--duration", "500ms", "--json"])
                .args(["--beside-slowdown", "2.5", "--beside", "0:1"])
                .output()
                .expect("taskset is there");
            let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
            let core = &report["emulated_core"];
            assert_eq!(core["slowdown"], 2.5);
            let [beside, added] =
                ["beside_s", "added_s"].map(|of| core[of].as_f64().expect("a number"));
            assert!(added >= 0.6 * beside - 1e-6, "{added} s for {beside} s");
            assert!(added <= report["seconds"].as_f64().expect("a number"));
            if beside > 0.0 {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "nothing was shared");
        }
        stop.store(true, Relaxed);
    });
}
