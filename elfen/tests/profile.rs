//! Goal: `elfen profile` says what a program did, passes the program's status on, and refuses what
//! it cannot read. Method: the commands, with programs of the base system.

mod process;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_instrument::process::status_field;
use elfen_profile::profile::{Place, Profile, SampleUnit, SampledEvent, SampledPlace, Source};
use process::KilledOnDrop;

fn elfen(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen")).arg("profile").args(words).output().unwrap()
}

/// Compiles a program. Its source stays next to it.
fn compile(source: &str, program: &Path, flags: &[&str]) {
    let file = program.with_extension("c");
    fs::write(&file, source).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(flags).arg("-o").args([program, &file]);
    assert!(compiler.status().unwrap().success());
}

fn error(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_profile_is_recorded_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.elfprof");
    let file = file.to_str().unwrap();
    let recorded =
        elfen(&["record", "--by", "everything", "-o", file, "--", "sh", "-c", "echo out; exit 3"]);
    assert_eq!(recorded.status.code(), Some(3));
    assert_eq!(recorded.stdout, b"out\n");
    assert!(error(&recorded).starts_with("elfen: profile by everything: "), "{}", error(&recorded));
    let text = elfen(&["report", file, "--top", "3"]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("sh -c echo out; exit 3: "), "{text}");
    assert!(text.contains("share %") && text.lines().count() == 6, "{text}");
    let json: serde_json::Value =
        serde_json::from_slice(&elfen(&["report", file, "--json"]).stdout).unwrap();
    assert_eq!((&json["by"], &json["programs"]), (&"everything".into(), &1.into()));
    let function = &json["functions"][0];
    assert!(function["instructions"].as_u64().unwrap() > 100, "{function}");
    for (sort, fix) in
        [("path", "paths"), ("total", "stacks"), ("value", "values"), ("stream", "streams")]
    {
        let missing = elfen(&["report", file, "--sort", sort]);
        assert_eq!(missing.status.code(), Some(1));
        let fix = format!("--what {fix}");
        assert!(error(&missing).contains(&fix), "{}", error(&missing));
    }
    let calls = elfen(&["report", file, "--sort", "call"]).stdout;
    assert!(String::from_utf8(calls).unwrap().contains("to\n"));
}

#[test]
fn without_a_file_the_hottest_functions_are_printed() {
    let recorded = elfen(&["record", "--by", "everything", "--", "true"]);
    assert!(recorded.stdout.is_empty());
    assert!(error(&recorded).contains("instructions of 1 program, all counted"));
    let quiet = elfen(&["record", "-q", "--by", "everything", "--", "true"]);
    assert_eq!((quiet.status.code(), error(&quiet)), (Some(0), String::new()));
}

/// Goal: bursts are the usual way, and their profile is compared with an exact one. Method: a shell
/// that computes for a second.
#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn bursts_are_recorded_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (exact, bursts) = (file("exact.elfprof"), file("bursts.elfprof"));
    let script = "i=0; while [ $i -lt $0 ]; do i=$((i+1)); done; echo $i; exit 3";
    let program = ["--", "sh", "-c", script, "1000000"];
    // The same shares in less time.
    let shorter = ["--", "sh", "-c", script, "50000"];
    let what = ["--what", "stacks,paths"];
    let recorded = elfen(&[&["record", "-o", &bursts][..], &what, &program].concat());
    assert_eq!((recorded.status.code(), &*recorded.stdout), (Some(3), &b"1000000\n"[..]));
    let printed = error(&recorded);
    assert!(printed.starts_with("elfen: profile by bursts: "), "{printed}");
    assert!(printed.contains("of user time; cost "), "{printed}");
    let counted = ["record", "--by", "everything", "-q", "-o", &exact];
    assert_eq!(elfen(&[&counted[..], &what, &shorter].concat()).status.code(), Some(3));
    let text = String::from_utf8(elfen(&["report", &bursts]).stdout).unwrap();
    assert!(text.contains(" bursts\n") && text.contains("± %"), "{text}");
    let compared = elfen(&["compare", &exact, &bursts, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&compared.stdout).unwrap();
    let overlap = json["rows"][0]["overlap"].as_f64().unwrap();
    assert!(overlap > 0.7, "{json}");
    let paths = json["rows"].as_array().unwrap().iter().find(|row| row["what"] == "paths");
    assert!(paths.unwrap()["weight_match"].as_f64().unwrap() > 0.5, "{json}");
    let paths = elfen(&["report", &exact, "--sort", "path", "--top", "1", "--json"]);
    let paths: serde_json::Value = serde_json::from_slice(&paths.stdout).unwrap();
    let hottest = &paths["paths"][0];
    assert!(hottest["count"].as_u64().unwrap() >= 49_000, "{hottest}");
    let swapped = elfen(&["compare", &bursts, &exact]);
    assert_eq!(swapped.status.code(), Some(1));
    assert!(error(&swapped).contains("its counts are estimates"), "{}", error(&swapped));
}

/// Goal: shadows are recorded without privileges; meanwhile, another command asks what they cost
/// and changes that. Method: a shell that prints its id and computes for two seconds.
#[test]
fn shadows_are_recorded_and_changed_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shadows.elfprof").to_str().unwrap().to_owned();
    let script = "echo $$; i=0; while [ $i -lt 2000000 ]; do i=$((i+1)); done; exit 4";
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["profile", "record", "--by", "shadows", "--sample", "100K", "-o", &file, "--"]);
    let recording = command.args(["sh", "-c", script]).stdout(Stdio::piped());
    let mut recording = recording.stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(recording.stdout.take().unwrap()).read_line(&mut first).unwrap();
    let process = first.trim();
    let set = elfen(&["set", process, "--cost", "2%", "--sample", "200K", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&set.stdout).unwrap();
    assert_eq!((&told["by"], &told["may_cost_percent"]), (&"shadows".into(), &2.0.into()));
    assert_eq!(told["process"].to_string(), process);
    let top = Command::new(env!("CARGO_BIN_EXE_elfen")).args(["top", "--once"]).output().unwrap();
    let top = String::from_utf8(top.stdout).unwrap();
    let row = top.lines().find(|line| line.trim_start().starts_with(process));
    assert!(row.is_none_or(|row| row.contains(" shadows ")), "{top}");
    for wrong in [["--cost", "90%"], ["--edges", "500"]] {
        let wrong = elfen(&["set", process, wrong[0], wrong[1]]);
        assert_eq!(wrong.status.code(), Some(2), "{}", error(&wrong));
    }
    let ended = recording.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(4), "{}", error(&ended));
    assert!(error(&ended).contains(" shadows with "), "{}", error(&ended));
    let gone = elfen(&["set", process]);
    assert_eq!(gone.status.code(), Some(1));
    let text = String::from_utf8(elfen(&["report", &file]).stdout).unwrap();
    assert!(text.contains(" shadows\n"), "{text}");
    let unfit = elfen(&["record", "--by", "bursts", "--what", "values", "--", "true"]);
    assert_eq!(unfit.status.code(), Some(2));
    assert!(error(&unfit).contains("--by shadows"), "{}", error(&unfit));
}

