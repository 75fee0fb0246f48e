//! Tests `elfen lanes` on recorded machines, compared with files.
//!
//! `sysfs/NAME.machine` is a recorded machine; `lanes/NAME.txt` and `lanes/NAME.json` are its
//! output. `lanes/by-hand.txt` and `lanes/refused.txt` are sessions with `--lanes`. After an
//! intended change, `SNAPSHOTS=overwrite cargo test -p elfen --test lanes` writes these files.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// `elfen` with these arguments, without variables of this process.
fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.env_remove("ELFEN_LANES").env_remove("ELFEN_MACHINE").args(words);
    command
}

fn on_machine(machine: &Path, words: &[&str]) -> Output {
    elfen(words).env("ELFEN_MACHINE", machine).output().expect("elfen starts")
}

fn stdout_of(output: &Output) -> String {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn assert_file(name: &str, actual: String) {
    let expected = Data::read_from(&tests().join("lanes").join(name), Some(DataFormat::Text));
    Assert::new().action_env("SNAPSHOTS").normalize_paths(false).eq(actual, expected);
}

/// Writes each key of the object on its own line, so that differences are easy to find.
fn split_keys(json: &str) -> String {
    let Value::Object(object) = serde_json::from_str(json).expect("one JSON value") else {
        panic!("no JSON object: {json}");
    };
    let line = |(key, value): (&String, &Value)| match value {
        Value::Array(items) if items.iter().any(Value::is_object) => {
            let items: Vec<_> = items.iter().map(Value::to_string).collect();
            format!("  {key:?}: [\n    {}\n  ]", items.join(",\n    "))
        }
        value => format!("  {key:?}: {value}"),
    };
    let lines: Vec<_> = object.iter().map(line).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

/// Goal: table and JSON of each recorded machine equal the files. Method: every file in `sysfs`.
#[test]
fn recorded_machines_have_the_recorded_lanes() {
    let folder = fs::read_dir(tests().join("sysfs")).expect("the recordings are in the repository");
    let mut machines: Vec<PathBuf> = folder.map(|entry| entry.unwrap().path()).collect();
    machines.sort();
    assert!(machines.len() >= 19, "{machines:?}");
    for machine in machines {
        let name = machine.file_stem().unwrap().to_str().unwrap();
        assert_file(&format!("{name}.txt"), stdout_of(&on_machine(&machine, &["lanes"])));
        let json = stdout_of(&on_machine(&machine, &["lanes", "--json"]));
        assert_file(&format!("{name}.json"), split_keys(&json));
    }
}

/// 512 CPUs in two packages with a hole between them: 0-255 and 512-767. Siblings have numbers that
/// differ by 128.
fn large_machine() -> String {
    let cpu = "/sys/devices/system/cpu";
    let mut files = String::from("affinity: 0-255,512-767\n");
    for list in ["online", "present"] {
        writeln!(files, "{cpu}/{list}: 0-255,512-767").unwrap();
    }
    files += "/sys/devices/system/node/online: 0-1\n";
    for (package, first) in [(0, 0), (1, 512)] {
        let node = format!("/sys/devices/system/node/node{package}/cpulist");
        writeln!(files, "{node}: {first}-{}", first + 255).unwrap();
        for core in 0..128 {
            let (low, high) = (first + core, first + core + 128);
            for (sibling, other) in [(low, high), (high, low)] {
                let topology = format!("{cpu}/cpu{sibling}/topology");
                let (a, b) = (sibling.min(other), sibling.max(other));
                writeln!(files, "{topology}/core_cpus_list: {a},{b}").unwrap();
                writeln!(files, "{topology}/core_id: {core}").unwrap();
                writeln!(files, "{topology}/physical_package_id: {package}").unwrap();
            }
        }
    }
    files
}

fn large_machine_file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), large_machine()).expect("room for it");
    file
}

