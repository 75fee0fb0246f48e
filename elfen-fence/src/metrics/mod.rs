//! Prometheus metrics of batches, lanes, services, fences and watches.
//!
//! Every family is present even while nothing runs, so that dashboards can find its name. Counters
//! come from the pages and start with their run or service: a new one has a new pid or, for a
//! service, resets the counter.

pub(crate) mod exposition;
mod fences;
pub mod machine;
pub mod reference;
pub mod server;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::histogram::{Histogram, bucket_top_ns};
use elfen_rt::signal::lane::{BATCH_OFFLINE, LaneSlot, LaneState, REQUEST_OFFLINE};
use elfen_rt::signal::task::TaskMap;

use elfen_machine::fence::status::Status;
use elfen_run::batches::Batch;
use elfen_run::services::{Published, Tails};
use elfen_run::watches::Tail;
use exposition::{Family, Kind, Labels};

/// The labels of the metrics of a lane that a run uses.
const LANE: [&str; 4] = ["pid", "program", "lane", "request_lane"];
const LANE_STATE: [&str; 5] = ["pid", "program", "lane", "request_lane", "state"];
/// The labels of the metrics of a service.
const SERVICE: [&str; 2] = ["service", "request_lane"];

/// All inputs of one scrape.
#[derive(Debug)]
pub struct ScrapeInput<'a> {
    pub batches: &'a [Batch],
    pub services: &'a [Published],
    pub tails: &'a Tails,
    /// The task map of elfend, if it gives that to us.
    pub tasks: Option<&'a TaskMap>,
    /// The status of elfend, if one answers.
    pub fences: Option<&'a Status>,
    /// The tails that `elfen tailor watch` publishes, by service.
    pub watches: &'a BTreeMap<String, Tail>,
}

/// The text of one scrape.
pub fn scrape(input: &ScrapeInput<'_>) -> String {
    exposition::text(&families(input))
}

/// All metrics, with the samples of one scrape.
fn families(input: &ScrapeInput<'_>) -> Vec<Family> {
    let mut families = vec![build()];
    families.extend(of_batches(input));
    families.extend(of_lanes(input.batches));
    families.push(of_hotplug(input.batches));
    families.push(of_request_lanes(input));
    families.extend(of_services(input.services));
    families.push(fences::of_levels(input.batches, input.fences));
    families.extend(fences::of_fences(input.fences));
    families.extend(of_tails(input.watches));
    families
}