/// Goal: shadows run on the lanes that `elfen run` has lent to a batch. Method: what the
/// recording says, and the CPUs of the shadows, with and without a batch.
#[test]
#[ignore = "needs two CPUs, and root: the process is not a descendant"]
fn shadows_run_on_lent_lanes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.elfprof");
    let script = "while :; do i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 0.02; done";
    let mut service = Command::new("taskset");
    service.args(["-c", "0", "sh", "-c", script]);
    let service = KilledOnDrop(service.spawn().unwrap());
    let process = service.id().to_string();
    let record = || {
        let options = ["--by", "shadows", "--sample", "100K", "--cost", "50%", "--load", "1"];
        let words = ["record", "-d", "2s", "-p", &process, "-o", file.to_str().unwrap()];
        let mut recorder = Command::new(env!("CARGO_BIN_EXE_elfen"));
        recorder.arg("profile").args(words).args(options).stderr(Stdio::piped());
        let mut recorder = KilledOnDrop(recorder.spawn().unwrap());
        let mut cpus = HashSet::new();
        while recorder.try_wait().unwrap().is_none() {
            cpus.extend(cpus_of_processes_traced_by(recorder.id()));
        }
        let mut said = String::new();
        recorder.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(recorder.wait().unwrap().success(), "{said}");
        (said, cpus)
    };
    let (alone, alone_on) = record();
    let mut batch = Command::new(env!("CARGO_BIN_EXE_elfen"));
    batch.args(["run", "--lanes", "0:1", "--", "sh", "-c", "while :; do :; done"]);
    let mut batch = KilledOnDrop(batch.spawn().unwrap());
    sleep(Duration::from_secs(1));
    let (next, next_on) = record();
    let ends = Command::new("kill").arg(batch.id().to_string()).status().unwrap();
    assert!(ends.success());
    batch.wait().unwrap();
    assert!(!alone.contains("lanes"), "{alone}");
    assert!(next.contains("shadows ran on lanes that `elfen run` has lent"), "{next}");
    assert!(!alone_on.contains("1") && next_on.contains("1"), "{alone_on:?}, {next_on:?}");
}

/// The CPUs that each process may use which this one traces.
fn cpus_of_processes_traced_by(tracer: u32) -> impl Iterator<Item = String> {
    let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    let processes = names.filter_map(|name| name.to_str()?.parse::<u32>().ok());
    let tracer = tracer.to_string();
    processes
        .filter(move |process| status_field(process, "TracerPid").as_ref() == Some(&tracer))
        .filter_map(|process| status_field(process, "Cpus_allowed_list"))
}

/// Functions that call each other in known ways, also by qsort(3), with a frame of variable size,
/// and from a handler of a signal.
const STACKS: &str = r#"
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>
#define APART __attribute__((noinline, noipa))
volatile long sum;
APART void leaf(long times) { for (long i = 0; i < times; i++) sum += i; sum++; }
APART void left(void) { leaf(300); sum++; }
APART void right(void) { leaf(100); sum++; }
APART void deep(int depth) { if (depth) deep(depth - 1); else leaf(50); sum++; }
APART int order(const void *a, const void *b) { leaf(3); return *(int *)a - *(int *)b; }
APART void sorted(void) {
    int all[32];
    for (int i = 0; i < 32; i++) all[i] = i * 7 % 32;
    qsort(all, 32, sizeof(int), order);
    sum++;
}
APART void wide(int n) { char room[n]; room[n - 1] = 1; leaf(room[n - 1] * 60); sum++; }
static void handler(int signal) { leaf(500000); sum += signal; }
int main(void) {
    struct itimerval timer = {{0, 5000}, {0, 5000}};
    void (*volatile call)(void) = left;
    signal(SIGALRM, handler);
    setitimer(ITIMER_REAL, &timer, 0);
    for (int i = 0; i < 6000000; i++) {
        call();
        call = call == left ? right : left;
        deep(i % 7);
        if (i % 16 == 0) { sorted(); wide(100 + i % 900); }
    }
    timer.it_value.tv_usec = 0;
    setitimer(ITIMER_REAL, &timer, 0);
    return 0;
}
"#;

/// Whether a stack is one that the program above can have, from `main` on.
fn is_possible(stack: &str) -> bool {
    let words: Vec<&str> = stack.split(';').collect();
    let (inner, outer) = match words.iter().position(|&word| word == "handler") {
        // What it interrupts may be at any instruction, also in front of its first one.
        Some(at) => (&words[at + 1..], &words[1..at.saturating_sub(1).max(1)]),
        None => (&words[1..], &[][..]),
    };
    let in_main = |words: &[&str]| match words {
        [] | ["left" | "right" | "wide"] | ["left" | "right" | "wide", "leaf"] => true,
        ["deep", rest @ ..] => {
            let rest = rest.strip_suffix(&["leaf"]).unwrap_or(rest);
            rest.len() < 7 && rest.iter().all(|&word| word == "deep")
        }
        ["sorted", rest @ ..] => !rest.contains(&"left") && !rest.contains(&"main"),
        [one] => one.contains(":0x"),
        _ => false,
    };
    let in_handler = matches!(inner, [] | ["leaf"]);
    if words.contains(&"handler") { in_handler && in_main(outer) } else { in_main(inner) }
}

