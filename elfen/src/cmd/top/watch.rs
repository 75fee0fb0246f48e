//! Reads the pages of batches, services and `elfen tailor watch`. Makes the rows of `elfen top`
//! from their content now and at the last picture.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::duration;
use elfen_kernel::task_map;
use elfen_machine::process::name_of;
use elfen_profile::control::{Recording, recordings};
use elfen_profile::profile::Source;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::service::ServiceSlot;
use elfen_rt::signal::task::{Running, TaskMap};
use elfen_run::batches::{self, Batch};
use elfen_run::figures::Figures;
use elfen_run::services::{Published, Tails, services};
use elfen_run::watches::{Tail, watches};

use super::picture::{ALARM, Bar, Column, DIM, PLAIN, Row, Section, View};

const BATCHES: [Column; 7] = [
    ("PID", 8, false),
    ("PROGRAM", 17, false),
    ("POLICY", 15, false),
    ("BUDGET", 8, true),
    ("BORROWED", 8, true),
    ("OVERLAP", 7, true),
    ("REACT p99", 9, true),
];

const LANES: [Column; 7] = [
    ("CPU", 4, true),
    ("RUNS", 17, false),
    ("BATCH", 5, true),
    ("RUNS", 17, false),
    ("STATE", 9, false),
    ("BORROWED", 8, true),
    ("OVERLAP", 7, true),
];

const SERVICES: [Column; 7] = [
    ("SERVICE", 30, false),
    ("CPU", 4, true),
    ("REQ/S", 8, true),
    ("QUEUE", 6, true),
    ("MEDIAN", 8, true),
    ("P99", 8, true),
    ("", 4, false),
];

const PROFILES: [Column; 6] = [
    ("PROFILED", 9, true),
    ("PROGRAM", 16, false),
    ("BY", 10, false),
    ("SEEN", 10, true),
    ("COST %", 7, true),
    ("OF A CPU %", 10, true),
];
const TAILS: [Column; 6] = [
    ("TAIL OF SERVICE", 22, false),
    ("ABOVE", 8, true),
    ("SLOW", 6, true),
    ("MAIN CAUSE", 22, false),
    ("SHARE", 7, true),
    ("EACH", 8, true),
];

/// The most causes of a tail that are shown.
const MOST_CAUSES: usize = 5;
/// The columns of a lane's row and of an SLO's row without the bar.
const LANE_COLUMNS: usize = 82;
const SLO_COLUMNS: usize = 58;

/// A share in thousandths; `None` in the first picture.
type Share = Option<u64>;

/// The pages, and their content at the last picture.
#[derive(Debug, Default)]
pub(super) struct Watch {
    pub(super) batches: Vec<Batch>,
    services: Vec<Published>,
    /// The socket of elfend.
    socket: PathBuf,
    tasks: Option<TaskMap>,
    tails: Tails,
    at_ns: u64,
    /// Borrowed and overlapped time, by the batch's pid and batch lane.
    spent_ns: BTreeMap<(u32, u64), [u64; 2]>,
    /// Finished requests, by service and lane.
    finished: BTreeMap<(String, u64), u64>,
}