/// Goal: 512 CPUs with a hole give 256 pairs, and no pair is in the hole. Method: a generated
/// machine, and the same rule applied to the output.
#[test]
fn a_large_machine_with_a_hole_has_256_pairs() {
    let machine = large_machine_file();
    let json = stdout_of(&on_machine(machine.path(), &["lanes", "--json"]));
    let report: Value = serde_json::from_str(&json).expect("one JSON value");
    let pairs = report["pairs"].as_array().expect("a list");
    assert_eq!(pairs.len(), 256);
    for (index, pair) in (0u64..).zip(pairs) {
        let request = if index < 128 { index } else { index - 128 + 512 };
        assert_eq!(pair["request"], request);
        assert_eq!(pair["batch"], serde_json::json!([request + 128]));
        assert_eq!(pair["core"], index % 128);
        assert_eq!(pair["node"], index / 128);
    }
    assert_eq!(report["cpus_offline"], serde_json::json!([]), "a hole is no offline CPU");

    let table = stdout_of(&on_machine(machine.path(), &["lanes"]));
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 257);
    assert_eq!(lines[256], "639      767    1        127   1");
}

/// The commands with their outputs as in a shell, each on its machine.
fn session(steps: &[(&str, &[&str])]) -> String {
    let large = large_machine_file();
    let mut session = String::new();
    for &(machine, words) in steps {
        let file = match machine {
            "large" => large.path().to_owned(),
            name => tests().join("sysfs").join(name).with_extension("machine"),
        };
        let output = on_machine(&file, &[&["lanes"], words].concat());
        let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
        writeln!(session, "{machine}$ elfen lanes {}", quoted.join(" ")).unwrap();
        session += &String::from_utf8(output.stderr).expect("UTF-8");
        session += &String::from_utf8(output.stdout).expect("UTF-8");
        writeln!(session, "= {}\n", output.status.code().expect("it exits")).unwrap();
    }
    session
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-:,".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("{word:?}") }
}

/// Goal: unusable lanes are refused with status 2, in one line with the mistake and the
/// alternatives. Method: commands with one mistake each, on machines where it is a mistake.
#[test]
fn unusable_lanes_are_refused() {
    let desktop = "desktop-2way";
    let session = session(&[
        (desktop, &["--lanes", ""]),
        (desktop, &["--lanes", "0"]),
        (desktop, &["--lanes", "0:"]),
        (desktop, &["--lanes", ":1"]),
        (desktop, &["--lanes", "0:0"]),
        (desktop, &["--lanes", "0:1,2:1"]),
        (desktop, &["--lanes", "0:1,,2"]),
        (desktop, &["--lanes", "0-3:4"]),
        (desktop, &["--lanes", "0:3-1"]),
        (desktop, &["--lanes", "0:1-3:0"]),
        (desktop, &["--lanes", "zero:one"]),
        (desktop, &["--lanes", "0\n:1"]),
        (desktop, &["--lanes", "0,1:2"]),
        (desktop, &["--lanes", "0:1,"]),
        (desktop, &["--lanes", "0:1,2:"]),
        (desktop, &["--lanes", "0:1-3,2:5"]),
        (desktop, &["--lanes", "0:1:2"]),
        (desktop, &["--lanes", "0:+1"]),
        (desktop, &["--lanes", "0 :1"]),
        (desktop, &["--lanes", "0:1-4:x"]),
        (desktop, &["--lanes", "0:8"]),
        (desktop, &["--lanes", "0:99999999999"]),
        (desktop, &["--lanes", "-1:0"]),
        ("large", &["--lanes", "0:300"]),
        ("cpu-offline", &["--lanes", "4:5"]),
        ("smt-off", &["--lanes", "0:1"]),
        ("container-v2", &["--lanes", "0:1"]),
        ("container-v1", &["--lanes", "2:3,4:5"]),
        ("taskset", &["--lanes", "2:3"]),
        ("one-cpu", &["--lanes", "0:1"]),
    ]);
    for step in session.split("\n\n").filter(|step| !step.is_empty()) {
        let lines: Vec<&str> = step.lines().collect();
        assert_eq!((lines.len(), lines[lines.len() - 1]), (3, "= 2"), "{step}");
    }
    assert_file("refused.txt", session);
}