#[test]
#[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
fn stacks_are_those_of_the_program_and_are_exported() {
    let folder = tempfile::tempdir().unwrap();
    let [program, profile] = ["stacks", "stacks.elfprof"].map(|name| folder.path().join(name));
    compile(STACKS, &program, &["-O2"]);
    let [program, profile] = [&program, &profile].map(|path| path.to_str().unwrap());
    let recorded = elfen(&["record", "-q", "--cost", "5%", "-o", profile, "--", program]);
    assert!(recorded.status.success(), "{}", error(&recorded));
    let exported = |format: &str| {
        let output = elfen(&["export", profile, "--to", format]);
        assert!(output.status.success(), "{format}: {}", error(&output));
        output.stdout
    };
    let folded = String::from_utf8(exported("folded")).unwrap();
    let mut sums: HashMap<&str, u64> = HashMap::new();
    for line in folded.lines() {
        let (stack, count) = line.rsplit_once(' ').unwrap();
        let from_main = stack.find(";main").map(|at| &stack[at + 1..]).unwrap_or_default();
        assert!(is_possible(from_main) && from_main.starts_with("main"), "{line}");
        *sums.entry(from_main).or_default() += count.parse::<u64>().unwrap();
    }
    let [left, right] = ["left", "right"].map(|name| sums[&*format!("main;{name};leaf")]);
    assert!((2 * right..4 * right).contains(&left), "300 to 100: {left} to {right}");
    assert!(sums.keys().any(|stack| stack.ends_with(";handler;leaf")), "{folded}");
    let report = elfen(&["report", profile, "--sort", "total", "--top", "1", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(report["functions"][0]["total_percent"], 100.0, "{report}");
    assert!(exported("pprof").starts_with(b"\x1f\x8b"));
    let viewed: serde_json::Value = serde_json::from_slice(&exported("firefox")).unwrap();
    let weights = viewed["threads"][0]["samples"]["weight"].as_array().unwrap();
    let weights: u64 = weights.iter().map(|weight| weight.as_u64().unwrap()).sum();
    assert_eq!(weights, sums.values().sum::<u64>());
    let calls = String::from_utf8(exported("callgrind")).unwrap();
    assert!(calls.contains("\ncfn=leaf\n"), "{calls}");
    let wrong = elfen(&["export", profile, "--to", "folded", "--binary", program]);
    assert!(error(&wrong).contains("--binary is for bolt and llvm only"), "{}", error(&wrong));
}

#[test]
fn failures_have_a_reason_and_a_status() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "no profile").unwrap();
    let text = text.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 11] = [
        (
            &["record", "--by", "everything", "--", "/no/such/program"],
            127,
            "No such file or directory",
        ),
        (&["record", "--by", "everything", "--", text], 126, "Permission denied"),
        (&["record"], 2, "PROGRAM"),
        (&["record", "-o", "/no/such/folder/f", "--", "true"], 1, "No such file or directory"),
        (&["report", text], 1, "it is not a profile of Elfen"),
        (&["record", "--by", "magic", "--", "true"], 2, "magic"),
        (&["record", "--cost", "0%", "--", "true"], 2, "from 0.01% to 50%"),
        (&["record", "--cost", "much", "--", "true"], 2, "as in 1%"),
        (&["record", "--edges", "9000", "--", "true"], 2, "8191"),
        (&["record", "--by", "everything", "-p", "1"], 2, "from its start to its end"),
        (&["compare", text, text], 1, "it is not a profile of Elfen"),
    ];
    for (words, status, why) in cases {
        let output = elfen(words);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", error(&output));
        assert!(error(&output).contains(why), "{words:?}: {}", error(&output));
    }
    let mut stopped = Command::new("sh").args(["-c", "kill -STOP $$"]).spawn().unwrap();
    let process = stopped.id().to_string();
    let state = || fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    while !state().contains(") T ") {
        sleep(Duration::from_millis(5));
    }
    let output = elfen(&["record", "-p", &process]);
    assert_eq!(output.status.code(), Some(1));
    assert!(error(&output).contains(&format!("kill -CONT {process}")), "{}", error(&output));
    stopped.kill().unwrap();
    stopped.wait().unwrap();
    let killed = elfen(&["record", "-q", "--by", "everything", "--", "sh", "-c", "kill -KILL $$"]);
    assert_eq!(killed.status.code(), Some(128 + 9));
    for wrong in
        [["--by", "bursts", "--cpu", "0", "true"], ["--by", "shadows", "--cpu", "8191", "true"]]
    {
        let refused = elfen(&[&["record"][..], &wrong[..4], &["--", wrong[4]]].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", error(&refused));
    }
    let of_kernel = elfen(&["record", "-p", "2"]);
    assert!(matches!(of_kernel.status.code(), Some(1 | 3)), "{}", error(&of_kernel));
    // An existing profile is replaced only by a whole one.
    let kept = folder.path().join("kept.elfprof");
    fs::write(&kept, "kept").unwrap();
    let missing = elfen(&["record", "-o", kept.to_str().unwrap(), "--", "/no/such/program"]);
    assert_eq!(missing.status.code(), Some(127));
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let unread = elfen(&["record", "-o", pipe.to_str().unwrap(), "--", "true"]);
    assert_eq!(unread.status.code(), Some(1), "{}", error(&unread));
    let limited = format!(
        "ulimit -f 0; exec {} profile record --by everything -o {} -- true",
        env!("CARGO_BIN_EXE_elfen"),
        kept.display()
    );
    let limited = Command::new("sh").args(["-c", &limited]).output().unwrap();
    assert_eq!(limited.status.code(), Some(1), "{}", error(&limited));
    assert_eq!(fs::read(&kept).unwrap(), b"kept");
    let endless = elfen(&["report", "/dev/zero"]);
    assert_eq!(endless.status.code(), Some(1), "{}", error(&endless));
}

