//! Columns of tables with samples of instructions: those of the modelled core, and those of
//! processors.

use elfen_core_model::estimate::{LATENCIES, SiteEstimate};
use serde::Serialize;

/// Means of latencies, in cycles. Processors measure others than the paper's Table 1.
#[derive(Serialize, Debug)]
pub(crate) struct MeanLatencies {
    fetch_to_map: Option<f64>,
    map_to_ready: Option<f64>,
    ready_to_issue: Option<f64>,
    issue_to_retire_ready: Option<f64>,
    retire_ready_to_retire: Option<f64>,
    load_issue_to_completion: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fetch: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    map_to_issue: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    map_to_retire: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dcache_refill: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    translation: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    between_retirements: Option<f64>,
}

/// Latencies of Table 1; the others behind them.
pub(crate) const TABLE_1: usize = 6;
pub(crate) const LATENCY_HEADS: [&str; LATENCIES] = [
    "map",
    "ready",
    "issue",
    "done",
    "retire",
    "load",
    "fetch",
    "to issue",
    "to retire",
    "refill",
    "TLB",
    "apart",
];

impl MeanLatencies {
    pub(crate) fn of(estimate: &SiteEstimate) -> Self {
        let [
            fetch_to_map,
            map_to_ready,
            ready_to_issue,
            issue_to_retire_ready,
            retire_ready_to_retire,
            load_issue_to_completion,
            fetch,
            map_to_issue,
            map_to_retire,
            dcache_refill,
            translation,
            between_retirements,
        ] = estimate.latencies.map(|mean| mean.value());
        Self {
            fetch_to_map,
            map_to_ready,
            ready_to_issue,
            issue_to_retire_ready,
            retire_ready_to_retire,
            load_issue_to_completion,
            fetch,
            map_to_issue,
            map_to_retire,
            dcache_refill,
            translation,
            between_retirements,
        }
    }

    /// In the order of [`LATENCY_HEADS`].
    pub(crate) fn cells(&self) -> [String; LATENCIES] {
        [
            self.fetch_to_map,
            self.map_to_ready,
            self.ready_to_issue,
            self.issue_to_retire_ready,
            self.retire_ready_to_retire,
            self.load_issue_to_completion,
            self.fetch,
            self.map_to_issue,
            self.map_to_retire,
            self.dcache_refill,
            self.translation,
            self.between_retirements,
        ]
        .map(|cycles| cycles.map_or(String::new(), |cycles| format!("{cycles:.1}")))
    }
}

/// The parts of samples with an event, of all that know it.
#[derive(Serialize, Debug)]
pub(crate) struct EventRates {
    icache_miss_rate: Option<f64>,
    itlb_miss_rate: Option<f64>,
    pub(crate) dcache_miss_rate: Option<f64>,
    dtlb_miss_rate: Option<f64>,
    pub(crate) mispredict_rate: Option<f64>,
}

pub(crate) const RATE_HEADS: [&str; 5] = ["I-miss", "ITLB", "D-miss", "DTLB", "mispr."];

impl EventRates {
    pub(crate) fn of(estimate: &SiteEstimate) -> Self {
        Self {
            icache_miss_rate: estimate.icache_misses.value(),
            itlb_miss_rate: estimate.itlb_misses.value(),
            dcache_miss_rate: estimate.dcache_misses.value(),
            dtlb_miss_rate: estimate.dtlb_misses.value(),
            mispredict_rate: estimate.mispredicted.value(),
        }
    }

    /// In the order of [`RATE_HEADS`].
    pub(crate) fn cells(&self) -> [String; RATE_HEADS.len()] {
        [
            self.icache_miss_rate,
            self.itlb_miss_rate,
            self.dcache_miss_rate,
            self.dtlb_miss_rate,
            self.mispredict_rate,
        ]
        .map(percent)
    }
}

pub(crate) fn percent(share: Option<f64>) -> String {
    share.map_or(String::new(), |share| format!("{:.1} %", share * 100.0))
}