/// Goal: usable lanes are accepted, with a warning if sysfs shows that they do not share a core.
/// Method: pairs that share a core, pairs that do not, and pairs for which sysfs does not tell.
#[test]
fn usable_lanes_are_accepted() {
    let session = session(&[
        ("desktop-2way", &["--lanes", "2:3,0:1"]),
        ("desktop-2way", &["--lanes", "0:1,2,4-7:2"]),
        ("hybrid", &["--lanes", "0:1,12:13"]),
        ("power9-4way", &["--lanes", "4:5-7,16:17,18"]),
        ("server-2-sockets", &["--lanes", "0:1,8:9"]),
        ("isolated", &["--lanes", "2:3"]),
        ("smt-off", &["--lanes", "0:2"]),
        ("vm-hidden", &["--lanes", "0:1"]),
        ("no-cores", &["--lanes", "2:3"]),
    ]);
    assert_file("by-hand.txt", session);
}

/// Goal: ELFEN_LANES is the default of --lanes, which takes precedence. Method: both, with
/// different pairs.
#[test]
fn elfen_lanes_is_the_default_of_the_option() {
    let machine = tests().join("sysfs/desktop-2way.machine");
    let requests = |words: &[&str]| {
        let mut command = elfen(&[&["lanes", "--json"], words].concat());
        command.env("ELFEN_MACHINE", &machine).env("ELFEN_LANES", "2:3");
        let report: Value =
            serde_json::from_str(&stdout_of(&command.output().unwrap())).expect("JSON");
        let pairs = report["pairs"].as_array().expect("a list").clone();
        pairs.iter().map(|pair| pair["request"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(requests(&[]), [2]);
    assert_eq!(requests(&["--lanes", "4:5"]), [4]);
}

/// Goal: a recording contains all that the command reads. Method: compare the output for this
/// machine with the output for its recording.
#[test]
fn a_recording_replays_this_machine() {
    let recording = stdout_of(&elfen(&["lanes", "--dump-machine"]).output().unwrap());
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), &recording).expect("room for it");
    assert_eq!(stdout_of(&on_machine(file.path(), &["lanes", "--dump-machine"])), recording);
    for words in [&["lanes"][..], &["lanes", "--json"]] {
        let live = stdout_of(&elfen(words).output().unwrap());
        assert_eq!(stdout_of(&on_machine(file.path(), words)), live, "{recording}");
    }
}

/// Goal: an invalid or incomplete recording is refused with the reason. Method: files with one
/// fault each, and their status.
#[test]
fn broken_recordings_are_refused() {
    let online = "/sys/devices/system/cpu/online: 0-1\n";
    let faults = [
        ("no recording\n".to_owned(), 2, "line 1 is not PATH: CONTENT"),
        ("affinity: 0\n".to_owned(), 3, "there is no /sys/devices/system/cpu/online"),
        (online.to_owned(), 1, "the recording has no line affinity: CPUS"),
        (format!("{online}affinity: x\n"), 1, "affinity holds \"x\": \"x\" is not a CPU number"),
    ];
    for (content, status, reason) in faults {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), &content).expect("room for it");
        let output = on_machine(file.path(), &["lanes"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{content:?}: {stderr}");
        assert!(stderr.contains(reason) && stderr.lines().count() == 1, "{content:?}: {stderr}");
        assert!(output.stdout.is_empty());
    }
    let absent = on_machine(Path::new("/nonexistent"), &["lanes"]);
    assert_eq!(absent.status.code(), Some(2));
}

/// Goal: Slurm's node has as many CPUs as there are batch lanes. Method: `--lanes` on a recorded
/// machine, with several batch lanes for one request lane; and a machine without pairs.
#[test]
fn the_node_for_slurm_has_a_cpu_for_each_batch_lane() {
    let machines = tests().join("sysfs");
    let machine = machines.join("power9-4way.machine");
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let name = name.trim().split('.').next().unwrap();
    let words = ["lanes", "--slurm", "--lanes", "0:1-3,4:5"];
    let line = stdout_of(&on_machine(&machine, &words));
    assert_eq!(line, format!("NodeName={name} CPUs=4 Features=elfen State=UNKNOWN\n"));
    let json = stdout_of(&on_machine(&machine, &[&words[..], &["--json"]].concat()));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["CPUs"], 4);
    assert_eq!(json["NodeName"], name);
    let none = on_machine(&machines.join("smt-off.machine"), &["lanes", "--slurm"]);
    assert_eq!(none.status.code(), Some(3), "{none:?}");
    assert!(String::from_utf8_lossy(&none.stderr).contains("no batch lane"), "{none:?}");
}
