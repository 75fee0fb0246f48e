//! Goal: numbers have the program's values in every form of output: signed numbers are signed, and
//! a constant has no changes. Method: a program with globals of known values; the summary, the
//! text, all exports, and the report of its recording.

use crate::needs;
use crate::stage::{build, json, report_page, said, shim, text};

/// A program whose `queue` alternates between 3 and -1, 40 times each.
const NUMBERS: &str = r#"
long negative = -5;
int small = -5;
unsigned long seven = 7;
volatile long queue = 3;
int main(void)
{
	for (int turn = 0; turn < 80; turn++) {
		queue = turn % 2 ? 3 : -1;
		for (volatile long spin = 0; spin < 5000000; spin++)
			;
	}
	queue = 3;
	return 0;
}
"#;

#[test]
fn signed_numbers_are_signed_and_constants_do_not_change() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path(), "numbers", NUMBERS, &[]);
    let path = folder.path().join("run.shim");
    let (program, file) = (program.to_str().unwrap(), path.to_str().unwrap());
    let signals = ["negative:i64", "small:i32", "seven", "queue:i64"];
    let watched = signals.iter().flat_map(|signal| ["--watch", signal]);
    let words: Vec<&str> = ["--json", "-o", file].into_iter().chain(watched).collect();
    let summary = json(&shim(&[&words[..], &["--", program]].concat()));
    let csv = text(shim(&["export", file]));
    let shown = text(shim(&["show", file]));
    let constants = [("negative:i64", -5), ("small:i32", -5), ("seven", 7)];
    for (signal, (name, value)) in summary["signals"].as_array().unwrap().iter().zip(constants) {
        assert_eq!((&signal["name"], &signal["new_values"]), (&name.into(), &0.into()));
        for key in ["first", "last", "least", "most", "mean"] {
            assert_eq!(signal["values"][key].as_f64(), Some(f64::from(value)), "{signal:#}");
        }
        let states = csv.lines().filter(|line| line.starts_with(&format!("{name},")));
        let states = states.map(|line| line.split(',').nth(3).unwrap().to_owned());
        let values: Vec<String> = states.filter(|state| !state.starts_with('(')).collect();
        let expected = value.to_string();
        assert!(!values.is_empty() && values.iter().all(|value| *value == expected), "{values:?}");
        let line = shown.lines().find(|line| line.starts_with(name)).unwrap();
        let cells: Vec<&str> = line.split_whitespace().skip(1).collect();
        let mean = format!("{value}.0");
        assert_eq!(cells, ["0", &expected, &expected, &expected, &expected, &mean], "{shown}");
    }
    let queue = &summary["signals"][3];
    assert_eq!((&queue["values"]["least"], &queue["values"]["most"]), (&(-1).into(), &3.into()));
    assert!(queue["new_values"].as_u64().unwrap() <= 81, "{queue:#}");
    let mean = queue["values"]["mean"].as_f64().unwrap();
    assert!(-1.0 < mean && mean < 3.0, "{queue:#}");
    let trace = json(&shim(&["export", file, "--as", "perfetto"]));
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let mut values = events.filter(|event| event["ph"] == "C").map(|event| &event["args"]["value"]);
    assert!(values.all(|value| (-5..=7).contains(&value.as_i64().unwrap())), "{trace:#}");
    let profile = json(&shim(&["export", file, "--as", "firefox"]));
    let counters = profile["counters"].as_array().unwrap();
    assert_eq!(counters[0]["samples"]["count"][0], -5.0, "{profile:#}");
    assert!(!report_page(&path).is_empty());
    let until = shim(&["--watch", "queue:i64", "--until", "queue:i64 > -2", "--", program]);
    assert!(until.status.success(), "{until:?}");
    let never = shim(&["--watch", "seven", "--until", "seven > -2", "--", program]);
    assert_eq!(never.status.code(), Some(2), "{never:?}");
}

/// Goal: a flame graph contains each moment once. Method: a recording of functions and tags. The
/// sum of its stacks is at most the length of the recording.
#[test]
fn a_flame_graph_is_of_one_signal() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let tagged = "#include \"elfen_tag.h\"\n\
        int main(void) { elfen_tag(\"spins\"); \
        for (volatile long i = 0; i < 500000000; i++) ; return 0; }\n";
    let program = build(folder.path(), "tagged", tagged, &["-finstrument-functions"]);
    let file = folder.path().join("run.shim");
    let (program, file) = (program.to_str().unwrap(), file.to_str().unwrap());
    text(shim(&["--watch", "function", "--watch", "tag", "-o", file, "--", program]));
    let stacks = |words: &[&str]| -> Vec<(String, u64)> {
        let all = text(shim(&[&["export", file, "--as", "folded"], words].concat()));
        let row = |line: &str| {
            let (stack, ns) = line.rsplit_once(' ').unwrap();
            (stack.split(';').nth(1).unwrap().to_owned(), ns.parse().unwrap())
        };
        all.lines().map(row).collect()
    };
    let default = stacks(&[]);
    assert!(!default.is_empty() && default.iter().all(|(signal, _)| signal == "function"));
    assert_eq!(default, stacks(&["--signal", "function"]));
    assert!(stacks(&["--signal", "tag"]).iter().all(|(signal, _)| signal == "tag"));
    let summary = json(&shim(&["show", file, "--json"]));
    let whole = ["observed_ns", "gap_ns"].map(|key| summary[key].as_u64().unwrap());
    let sum: u64 = default.iter().map(|(_, ns)| ns).sum();
    assert!(sum <= whole.iter().sum(), "{sum} of {whole:?}");
    for (words, why) in [
        (["--as", "folded", "--signal", "none"], "function"),
        (["--as", "csv", "--signal", "tag"], "all signals"),
    ] {
        let refused = shim(&[&["export", file], &words[..]].concat());
        let said = said(&refused);
        assert!(refused.status.code() == Some(2) && said.contains(why), "{said}");
    }
}
