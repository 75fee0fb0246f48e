//! The page of the reference about metrics, from the same families that a scrape prints.

use std::collections::BTreeMap;

use elfen_console::reference::{GENERATED, Page, prose};
use elfen_machine::fence::guarantees::Guarantee;
use elfen_machine::fence::status::Frozen;
use elfen_rt::signal::control::PolicyKind;
use elfen_rt::signal::lane::LaneState;
use elfen_run::services::Tails;

use super::exposition::{Family, Kind};
use super::{ScrapeInput, families};

const INTRO: &str = "\
`elfen metrics` serves these metrics at http://127.0.0.1:9752/metrics, in the text format of \
Prometheus. elfend serves the same metrics if its settings name an address \
([`metrics`](elfend-toml.md)).

Every metric has its HELP and TYPE lines even while nothing runs. A metric without a sample has \
nothing to show, such as lanes without a batch. Counters start with their run or service. A new \
run has a new `pid`.";

/// The names of labels, and their values.
fn labels() -> [(&'static str, String); 16] {
    let list = |names: &[&str]| {
        names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    };
    let guarantees = list(&Guarantee::ALL.map(Guarantee::name));
    let one_of = "the sample of the current one is 1, the others are 0";
    let states = list(&LaneState::ALL.map(LaneState::name));
    let policies = list(&PolicyKind::ALL.map(PolicyKind::name));
    [
        ("cause", "a cause of delay, as `elfen tailor report` names it".to_owned()),
        ("cgroup", "the path of a service's cgroup".to_owned()),
        ("cpu", "a CPU that a run uses, as request lane or as batch lane".to_owned()),
        ("fence", "the name of a fence in elfend.toml".to_owned()),
        ("guarantee", format!("a guarantee of a fence: {guarantees}")),
        ("lane", "the CPU of the batch lane".to_owned()),
        ("level", "what keeps a batch on its lanes: `fence` or `affinity`".to_owned()),
        ("pid", "the process id of the batch".to_owned()),
        ("policy", format!("the policy in force: {policies}")),
        ("program", "the name of the batch program".to_owned()),
        ("quantile", "the percentile of the SLO as a fraction, such as 0.99".to_owned()),
        ("request_lane", "the CPU of the request lane".to_owned()),
        ("service", "the name of a service".to_owned()),
        ("state", format!("a state of a lane: {states}; {one_of}")),
        ("version", "the version of elfen".to_owned()),
        ("why", format!("a reason to freeze a fence: {}; {one_of}", list(&Frozen::NAMES))),
    ]
}

/// Every metric, without samples.
fn known() -> Vec<Family> {
    families(&ScrapeInput {
        batches: &[],
        services: &[],
        tails: &Tails::default(),
        tasks: None,
        fences: None,
        watches: &BTreeMap::new(),
    })
}

/// The unit of a metric, which its name ends with.
fn unit(family: &Family) -> &'static str {
    let name = family.name.trim_end_matches("_total");
    if name.ends_with("_seconds") {
        "seconds"
    } else if name.ends_with("_ratio") {
        "ratio"
    } else if family.kind == Kind::Gauge && family.help.starts_with("1 ") {
        "0 or 1"
    } else if family.help.ends_with("always 1.") {
        "1"
    } else {
        "count"
    }
}

/// The page of all metrics.
pub fn page() -> Page {
    let mut text = format!("{GENERATED}\n# Metrics\n\n{}\n", prose(INTRO, ""));
    text += "| metric | type | unit | labels | help |\n| --- | --- | --- | --- | --- |\n";
    for family in known() {
        let labels: Vec<String> = family.labels.iter().map(|name| format!("`{name}`")).collect();
        let Family { name, help, kind, .. } = &family;
        let (kind, unit, labels) = (kind.name(), unit(&family), labels.join(", "));
        text += &format!("| `{name}` | {kind} | {unit} | {labels} | {help} |\n");
    }
    let histograms = "\
A histogram has the samples `NAME_bucket`, `NAME_sum` and `NAME_count`. The label `le` of a bucket \
is its upper bound in seconds: 1, 2 and 5 times every power of ten from 1 us to 10 s, and `+Inf`. \
Each value counts as the highest value of a finer bucket, which is at most a sixteenth more.";
    text += &format!("\n{}\n| label | value |\n| --- | --- |\n", prose(histograms, ""));
    text.extend(labels().map(|(name, value)| format!("| `{name}` | {value} |\n")));
    ("metrics.md", text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Goal: the page explains every label, and no other. Method: the labels of all metrics.
    #[test]
    fn every_label_is_explained() {
        let used: BTreeSet<&str> =
            known().iter().flat_map(|family| family.labels).copied().collect();
        assert_eq!(labels().map(|(name, _)| name).into_iter().collect::<BTreeSet<_>>(), used);
    }

    /// Goal: names follow the conventions of Prometheus, from which the page takes the unit.
    /// Method: the suffix of every counter.
    #[test]
    fn counters_end_with_total() {
        for family in known() {
            let is_total = family.name.ends_with("_total");
            assert_eq!(is_total, family.kind == Kind::Counter, "{}", family.name);
        }
    }
}
