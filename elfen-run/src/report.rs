//! The report of `elfen run --json-out`.
//!
//! `experiments` reads it by the same type: a missing key is an error, not a zero.

use serde::{Deserialize, Serialize};

use super::figures::Figures;
use super::live::page::Live;
use super::poll_timing::PollReport;

/// Times are nanoseconds.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RunReport {
    /// The policy that was in force at the end: `elfen set` may have changed it.
    pub policy: String,
    pub budget_ns: u64,
    pub policy_was_set: bool,
    /// As in the argument of `--lanes`.
    pub lanes: String,
    pub source: String,
    pub nap: String,
    /// How threads with checks napped; `None` if no thread checked.
    #[serde(deserialize_with = "Option::deserialize")]
    pub nap_of_checks: Option<String>,
    /// The counters that `dynamic-budget` uses, the hardware's or the service's; `None` under other
    /// policies.
    #[serde(deserialize_with = "Option::deserialize")]
    pub ipc: Option<String>,
    pub checks: String,
    /// What keeps the batch on its lanes: always `affinity`, as batches in fences have no run.
    pub level: String,
    /// Batch processes that were in cgroups which do not rank below their guard's.
    pub beside_guards: u64,
    #[serde(flatten)]
    pub poll_timing: PollReport,
    pub wall_ns: u64,
    #[serde(flatten)]
    pub figures: Figures,
    /// `None` without a task map.
    #[serde(deserialize_with = "Option::deserialize")]
    pub request_busy_ns: Option<u64>,
    /// Only with live checks.
    #[serde(deserialize_with = "Option::deserialize")]
    pub live: Option<Live>,
    /// As the shell sees it.
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
