//! From pages to a view: what was read last time and now, and the shares between.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::{fs, io};

use elfen_kernel::task_map;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::task::{Running, TaskMap};
use elfen_run::batches::{self, Batch};
use elfen_run::figures::Figures;
use elfen_run::services::{Published, Tails, services};
use elfen_run::watches::{Cause, Tail, watches};

use super::picture::{BatchView, LaneView, ServiceView, Share, SloView, TailView, View};

/// The time that a batch had borrowed and overlapped on a lane.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    borrowed_ns: u64,
    overlapped_ns: u64,
}

/// Pages as they were read last, and what is remembered from before.
#[derive(Debug, Default)]
pub(super) struct Watch {
    pub(super) batches: Vec<Batch>,
    pub(super) services: Vec<Published>,
    /// elfend's.
    socket: PathBuf,
    tasks: Option<TaskMap>,
    tails: Tails,
    at_ns: u64,
    /// By program and batch lane.
    spent: BTreeMap<(u32, u64), Spent>,
    /// Finished requests by service and lane.
    finished: BTreeMap<(String, u64), u64>,
}

impl Watch {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket, ..Self::default() }
    }

    /// Reads all pages again.
    pub(super) fn look(&mut self) -> io::Result<View> {
        self.batches = batches::batches(&self.socket)?;
        self.services = services()?;
        if self.tasks.is_none() && !self.batches.is_empty() {
            // Pinned, or held by a batch already. Without the map no program's name is shown, and
            // all else is.
            self.tasks = task_map::open().ok().map(|(map, _)| map);
        }
        let now_ns = monotonic_ns();
        let passed_ns = (self.at_ns != 0).then(|| now_ns.saturating_sub(self.at_ns));
        let lanes = self.lanes(passed_ns);
        let view = View {
            batches: self.batches.iter().map(|batch| self.batch(batch, passed_ns)).collect(),
            lanes,
            services: self.service_views(passed_ns),
            tails: watches()?.iter().flat_map(|(name, tail)| tail_views(name, tail)).collect(),
            selected: 0,
            note: None,
        };
        self.remember(now_ns);
        Ok(view)
    }

    fn remember(&mut self, now_ns: u64) {
        self.at_ns = now_ns;
        self.tails.observe(&self.services, now_ns);
        let slots = self.batches.iter().flat_map(|b| b.lanes.slots().map(move |s| (b.pid, s)));
        let key =
            |(pid, slot): (u32, &LaneSlot)| ((pid, slot.batch_cpu.load(Relaxed)), spent(slot));
        self.spent = slots.map(key).collect();
        let finished = |service: &Published| -> Vec<_> {
            let key = |cpu| (service.name.clone(), cpu);
            let slots = service.slots();
            slots.map(|(cpu, slot, _)| (key(cpu), slot.finished_requests.load(Relaxed))).collect()
        };
        self.finished = self.services.iter().flat_map(finished).collect();
    }

    /// The time that a batch borrowed and overlapped on a lane since the last look.
    fn since(&self, pid: u32, slot: &LaneSlot) -> Option<Spent> {
        let before = self.spent.get(&(pid, slot.batch_cpu.load(Relaxed)))?;
        if !slot.is_counted() {
            return None;
        }
        let now = spent(slot);
        Some(Spent {
            borrowed_ns: now.borrowed_ns.saturating_sub(before.borrowed_ns),
            overlapped_ns: now.overlapped_ns.saturating_sub(before.overlapped_ns),
        })
    }

    fn batch(&self, batch: &Batch, passed_ns: Option<u64>) -> BatchView {
        let settings = batch.settings();
        let since: Option<Vec<Spent>> =
            batch.lanes.slots().map(|slot| self.since(batch.pid, slot)).collect();
        let lanes = u64::from(batch.lanes.slot_count());
        let of_all = |part: fn(&Spent) -> u64| {
            let sum = since.as_ref()?.iter().map(part).fold(0, u64::saturating_add);
            share(Some(sum), passed_ns.map(|ns| ns.saturating_mul(lanes)))
        };
        let (borrowed, overlapped) = (of_all(|s| s.borrowed_ns), of_all(|s| s.overlapped_ns));
        let has_budget = |settings: &&Settings| settings.policy != PolicyKind::BorrowIdle;
        BatchView {
            pid: batch.pid,
            program: batch.program.clone(),
            policy: settings.map_or("unknown", |settings| settings.policy.name()),
            budget_ns: settings.as_ref().filter(has_budget).map(|settings| settings.budget_ns),
            borrowed,
            overlapped,
            reaction_p99_ns: Figures::of(&batch.lanes).reaction_ns.p99,
            slo: settings.filter(|s| s.slo_latency_ns != 0).map(|s| self.slo(batch, &s)),
        }
    }

    fn slo(&self, batch: &Batch, settings: &Settings) -> SloView {
        let per_million = u32::try_from(settings.slo_per_million).unwrap_or(u32::MAX);
        let tail_ns = self.tails.of_lanes_ns(&self.services, &batch.request_lanes(), per_million);
        SloView { per_million, latency_ns: settings.slo_latency_ns, tail_ns }
    }

    fn lanes(&self, passed_ns: Option<u64>) -> Vec<LaneView> {
        let lane = |batch: &Batch, slot: &LaneSlot| {
            let (request, own) = (slot.request_cpu.load(Relaxed), slot.batch_cpu.load(Relaxed));
            let since = self.since(batch.pid, slot);
            LaneView {
                request,
                request_runs: self.who_runs_on(request),
                batch: own,
                batch_runs: self.who_runs_on(own),
                state: slot.state().map_or("unknown", |(state, _)| state.name()),
                borrowed: share(since.map(|since| since.borrowed_ns), passed_ns),
                overlapped: share(since.map(|since| since.overlapped_ns), passed_ns),
            }
        };
        self.batches.iter().flat_map(|b| b.lanes.slots().map(move |slot| lane(b, slot))).collect()
    }

    /// The name of the task on a CPU, as the kernel has it.
    fn who_runs_on(&self, cpu: u64) -> String {
        let slot = self.tasks.as_ref().zip(u32::try_from(cpu).ok());
        let switch = slot.and_then(|(map, cpu)| map.slot(cpu)?.snapshot());
        match switch.map(|switch| switch.running) {
            None | Some(Running::Unknown) => "?".to_owned(),
            Some(Running::Idle) => "idle".to_owned(),
            Some(Running::Task(task)) => {
                // It may have ended, or be another namespace's.
                let comm = fs::read(format!("/proc/{}/task/{}/comm", task.process, task.thread));
                let name = comm.map(|name| String::from_utf8_lossy(&name).trim_end().to_owned());
                name.unwrap_or_else(|_| task.thread.to_string())
            }
        }
    }

    fn service_views(&self, passed_ns: Option<u64>) -> Vec<ServiceView> {
        let view = |service: &Published| {
            let of = service.slots().map(|(lane, slot, alive)| {
                let finished = slot.finished_requests.load(Relaxed);
                let before = self.finished.get(&(service.name.clone(), lane)).copied();
                let since = before.map(|before| finished.saturating_sub(before));
                let tail = |per_million| self.tails.of_service_ns(service, lane, per_million);
                ServiceView {
                    name: service.name.clone(),
                    lane,
                    alive,
                    per_second: since.zip(passed_ns).map(|(n, ns)| per_second(n, ns)),
                    queue: slot.queue_len.load(Relaxed),
                    median_ns: tail(500_000),
                    p99_ns: tail(990_000),
                }
            });
            of.collect::<Vec<_>>()
        };
        self.services.iter().flat_map(view).collect()
    }

    /// Whether a living service publishes on a request lane of a batch.
    pub(super) fn is_published(&self, batch: &Batch) -> bool {
        let lanes = batch.request_lanes();
        let mut slots = self.services.iter().flat_map(Published::slots);
        slots.any(|(cpu, _, alive)| alive && lanes.contains(&cpu))
    }
}

