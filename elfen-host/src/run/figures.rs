//! What a run did, in figures: read from its lane page and from the task
//! map's own count of busy time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::Kind;
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::Page;
use serde::{Deserialize, Serialize};

use super::channels::Channels;
use super::latency::Latency;

/// The lanes of a run, summed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// How long the batch's own tasks ran, by the kernel's account; nothing where the kernel keeps
    /// none (see [`elfen_rt::signal::account`]).
    #[serde(deserialize_with = "Option::deserialize")]
    pub borrowed_ns: Option<u64>,
    #[serde(deserialize_with = "Option::deserialize")]
    pub overlapped_ns: Option<u64>,
    pub napped_ns: u64,
    pub naps: u64,
    pub reaction_ns: Latency,
    pub wake_ns: Latency,
}

impl Figures {
    /// How long the batch ran in all.
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

/// How threads that check have napped on these lanes; `None` if none has checked.
pub fn nap_of_checks(lanes: &Page<LaneSlot>) -> Option<&'static str> {
    let mut kinds = lanes.slots().filter_map(|slot| Kind::from_word(slot.check_nap.load(Relaxed)));
    kinds.next().map(Kind::name)
}

/// How long the request lanes have been busy so far, all together; `None` without a task map.
pub fn request_busy_ns(channels: &Channels) -> Option<u64> {
    let busy = |request| channels.busy_ns(request, monotonic_ns());
    channels.requests().into_iter().map(busy).sum()
}

/// How long they were busy between two such readings. Where a lease ran out meanwhile, as its
/// keeper was stopped, a count may have begun anew: then no time is known, and none is made up.
pub fn busy_between(before: Option<u64>, after: Option<u64>) -> Option<u64> {
    after?.checked_sub(before?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_began_anew_is_no_time() {
        assert_eq!(busy_between(Some(40), Some(100)), Some(60));
        assert_eq!(busy_between(Some(100), Some(40)), None);
        assert_eq!([(None, Some(1)), (Some(1), None)].map(|(b, a)| busy_between(b, a)), [None; 2]);
    }
}
