//! What a fence borrowed and overlapped on each lane, from the kernel's account of its cgroup.
//!
//! The daemon adds the growth of the kernel's account since the last reading, so the counters
//! survive batches and guard processes. They begin with the daemon. To the kernel, a thread that
//! naps in its own check runs, and it counts as running here.

use std::collections::{BTreeMap, BTreeSet};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::account::Claim;
use elfen_rt::signal::task::TaskMap;

use super::lent_lanes::LaneGroup;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::status::LaneAccount;

#[derive(Debug)]
pub(super) struct FenceAccounts {
    claim: Claim,
    /// By batch lane.
    lanes: BTreeMap<u32, Counted>,
    /// Lanes on which other batches have taken all accounts.
    uncounted: BTreeSet<u32>,
}

#[derive(Debug)]
struct Counted {
    account: LaneAccount,
    /// The kernel's account at the last reading.
    ran_ns: u64,
    shared_ns: u64,
}

impl FenceAccounts {
    /// Accounts of the cgroup with this id.
    pub(super) fn of(cgroup: u64) -> Self {
        Self { claim: Claim::Cgroup(cgroup), lanes: BTreeMap::new(), uncounted: BTreeSet::new() }
    }

    pub(super) fn claim(&self) -> Claim {
        self.claim
    }

    /// Tells that the cgroup has this id now.
    pub(super) fn set_cgroup(&mut self, cgroup: u64, opened: &[LaneGroup]) {
        let claim = Claim::Cgroup(cgroup);
        if claim != self.claim {
            self.disclaim(opened);
            self.claim = claim;
        }
    }

    /// Adds what the kernel has counted. `known` are the claims of all fences: claims of an earlier
    /// daemon give way. Returns lanes on which this fence has no account any more.
    pub(super) fn update(
        &mut self,
        opened: &[LaneGroup],
        own: &CpuSet,
        known: &[Claim],
    ) -> Vec<u32> {
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
        let is_dead = |claim: Claim| matches!(claim, Claim::Cgroup(_)) && !known.contains(&claim);
        let Some(index) = map.claim(batch, request, self.claim, is_dead) else {
            self.uncounted.insert(batch);
            return;
        };
        self.uncounted.remove(&batch);
        let now_ns = monotonic_ns();
        let busy = map.slot(request).and_then(|slot| slot.snapshot());
        let account = map.account(batch, index, self.claim.word());
        // No account: the eBPF program has seen no switch since the claim, or is switching just
        // now.
        let (ran_ns, shared_ns) = match (account, busy) {
            (Some(account), Some(busy)) => {
                let busy_ns = busy.busy_until_ns(now_ns);
                (account.ran_until_ns(now_ns), account.shared_until_ns(now_ns, busy_ns))
            }
            _ if self.lanes.contains_key(&batch) => return,
            _ => (0, 0),
        };
        // At the first reading, the account's value was counted for an earlier daemon.
        let counted = self.lanes.entry(batch).or_insert(Counted {
            account: LaneAccount { lane: batch, request, borrowed_ns: 0, overlapped_ns: 0 },
            ran_ns,
            shared_ns,
        });
        counted.add(ran_ns, shared_ns);
    }

    /// Gives the accounts back.
    pub(super) fn disclaim(&self, opened: &[LaneGroup]) {
        for lanes in opened {
            let Some((map, _)) = &lanes.channels.tasks else { continue };
            lanes
                .channels
                .assigned()
                .iter()
                .for_each(|&(batch, _)| map.disclaim(batch, self.claim));
        }
    }

    pub(super) fn lanes(&self) -> Vec<LaneAccount> {
        self.lanes.values().map(|counted| counted.account.clone()).collect()
    }
}

impl Counted {
    /// Adds the growth since the last reading. A smaller account has restarted from 0.
    fn add(&mut self, ran_ns: u64, shared_ns: u64) {
        if ran_ns < self.ran_ns || shared_ns < self.shared_ns {
            self.ran_ns = 0;
            self.shared_ns = 0;
        }
        let ran = ran_ns - self.ran_ns;
        let shared = (shared_ns - self.shared_ns).min(ran);
        self.account.overlapped_ns += shared;
        self.account.borrowed_ns += ran - shared;
        self.ran_ns = ran_ns;
        self.shared_ns = shared_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: nothing is counted twice, and nothing is lost when the kernel restarts from 0. Method:
    /// an account that grows, restarts, and grows.
    #[test]
    fn counters_survive_restarts_of_the_account() {
        let account = LaneAccount { lane: 1, request: 0, borrowed_ns: 0, overlapped_ns: 0 };
        let mut counted = Counted { account, ran_ns: 1_000, shared_ns: 100 };
        for (ran_ns, shared_ns) in [(1_000, 100), (1_500, 200), (30, 10), (40, 10), (50, 90)] {
            counted.add(ran_ns, shared_ns);
        }
        let LaneAccount { borrowed_ns, overlapped_ns, .. } = counted.account;
        assert_eq!(overlapped_ns, 100 + 10 + 10, "no more than the time that it ran");
        assert_eq!(borrowed_ns, 400 + 20 + 10);
    }
}