impl Watch {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, ..Self::default() }
    }

    /// Reads all pages again.
    pub(super) fn read(&mut self) -> io::Result<View> {
        self.batches = batches::batches(&self.socket)?;
        self.services = services()?;
        if self.tasks.is_none() && !self.batches.is_empty() {
            // Without the task map, only the names of running programs are missing.
            self.tasks = task_map::open().ok().map(|(map, _)| map);
        }
        let now_ns = monotonic_ns();
        let passed_ns = (self.at_ns != 0).then(|| now_ns.saturating_sub(self.at_ns));
        let batches = self.batches.iter().flat_map(|batch| self.batch_rows(batch, passed_ns));
        let lanes = self.slots().map(|(pid, slot)| self.lane_row(pid, slot, passed_ns));
        let services = self.services.iter().flat_map(|it| self.service_rows(it, passed_ns));
        let tails = watches()?;
        let tails = tails.iter().flat_map(|(name, tail)| tail_rows(name, tail));
        let view = View {
            summary: self.summary(),
            sections: vec![
                Section::new(&BATCHES, batches.collect()),
                Section::new(&LANES, lanes.collect()),
                Section::new(&SERVICES, services.collect()),
                Section::new(&TAILS, tails.collect()),
                Section::new(&PROFILES, recordings().iter().map(profile_row).collect()),
            ],
        };
        self.remember(now_ns);
        Ok(view)
    }

    /// The slots of all batches, each with the pid of its batch.
    fn slots(&self) -> impl Iterator<Item = (u32, &LaneSlot)> {
        self.batches.iter().flat_map(|batch| batch.lanes.slots().map(|slot| (batch.pid, slot)))
    }

    fn remember(&mut self, now_ns: u64) {
        self.at_ns = now_ns;
        self.tails.observe(&self.services, now_ns);
        let spent =
            self.slots().map(|(pid, slot)| ((pid, slot.batch_cpu.load(Relaxed)), spent_ns(slot)));
        self.spent_ns = spent.collect();
        let finished = self.services.iter().flat_map(|service| {
            let of = |(cpu, finished)| ((service.name.clone(), cpu), finished);
            let slots = service.slots();
            slots.map(|(cpu, slot, _)| (cpu, slot.finished_requests.load(Relaxed))).map(of)
        });
        self.finished = finished.collect();
    }

    fn summary(&self) -> String {
        let state = |(_, slot): (u32, &LaneSlot)| slot.state().map(|(state, _)| state);
        let states: Vec<Option<LaneState>> = self.slots().map(state).collect();
        let count = |state| states.iter().filter(|found| **found == Some(state)).count();
        let number = |n: usize, one: &str, several: &str| {
            format!("{n} {}", if n == 1 { one } else { several })
        };
        format!(
            "elfen {}   {}   {}: {} running, {} napping   {}",
            env!("CARGO_PKG_VERSION"),
            number(self.batches.len(), "batch", "batches"),
            number(states.len(), "batch lane", "batch lanes"),
            count(LaneState::Running),
            count(LaneState::Napping),
            number(
                self.services.iter().flat_map(Published::slots).count(),
                "service lane",
                "service lanes"
            ),
        )
    }

    /// The time that a batch borrowed and overlapped on a lane since the last picture.
    fn spent_since(&self, pid: u32, slot: &LaneSlot) -> Option<[u64; 2]> {
        let before = self.spent_ns.get(&(pid, slot.batch_cpu.load(Relaxed)))?;
        let now = spent_ns(slot);
        let since = [0, 1].map(|at| now[at].saturating_sub(before[at]));
        slot.is_counted().then_some(since)
    }

    /// The row of a batch, and a second row if it has an SLO.
    fn batch_rows(&self, batch: &Batch, passed_ns: Option<u64>) -> Vec<Row> {
        let settings = batch.settings();
        let slots = || batch.lanes.slots();
        let since: Option<Vec<[u64; 2]>> =
            slots().map(|slot| self.spent_since(batch.pid, slot)).collect();
        let all_ns = passed_ns.map(|ns| ns.saturating_mul(u64::from(batch.lanes.slot_count())));
        let [borrowed, overlapped] = [0, 1].map(|at| {
            let sum =
                since.as_ref().map(|all| all.iter().map(|of| of[at]).fold(0, u64::saturating_add));
            share(sum, all_ns)
        });
        let has_budget = |settings: &&Settings| settings.policy != PolicyKind::BorrowIdle;
        let cells = [
            batch.pid.to_string(),
            batch.program.clone(),
            settings.map_or("unknown", |settings| settings.policy.name()).to_owned(),
            time(settings.as_ref().filter(has_budget).map(|settings| settings.budget_ns)),
            percent(borrowed),
            percent(overlapped),
            time(Figures::of(&batch.lanes).reaction_ns.p99),
        ];
        let mut rows = vec![Row { pid: Some(batch.pid), ..Row::new(&BATCHES, cells) }];
        rows.extend(settings.filter(|settings| settings.slo_latency_ns != 0).map(|settings| {
            let per_million = u32::try_from(settings.slo_per_million).unwrap_or(u32::MAX);
            let lanes = batch.request_lanes();
            let tail_ns = self.tails.of_lanes_ns(&self.services, &lanes, per_million);
            slo_row(per_million, settings.slo_latency_ns, tail_ns)
        }));
        rows
    }

    fn lane_row(&self, pid: u32, slot: &LaneSlot, passed_ns: Option<u64>) -> Row {
        let (request, batch) = (slot.request_cpu.load(Relaxed), slot.batch_cpu.load(Relaxed));
        let since = self.spent_since(pid, slot);
        let [borrowed, overlapped] = [0, 1].map(|at| share(since.map(|of| of[at]), passed_ns));
        let cells = [
            request.to_string(),
            self.name_of_task_on(request),
            batch.to_string(),
            self.name_of_task_on(batch),
            slot.state().map_or("unknown", |(state, _)| state.name()).to_owned(),
            percent(borrowed),
            percent(overlapped),
        ];
        let bar = borrowed.zip(overlapped).map(|(borrowed, overlapped)| Bar {
            parts: vec![('#', borrowed), ('+', overlapped)],
            rest: LANE_COLUMNS,
            after: String::new(),
        });
        Row { bar, ..Row::new(&LANES, cells) }
    }

    fn name_of_task_on(&self, cpu: u64) -> String {
        let slot = self.tasks.as_ref().zip(u32::try_from(cpu).ok());
        let switch = slot.and_then(|(map, cpu)| map.slot(cpu)?.snapshot());
        match switch.map(|switch| switch.running) {
            None | Some(Running::Unknown) => "?".to_owned(),
            Some(Running::Idle) => "idle".to_owned(),
            // The thread may have ended, or be in another pid namespace.
            Some(Running::Task(task)) => {
                name_of(task.thread).unwrap_or_else(|| task.thread.to_string())
            }
        }
    }

    fn service_rows(&self, service: &Published, passed_ns: Option<u64>) -> Vec<Row> {
        let row = |(lane, slot, alive): (u64, &ServiceSlot, bool)| {
            let finished = slot.finished_requests.load(Relaxed);
            let before = self.finished.get(&(service.name.clone(), lane));
            let since = before.map(|before| finished.saturating_sub(*before));
            let rate = since.zip(passed_ns).map(|(n, ns)| per_second(n, ns).to_string());
            let tail = |per_million| time(self.tails.of_service_ns(service, lane, per_million));
            let cells = [
                service.name.clone(),
                lane.to_string(),
                rate.unwrap_or_else(|| "-".to_owned()),
                slot.queue_len.load(Relaxed).to_string(),
                tail(500_000),
                tail(990_000),
                if alive { "" } else { "gone" }.to_owned(),
            ];
            Row { style: if alive { PLAIN } else { DIM }, ..Row::new(&SERVICES, cells) }
        };
        service.slots().map(row).collect()
    }

    /// Whether a living service publishes on a request lane of a batch.
    pub(super) fn is_published(&self, batch: &Batch) -> bool {
        let lanes: BTreeSet<u64> = batch.request_lanes();
        let mut slots = self.services.iter().flat_map(Published::slots);
        slots.any(|(cpu, _, alive)| alive && lanes.contains(&cpu))
    }
}

