//! What recording costs a service that is under load: its CPU time for each request that it
//! finished, by the scheduler's account and its own count.
//!
//! Windows with and without programs take turns, and each with them is held against the two beside
//! it. While they are attached, events are taken as `elfen tailor record` takes them.

use std::io;
use std::time::{Duration, Instant};

use elfen_console::duration::number;
use elfen_kernel::events::{Detail, Events, Watched};
use elfen_machine::affinity;
use elfen_rt::signal::event::Words;
use elfen_rt::signal::service::OpenError;

use super::Error;
use super::counted::{Counted, Page, Redis};
use crate::live::summary::{Figure, figure};
use crate::live::usage;

/// As `elfen tailor` looks at its rings.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const RING: u32 = 16_384;

/// CPU time of a request, in nanoseconds, and what it is of that without.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub(crate) struct CpuPerRequest {
    pub(crate) off_ns: f64,
    pub(crate) on_ns: f64,
    pub(crate) pairs: usize,
    pub(crate) ratio: f64,
    pub(crate) ratio_ci95: Option<[f64; 2]>,
    /// Events of a second while it was recorded.
    pub(crate) events_a_second: f64,
}

#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub(crate) struct Served {
    pub(crate) requests_a_second: f64,
    /// Of each window, it was recorded for so much.
    pub(crate) duty_percent: u32,
    pub(crate) sched: CpuPerRequest,
    pub(crate) full: CpuPerRequest,
}

/// A service that somebody puts under load.
#[derive(Debug)]
pub(crate) struct Service {
    counted: Box<dyn Counted>,
    /// It has no marks, so its sockets are recorded; 0 if it has.
    port: u16,
    processes: Vec<u32>,
}

/// How it is recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// So many with each detail.
    pub(crate) pairs: usize,
    pub(crate) time: Duration,
    pub(crate) duty_percent: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    cpu_ns: u64,
    requests: u64,
    events: u64,
}

impl Window {
    fn ns_a_request(self) -> f64 {
        number(self.cpu_ns) / number(self.requests.max(1))
    }
}

impl Service {
    pub(crate) fn find(name: &str) -> Result<Self, OpenError> {
        let (page, processes) = Page::find(name)?;
        Ok(Self { counted: Box::new(page), port: 0, processes })
    }

    pub(crate) fn redis(port: u16) -> io::Result<Self> {
        let (redis, process) = Redis::find(port)?;
        Ok(Self { counted: Box::new(redis), port, processes: vec![process] })
    }

    fn so_far(&mut self) -> Result<Window, Error> {
        Ok(Window {
            cpu_ns: self.processes.iter().map(|process| usage::process_cpu_ns(*process)).sum(),
            requests: self.counted.finished().map_err(Error::Count)?,
            events: 0,
        })
    }

    /// With `attach`, recorded for so long. To begin and to end is a part of turns alone.
    fn window(
        &mut self,
        time: Duration,
        attach: Option<(Detail, Duration)>,
    ) -> Result<Window, Error> {
        let watched = Watched {
            port: self.port,
            processes: self.processes.clone(),
            cpus: affinity::allowed()?.iter().collect(),
        };
        let attached = |(detail, _)| Events::attach(detail, RING, &watched);
        let recorded = attach.map_or(time, |(_, recorded)| recorded);
        let turns = recorded < time;
        let mut events = attach.filter(|_| !turns).map(attached).transpose()?;
        let (before, began) = (self.so_far()?, Instant::now());
        if turns {
            events = attach.map(attached).transpose()?;
        }
        let (mut words, mut taken): (Vec<Words>, u64) = (Vec::new(), 0);
        while let Some(left) = time.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left.min(LOOK_EVERY));
            if let Some(events) = &mut events {
                for cpu in 0..events.cpus() {
                    words.clear();
                    events.read(cpu, &mut words);
                    taken += words.len() as u64;
                }
            }
            if turns && began.elapsed() >= recorded {
                events = None;
            }
        }
        let after = self.so_far()?;
        Ok(Window {
            cpu_ns: after.cpu_ns.saturating_sub(before.cpu_ns),
            requests: after.requests.saturating_sub(before.requests),
            events: taken,
        })
    }

    /// Without programs; a service that does nothing has no cost.
    fn loaded(&mut self, time: Duration) -> Result<Window, Error> {
        let window = self.window(time, None)?;
        // A Redis counts that it is asked for its count.
        let most_of_ours = if self.port == 0 { 0 } else { 1 };
        (window.requests > most_of_ours).then_some(window).ok_or(Error::Idle)
    }

    pub(crate) fn measure(&mut self, windows: Windows) -> Result<Served, Error> {
        let Windows { pairs, time, duty_percent } = windows;
        let recorded = time * duty_percent / 100;
        let details = [Detail::Sched, Detail::Full];
        let mut all: [Vec<(f64, Window)>; 2] = [Vec::new(), Vec::new()];
        let mut off = vec![self.loaded(time)?];
        for _ in 0..pairs {
            for (detail, seen) in details.into_iter().zip(&mut all) {
                let on = self.window(time, Some((detail, recorded)))?;
                let before = off.last().copied().unwrap_or_default();
                let after = self.loaded(time)?;
                off.push(after);
                let beside = f64::midpoint(before.ns_a_request(), after.ns_a_request());
                seen.push((beside, on));
            }
        }
        let requests: u64 = off.iter().map(|window| window.requests).sum();
        let [sched, full] = all.map(|seen| cost(&seen, time));
        let requests_a_second = number(requests) / (time.as_secs_f64() * number(off.len() as u64));
        Ok(Served { requests_a_second, duty_percent, sched, full })
    }
}

fn cost(seen: &[(f64, Window)], time: Duration) -> CpuPerRequest {
    let median = |values: Vec<f64>| figure(&values).median;
    let ratios: Vec<f64> = seen.iter().map(|(off_ns, on)| on.ns_a_request() / off_ns).collect();
    let Figure { median: ratio, ci95: ratio_ci95 } = figure(&ratios);
    let events = seen.iter().map(|(_, on)| number(on.events) / time.as_secs_f64());
    CpuPerRequest {
        off_ns: median(seen.iter().map(|(off_ns, _)| *off_ns).collect()),
        on_ns: median(seen.iter().map(|(_, on)| on.ns_a_request()).collect()),
        pairs: seen.len(),
        ratio,
        ratio_ci95,
        events_a_second: median(events.collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_with_programs_is_held_against_those_beside_it() {
        let window = |cpu_ns| Window { cpu_ns, requests: 10, events: 50 };
        let seen = [(100.0, window(1_010)), (200.0, window(2_040)), (100.0, window(1_030))];
        let cost = cost(&seen, Duration::from_millis(500));
        assert!((cost.ratio - 1.02).abs() < 1e-9 && cost.pairs == 3, "{cost:?}");
        assert_eq!((cost.off_ns, cost.on_ns, cost.events_a_second), (100.0, 103.0, 100.0));
    }
}
