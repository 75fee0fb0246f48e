//! The services that publish on this machine, found by the keys of their pages, and the tails of
//! their latencies.
//!
//! As with batches, no registry exists. The kernel lists its segments; a segment whose key
//! matches the name in it is a service's page. Pages that this user may not map are not visible.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::Liveness;
use elfen_rt::signal::histogram::{BUCKETS, quantile_ns};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::{ServiceReader, ServiceSlot, Writer, key_of};

use elfen_machine::segment::{Segment, segments, text_of};

/// One service's page.
#[derive(Debug)]
pub struct Published {
    pub name: String,
    pub reader: ServiceReader,
}

impl Published {
    fn open(Segment { key, id, .. }: Segment) -> Option<Self> {
        let memory = || Memory::attach_id(id, Access::Read).ok();
        let name = Page::<ServiceSlot>::open(memory()?).ok()?.name();
        if key_of(&name) != key {
            return None;
        }
        let reader = ServiceReader::from_memory(memory()?, &name).ok()?;
        Some(Self { name: text_of(&name), reader })
    }

    /// The slots that a process has claimed, as (CPU of the request lane, slot, whether the process
    /// lives).
    pub fn slots(&self) -> impl Iterator<Item = (u64, &ServiceSlot, bool)> {
        (0..self.reader.lanes()).filter_map(|lane| {
            let slot = self.reader.slot(lane)?;
            let alive = match self.reader.writer(lane) {
                Writer::None => return None,
                Writer::Process(_, liveness) => liveness != Liveness::Dead,
            };
            Some((slot.cpu.load(Relaxed), slot, alive))
        })
    }
}

/// All services that this user may see, by name.
pub fn services() -> io::Result<Vec<Published>> {
    let mut found: Vec<Published> = segments()?.into_iter().filter_map(Published::open).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Counts of requests by latency, in the buckets of the pages.
pub type Counts = [u64; BUCKETS];

/// The time over which a tail is computed.
const WINDOW_NS: u64 = 10_000_000_000;

/// Finished requests of living services, by service and request lane.
type ByService = BTreeMap<(String, u64), Box<Counts>>;

/// Latencies of the last ten seconds: the present counts of the pages minus their counts then.
#[derive(Debug, Default)]
pub struct Tails {
    /// The oldest sample first.
    samples: VecDeque<(u64, ByService)>,
}

impl Tails {
    /// Samples the present counts of the services.
    pub fn observe(&mut self, services: &[Published], now_ns: u64) {
        self.remember(counts_of(services), now_ns);
    }

    fn remember(&mut self, counts: ByService, now_ns: u64) {
        // The oldest sample stays while the next one is inside the window.
        let outside = |at_ns: u64| now_ns.saturating_sub(at_ns) >= WINDOW_NS;
        while self.samples.get(1).is_some_and(|(at_ns, _)| outside(*at_ns)) {
            self.samples.pop_front();
        }
        self.samples.push_back((now_ns, counts));
    }

    /// The latency that `per_million` of a million requests on these lanes did not exceed. Counts
    /// since the services began without an earlier sample. `None` without requests.
    pub fn of_lanes_ns(
        &self,
        services: &[Published],
        lanes: &BTreeSet<u64>,
        per_million: u32,
    ) -> Option<u64> {
        self.tail_of(&counts_of(services), |_, lane| lanes.contains(&lane), per_million)
    }

    /// The tail of one service on one lane.
    pub fn of_service_ns(&self, service: &Published, lane: u64, per_million: u32) -> Option<u64> {
        let now = counts_of(std::slice::from_ref(service));
        self.tail_of(&now, |_, of| of == lane, per_million)
    }

    fn tail_of(
        &self,
        now: &ByService,
        is_meant: impl Fn(&str, u64) -> bool,
        per_million: u32,
    ) -> Option<u64> {
        let mut window = [0u64; BUCKETS];
        for (key, now) in now.iter().filter(|((name, lane), _)| is_meant(name, *lane)) {
            let then = self.samples.front().and_then(|(_, counts)| counts.get(key));
            for (at, (sum, count)) in window.iter_mut().zip(now.iter()).enumerate() {
                // A page that was made again counts from 0.
                let before = then.map_or(0, |then| then[at]);
                *sum = sum.saturating_add(count.checked_sub(before).unwrap_or(*count));
            }
        }
        quantile_ns(window.into_iter(), per_million)
    }
}

fn counts_of(services: &[Published]) -> ByService {
    let mut all = ByService::new();
    for service in services {
        for (cpu, slot, _) in service.slots().filter(|(_, _, alive)| *alive) {
            let counts = all.entry((service.name.clone(), cpu));
            let counts = counts.or_insert_with(|| Box::new([0; BUCKETS]));
            for (sum, count) in counts.iter_mut().zip(slot.latency.counts()) {
                *sum = sum.saturating_add(count);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::histogram::bucket_of;

    fn counted(requests: &[(u64, u64)]) -> ByService {
        let mut counts = Box::new([0; BUCKETS]);
        requests.iter().for_each(|&(ns, n)| counts[bucket_of(ns)] += n);
        ByService::from([(("search".to_owned(), 2), counts)])
    }

    /// Goal: a tail covers the last ten seconds. Method: slow requests first, then quick ones, on a
    /// simulated clock.
    #[test]
    fn a_tail_ignores_requests_before_its_window() {
        let mut tails = Tails::default();
        let slow = counted(&[(1_000_000, 100)]);
        let both = counted(&[(1_000_000, 100), (1_000, 900)]);
        let tail = |tails: &Tails, now| tails.tail_of(now, |_, lane| lane == 2, 990_000);
        assert!(tail(&tails, &slow).is_some_and(|ns| ns >= 1_000_000), "since the beginning");
        tails.remember(counted(&[]), 0);
        tails.remember(slow.clone(), 5_000_000_000);
        assert!(tail(&tails, &both).is_some_and(|ns| ns >= 1_000_000), "five seconds ago");
        tails.remember(both.clone(), 16_000_000_000);
        assert!(tail(&tails, &both).is_some_and(|ns| ns < 1_100), "since second 5");
        tails.remember(both.clone(), 27_000_000_000);
        assert_eq!(tail(&tails, &both), None, "no request since second 16");
        let another = |name: &str, lane| name != "search" || lane == 3;
        assert_eq!(Tails::default().tail_of(&both, another, 990_000), None);
        assert!(tail(&tails, &counted(&[(500, 1)])).is_some(), "a page that restarts from 0");
    }
}