/// The tail compared with its SLO, as a bar that is full when the tail reaches the SLO.
fn slo_row(per_million: u32, limit_ns: u64, tail_ns: Option<u64>) -> Row {
    let percentile = format!("{}.{:04}", per_million / 10_000, per_million % 10_000);
    let percentile = percentile.trim_end_matches('0').trim_end_matches('.');
    let limit = duration::show(limit_ns);
    let Some(tail_ns) = tail_ns else {
        let text = format!("           p{percentile}: no requests; SLO {limit}");
        return Row { style: DIM, text, bar: None, pid: None };
    };
    let used = u128::from(tail_ns) * 1000 / u128::from(limit_ns.max(1));
    let used = u64::try_from(used).unwrap_or(u64::MAX);
    let after = match 1000u64.checked_sub(used) {
        Some(left) => format!(" {} left", percent(Some(left))),
        None => " BROKEN".to_owned(),
    };
    let tail = duration::show(tail_ns);
    Row {
        style: if used > 1000 { ALARM } else { PLAIN },
        text: format!("           p{percentile} {tail:>8} of {limit:<8}"),
        bar: Some(Bar { parts: vec![('#', used.min(1000))], rest: SLO_COLUMNS, after }),
        pid: None,
    }
}

/// A recording of `elfen profile record`.
fn profile_row(recording: &Recording) -> Row {
    let by = match recording.by {
        Source::Bursts => "bursts",
        Source::Shadows => "shadows",
        Source::Samples => "samples",
        Source::Everything => "everything",
    };
    let cells = [
        recording.process.to_string(),
        name_of(recording.process).unwrap_or_default(),
        by.to_owned(),
        recording.bursts.to_string(),
        format!("{:.2}", recording.cost_percent),
        format!("{:.2}", recording.own_percent),
    ];
    Row::new(&PROFILES, cells)
}

