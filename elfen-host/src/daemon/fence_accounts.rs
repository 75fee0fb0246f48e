//! What a fence borrowed and overlapped, lane by lane, by the kernel's account of its cgroup.
//!
//! The daemon adds up what has come to the account since it last looked, so that the counters go on
//! whatever becomes of batches and of the guards' process. They begin with the daemon. To the
//! kernel a thread that naps in a check of its own runs, and here it counts as that.

use std::collections::{BTreeMap, BTreeSet};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::account::Claim;
use elfen_rt::signal::task::TaskMap;

use super::lent_lanes::Lanes;
use crate::cpulist::CpuSet;
use crate::fence::status::LaneAccount;

#[derive(Debug)]
pub(super) struct Tally {
    claim: Claim,
    /// By batch lane.
    lanes: BTreeMap<u32, Counted>,
    /// Lanes whose accounts are all others'.
    uncounted: BTreeSet<u32>,
}

#[derive(Debug)]
struct Counted {
    account: LaneAccount,
    /// How far the kernel's account has gone into ours.
    ran_ns: u64,
    shared_ns: u64,
}

impl Tally {
    /// Of a cgroup by its id.
    pub(super) fn of(cgroup: u64) -> Self {
        Self { claim: Claim::Cgroup(cgroup), lanes: BTreeMap::new(), uncounted: BTreeSet::new() }
    }

    pub(super) fn claim(&self) -> Claim {
        self.claim
    }

    /// The cgroup has this id now.
    pub(super) fn follow(&mut self, cgroup: u64, opened: &[Lanes]) {
        let claim = Claim::Cgroup(cgroup);
        if claim != self.claim {
            self.end(opened);
            self.claim = claim;
        }
    }

    /// Takes over what the kernel has counted. `known` are the claims of all fences: what another
    /// daemon left behind gives way. Returns the lanes where there is no account for it any more.
    pub(super) fn count(&mut self, opened: &[Lanes], own: &CpuSet, known: &[Claim]) -> Vec<u32> {
        let before = self.uncounted.clone();
        for lanes in opened {
            let Some((map, _)) = &lanes.channels.tasks else { continue };
            for &(batch, request) in lanes.channels.assigned() {
                if own.contains(batch) && map.counts_cgroups() {
                    self.count_lane(map, (batch, request), known);
                }
            }
        }
        self.uncounted.difference(&before).copied().collect()
    }

    fn count_lane(&mut self, map: &TaskMap, (batch, request): (u32, u32), known: &[Claim]) {
        let is_dead = |held: Claim| matches!(held, Claim::Cgroup(_)) && !known.contains(&held);
        let Some(index) = map.claim(batch, request, self.claim, is_dead) else {
            self.uncounted.insert(batch);
            return;
        };
        self.uncounted.remove(&batch);
        let now_ns = monotonic_ns();
        let busy = map.slot(request).and_then(|slot| slot.snapshot());
        let account = map.account(batch, index, self.claim.word());
        // Without an account the program has not switched since the claim, or does so all the time.
        let (ran_ns, shared_ns) = match (account, busy) {
            (Some(account), Some(busy)) => {
                let busy_ns = busy.busy_until_ns(now_ns);
                (account.ran_until_ns(now_ns), account.shared_until_ns(now_ns, busy_ns))
            }
            _ if self.lanes.contains_key(&batch) => return,
            _ => (0, 0),
        };
        // What is there at the first look was counted for another daemon.
        let counted = self.lanes.entry(batch).or_insert(Counted {
            account: LaneAccount { lane: batch, request, borrowed_ns: 0, overlapped_ns: 0 },
            ran_ns,
            shared_ns,
        });
        counted.add(ran_ns, shared_ns);
    }

    /// Nobody reads it any more.
    pub(super) fn end(&self, opened: &[Lanes]) {
        for lanes in opened {
            let Some((map, _)) = &lanes.channels.tasks else { continue };
            lanes
                .channels
                .assigned()
                .iter()
                .for_each(|&(batch, _)| map.disclaim(batch, self.claim));
        }
    }

    pub(super) fn accounts(&self) -> Vec<LaneAccount> {
        self.lanes.values().map(|counted| counted.account.clone()).collect()
    }
}

impl Counted {
    /// An account that is smaller than it was has begun anew.
    fn add(&mut self, ran_ns: u64, shared_ns: u64) {
        if ran_ns < self.ran_ns || shared_ns < self.shared_ns {
            (self.ran_ns, self.shared_ns) = (0, 0);
        }
        let ran = ran_ns - self.ran_ns;
        let shared = (shared_ns - self.shared_ns).min(ran);
        self.account.overlapped_ns += shared;
        self.account.borrowed_ns += ran - shared;
        (self.ran_ns, self.shared_ns) = (ran_ns, shared_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: nothing is counted twice, and nothing is lost when the kernel begins anew. Method: an
    /// account that grows, starts at 0, and grows.
    #[test]
    fn counters_go_on() {
        let account = LaneAccount { lane: 1, request: 0, borrowed_ns: 0, overlapped_ns: 0 };
        let mut counted = Counted { account, ran_ns: 1_000, shared_ns: 100 };
        for (ran_ns, shared_ns) in [(1_000, 100), (1_500, 200), (30, 10), (40, 10), (50, 90)] {
            counted.add(ran_ns, shared_ns);
        }
        let LaneAccount { borrowed_ns, overlapped_ns, .. } = counted.account;
        assert_eq!(overlapped_ns, 100 + 10 + 10, "no more than it ran");
        assert_eq!(borrowed_ns, 400 + 20 + 10);
    }
}
