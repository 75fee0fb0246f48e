//! Columns of tables with samples of instructions: those of the modelled core, and those of
//! processors.

use elfen_core_model::estimate::{LATENCIES, SiteEstimate};
use serde::{Serialize, Serializer};

/// Latencies of Table 1; the others behind them.
pub(crate) const TABLE_1: usize = 6;
/// The heads of columns, and the names in JSON, in the order of [`SiteEstimate::latencies`].
const LATENCY_NAMES: [(&str, &str); LATENCIES] = [
    ("map", "fetch_to_map"),
    ("ready", "map_to_ready"),
    ("issue", "ready_to_issue"),
    ("done", "issue_to_retire_ready"),
    ("retire", "retire_ready_to_retire"),
    ("load", "load_issue_to_completion"),
    ("fetch", "fetch"),
    ("to issue", "map_to_issue"),
    ("to retire", "map_to_retire"),
    ("refill", "dcache_refill"),
    ("TLB", "translation"),
    ("apart", "between_retirements"),
];

pub(crate) fn latency_heads() -> [&'static str; LATENCIES] {
    LATENCY_NAMES.map(|(head, _)| head)
}

/// Means of latencies, in cycles. Processors measure others than the paper's Table 1.
#[derive(Debug)]
pub(crate) struct MeanLatencies([Option<f64>; LATENCIES]);

impl MeanLatencies {
    pub(crate) fn of(estimate: &SiteEstimate) -> Self {
        Self(estimate.latencies.map(|mean| mean.value()))
    }

    /// In the order of [`latency_heads`].
    pub(crate) fn cells(&self) -> [String; LATENCIES] {
        self.0.map(|cycles| cycles.map_or(String::new(), |cycles| format!("{cycles:.1}")))
    }
}

/// Those of Table 1 are always there.
impl Serialize for MeanLatencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let all = LATENCY_NAMES.iter().zip(&self.0).enumerate();
        let present = all.filter(|(number, (_, mean))| *number < TABLE_1 || mean.is_some());
        serializer.collect_map(present.map(|(_, ((_, name), mean))| (name, mean)))
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
