//! What `elfen set` changes shows where it is said: in the report too.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::needs;
use crate::stage::Serving;

/// Goal: a report names the policy that held at the end beside the budget that held then, and says
/// that it was set. Method: a run of one policy that is given another, beside one that is not.
#[test]
fn a_report_is_of_the_policy_that_held_at_the_end() {
    needs::two_cpus();
    let serving = Serving::start();
    let _worker = serving.service().claim(0, 0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for set in [&[][..], &["--policy", "refresh-budget", "--budget", "3ms"]] {
        let file = folder.path().join("report");
        let options = ["--policy", "fixed-budget", "--budget", "2ms", "--report"];
        let options = [&options[..], &[file.to_str().unwrap()]].concat();
        let mut command = serving.elfen(&options, &["sh", "-c", "echo $$; read line"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut front = command.spawn().unwrap();
        let mut pid = String::new();
        BufReader::new(front.stdout.take().unwrap()).read_line(&mut pid).unwrap();
        if !set.is_empty() {
            let mut elfen = Command::new(env!("CARGO_BIN_EXE_elfen"));
            let output = elfen.args(["set", pid.trim()]).args(set).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        drop(front.stdin.take());
        front.wait().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let says = (&report["policy"], &report["budget_ns"], &report["policy_was_set"]);
        let expected = match set.is_empty() {
            true => ("fixed-budget".into(), 2_000_000.into(), false.into()),
            false => ("refresh-budget".into(), 3_000_000.into(), true.into()),
        };
        assert_eq!(says, (&expected.0, &expected.1, &expected.2), "{report}");
    }
}