fn build() -> Family {
    let mut info = Family::new(
        "elfen_build_info",
        Kind::Gauge,
        &["version"],
        "The version of elfen; always 1.",
    );
    info.number(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    info
}

fn of_batches(input: &ScrapeInput<'_>) -> Vec<Family> {
    let gauge = |name, labels, help| Family::new(name, Kind::Gauge, labels, help);
    let mut info = gauge(
        "elfen_batch_info",
        &["pid", "program", "policy"],
        "A running batch and its policy; always 1.",
    );
    let mut budget = gauge(
        "elfen_batch_budget_seconds",
        &["pid", "program"],
        "How long the batch may share a core with a request; 0 where the policy has no budget.",
    );
    let mut slo = gauge(
        "elfen_batch_slo_seconds",
        &["pid", "program", "quantile"],
        "The latency that the batch has to keep.",
    );
    let mut tail = gauge(
        "elfen_batch_tail_seconds",
        &["pid", "program", "quantile"],
        "The latency at the SLO's percentile, over the last ten seconds of its request lanes.",
    );
    let mut headroom = gauge(
        "elfen_batch_slo_headroom_ratio",
        &["pid", "program", "quantile"],
        "1 minus the tail latency divided by the SLO; below 0 the SLO is broken.",
    );
    for batch in input.batches {
        let Some(settings) = batch.settings() else { continue };
        let pid = batch.pid.to_string();
        let labels = [("pid", pid.as_str()), ("program", &batch.program)];
        info.number(&[labels[0], labels[1], ("policy", settings.policy.name())], 1);
        budget.time(&labels, settings.budget_ns);
        if settings.slo_latency_ns == 0 {
            continue;
        }
        let per_million = u32::try_from(settings.slo_per_million).unwrap_or(u32::MAX);
        let quantile = (f64::from(per_million) / 1e6).to_string();
        let labels = [labels[0], labels[1], ("quantile", quantile.as_str())];
        slo.time(&labels, settings.slo_latency_ns);
        let tail_ns = input.tails.of_lanes_ns(input.services, &batch.request_lanes(), per_million);
        if let Some(tail_ns) = tail_ns {
            tail.time(&labels, tail_ns);
            headroom.ratio(&labels, headroom_of(tail_ns, settings.slo_latency_ns));
        }
    }
    vec![info, budget, slo, tail, headroom]
}

/// The part of its SLO that a tail leaves: 1 is all of it, and below 0 the SLO is broken.
pub(crate) fn headroom_of(tail_ns: u64, slo_ns: u64) -> f64 {
    let real = elfen_console::duration::number;
    1.0 - real(tail_ns) / real(slo_ns.max(1))
}

fn of_lanes(batches: &[Batch]) -> Vec<Family> {
    let counter = |name, labels, help| Family::new(name, Kind::Counter, labels, help);
    let histogram = |name, labels, help| Family::new(name, Kind::Histogram, labels, help);
    let mut borrowed = counter(
        "elfen_lane_borrowed_seconds_total",
        &LANE,
        "Time for which the batch ran while its request lane was idle.",
    );
    let mut overlapped = counter(
        "elfen_lane_overlapped_seconds_total",
        &LANE,
        "Time for which the batch ran while its request lane was busy.",
    );
    let mut napped =
        counter("elfen_lane_napped_seconds_total", &LANE, "Time for which the lane napped.");
    let mut naps = counter("elfen_lane_naps_total", &LANE, "Naps started.");
    let mut state = Family::new(
        "elfen_lane_state",
        Kind::Gauge,
        &LANE_STATE,
        "1 for the lane's current state.",
    );
    let mut reaction = histogram(
        "elfen_lane_reaction_seconds",
        &LANE,
        "Time from the request lane becoming busy until the batch is off its lane.",
    );
    let mut wake = histogram(
        "elfen_lane_wake_seconds",
        &LANE,
        "Time from the request lane becoming idle until the batch is back on its lane.",
    );
    for batch in batches {
        for slot in batch.lanes.slots() {
            let pid = batch.pid.to_string();
            let lane = slot.batch_cpu.load(Relaxed).to_string();
            let request = slot.request_cpu.load(Relaxed).to_string();
            let labels = [
                ("pid", pid.as_str()),
                ("program", &batch.program),
                ("lane", &lane),
                ("request_lane", &request),
            ];
            if slot.is_counted() {
                borrowed.time(&labels, slot.borrowed_ns.load(Relaxed));
                overlapped.time(&labels, slot.overlapped_ns.load(Relaxed));
            }
            napped.time(&labels, slot.napped_ns.load(Relaxed));
            naps.number(&labels, slot.naps.load(Relaxed));
            states(&mut state, &labels, slot);
            buckets(&mut reaction, &labels, &slot.reaction);
            buckets(&mut wake, &labels, &slot.wake);
        }
    }
    vec![borrowed, overlapped, napped, naps, state, reaction, wake]
}

/// For every lent lane, by its number.
fn of_hotplug(batches: &[Batch]) -> Family {
    let help = "1 while a lent lane is offline.";
    let mut offline = Family::new("elfen_lane_offline", Kind::Gauge, &["cpu"], help);
    let mut lanes: BTreeMap<u64, bool> = BTreeMap::new();
    for slot in batches.iter().flat_map(|batch| batch.lanes.slots()) {
        let gone = slot.inputs.hotplug.load(Relaxed);
        let of = [(&slot.batch_cpu, BATCH_OFFLINE), (&slot.request_cpu, REQUEST_OFFLINE)];
        for (cpu, bit) in of {
            *lanes.entry(cpu.load(Relaxed)).or_default() |= gone & bit != 0;
        }
    }
    for (cpu, is_gone) in lanes {
        offline.number(&[("cpu", &cpu.to_string())], u64::from(is_gone));
    }
    offline
}

fn states(family: &mut Family, labels: &[(&'static str, &str); 4], slot: &LaneSlot) {
    let now = slot.state().map(|(state, _)| state);
    for state in LaneState::ALL {
        let [pid, program, lane, request] = *labels;
        let is_now = u64::from(now == Some(state));
        family.number(&[pid, program, lane, request, ("state", state.name())], is_now);
    }
}

fn of_request_lanes(input: &ScrapeInput<'_>) -> Family {
    let mut busy = Family::new(
        "elfen_request_lane_busy_seconds_total",
        Kind::Counter,
        &["request_lane"],
        "Time for which a request lane was not idle; with elfend's task map, all of its time.",
    );
    let fenced = input.fences.iter().flat_map(|status| &status.requests);
    let mut lanes: BTreeMap<u64, u64> =
        fenced.map(|request| (u64::from(request.lane), request.busy_ns)).collect();
    for cpu in input.batches.iter().flat_map(Batch::request_lanes) {
        let slot = u32::try_from(cpu).ok().and_then(|cpu| input.tasks?.slot(cpu));
        if let Some(switch) = slot.and_then(|slot| slot.snapshot()) {
            lanes.entry(cpu).or_insert_with(|| switch.busy_until_ns(monotonic_ns()));
        }
    }
    for (cpu, busy_ns) in lanes {
        busy.time(&[("request_lane", &cpu.to_string())], busy_ns);
    }
    busy
}

fn of_services(services: &[Published]) -> Vec<Family> {
    let gauge = |name, labels, help| Family::new(name, Kind::Gauge, labels, help);
    let mut up =
        gauge("elfen_service_up", &SERVICE, "1 while the process that publishes is alive.");
    let mut running = gauge("elfen_service_running_requests", &SERVICE, "1 while a request runs.");
    let mut queue =
        gauge("elfen_service_queue_length", &SERVICE, "Requests that wait in the queue.");
    let mut finished =
        Family::new("elfen_service_requests_total", Kind::Counter, &SERVICE, "Requests finished.");
    let mut latency = Family::new(
        "elfen_service_latency_seconds",
        Kind::Histogram,
        &SERVICE,
        "From the arrival of a request to its end.",
    );
    for service in services {
        for (cpu, slot, alive) in service.slots() {
            let lane = cpu.to_string();
            let labels = [("service", service.name.as_str()), ("request_lane", &lane)];
            let runs = alive && slot.running_request.load(Relaxed) != 0;
            up.number(&labels, u64::from(alive));
            running.number(&labels, u64::from(runs));
            queue.number(&labels, if alive { slot.queue_len.load(Relaxed) } else { 0 });
            finished.number(&labels, slot.finished_requests.load(Relaxed));
            buckets(&mut latency, &labels, &slot.latency);
        }
    }
    vec![up, running, queue, finished, latency]
}

/// The tails that `elfen tailor watch` publishes.
fn of_tails(tails: &BTreeMap<String, Tail>) -> Vec<Family> {
    let gauge = |name, labels, help| Family::new(name, Kind::Gauge, labels, help);
    let mut requests = gauge(
        "elfen_tail_requests",
        &["service"],
        "Requests that `elfen tailor watch` observed in the last minute.",
    );
    let mut slow =
        gauge("elfen_tail_slow_requests", &["service"], "Slow requests among elfen_tail_requests.");
    let mut threshold = gauge(
        "elfen_tail_threshold_seconds",
        &["service"],
        "The latency above which a request is slow.",
    );
    let mut causes = gauge(
        "elfen_tail_cause_ratio",
        &["service", "cause"],
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

/// 1, 2 and 5 times every power of ten, from 1 us to 10 s.
fn tops_ns() -> impl Iterator<Item = u64> {
    let decades = (3..10).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power)));
    decades.chain([10_000_000_000])
}

/// Merges a page's buckets into the buckets of the metric. Each value counts as the highest value
/// of its bucket in the page, which is at most a sixteenth more.
fn buckets(family: &mut Family, labels: &Labels<'_>, histogram: &Histogram) {
    // Read once, because the last bucket and the count must agree.
    let counts: Vec<u64> = histogram.counts().collect();
    let up_to = |top_ns| {
        let fine = counts.iter().enumerate().take_while(|(at, _)| bucket_top_ns(*at) <= top_ns);
        fine.fold(0, |sum: u64, (_, count)| sum.saturating_add(*count))
    };
    let coarse: Vec<(u64, u64)> = tops_ns().map(|top_ns| (top_ns, up_to(top_ns))).collect();
    let count = counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
    family.histogram(labels, &coarse, count, histogram.sum_ns());
}
