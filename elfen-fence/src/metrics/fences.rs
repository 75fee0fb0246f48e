//! The metric families of elfend's fences.

use super::exposition::{Family, Kind};
use elfen_machine::fence::guarantees::Guarantee;
use elfen_machine::fence::status::{Frozen, Status};
use elfen_run::batches::Batch;
use elfen_run::batches::Level;

/// How many batches each level keeps on their lanes.
pub(super) fn of_levels(batches: &[Batch], status: Option<&Status>) -> Family {
    let help = "Fences that elfend holds, and runs that are confined only by their affinity.";
    let mut levels = Family::new("elfen_confinement", Kind::Gauge, &["level"], help);
    let runs = batches.iter().filter(|batch| batch.level() == Level::Affinity).count();
    for (level, count) in
        [(Level::Fence, status.map_or(0, |status| status.fences.len())), (Level::Affinity, runs)]
    {
        levels.number(&[("level", level.name())], u64::try_from(count).unwrap_or(u64::MAX));
    }
    levels
}

/// Empty samples where no elfend answers.
pub(super) fn of_fences(status: Option<&Status>) -> Vec<Family> {
    let gauge = |name, labels, help| Family::new(name, Kind::Gauge, labels, help);
    let counter = |name, labels, help| Family::new(name, Kind::Counter, labels, help);
    let mut up = gauge("elfen_elfend_up", &[], "1 while elfend answers.");
    let mut waiting = gauge("elfen_fences_waiting", &[], "Settings that cannot be applied yet.");
    let mut lost = counter("elfen_guards_lost_total", &[], "Number of restarts of guards.");
    let mut holds = gauge(
        "elfen_fence_holds",
        &["fence", "guarantee"],
        "1 while a guarantee of the fence holds.",
    );
    let mut repaired = counter(
        "elfen_fence_repaired_total",
        &["fence", "guarantee"],
        "Number of repairs of a guarantee.",
    );
    let mut frozen =
        gauge("elfen_fence_frozen", &["fence", "why"], "1 for the reason why the fence is frozen.");
    let mut processes = gauge("elfen_fence_processes", &["fence"], "Processes in the fence.");
    let mut borrowed = counter(
        "elfen_fence_borrowed_seconds_total",
        &["fence", "lane", "request_lane"],
        "Time for which the fence ran while its request lane was idle.",
    );
    let mut overlapped = counter(
        "elfen_fence_overlapped_seconds_total",
        &["fence", "lane", "request_lane"],
        "Time for which the fence ran while its request lane was busy.",
    );
    let mut confined = counter(
        "elfen_service_confined_repaired_total",
        &["service", "cgroup"],
        "Number of times that a service was moved back to its request lanes.",
    );
    up.number(&[], u64::from(status.is_some()));
    if let Some(status) = status {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        waiting.number(&[], count(status.waiting.len()));
        lost.number(&[], status.guard_processes_lost);
    }
    for fence in status.iter().flat_map(|status| &status.fences) {
        let name = ("fence", fence.name.as_str());
        processes.number(&[name], fence.processes);
        for guarantee in Guarantee::ALL {
            let labels = [name, ("guarantee", guarantee.name())];
            let is_broken = fence.broken.iter().any(|broken| broken.guarantee == guarantee);
            holds.number(&labels, u64::from(!is_broken));
            let times = fence.repaired.iter().find(|one| one.guarantee == guarantee);
            repaired.number(&labels, times.map_or(0, |one| one.times));
        }
        for account in &fence.accounts {
            let lane = account.lane.to_string();
            let request = account.request.to_string();
            let labels = [name, ("lane", &lane), ("request_lane", &request)];
            borrowed.time(&labels, account.borrowed_ns);
            overlapped.time(&labels, account.overlapped_ns);
        }
        let now = fence.frozen.as_ref().map(Frozen::name);
        for why in Frozen::NAMES {
            frozen.number(&[name, ("why", why)], u64::from(now == Some(why)));
        }
    }
    for one in status.iter().flat_map(|status| &status.confined) {
        let labels = [("service", one.service.as_str()), ("cgroup", one.path.as_str())];
        confined.number(&labels, one.repaired);
    }
    vec![up, waiting, lost, holds, repaired, frozen, processes, borrowed, overlapped, confined]
}