/// Goal: SIGTERM to the command reaches the program, and what the program leaves behind goes on.
#[test]
fn signals_are_passed_on_and_children_live_on() {
    let folder = tempfile::tempdir().unwrap();
    let [up, done] = ["up", "done"].map(|name| folder.path().join(name));
    let script = format!(
        "trap 'exit 7' TERM; (sleep 1; echo late > {}) & echo up > {}; wait; wait",
        done.display(),
        up.display()
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command
        .args(["profile", "record", "-q", "--by", "everything", "--", "sh", "-c", &script])
        .stderr(Stdio::null());
    let mut running = command.spawn().unwrap();
    wait_for(&up);
    let id = nix::unistd::Pid::from_raw(running.id().cast_signed());
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(7));
    wait_for(&done);
}

const COLLATZ: &str = "\
#include <stdio.h>
static long odd(long n) { return 3 * n + 1; }
static long even(long n) { return n / 2; }
long steps(long n) {
    long count = 0;
    for (; n != 1; count++)
        n = n % 2 ? odd(n) : even(n);
    return count;
}
int main(void) {
    long sum = 0;
    for (long n = 1; n < 30000; n++)
        sum += steps(n);
    printf(\"%ld\\n\", sum);
    return 0;
}
";

/// Records the program above, and returns the profile for llvm-bolt.
fn branches(folder: &Path) -> String {
    let [program, file] = ["collatz", "run.elfprof"].map(|name| folder.join(name));
    let flags = ["-O2", "-fno-inline", "-fno-reorder-blocks", "-Wl,--emit-relocs"];
    compile(COLLATZ, &program, &flags);
    let [program, file] = [program, file].map(|path| path.to_str().unwrap().to_owned());
    assert!(
        elfen(&["record", "-q", "--by", "everything", "-o", &file, "--", &program])
            .status
            .success()
    );
    let exported = elfen(&["export", &file, "--to", "bolt"]);
    assert!(exported.status.success(), "{}", error(&exported));
    String::from_utf8(exported.stdout).unwrap()
}

/// Goal: branches are exported with their counts, by symbols. Method: calls of known number.
#[test]
fn branches_are_exported_by_symbol() {
    let folder = tempfile::tempdir().unwrap();
    let text = branches(folder.path());
    let calls = |to: &str| {
        let lines = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let calls = lines.filter(|words| words[1] != to && words[4..6] == [to, "0"]);
        calls.map(|words| words[7].parse::<u64>().unwrap()).sum::<u64>()
    };
    assert_eq!(calls("steps"), 29_999, "{text}");
    // The compiler names no file: local functions have a number.
    assert!(calls("odd/1") > 0 && calls("even/1") > calls("odd/1"), "{text}");
    let file = folder.path().join("run.elfprof");
    let other = elfen(&["export", file.to_str().unwrap(), "--to", "bolt", "--binary", "/bin/true"]);
    assert_eq!(other.status.code(), Some(1));
    assert!(error(&other).contains("it has no such file"), "{}", error(&other));
}

/// Goal: llvm-bolt takes the exported branches. Method: the program that it writes takes fewer
/// branches, and prints the same.
#[test]
#[ignore = "needs llvm-bolt"]
fn llvm_bolt_takes_the_branches() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("run.fdata");
    fs::write(&data, branches(folder.path())).unwrap();
    let [program, fast] = ["collatz", "fast"].map(|name| folder.path().join(name));
    let mut bolt = Command::new("/usr/lib/llvm-16/bin/llvm-bolt");
    bolt.arg(&program).arg("-data").arg(&data).arg("-o").arg(&fast);
    let printed = bolt.args(["-reorder-blocks=ext-tsp", "-dyno-stats"]).output().unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    let taken = printed.lines().filter(|line| line.trim_end().contains(": taken branches"));
    let taken: Vec<u64> =
        taken.map(|line| line.split_whitespace().next().unwrap().parse().unwrap()).collect();
    let [before, after] = taken[..] else { panic!("{printed}") };
    assert!(after * 2 < before, "{printed}");
    let output = |program: &Path| Command::new(program).output().unwrap().stdout;
    assert_eq!(output(&fast), output(&program));
}

/// A loop with an inlined function, whose counts are known.
const LINES: &str = "\
#include <stdio.h>
static inline int third(int x) { return x % 3 ? x : x / 3; }
volatile int seed;
__attribute__((noinline)) int hot(int n) {
    int sum = seed;
    for (int i = 0; i < n; i++)
        sum += third(i ^ sum);
    return sum;
}
int main(void) {
    int all = 0;
    for (int i = 0; i < 300; i++)
        all += hot(1000);
    printf(\"%d\\n\", all);
    return 0;
}
";

/// Goal: lines are exported with exact counts, and clang takes them. Method: it inlines what the
/// profile says, and uses the weights of the branches.
#[test]
#[ignore = "needs clang and llvm-profdata"]
fn clang_takes_the_lines() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (source, program) = (file("lines.c"), file("lines"));
    let (profile, lines) = (file("run.elfprof"), file("run.prof"));
    fs::write(&source, LINES).unwrap();
    let clang = |words: &[&str]| {
        let done = Command::new("clang-14").arg("-O2").args(words).output().unwrap();
        assert!(done.status.success(), "{}", error(&done));
        error(&done)
    };
    let lines_only = ["-gline-tables-only", "-fdebug-info-for-profiling", "-o", &program, &source];
    clang(&lines_only);
    let record = ["record", "--by", "everything", "-q", "-o", &profile, "--", &program];
    assert!(elfen(&record).status.success());
    let exported = String::from_utf8(elfen(&["export", &profile, "--to", "llvm"]).stdout).unwrap();
    // The third line of `hot` ran in each round, and has the inlined function.
    assert!(exported.starts_with("hot:"), "{exported}");
    let hot = exported.split("main:").next().unwrap();
    assert!(hot.lines().any(|line| line.starts_with(" 3: third:")), "{exported}");
    assert!(hot.lines().any(|line| line == "  0: 300000"), "{exported}");
    assert!(exported.contains(":300\n"), "hot was called 300 times: {exported}");
    fs::write(&lines, &exported).unwrap();
    let mut show = Command::new("/usr/lib/llvm-14/bin/llvm-profdata");
    let shown = show.args(["show", "--sample", &lines]).output().unwrap();
    assert!(shown.status.success(), "{}", error(&shown));
    let fast = file("fast");
    let used = format!("-fprofile-sample-use={lines}");
    let remarks = clang(&[&used, "-Rpass=sample-profile", "-o", &fast, &source]);
    assert!(remarks.contains("to match profiling context"), "{remarks}");
    let output = |program: &str| Command::new(program).output().unwrap().stdout;
    assert_eq!(output(&fast), output(&program));

    clang(&["-s", "-o", &program, &source]);
    assert!(elfen(&record).status.success());
    let exported = elfen(&["export", &profile, "--to", "llvm"]);
    assert!(error(&exported).contains("has no lines; compile it with"), "{}", error(&exported));
}

