//! The report of `elfen run --json-out`.
//!
//! `experiments` reads it by the same type: a missing key is an error, not a zero.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::figures::Figures;
use super::live::page::Live;
use super::poll_timing::PollReport;

/// The measurements of one run.
///
/// Times are nanoseconds. The comments of the fields are the text of the reference
/// (`report_reference.rs`).
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RunReport {
    /// The policy that was in force at the end. `elfen set` may have changed it.
    pub policy: String,
    /// The budget that was in force at the end; 0 if the policy has none.
    pub budget_ns: u64,
    /// Whether `elfen set` changed the policy during the run.
    pub policy_was_set: bool,
    /// The pairs of the run, in the syntax of `--lanes`.
    pub lanes: String,
    /// The source of signals, such as `tasks (attached)`, `module` or `service alone`.
    pub source: String,
    /// How guards waited: `device`, `umwait`, `mwaitx`, `block` or `spin`.
    pub nap: String,
    /// How threads with checks napped. `null` if no thread checked.
    #[serde(deserialize_with = "Option::deserialize")]
    pub nap_of_checks: Option<String>,
    /// The counters that `dynamic-budget` used: `hardware` or `service`. `null` under other
    /// policies.
    #[serde(deserialize_with = "Option::deserialize")]
    pub ipc: Option<String>,
    /// Where the program got its checks, as in `--checks`.
    pub checks: String,
    /// What kept the batch on its lanes. Always `affinity`: a batch in a fence has no report.
    pub level: String,
    /// Processes of the batch that were in cgroups which do not rank below their guard's.
    pub beside_guards: u64,
    #[serde(flatten)]
    pub poll_timing: PollReport,
    /// How long the run took.
    pub wall_ns: u64,
    #[serde(flatten)]
    pub figures: Figures,
    /// How long the request lanes were busy during the run, in sum. `null` without a task map.
    #[serde(deserialize_with = "Option::deserialize")]
    pub request_busy_ns: Option<u64>,
    /// What live checks did. `null` without live checks.
    #[serde(deserialize_with = "Option::deserialize")]
    pub live: Option<Live>,
    /// The exit status of the program as a shell reports it: 128 + N after signal N.
    pub exit_status: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a report that lacks a key is refused. Method: each key, one after the other.
    #[test]
    fn every_key_is_required() {
        let report =
            RunReport { ipc: Some("hardware".to_owned()), wall_ns: 7, ..RunReport::default() };
        let written = serde_json::to_value(&report).unwrap();
        assert_eq!(serde_json::from_value::<RunReport>(written.clone()).unwrap(), report);
        let keys: Vec<String> = written.as_object().unwrap().keys().cloned().collect();
        assert!(keys.len() > 15, "{keys:?}");
        for key in keys {
            let mut lacking = written.clone();
            lacking.as_object_mut().unwrap().remove(&key);
            let error = serde_json::from_value::<RunReport>(lacking).expect_err(&key).to_string();
            assert!(error.contains(&key), "{key}: {error}");
        }
        let mut lacking = written;
        lacking["reaction_ns"].as_object_mut().unwrap().remove("p99");
        assert!(serde_json::from_value::<RunReport>(lacking).is_err());
    }
}