/// Causes of a tail that are shown.
const MOST_CAUSES: usize = 5;

fn tail_views(service: &str, tail: &Tail) -> Vec<TailView> {
    let all = tail.causes.iter().fold(0, |sum: u64, cause| sum.saturating_add(cause.ns));
    let view = |cause: &Cause| TailView {
        service: service.to_owned(),
        slow: tail.slow,
        threshold_ns: tail.threshold_ns,
        cause: cause.name.clone(),
        share: share(Some(cause.ns), Some(all)),
        each_ns: cause.ns / tail.slow.max(1),
    };
    tail.causes.iter().take(MOST_CAUSES).map(view).collect()
}

fn spent(slot: &LaneSlot) -> Spent {
    Spent {
        borrowed_ns: slot.borrowed_ns.load(Relaxed),
        overlapped_ns: slot.overlapped_ns.load(Relaxed),
    }
}

/// In thousandths; a guard that counts late can find a little more than all.
fn share(part_ns: Option<u64>, of_ns: Option<u64>) -> Share {
    let (part_ns, of_ns) = part_ns.zip(of_ns).filter(|&(_, of_ns)| of_ns > 0)?;
    let share = u128::from(part_ns) * 1000 / u128::from(of_ns);
    Some(u64::try_from(share).unwrap_or(u64::MAX).min(1000))
}

fn per_second(n: u64, ns: u64) -> u64 {
    let rate = u128::from(n) * 1_000_000_000 / u128::from(ns.max(1));
    u64::try_from(rate).unwrap_or(u64::MAX)
}