/// A program whose counts of calls and instructions are known.
const CALLS: &str = "\
volatile int sink;
static __attribute__((noinline)) void one(void) {
    sink = 1;
}
static inline __attribute__((always_inline)) void two(void) {
    sink = 2;
}
__attribute__((noinline)) void both(int times) {
    for (int i = 0; i < times; i++) {
        one();
        two();
    }
}
void never(void) {
    sink = 3;
}
int main(void) {
    both(TIMES);
    return 0;
}
";

/// Compiles the program above as `src/calls.c`, with a number of rounds, and records it by
/// everything. Returns the profile and the program.
fn calls(folder: &Path, name: &str, times: u32, options: &[&str]) -> [String; 2] {
    let [sources, program] = ["src", name].map(|name| folder.join(name));
    fs::create_dir_all(&sources).unwrap();
    fs::create_dir_all(&program).unwrap();
    fs::write(sources.join("calls.c"), CALLS).unwrap();
    let [program, file] =
        ["calls", "run.elfprof"].map(|one| program.join(one).to_str().unwrap().to_owned());
    let mut compiler = Command::new("gcc");
    compiler.current_dir(folder).arg(format!("-DTIMES={times}")).args(options);
    compiler.args(["-O1", "-o", &program, "src/calls.c"]);
    assert!(compiler.status().unwrap().success());
    let recorded = elfen(&["record", "-q", "--by", "everything", "-o", &file, "--", &program]);
    assert!(recorded.status.success(), "{}", error(&recorded));
    [file, program]
}

