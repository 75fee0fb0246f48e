//! Reads when each collection of a JVM began and ended, to the nanosecond, from the counters that
//! the JVM keeps in a file. The JVM's clock is the machine's clock minus a constant.
//!
//! The counters hold only the last collection of each collector, so they are polled more often than
//! a JVM collects. The constant is estimated from a counter of ticks that the JVM updates now and
//! then. Each poll sees an update late, never early. So the least difference between the machine's
//! clock and the counter is the best estimate.

use std::fs::File;
use std::os::unix::fs::FileExt;

use elfen_machine::hsperf::{self, Counter};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, EventKind, Runtime};

#[derive(Debug)]
struct Collector {
    began: Counter,
    ended: Counter,
    /// The end of the last reported collection.
    reported: u64,
}

/// The counters of one JVM.
#[derive(Debug)]
pub(super) struct Counters {
    file: File,
    ticks: Counter,
    collectors: Vec<Collector>,
    ticked: u64,
    ahead_ns: Option<u64>,
}

const NS: u64 = 1_000_000_000;
/// A limit on the number of collectors. Most JVMs have two.
const COLLECTORS_MAX: usize = 8;

impl Counters {
    /// Opens the counters. The error says in a few words why that is impossible.
    pub(super) fn open(process: u32) -> Result<Self, String> {
        let (file, all) = hsperf::counters(process).map_err(|error| error.to_string())?;
        let named = |name: &str| {
            let found = all.iter().find(|counter| counter.name == name);
            found.cloned().ok_or_else(|| format!("it has no counter {name}"))
        };
        let frequency = named("sun.os.hrt.frequency")?;
        let ticks = named("sun.os.hrt.ticks")?;
        let collector = |number: usize| {
            let of = |what| named(&format!("sun.gc.collector.{number}.{what}")).ok();
            Some(Collector { began: of("lastEntryTime")?, ended: of("lastExitTime")?, reported: 0 })
        };
        let collectors = (0..COLLECTORS_MAX).map_while(collector).collect();
        let mut found = Self { file, ticks, collectors, ticked: 0, ahead_ns: None };
        if found.value(&frequency) != Some(NS) {
            return Err("its clock does not count nanoseconds".to_owned());
        }
        found.ticked = found.value(&found.ticks).unwrap_or(0);
        for at in 0..found.collectors.len() {
            // Collections that have ended by now are not reported.
            found.collectors[at].reported = found.value(&found.collectors[at].ended).unwrap_or(0);
        }
        Ok(found)
    }

    /// Reads a counter from the file. The file is never mapped, because it may be truncated at any
    /// time.
    fn value(&self, counter: &Counter) -> Option<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, counter.offset).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Adds the collections that ended since the last poll.
    pub(super) fn poll(&mut self, into: &mut Vec<Event>) {
        let Some(ticks) = self.value(&self.ticks) else { return };
        let now_ns = monotonic_ns();
        if ticks != self.ticked {
            self.ticked = ticks;
            let ahead_ns = now_ns.saturating_sub(ticks);
            self.ahead_ns = Some(self.ahead_ns.map_or(ahead_ns, |least| least.min(ahead_ns)));
        }
        let Some(ahead_ns) = self.ahead_ns else { return };
        for at in 0..self.collectors.len() {
            let Collector { began, ended, reported } = &self.collectors[at];
            let Some((began, ended)) = self.value(began).zip(self.value(ended)) else { continue };
            // During a collection, its begin is later than the end of the last one.
            if ended == *reported || began >= ended {
                continue;
            }
            self.collectors[at].reported = ended;
            let event = |ticks: u64, step| Event {
                at_ns: ticks.saturating_add(ahead_ns),
                thread: u32::try_from(at).unwrap_or(0),
                kind: EventKind::Runtime(step),
            };
            into.extend([event(began, Runtime::GcBegin), event(ended, Runtime::GcEnd)]);
        }
    }
}
