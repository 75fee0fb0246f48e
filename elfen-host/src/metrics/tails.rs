//! The metric families of watched tails.

use std::collections::BTreeMap;

use super::exposition::{Family, Kind};
use crate::watches::Tail;

pub(super) fn of_tails(tails: &BTreeMap<String, Tail>) -> Vec<Family> {
    let gauge = |name, help| Family::new(name, Kind::Gauge, help);
    let mut requests =
        gauge("elfen_tail_requests", "Requests that a watch saw in the last minute.");
    let mut slow = gauge("elfen_tail_slow_requests", "Slow requests among them.");
    let mut threshold =
        gauge("elfen_tail_threshold_seconds", "The latency above which a request is slow.");
    let mut causes = gauge(
        "elfen_tail_cause_ratio",
        "The share of a cause in the delay of slow requests in the last minute.",
    );
    for (service, tail) in tails {
        let service = ("service", service.as_str());
        requests.number(&[service], tail.requests);
        slow.number(&[service], tail.slow);
        threshold.time(&[service], tail.threshold_ns);
        for cause in &tail.causes {
            causes.ratio(&[service, ("cause", &cause.name)], tail.share(cause));
        }
    }
    vec![requests, slow, threshold, causes]
}
