//! Goal: `elfen lab hps` prints the paper's figures next to those of real programs. The tables
//! hold what the paper says of any program. Method: a program of the base system.

use std::process::{Command, Output};

use serde_json::Value;

fn hps(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elfen-lab")).arg("hps").args(words).output().unwrap()
}

fn error(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn one_stream_is_judged_with_all_settings() {
    let output = hps(&["--program", "sort", "--json"]);
    assert!(output.status.success(), "{}", error(&output));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let program = &result["programs"][0];
    let count = |name: &str| program[name].as_u64().unwrap();
    let (calls, events) = (count("calls"), count("events"));
    assert!(calls > 10_000 && events > calls && count("instructions") > 10 * calls, "{program}");
    let rows = result["sampling"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 4 * 5);
    let number = |row: &Value, profile: &str, name: &str| row[profile][name].as_f64().unwrap();
    let find = |burst: u64, period: u64, random: bool| {
        let row = rows.iter().find(|row| {
            row["burst"] == burst && row["period"] == period && row["random"] == random
        });
        row.unwrap()
    };
    for row in rows {
        // A burst of its length and an interval, and the event that ends both.
        let (burst, period) = (row["burst"].as_u64().unwrap(), row["period"].as_u64().unwrap());
        let expected = events as f64 * burst as f64 / (burst * period + 1) as f64;
        let found = number(row, "methods", "samples");
        let tolerance = 2.0 * burst as f64 + 0.1 * expected;
        assert!((found - expected).abs() <= tolerance, "{row}: not {expected}");
        for profile in ["pairs", "methods"] {
            let accuracy = number(row, profile, "accuracy_percent");
            assert!((0.0..=100.0).contains(&accuracy), "{row}");
        }
    }
    // More samples are better, and cost more. One choice of few samples may be a lucky one: the
    // environment alone changes how often the dynamic loader calls a function.
    for name in ["accuracy_percent", "drawn_percent", "overhead_percent"] {
        let [often, seldom] = [100, 10_000].map(|period| {
            let found = rows.iter().filter(|row| row["period"] == period);
            found.map(|row| number(row, "methods", name)).sum::<f64>() / 8.0
        });
        assert!(often > seldom, "{name}: {often}, {seldom}");
    }
    let accuracy = number(find(1, 100, true), "methods", "accuracy_percent");
    assert!(accuracy > 85.0, "{accuracy}");
    let overheads = &result["overheads"][0]["pairs"];
    assert_eq!(overheads["hps"]["basic_percent"], 0.0);
    assert!(
        overheads["dise"]["basic_percent"].as_f64()
            > overheads["two_copies"]["basic_percent"].as_f64()
    );
    assert!(result["published"].as_array().unwrap().len() >= 10);
}

#[test]
fn the_tables_are_printed_and_unknown_programs_refused() {
    let output = hps(&["--program", "sort", "--handler", "40"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("published > 90, here ") && text.contains("a handler executes 40"));
    let unknown = hps(&["--program", "true"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(error(&unknown).contains("bzip2, grep, gzip"), "{}", error(&unknown));
}
