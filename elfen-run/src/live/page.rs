//! The page of live checks. The supervisor counts in it what live checks did, and the launcher
//! reports these counts.

use std::array;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_instrument::live::{Missed, SiteCounts};
use elfen_kernel::preempted::Notes;
use elfen_rt::signal::histogram::Histogram;
use elfen_rt::signal::page::{NAME_BYTES, Page, Slot};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::latency::Latency;
use crate::pages::{PagesError, keep_open, page};

/// The reasons for which a thread has no check where it stood, as reports name them.
pub(super) const REASONS: [&str; 8] =
    ["kernel", "jit", "ld_so", "no_function", "no_place", "too_dense", "refused", "passing"];
const WHY_WORDS: usize = 16;
const NAME_WORDS: usize = 8;
/// How many names of methods with checks are kept, the latest ones.
const NAMES: usize = 16;

/// Text of up to this many words, padded with zeros.
#[derive(Debug)]
struct Text<const WORDS: usize>([AtomicU64; WORDS]);

impl<const WORDS: usize> Text<WORDS> {
    fn store(&self, text: &str) {
        let mut bytes = text.bytes();
        for word in &self.0 {
            let chunk: [u8; 8] = array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_le_bytes(chunk), Relaxed);
        }
    }

    fn load(&self) -> Option<String> {
        let bytes = self.0.iter().flat_map(|word| word.load(Relaxed).to_le_bytes());
        let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
        (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The page's only slot. The supervisor's guards and its planner write it.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct LiveWords {
    pub(super) probes: AtomicU64,
    pub(super) missed: AtomicU64,
    pub(super) stopped_by_check: AtomicU64,
    pub(super) stopped_by_guard: AtomicU64,
    reasons: [AtomicU64; REASONS.len()],
    processes: AtomicU64,
    pub(super) first_touch_ns: AtomicU64,
    places: [AtomicU64; 11],
    pub(super) checks_per_ms: AtomicU64,
    /// The last reason to refuse a process, as text.
    why: Text<WHY_WORDS>,
    /// Rendezvous of all guards, before one of them writes.
    pub(super) rendezvous: AtomicU64,
    pub(super) rendezvous_missed: AtomicU64,
    /// How many methods were named; the latest names, in turn.
    named: AtomicU64,
    names: [Text<NAME_WORDS>; NAMES],
    /// When the first and the last check was added, on the monotonic clock; 0 for never.
    first_check_ns: AtomicU64,
    last_check_ns: AtomicU64,
    reserved: [AtomicU64; 1],
    /// From the start of a probe to the answer.
    pub(super) gap: Histogram,
}

const _: () = assert!(size_of::<LiveWords>() == 1408 + size_of::<Histogram>());

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNLIVE" is used nowhere else.
unsafe impl Slot for LiveWords {
    const MAGIC: [u8; 8] = *b"ELFNLIVE";
    const CHANNEL: &'static str = "live";
}

impl LiveWords {
    pub(super) fn count(&self, missed: &Missed) {
        if let Some(at) = REASONS.iter().position(|&name| name == missed.name()) {
            self.reasons[at].fetch_add(1, Relaxed);
        }
        if let Missed::Process(why) | Missed::Traced(why) = missed {
            self.record_reason(why);
        }
    }

    /// Records why a process was refused, or why all were.
    pub(super) fn record_reason(&self, why: &str) {
        self.why.store(why);
    }

    /// Records a Java method that has received a check. Only the planner calls this.
    pub(super) fn name_method(&self, name: &str) {
        let stored = &name.as_bytes()[..name.len().min(8 * NAME_WORDS)];
        let is_it =
            |known: &Text<NAME_WORDS>| known.load().is_some_and(|it| it.as_bytes() == stored);
        if self.names.iter().any(is_it) {
            return;
        }
        let named = self.named.fetch_add(1, Relaxed);
        let at = usize::try_from(named).unwrap_or(0) % NAMES;
        self.names.iter().skip(at).take(1).for_each(|text| text.store(name));
    }

    pub(super) fn publish(&self, all: SiteCounts) {
        let SiteCounts { on, too_dense, refused, arenas, compiled, rounds, dense, .. } = all;
        let [one, several, memory, flags] = all.by_tactic;
        let counts = [on, too_dense, refused, one, several, memory, flags];
        let words = counts.into_iter().chain([arenas, compiled, rounds, dense]);
        self.processes.store(all.processes, Relaxed);
        self.places.iter().zip(words).for_each(|(word, value)| word.store(value, Relaxed));
    }

    /// Records that a check was added now. Only the planner calls this.
    pub(super) fn note_check(&self, now_ns: u64) {
        let _kept = self.first_check_ns.compare_exchange(0, now_ns, Relaxed, Relaxed);
        self.last_check_ns.store(now_ns, Relaxed);
    }

    /// The live checks as reports show them, of a run that began at `start_ns`.
    pub fn live(&self, start_ns: u64) -> Live {
        let load = |word: &AtomicU64| word.load(Relaxed);
        let after = |word: &AtomicU64| {
            Some(load(word)).filter(|&ns| ns != 0).map(|ns| ns.saturating_sub(start_ns))
        };
        let [on, too_dense, refused, one, several, memory, flags, arenas, compiled, rounds, dense] =
            self.places.each_ref().map(load);
        let counts: [u64; REASONS.len()] = array::from_fn(|at| load(&self.reasons[at]));
        let reasons = REASONS.iter().zip(counts).filter(|(_, count)| *count > 0);
        Live {
            processes: load(&self.processes),
            first_touch_ns: load(&self.first_touch_ns),
            first_check_after_ns: after(&self.first_check_ns),
            last_check_after_ns: after(&self.last_check_ns),
            sites: LiveSites {
                on,
                too_dense,
                refused,
                one,
                several,
                memory,
                flags,
                arenas,
                compiled,
                rounds,
                dense,
            },
            checks_per_ms: load(&self.checks_per_ms),
            probes: load(&self.probes),
            missed: load(&self.missed),
            missed_by: reasons.map(|(name, count)| ((*name).to_owned(), count)).collect(),
            gap_ns: Latency::of(std::iter::once(&self.gap)),
            stopped_by_check: load(&self.stopped_by_check),
            stopped_by_guard: load(&self.stopped_by_guard),
            rendezvous: load(&self.rendezvous),
            rendezvous_missed: load(&self.rendezvous_missed),
            refused: self.why.load(),
            methods: self.names.iter().filter_map(Text::load).collect(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct LivePage {
    words: Page<LiveWords>,
    /// The kernel's map of CPUs whose thread filters its system calls: a descriptor that batch
    /// processes inherit, and the map's length. `None` where the kernel has no such map.
    pub(crate) filters: Option<(RawFd, u64)>,
}

impl LivePage {
    pub(crate) fn make(notes: &Notes, name: &[u8; NAME_BYTES]) -> Result<Self, PagesError> {
        let filters = match notes.filters() {
            Ok((map, bytes)) => Some((keep_open(map.as_raw_fd())?, bytes)),
            // Code in the C library notes it instead; `elfen doctor` prints the reason.
            Err(_) => None,
        };
        Ok(Self { words: page(1, name)?, filters })
    }

    pub(crate) fn words(&self) -> Option<&LiveWords> {
        self.words.slot(0)
    }
}

/// The live checks of a run, in its report.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Live {
    /// Processes that were patched.
    pub processes: u64,
    /// The longest time that the first patch of a process took.
    pub first_touch_ns: u64,
    /// When the first check was added, from the start of the run. `null` if none was.
    #[serde(default)]
    pub first_check_after_ns: Option<u64>,
    /// When the last check was added, from the start of the run. `null` if none was.
    #[serde(default)]
    pub last_check_after_ns: Option<u64>,
    pub sites: LiveSites,
    /// How often checks ran lately in a millisecond of the lanes' time.
    pub checks_per_ms: u64,
    /// Probes: simulated requests that measure whether a check reacts.
    pub probes: u64,
    /// Probes to which no check reacted.
    pub missed: u64,
    /// Misses of probes and of requests, by the reason why there was no check.
    pub missed_by: std::collections::BTreeMap<String, u64>,
    /// From the start of a probe to the reaction of a check, or to the end of the batch's time on
    /// the lane.
    pub gap_ns: Latency,
    /// Requests that a check noticed first.
    pub stopped_by_check: u64,
    /// Requests that a poll of the guard noticed first.
    pub stopped_by_guard: u64,
    /// With several lanes: how often all guards came to a rendezvous.
    pub rendezvous: u64,
    /// With several lanes: how often a guard did not come to a rendezvous in time.
    pub rendezvous_missed: u64,
    /// Why a process got no checks. `null` if no process was refused.
    #[serde(deserialize_with = "Option::deserialize")]
    pub refused: Option<String>,
    /// Java methods that received checks: the last sixteen, in no order.
    #[serde(default)]
    pub methods: Vec<String>,
}

/// Patch sites of all processes together; those with a check also by tactic.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LiveSites {
    /// Sites with a check.
    pub on: u64,
    /// Sites whose check was removed, because it ran too often.
    pub too_dense: u64,
    /// Sites that could not be patched.
    pub refused: u64,
    /// Of those with a check: one instruction was moved.
    pub one: u64,
    /// Of those with a check: several instructions were moved.
    #[serde(default)]
    pub several: u64,
    /// Of those with a check: one instruction was moved that accesses memory.
    pub memory: u64,
    /// Of those with a check: the check saves and restores the flags.
    pub flags: u64,
    /// Memory areas with the code of checks.
    pub arenas: u64,
    /// Of those with a check: in Java methods that the virtual machine has compiled.
    #[serde(default)]
    pub compiled: u64,
    /// Of those with a check: followed by copied rounds of their loop, which takes nanoseconds.
    #[serde(default)]
    pub rounds: u64,
    /// Of those with a check: run too often, but are the only check of their loop.
    #[serde(default)]
    pub dense: u64,
}