fn text(words: &[&str]) -> String {
    let output = elfen(words);
    assert!(output.status.success(), "{words:?}: {}", error(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn json(words: &[&str]) -> serde_json::Value {
    serde_json::from_str(&text(&[words, &["--json"]].concat())).unwrap()
}

/// Goal: each line has the instructions that were executed for it. Method: calls of known number;
/// the instructions of a line are those of one round, times the rounds.
#[test]
fn lines_have_exact_counts() {
    let folder = tempfile::tempdir().unwrap();
    let [file, _] = calls(folder.path(), "dwarf", 100_000, &["-g"]);
    let report = json(&["report", &file, "--sort", "line"]);
    let lines = report["lines"].as_array().unwrap();
    let line = |number: u64| {
        let found = lines.iter().find(|one| one["line"] == number);
        found.unwrap_or_else(|| panic!("no line {number} in {report}"))
    };
    // A line is one instruction or more. All of them ran in each round.
    for (number, function) in [(3, "one"), (6, "two"), (10, "both")] {
        let found = line(number);
        let instructions = found["instructions"].as_u64().unwrap();
        assert!(instructions >= 100_000 && instructions.is_multiple_of(100_000), "{found}");
        assert_eq!((&found["function"], &found["file"]), (&function.into(), &"calls".into()));
        let path = found["path"].as_str().unwrap();
        assert_eq!(Path::new(path), folder.path().canonicalize().unwrap().join("src/calls.c"));
    }
    let table = text(&["report", &file, "--sort", "line", "--top", "6"]);
    assert!(table.contains("share %  instructions  line"), "{table}");
    let row = table.lines().find(|line| line.contains("src/calls.c:6 ")).unwrap();
    assert!(row.ends_with(" two"), "{table}");
    assert_eq!(table.lines().count(), 9, "{table}");
    // All instructions are in one row each.
    let all = json(&["report", &file, "--sort", "line", "--top", "1000000"]);
    let counted = |rows: &serde_json::Value| {
        let rows = rows.as_array().unwrap().iter();
        rows.map(|row| row["instructions"].as_u64().unwrap()).sum::<u64>()
    };
    let functions = json(&["report", &file, "--top", "1000000"]);
    assert_eq!(counted(&all["lines"]), counted(&functions["functions"]));
    assert_eq!(functions.get("lines"), None);

    // The loader may have lines in its debug package, so this program has none.
    let [bare, _] = calls(folder.path(), "bare", 10, &["-static", "-s"]);
    let failed = elfen(&["report", &bare, "--sort", "line"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(error(&failed).contains("have no lines; compile with -g"), "{}", error(&failed));
}

/// Goal: a function's instructions have their counts, and the lines that they are of.
#[test]
fn functions_are_annotated() {
    let folder = tempfile::tempdir().unwrap();
    let [file, program] = calls(folder.path(), "a", 1000, &["-g"]);
    let annotation = json(&["report", &file, "--annotate", "both"]);
    assert_eq!(annotation["function"], "both");
    assert_eq!(annotation["file"], *program);
    let rows = annotation["rows"].as_array().unwrap();
    let addresses: Vec<u64> = rows.iter().map(|row| row["address"].as_u64().unwrap()).collect();
    assert!(addresses.is_sorted() && !addresses.is_empty());
    let sum: u64 = rows.iter().map(|row| row["count"].as_u64().unwrap()).sum();
    assert_eq!(annotation["instructions"], sum);
    let counts = |text: &str| -> Vec<(u64, u64)> {
        let found = rows.iter().filter(|row| row["instruction"].as_str().unwrap() == text);
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        found.map(|row| (number(&row["count"]), number(&row["line"]))).collect()
    };
    assert_eq!(counts("call one"), [(1000, 10)], "{annotation}");
    // It returns once, and may have another way out for no rounds.
    let returns: u64 = counts("ret").iter().map(|&(count, _)| count).sum();
    assert_eq!(returns, 1, "{annotation}");
    let table = text(&["report", &file, "--annotate", "both"]);
    let head = format!("both of {program}: ");
    assert!(table.starts_with(&head) && table.contains("count  share %  address"), "{table}");
    assert!(table.contains("\nsrc/calls.c:10          one();\n1,000 "), "{table}");
    // The loop branches back into the function.
    assert!(table.lines().any(|line| line.starts_with("1,000") && line.contains(" both+0x")));
    // A part of the name is enough, and the source is not needed.
    fs::remove_dir_all(folder.path().join("src")).unwrap();
    let table = text(&["report", &file, "--annotate", "bot"]);
    assert!(table.contains("\nsrc/calls.c:10\n1,000 "), "{table}");
    for (name, why) in [
        ("never", "none of its own instructions ran"),
        ("nothing", "no function that ran has this name; name another one, such as `"),
        ("o", "several functions match; name one of them, such as `"),
    ] {
        let failed = elfen(&["report", &file, "--annotate", name]);
        assert_eq!(failed.status.code(), Some(1), "{name}");
        assert!(error(&failed).contains(why), "{}", error(&failed));
    }
    let both = elfen(&["report", &file, "--annotate", "both", "--sort", "line"]);
    assert_eq!(both.status.code(), Some(2));
}

/// Goal: changes of exact profiles are listed. Method: a program that is built again with more
/// rounds.
#[test]
fn changes_between_profiles_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let [before, _] = calls(folder.path(), "a", 1000, &["-g"]);
    let [after, program] = calls(folder.path(), "b", 100_000, &["-g"]);
    let diff = json(&["diff", &before, &after, "--sort", "call"]);
    // The loader's calls are the same, so the share of this one grows.
    let row = &diff["rows"][0];
    assert_eq!((&row["from"], &row["to"]), (&"both".into(), &"one".into()), "{diff}");
    let of = |key: &str| row[key].as_f64().unwrap();
    assert!(of("before_percent") < of("after_percent") && of("after_percent") > 90.0, "{row}");
    assert!((of("after_percent") - of("before_percent") - of("change_points")).abs() < 1e-9);
    assert!(of("error_points").abs() < 1e-9);
    let functions = text(&["diff", &before, &after, "--top", "2"]);
    assert!(functions.starts_with("before %  after %  change  function\n"), "{functions}");
    let first = functions.lines().nth(1).unwrap();
    assert!(first.contains(" +") && first.ends_with("  both"), "{functions}");

    let edges = elfen(&["diff", &before, &after, "--sort", "edge"]);
    let warning = format!("edges of {program} are left out");
    assert!(edges.status.success() && error(&edges).contains(&warning), "{}", error(&edges));
    let same = text(&["diff", &before, &before, "--sort", "edge"]);
    assert!(same.ends_with("edges are left out: without a change; see --all\n"), "{same}");
    let all = text(&["diff", &before, &before, "--sort", "edge", "--all", "--top", "100000"]);
    assert!(all.contains("both+0x") && all.contains("  one\n"), "{all}");
}

fn wait_for(file: &Path) {
    let begun = Instant::now();
    while fs::read(file).map_or(true, |bytes| bytes.is_empty()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} is not written", file.display());
        sleep(Duration::from_millis(10));
    }
}

/// Goal: rules are applied, reported and compared. Method: the shipped file, on a program of the
/// base system.
#[test]
fn what_rules_collect_is_reported_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let [text, file, exact] =
        ["text", "run.elfprof", "exact.elfprof"].map(|name| folder.path().join(name));
    let lines: String = (0..20_000).map(|line| format!("{}\n", line * 7919 % 10_007)).collect();
    fs::write(&text, lines).unwrap();
    let [text, file, exact] = [&text, &file, &exact].map(|path| path.to_str().unwrap());
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../workloads/profile/hps.rules");
    let by = ["record", "-q", "--by", "everything", "-o"];
    let program = ["--", "env", "LC_ALL=C", "sort", text];
    let words = [&by[..], &[file, "--rules", rules], &program].concat();
    assert!(elfen(&words).status.success());
    assert!(elfen(&[&by[..], &[exact], &program].concat()).status.success());
    let report = elfen(&["report", file, "--sort", "rule", "--json"]).stdout;
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let rows = report["rules"].as_array().unwrap();
    for (rule, has_caller) in [("CallPairs", true), ("HotMethods", false)] {
        let rows = rows.iter().filter(|row| row["rule"] == rule);
        let rows: Vec<_> = rows.collect();
        assert!(rows.len() > 5, "{report}");
        assert!(rows.iter().all(|row| row["caller"].is_string() == has_caller), "{report}");
        let counts: Vec<u64> = rows.iter().map(|row| row["count"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted_by(|a, b| a >= b) && counts[0] > 100, "{counts:?}");
    }
    let table = elfen(&["report", file, "--sort", "rule", "--top", "2"]).stdout;
    let table = String::from_utf8(table).unwrap();
    assert!(table.contains("± %") && table.matches("HotMethods").count() == 2, "{table}");
    let compared = elfen(&["compare", exact, file, "--json"]).stdout;
    let compared: serde_json::Value = serde_json::from_slice(&compared).unwrap();
    for name in ["rule CallPairs, hottest 90 %", "rule HotMethods, hottest 90 %"] {
        let row = compared["rows"].as_array().unwrap().iter().find(|row| row["what"] == name);
        let overlap = row.expect(name)["overlap"].as_f64().unwrap();
        assert!((0.5..1.0).contains(&overlap), "{compared}");
    }
    let without = elfen(&["report", exact, "--sort", "rule"]);
    assert_eq!(without.status.code(), Some(1));
    assert!(error(&without).contains("record it with `--rules FILE`"), "{}", error(&without));
}

/// Goal: data streams are recorded, reported with their lines, compared, and refused where they
/// cannot be recorded. Method: a program that walks a list, by everything, in bursts of it, and by
/// the shipped rules.
#[test]
fn data_streams_are_reported_and_compared() {
    const SOURCE: &str = include_str!("../../elfen-profile/tests/c/chase.c");
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let [program, exact, cut, rules] = ["chase", "exact", "cut", "rules"].map(path);
    compile(SOURCE, Path::new(&program), &["-O2", "-g", "-w"]);
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../workloads/profile/hps.rules");
    let program = ["--", &program, "2000", "40"];
    let streams = ["--what", "streams"];
    let by = |by, file, more: &[&str]| {
        elfen(&[&["record", "-q", "--by", by, "-o", file], more, &program].concat())
    };
    let burst = [&streams[..], &["--burst", "20"]].concat();
    for (file, more) in [(&exact, &streams[..]), (&cut, &burst), (&rules, &["--rules", shipped])] {
        let recorded = by("everything", file, more);
        assert!(recorded.status.success(), "{}", error(&recorded));
    }
    let report = json(&["report", &exact, "--sort", "stream"]);
    let hottest = &report["streams"]["hottest"][0];
    let of = |row: &serde_json::Value, key: &str| row[key].as_u64().unwrap();
    assert!((80..90).contains(&of(hottest, "length")), "{hottest}");
    assert_eq!(of(hottest, "heat"), of(hottest, "length") * of(hottest, "count"));
    let walks = hottest["references"].as_array().unwrap().iter().filter(|one| {
        let has = |key: &str, part: &str| one[key].as_str().unwrap().contains(part);
        has("instruction", "walk") && has("path", "chase.c") && has("data", "[heap]+0x")
    });
    assert_eq!(walks.count(), 80, "{hottest}");
    let table = text(&["report", &exact, "--sort", "stream", "--top", "1"]);
    assert!(table.contains("(chase.c:") && !table.contains("± %"), "{table}");
    assert!(text(&["report", &rules, "--sort", "rule"]).contains("\nDataStreams "));
    let short = json(&["report", &cut, "--sort", "stream"]);
    assert!(of(&short["streams"]["hottest"][0], "length") <= 20, "{short}");
    let overlap = |file: &str, name: &str| {
        let compared = json(&["compare", &exact, file]);
        let row = compared["rows"].as_array().unwrap().iter().find(|row| row["what"] == name);
        row.expect(name)["overlap"].as_f64().unwrap()
    };
    assert!(overlap(&exact, "data streams, hottest 90 %") > 0.999);
    // No stream of the short bursts is the walk.
    assert!(overlap(&cut, "data streams, hottest 90 %") < 0.1);
    assert!((0.0..1.0).contains(&overlap(&rules, "rule DataStreams, hottest 90 %")));

    for (refused, why) in [
        (by("shadows", &cut, &["--what", "streams,values"]), "record the values by themselves"),
        (by("shadows", &cut, &["--burst", "20"]), "add `--what streams`"),
    ] {
        assert_eq!(refused.status.code(), Some(2));
        assert!(error(&refused).contains(why), "{}", error(&refused));
    }
}

/// Goal: a file of rules that is missing or wrong is refused before the program runs, with the
/// place of the error.
#[test]
fn wrong_rules_are_refused_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("own.rules");
    let refused = |text: &[u8]| {
        fs::write(&rules, text).unwrap();
        let file = rules.to_str().unwrap();
        let output = elfen(&["record", "--rules", file, "--", "echo", "ran"]);
        assert!(output.stdout.is_empty());
        (output.status.code(), error(&output))
    };
    let missing = elfen(&["record", "--rules", "/nonexistent/rules", "--", "echo", "ran"]);
    assert_eq!((missing.status.code(), missing.stdout), (Some(1), Vec::new()));
    let (status, message) = refused(b"# mine\nP1: T.OPCLASS == call -> null, inc_1\n");
    assert_eq!(status, Some(2));
    assert!(message.contains("own.rules\": line 2, column 18: expected a class"), "{message}");
    let caret = format!("{:22}^ expected a class", " ".repeat(3) + "|");
    assert!(message.contains(&caret), "{message}");
    let (status, message) = refused(b"S: T.OPCLASS != branch -> call(DataStream), null");
    assert_eq!(status, Some(2));
    assert!(message.contains("DataStream is for memory accesses only"), "{message}");
    let (status, message) = refused(b"P1: T.OPCLASS == proc_call -> null, inc_1");
    assert_eq!(status, Some(2));
    assert!(message.contains("no production has a handler"), "{message}");
    assert_eq!(refused(b"\xff\xfe").0, Some(2));
}

/// Goal: a traced program behaves as ever, and its trace runs on the model.
#[test]
fn a_trace_is_recorded_and_run_on_a_core() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("walk");
    let source = "#include <stdio.h>\n\
        long table[1 << 16];\n\
        __attribute__((noipa)) long walk(long at) {\n\
            long sum = 0;\n\
            for (long i = 0; i < 40000; i++) { sum += table[at & 0xffff]; at = at * 5 + 7; }\n\
            return sum;\n\
        }\n\
        int main(void) { printf(\"%ld\\n\", walk(1)); return 5; }\n";
    compile(source, &program, &["-O1"]);
    let file = folder.path().join("run.elftrace");
    let [file, program] = [&file, &program].map(|path| path.to_str().unwrap());
    let traced = elfen(&["trace", "--instructions", "10M", "-o", file, "--", program]);
    assert_eq!((traced.status.code(), &traced.stdout[..]), (Some(5), &b"0\n"[..]));
    assert!(error(&traced).contains("instructions in"), "{}", error(&traced));
    for machine in ["21264", "wide"] {
        let report = elfen(&["core", file, "--machine", machine, "--every", "50", "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
        let rows = json["rows"].as_array().unwrap();
        let load = rows.iter().find(|row| {
            row["name"].as_str().unwrap().starts_with("walk")
                && row["class"] == "integer"
                && !row["dcache_miss_rate"].is_null()
        });
        let load = load.or_else(|| rows.iter().find(|row| row["class"] == "load")).unwrap();
        let executions = load["executions_truly"].as_u64().unwrap();
        assert!((40_000..41_000).contains(&executions), "{load}");
        // The table is twice as large as the larger cache.
        assert!(load["dcache_miss_rate"].as_f64().unwrap() > 0.05, "{load}");
        let estimated = load["executions"].as_f64().unwrap() / 40_000.0;
        assert!((0.85..1.15).contains(&estimated), "{load}");
    }
    let text = elfen(&["core", file, "--pipeline", "walk"]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("walk+") && text.contains("F") && text.contains("R\n"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let text = elfen(&["core", file, "--beside", file]).stdout;
    assert!(String::from_utf8(text).unwrap().starts_with("experiment: "));
    let metric = elfen(&["core", file, "--metric", "ipc", "--top", "3"]).stdout;
    assert!(String::from_utf8(metric).unwrap().contains("metric"));
}

/// Goal: samples are refused where no device takes them, with the reason and a way out. Method: a
/// recording on this machine; with a device, it has to succeed.
#[test]
fn samples_are_taken_or_refused() {
    for words in [&["--by", "samples"][..], &["--what", "instructions"]] {
        let output = elfen(&[&["record"], words, &["--", "sh", "-c", "exit 7"]].concat());
        let text = error(&output);
        if output.status.code() == Some(7) {
            assert!(text.contains("profile by samples: "), "{text}");
            continue;
        }
        assert_eq!(output.status.code(), Some(3), "{text}");
        assert!(text.starts_with("elfen: samples: ") && text.contains("bursts"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    let cases: [(&[&str], &str); 3] = [
        (&["--by", "bursts", "--what", "instructions"], "use --by samples"),
        (&["--by", "samples", "--what", "stacks"], "single instructions only"),
        (&["--by", "samples", "--every", "1"], "10K"),
    ];
    for (words, why) in cases {
        let output = elfen(&[&["record"], words, &["--", "true"]].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(error(&output).contains(why), "{}", error(&output));
    }
}

/// Goal: a profile by samples is reported by function and by instruction, and other commands
/// refuse it. Method: a file with samples at a function of this test.
#[test]
fn samples_are_reported() {
    let program = std::env::current_exe().unwrap();
    let table = elfen_instrument::symbols::FunctionTable::read(&program).unwrap();
    let main = table.functions().iter().find(|one| one.name == "main").unwrap();
    let mut profile = Profile { by: Source::Samples, programs: 1, ..Profile::default() };
    profile.program = vec!["test".to_owned()];
    let file = profile.file(program.to_str().unwrap());
    let build_id = table.build_id.iter().map(|byte| format!("{byte:02x}")).collect();
    profile.files[0].build_id = build_id;
    profile.sampled_events = vec![SampledEvent {
        device: "ibs_op".to_owned(),
        source: "IBS".to_owned(),
        unit: SampleUnit::Operations,
        interval: 500_000,
        samples: 20,
        counted: 12_000_000,
        lost: 0,
    }];
    let start = table.offset_of(main.address).unwrap();
    for (inside, samples) in [(0, 4), (2, 16)] {
        let place = Place { file, offset: start + inside };
        let sums = profile.samples.entry(SampledPlace { place, event: 0 }).or_default();
        (sums.samples, sums.retired) = (samples, samples);
        (sums.mispredicted.sum, sums.mispredicted.count) = (1, samples);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.elfprof");
    elfen_profile::elfprof::write(&profile, &mut fs::File::create(&path).unwrap()).unwrap();
    let file = path.to_str().unwrap();
    let functions = text(&["report", file]);
    let first = "test: 1 program, 20 samples by IBS (ibs_op), one in 600000 operations\n";
    assert!(functions.starts_with(first), "{functions}");
    assert!(functions.contains("caution: not tried on such hardware yet"), "{functions}");
    assert!(functions.contains("main") && !functions.contains("main+"), "{functions}");
    let instructions = text(&["report", file, "--sort", "instruction"]);
    let rows: Vec<&str> = instructions.lines().skip(4).collect();
    assert!(rows[0].starts_with("80.00") && rows[0].contains("main+0x2"), "{instructions}");
    assert!(rows[0].contains("6.2 %") && rows[1].contains("25.0 %"), "{instructions}");
    let report = json(&["report", file, "--sort", "instruction"]);
    assert_eq!(report["by"], "samples");
    let row = &report["samples"]["instructions"][0];
    assert_eq!((&row["samples"], &row["executions"]), (&16.into(), &9.6e6.into()));
    assert_eq!((&row["relative_error"], &row["aborted_share"]), (&0.25.into(), &().into()));
    for words in [
        &["report", file, "--sort", "call"][..],
        &["report", file, "--annotate", "main"],
        &["export", file, "--to", "llvm"],
        &["diff", file, file],
    ] {
        let output = elfen(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(error(&output).contains("samples of single instructions"), "{}", error(&output));
    }
}

#[test]
fn what_a_core_cannot_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.elftrace");
    let file = file.to_str().unwrap();
    let words = ["trace", "-q", "--instructions", "20k", "-o", file, "--", "true"];
    assert!(elfen(&words).status.success());
    let machine = folder.path().join("core.toml");
    fs::write(&machine, "like = \"wide\"\n[map]\nreorder = 0\n").unwrap();
    let machine = machine.to_str().unwrap();
    let cut = folder.path().join("cut.elftrace");
    fs::write(&cut, &fs::read(file).unwrap()[..100]).unwrap();
    let cut = cut.to_str().unwrap();
    for (words, status, why) in [
        (&["core", file, "--machine", "p4"][..], 1, "name 21264, 21164, wide, or a file"),
        (&["core", file, "--machine", machine], 1, "`map.reorder` is 0"),
        (&["core", file, "--metric", "a.x"], 2, "column 1"),
        (&["core", file, "--pipeline", "nothing"], 1, "no instruction that ran is there"),
        (&["core", cut], 1, "it is cut short or damaged"),
        (&["core", machine], 1, "it is not a trace of Elfen"),
        (&["core", "/nonexistent"], 1, "No such file"),
        (&["trace", "-o", "/nonexistent/a", "--", "true"], 1, "/nonexistent/a"),
        (&["trace", "-o", cut, "--skip", "1G", "--", "true"], 1, "use a smaller --skip"),
        (&["trace", "-o", cut, "--", "/nonexistent"], 127, "/nonexistent"),
        (&["trace", "-o", cut, "--", "/etc/passwd"], 126, "name an executable file"),
    ] {
        let output = elfen(words);
        assert_eq!(output.status.code(), Some(status), "{words:?} {}", error(&output));
        assert!(error(&output).contains(why), "{words:?} {}", error(&output));
    }
}
