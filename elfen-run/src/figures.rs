//! What a run did, in figures. They come from its lane page and from the task map's count of busy
//! time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::NapKind;
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::Page;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::channels::Channels;
use super::latency::Latency;

/// The sums over all lanes of a run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Figures {
    // The kernel's account: see `elfen_rt::signal::account`.
    /// How long the batch ran while its request lane was idle, in sum over the lanes. `null` where
    /// the kernel keeps no account.
    #[serde(deserialize_with = "Option::deserialize")]
    pub borrowed_ns: Option<u64>,
    /// How long the batch ran while its request lane was busy, in sum over the lanes. `null` where
    /// the kernel keeps no account.
    #[serde(deserialize_with = "Option::deserialize")]
    pub overlapped_ns: Option<u64>,
    /// How long the lanes napped, in sum.
    pub napped_ns: u64,
    /// Naps that began.
    pub naps: u64,
    /// From the request lane becoming busy until the batch is off its lane.
    pub reaction_ns: Latency,
    /// From the request lane becoming idle until the batch is back on its lane.
    pub wake_ns: Latency,
}

impl Figures {
    /// How long the batch ran, next to requests or not.
    pub fn ran_ns(&self) -> Option<u64> {
        self.borrowed_ns.zip(self.overlapped_ns).map(|(alone, beside)| alone.saturating_add(beside))
    }

    pub fn of(lanes: &Page<LaneSlot>) -> Self {
        let sum = |word: fn(&LaneSlot) -> &AtomicU64| {
            lanes.slots().map(|slot| word(slot).load(Relaxed)).sum()
        };
        let counted = lanes.slots().all(LaneSlot::is_counted);
        Self {
            borrowed_ns: counted.then(|| sum(|slot| &slot.borrowed_ns)),
            overlapped_ns: counted.then(|| sum(|slot| &slot.overlapped_ns)),
            napped_ns: sum(|slot| &slot.napped_ns),
            naps: sum(|slot| &slot.naps),
            reaction_ns: Latency::of(lanes.slots().map(|slot| &slot.reaction)),
            wake_ns: Latency::of(lanes.slots().map(|slot| &slot.wake)),
        }
    }
}

/// How threads with checks napped on these lanes; `None` if no thread checked.
pub fn nap_of_checks(lanes: &Page<LaneSlot>) -> Option<&'static str> {
    let mut kinds =
        lanes.slots().filter_map(|slot| NapKind::from_word(slot.check_nap.load(Relaxed)));
    kinds.next().map(NapKind::name)
}

/// The sum of the busy time of all request lanes so far; `None` without a task map.
pub fn request_busy_ns(channels: &Channels) -> Option<u64> {
    let busy = |request| channels.busy_ns(request, monotonic_ns());
    channels.requests().into_iter().map(busy).sum()
}

/// The busy time between two such readings. If a lease expired in between, because the supervisor
/// was stopped, a count may have restarted from 0: then the time is unknown.
pub fn busy_between(before: Option<u64>, after: Option<u64>) -> Option<u64> {
    after?.checked_sub(before?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_restarted_gives_no_time() {
        assert_eq!(busy_between(Some(40), Some(100)), Some(60));
        assert_eq!(busy_between(Some(100), Some(40)), None);
        assert_eq!([(None, Some(1)), (Some(1), None)].map(|(b, a)| busy_between(b, a)), [None; 2]);
    }
}