/// The causes of a service's tail over the last minute, while `elfen tailor watch` runs.
fn tail_rows(service: &str, tail: &Tail) -> Vec<Row> {
    let all = tail.causes.iter().fold(0, |sum: u64, cause| sum.saturating_add(cause.ns));
    let causes = tail.causes.iter().take(MOST_CAUSES);
    let cells = causes.map(|cause| {
        [
            service.to_owned(),
            duration::show(tail.threshold_ns),
            tail.slow.to_string(),
            cause.name.clone(),
            percent(share(Some(cause.ns), Some(all))),
            // The mean for a slow request.
            duration::show(cause.ns / tail.slow.max(1)),
        ]
    });
    cells.map(|cells| Row::new(&TAILS, cells)).collect()
}

fn spent_ns(slot: &LaneSlot) -> [u64; 2] {
    [slot.borrowed_ns.load(Relaxed), slot.overlapped_ns.load(Relaxed)]
}

/// A guard that counts late can make the part larger than the whole, so the share is limited.
fn share(part_ns: Option<u64>, of_ns: Option<u64>) -> Share {
    let (part_ns, of_ns) = part_ns.zip(of_ns).filter(|&(_, of_ns)| of_ns > 0)?;
    let share = u128::from(part_ns) * 1000 / u128::from(of_ns);
    Some(u64::try_from(share).unwrap_or(u64::MAX).min(1000))
}

fn per_second(n: u64, ns: u64) -> u64 {
    let rate = u128::from(n) * 1_000_000_000 / u128::from(ns.max(1));
    u64::try_from(rate).unwrap_or(u64::MAX)
}

fn time(ns: Option<u64>) -> String {
    ns.map_or("-".to_owned(), duration::show)
}

fn percent(share: Share) -> String {
    share.map_or("-".to_owned(), |share| format!("{}.{} %", share / 10, share % 10))
}

#[cfg(test)]
mod tests {
    use elfen_run::watches::Cause;

    use super::*;

    /// Goal: a broken SLO is easy to see. Method: a tail below the SLO, a tail above it, and no
    /// tail.
    #[test]
    fn an_slo_has_a_bar_and_a_verdict() {
        let row = |tail_ns| slo_row(999_000, 100_000_000, tail_ns);
        let (kept, broken, unknown) = (row(Some(31_000_000)), row(Some(140_000_000)), row(None));
        assert_eq!(kept.text, "           p99.9  31.0 ms of 100 ms  ");
        let bar = |row: &Row| row.bar.clone().map(|bar| (bar.parts[0].1, bar.after));
        assert_eq!((kept.style, bar(&kept)), (PLAIN, Some((310, " 69.0 % left".to_owned()))));
        assert_eq!((broken.style, bar(&broken)), (ALARM, Some((1000, " BROKEN".to_owned()))));
        assert_eq!(unknown.text, "           p99.9: no requests; SLO 100 ms");
    }

    /// While `elfen tailor watch` runs, the tail of its service is shown by cause.
    #[test]
    fn a_tail_has_a_row_for_each_cause() {
        let cause = |name: &str, ns| Cause { name: name.to_owned(), ns };
        let causes =
            vec![cause("preempted:a\u{1b}name of many letters", 390_600_000), cause("io", 42_000)];
        let tail = Tail { slow: 42, threshold_ns: 12_000_000, causes, ..Tail::default() };
        let rows = tail_rows("redis-server:6379", &tail).into_iter().map(|row| row.text);
        assert_eq!(
            rows.collect::<Vec<_>>(),
            [
                "  redis-server:6379       12.0 ms     42 preempted:a?name of m~  99.9 %  9.30 ms",
                "  redis-server:6379       12.0 ms     42 io                       0.0 %  1.00 us",
            ]
        );
    }
}
