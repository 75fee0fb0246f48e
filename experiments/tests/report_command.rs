//! Tests `elfen lab report` from outside: its output, its files, and its error messages.
//!
//! - `report_files/results.jsonl` has live runs.
//! - `report_files/nap.json` has the output of `elfen lab bench nap --json`.
//! - `report_files/live.json` and `report_files/help.txt` have the expected output of the command.
//!
//! After an intended change, `SNAPSHOTS=overwrite cargo test -p experiments --test report_command`
//! writes the last two files again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report_files")
}

/// Runs `elfen lab report` with these words, in a folder.
fn report(words: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
    command.arg("report").args(words).current_dir(folder).output().expect("elfen starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Returns the output of a command that succeeds and prints nothing on stderr.
#[track_caller]
fn printed(words: &[&str], folder: &Path) -> String {
    let output = report(words, folder);
    assert_eq!((text(&output.stderr), output.status.code()), (String::new(), Some(0)));
    text(&output.stdout)
}

#[track_caller]
fn json(words: &[&str]) -> Value {
    serde_json::from_str(&printed(words, &folder())).expect("one JSON value")
}

fn assert_file(name: &str, actual: String) {
    let expected = Data::read_from(&folder().join(name), Some(DataFormat::Text));
    Assert::new().action_env("SNAPSHOTS").normalize_paths(false).eq(actual, expected);
}

fn ids(report: &Value) -> Vec<&str> {
    let figures = report["figures"].as_array().expect("figures");
    figures.iter().map(|figure| figure["id"].as_str().expect("an id")).collect()
}

/// Goal: unintended changes of the help and of the JSON are noticed. Method: compare both with
/// files.
#[test]
fn as_recorded() {
    assert_file("help.txt", printed(&["--help"], &folder()));
    assert_file("live.json", printed(&["results.jsonl", "--json"], &folder()));
}

/// Goal: the command writes one file, in the given place, and prints its name. Method: without a
/// name, with a name, and to standard output. All three give the same page.
#[test]
fn where_it_goes() {
    let scratch = tempfile::tempdir().expect("a folder");
    let results = folder().join("results.jsonl").display().to_string();
    assert_eq!(printed(&[&results], scratch.path()), "report.html: 3 figures\n");
    assert_eq!(printed(&[&results, "--html", "a b.html"], scratch.path()), "a b.html: 3 figures\n");
    let page = printed(&[&results, "--html", "-"], scratch.path());
    assert!(page.starts_with("<!DOCTYPE html>\n") && page.ends_with("</html>\n"));
    for name in ["report.html", "a b.html"] {
        assert_eq!(fs::read_to_string(scratch.path().join(name)).expect("the page"), page);
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 2);
}

/// Goal: each set of arguments gives its figures. Method: compare the ids of the figures.
#[test]
fn what_is_in_it() {
    let few = ["--requests", "1000", "--json"];
    let simulated = json(&few);
    assert_eq!(ids(&simulated).len(), 10);
    assert_eq!(ids(&simulated)[9], "naps");
    assert_eq!(simulated["figures"][9]["source"], "published");
    assert_eq!(simulated["command"], "elfen lab report --requests 1000 --seed 1");

    let live = json(&["results.jsonl", "--json"]);
    assert_eq!(ids(&live), ["live-cost", "live-at-one-load", "live-throughput"]);
    let both = json(&[&["results.jsonl", "--thesis"], &few[..]].concat());
    let all = [ids(&live), ids(&simulated)].concat();
    assert_eq!(ids(&both), all);
    let expected = "elfen lab report results.jsonl --thesis --requests 1000 --seed 1";
    assert_eq!(both["command"], expected);

    let naps = json(&["results.jsonl", "--naps", "nap.json", "--json"]);
    assert_eq!(ids(&naps)[3], "naps");
    let figure = &naps["figures"][3];
    assert_eq!(figure["source"], "live");
    let names = figure["x"]["names"]["names"].as_array().expect("names");
    assert_eq!(names[..], ["mwait", "device", "futex", "spin"]);
    let measured = &figure["panels"][1]["series"][1];
    assert_eq!(measured["name"], "measured here");
    let point = |index: usize| {
        (measured["points"][index]["x"].as_f64(), measured["points"][index]["y"].as_f64())
    };
    assert_eq!([point(0), point(1)], [(Some(3.0), Some(520.0)), (Some(2.0), Some(91_000.0))]);
}

/// Goal: figures name the file of their measured parameters, and do not show numbers of the thesis.
/// Method: a file as `elfen lab calibrate` writes it.
#[test]
fn a_calibrated_model() {
    let words = ["--model", "model.toml", "--requests", "2000", "--json"];
    let report = json(&words);
    assert_eq!(report["tables"].as_array().map(Vec::len), Some(0));
    assert_eq!(report["command"], "elfen lab report --requests 2000 --seed 1 --model model.toml");
    for figure in &report["figures"].as_array().expect("figures")[..9] {
        let made_with = figure["made_with"].as_str().expect("words");
        let expected = "Simulated with model.toml (calibrated on a CPU with SMT) and the demand of \
                        the thesis: a request takes 1.25 times as long next to \"loop\", 2 \
                        times as long next to \"flush\"";
        assert!(made_with.starts_with(expected), "{made_with}");
        assert!(!figure.to_string().contains("published in the thesis"), "{figure}");
    }
}

/// Goal: the command under a simulated figure gives a point of the figure. Method: run each command
/// that gives one point, and search for its p99 among the figure's points.
#[test]
fn the_command_below_makes_the_point_above() {
    let few = ["--requests", "20000", "--seed", "3", "--json"];
    let reports = [json(&few), json(&[&["--model", "model.toml"], &few[..]].concat())];
    let figures = reports.iter().map(|report| report["figures"].as_array().expect("figures"));
    let mut made = 0;
    for figure in figures.flatten() {
        let command = figure["command"].as_str().expect("a command");
        let Some((_, point)) = command.split_once("# one point of the figure:\n") else { continue };
        let words: Vec<&str> = point.split(' ').skip(2).collect();
        if words.contains(&"--trace-out") || figure["id"] == "simulated-overhead" {
            continue;
        }
        let mut elfen = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
        let output = elfen.args(&words).arg("--json").current_dir(folder()).output();
        let output = output.expect("elfen starts");
        assert!(output.status.success(), "{point}: {}", text(&output.stderr));
        let simulated: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let at = words.iter().position(|word| *word == "--rps").expect("a rate");
        let rps: f64 = words[at + 1].parse().expect("a rate");
        let points = figure["panels"][0]["series"].as_array().expect("series").iter();
        let mut points = points.flat_map(|series| series["points"].as_array().expect("points"));
        let same = |point: &Value| point["x"] == rps && point["y"] == simulated["p99_ms"];
        assert!(points.any(same), "{point}: {} in {figure}", simulated["p99_ms"]);
        made += 1;
    }
    assert_eq!(made, 12);
}

/// Goal: a last line that was cut off is left out, with a warning. Method: the results without
/// their last bytes.
#[test]
fn a_file_that_was_cut_off() {
    let scratch = tempfile::tempdir().expect("a folder");
    let whole = fs::read(folder().join("results.jsonl")).expect("the results");
    fs::write(scratch.path().join("cut.jsonl"), &whole[..whole.len() - 5]).expect("room");
    let output = report(&["cut.jsonl"], scratch.path());
    assert_eq!(output.status.code(), Some(0));
    let warning = "elfen: warning: results \"cut.jsonl\": line 10 is truncated, so it is ignored\n";
    assert_eq!(text(&output.stderr), warning);
}

/// Goal: every mistake gives one line that names the file and the line, with status 2, and no file
/// is written. Method: one wrong argument or one wrong file in each command.
#[test]
fn what_is_refused() {
    let scratch = tempfile::tempdir().expect("a folder");
    let whole = fs::read_to_string(folder().join("results.jsonl")).expect("the results");
    let lines: Vec<&str> = whole.lines().collect();
    let wrong = whole.replacen("\"p99_ms\":2.5", "\"p99_ms\":-2.5", 1);
    assert_ne!(wrong, whole);
    let files: [(&str, Vec<u8>); 9] = [
        ("empty.jsonl", Vec::new()),
        ("setup.jsonl", format!("{}\n", lines[0]).into_bytes()),
        ("headless.jsonl", format!("{}\n", lines[1]).into_bytes()),
        ("text.jsonl", b"these are\nno results\n".to_vec()),
        ("binary.jsonl", [lines[0].as_bytes(), b"\n\xff\xfe\n"].concat()),
        ("half.jsonl", format!("{}\n{}\n", lines[0], &lines[1][..90]).into_bytes()),
        ("negative.jsonl", wrong.into_bytes()),
        ("huge.json", HUGE_NAP.as_bytes().to_vec()),
        ("other.json", b"{\"naps\": []}".to_vec()),
    ];
    for (name, bytes) in &files {
        fs::write(scratch.path().join(name), bytes).expect("room");
    }
    for (line, why) in [
        ("empty.jsonl", "elfen: results \"empty.jsonl\": the file is empty; "),
        ("setup.jsonl", "elfen: results \"setup.jsonl\": the file has a setup, but no runs; "),
        ("headless.jsonl", "elfen: results \"headless.jsonl\": line 1 is not a setup; "),
        ("text.jsonl", "\"text.jsonl\": not the results of an experiment: line 1: expected "),
        (
            "binary.jsonl",
            "\"binary.jsonl\": not the results of an experiment: line 2 is not text; ",
        ),
        ("half.jsonl", "\"half.jsonl\": not the results of an experiment: line 2: "),
        ("negative.jsonl", "line 2: p99_ms is -2.5, which is not a possible measurement; "),
        ("missing.jsonl", "elfen: results \"missing.jsonl\": No such file"),
        (".", "elfen: results \".\": Is a directory"),
        ("--naps other.json", "elfen: nap \"other.json\": missing field `request_cpu`"),
        ("--naps huge.json --requests 10", "1e300 cannot be drawn; "),
        ("--model other.json", "elfen: model \"other.json\": line 1: "),
        ("--requests 0", "elfen: the simulation: there is nothing to simulate"),
        ("--requests 99999999999", "elfen: the simulation: a point of a figure may have"),
        ("--requests many", "invalid value 'many'"),
        ("--json --html x", "cannot be used with"),
        ("--theses", "unexpected argument '--theses'"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let output = report(&words, scratch.path());
        let stderr = text(&output.stderr);
        // The arguments are right, and a file that they name is not.
        let of_file = line.contains(".json") && !line.contains("--model") || line == ".";
        let status = if of_file { 1 } else { 2 };
        assert_eq!(output.status.code(), Some(status), "{line}: {stderr}");
        assert!(stderr.starts_with("elfen: ") && stderr.contains(why), "{line}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{line}: {stderr}");
        assert!(output.stdout.is_empty(), "{line}");
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), files.len());
}

const HUGE_NAP: &str = r#"{"request_cpu": 0, "batch_cpu": 1, "tsc_mhz": 2000, "naps":
    [{"nap": "spin", "sleep_cycles": {"median": 1e300}, "wake_cycles": null}]}"#;

/// Goal: if the page cannot be written, the command fails and names it. Method: a folder that does
/// not exist, and a full device.
#[test]
fn places_that_cannot_be_written() {
    for file in ["/nonexistent/report.html", "/dev/full"] {
        let output = report(&["results.jsonl", "--html", file], &folder());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.starts_with(&format!("elfen: page {file:?}: ")), "{stderr}");
        assert!(stderr.ends_with("; name a file that can be written\n"), "{stderr}");
    }
}
