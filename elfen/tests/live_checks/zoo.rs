//! Goal: unmodified programs do the same work with and without `elfen run`, and run only while the
//! request lane idles. Method: each program runs twice, the second time next to a request lane that
//! is alternately busy and idle for 10 ms. Output and status must be the same.
//!
//! The service's page says when the lane is busy, so that other processes do not slow down the
//! test. `ZOO_SIGNAL=tasks cargo test -p elfen --test live_checks zoo -- --nocapture` uses the task
//! map, which live checks require, and prints each program's overlap. `ZOO_ALL=1` adds programs,
//! `ZOO_ONLY=lua` selects by name, and `ZOO_ROUNDS=20` sets the number of rounds.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use elfen_rt::service::Service;

use super::{BusyTurns, reserve_lanes};

const TURN: Duration = Duration::from_millis(10);

/// A program: its name, the commands that it needs (or scripts that must succeed), and a script
/// that uses it and prints a result.
type ZooProgram = (&'static str, &'static [&'static str], &'static str);

const ZOO: &[ZooProgram] = &[
    ("xz", &["xz"], "xz -6 -T1 -c data | sha256sum"),
    ("zstd -T2", &["zstd"], "zstd -q -T2 -15 -c data | sha256sum"),
    ("python3", &["python3"], "python3 work.py"),
    ("perl", &["perl"], "perl work.pl"),
    ("gcc", &["gcc"], "gcc -O2 -S -o - big.c | sha256sum"),
    ("make -j2", &["make", "gcc"], "make -s -j2 && ./all"),
    ("sqlite3", &["sqlite3"], "sqlite3 :memory: < work.sql"),
    ("go", &["go"], "./go-work"),
    ("busybox, static", &["busybox"], "busybox sh work.sh"),
    ("java", &["java", "javac"], "java -cp . Work"),
];

/// More programs, for `ZOO_ALL`.
const MORE: &[ZooProgram] = &[
    ("gzip", &["gzip"], "gzip -9 -c < data | sha256sum"),
    ("sha256sum", &["sha256sum"], "for i in 1 2 3 4 5 6 7 8; do cat data; done | sha256sum"),
    ("sort", &["sort"], "tr ' ' '\\n' < data | LC_ALL=C sort --parallel=2 | sha256sum"),
    ("openssl", &["openssl"], "openssl enc -aes-256-cbc -K 00 -iv 00 -in data | sha256sum"),
    ("lua", &["lua5.4"], "lua5.4 work.lua"),
    ("node", &["node"], "node work.js"),
    ("ffmpeg", &["ffmpeg"], FFMPEG),
    (
        "rust",
        &["elfen-lab"],
        "elfen-lab simulate --rps 100 --policy borrow-idle --requests 4000000 --json",
    ),
    ("CPython's own tests", &["python3", "python3 -c 'import test.test_re'"], CPYTHON),
];

const CPYTHON: &str = "python3 -m test -q test_array test_bytes test_collections test_ctypes \
                       test_dict test_exceptions test_float test_fork1 test_functools test_gc \
                       test_generators test_hashlib test_itertools test_json test_list test_math \
                       test_operator test_popen test_re test_set test_signal test_sqlite3 \
                       test_struct test_zlib >tests 2>&1; status=$?; cat tests >&2; \
                       grep '^Total tests\\|^Result' tests; exit $status";

const FFMPEG: &str = "ffmpeg -v error -threads 2 -f lavfi -i testsrc=duration=2:size=320x240 \
                      -c:v mpeg4 -bitexact -f avi - | sha256sum";

#[test]
#[ignore = "needs two idle CPUs and the programs of the zoo"]
fn unmodified_programs_do_the_same_work() {
    let _lanes = reserve_lanes();
    let folder = tempfile::tempdir().unwrap();
    // The Rust program of the zoo is `elfen-lab`.
    let own = Path::new(env!("CARGO_BIN_EXE_elfen")).parent().unwrap().display();
    let path = format!("{}:{own}", std::env::var("PATH").unwrap_or_default());
    let asked = |name: &str| std::env::var(name).ok();
    let only = asked("ZOO_ONLY");
    let more = asked("ZOO_ALL").or(only.clone()).map_or(&[][..], |_| MORE);
    let all = ZOO.iter().chain(more);
    let chosen: Vec<_> = all.filter(|all| all.0.contains(only.as_deref().unwrap_or(""))).collect();
    let rounds: usize = asked("ZOO_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap());
    let name = format!("zoo-{}", std::process::id());
    let service = Arc::new(Service::open(&name, 1).unwrap());
    write_inputs(folder.path());
    for (program, needs, script) in (0..rounds).flat_map(|_| &chosen) {
        if let Some(missing) = needs.iter().find(|command| !is_there(command, &path)) {
            panic!("{program} needs {missing}; ZOO_ONLY=NAME chooses one program");
        }
        build(folder.path(), program);
        let shell = |command: &mut Command| {
            let command = command.current_dir(folder.path()).env("PATH", &path);
            let output = command.stdin(Stdio::null()).output().unwrap();
            (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
        };
        let script = format!("rm -f all *.o; {script}");
        let alone = shell(Command::new("sh").args(["-c", &script]));
        assert!(alone.1 == Some(0) && !alone.0.is_empty(), "{program} alone: {alone:?}");
        let turns = BusyTurns::start_with(Some(service.clone()), TURN, |_| TURN);
        let report = folder.path().join("report");
        let mut elfen = Command::new(env!("CARGO_BIN_EXE_elfen"));
        let signal = asked("ZOO_SIGNAL").unwrap_or_else(|| "service".to_owned());
        elfen.args(["run", "--lanes", "0:1", "--service", &name, "--source", &signal]);
        elfen.arg("--json-out").arg(&report);
        let lent = shell(elfen.args(["--", "sh", "-c", &script]).env_remove("ELFEN_LANES"));
        drop(turns);
        assert_eq!(lent, alone, "{program}");
        show(program, &fs::read(&report).unwrap());
    }
    Arc::into_inner(service).unwrap().remove().unwrap();
}

fn show(program: &str, report: &[u8]) {
    let report: serde_json::Value = serde_json::from_slice(report).unwrap();
    assert!(report["naps"].as_u64().unwrap() > 0, "{program} met no busy turn: {report}");
    let ms = |key: &str| report[key].as_u64().unwrap_or_default() / 1_000_000;
    let busy_ns = report["request_busy_ns"].as_f64();
    let share = busy_ns.map(|busy_ns| 100.0 * report["overlapped_ns"].as_f64().unwrap() / busy_ns);
    let share = share.map_or("unknown without the task map".to_owned(), |s| format!("{s:.2} %"));
    println!(
        "{program}, checks {}: {} ms, borrowed {} ms, overlapped {} ms of a busy lane: {share}",
        report["checks"].as_str().unwrap_or("unknown"),
        ms("wall_ns"),
        ms("borrowed_ns"),
        ms("overlapped_ns"),
    );
}

fn is_there(command: &str, path: &str) -> bool {
    let look = format!("command -v {command}");
    let look = if command.contains(' ') { command } else { &look };
    Command::new("sh").args(["-c", look]).env("PATH", path).output().unwrap().status.success()
}

/// Writes the inputs of the programs, the same on every machine.
fn write_inputs(folder: &Path) {
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo");
    for entry in fs::read_dir(zoo).unwrap() {
        let file = entry.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let mut seed = 1_u64;
    let words = (0..400_000).map(|_| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        format!("word{} ", (seed >> 33) % 5000)
    });
    fs::write(folder.join("data"), words.collect::<String>()).unwrap();
    let functions = (0..500).map(|n| {
        let loops = format!("for (int i = 0; i < b; i++) a = a * {n} + i % 7;");
        format!("int f{n}(int a, int b) {{ {loops} return a ^ {n}; }}\n")
    });
    fs::write(folder.join("big.c"), functions.collect::<String>()).unwrap();
}

/// Compiles the program, if it must be compiled.
fn build(folder: &Path, program: &str) {
    let command = match program {
        "go" => "GOCACHE=$PWD/cache GO111MODULE=off go build -o go-work work.go",
        "java" => "javac Work.java",
        _ => return,
    };
    let output = Command::new("sh").args(["-c", command]).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}
