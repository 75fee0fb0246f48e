//! What is reported about the checks of a process, and what the planner counts.

use std::ops::AddAssign;

use elfen_rewrite::Tactic;

use super::patched::{KnownSite, Patched, State, UsedArena};

/// The number of patch sites of a process, for reports.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SiteCounts {
    /// Processes that have at least one arena.
    pub processes: u64,
    pub on: u64,
    /// Of the sites that are on, the ones whose check runs too often but has no alternative.
    pub dense: u64,
    pub too_dense: u64,
    pub refused: u64,
    /// Of the sites that are on, by tactic: T1, T2, T3, T4.
    pub by_tactic: [u64; 4],
    /// Of the sites that are on, those with rounds of their loop after the check.
    pub rounds: u64,
    /// Of the sites that are on, those in compiled Java methods.
    pub compiled: u64,
    pub arenas: u64,
}

impl AddAssign for SiteCounts {
    fn add_assign(&mut self, other: Self) {
        self.processes += other.processes;
        self.on += other.on;
        self.dense += other.dense;
        self.too_dense += other.too_dense;
        self.refused += other.refused;
        self.arenas += other.arenas;
        self.compiled += other.compiled;
        self.rounds += other.rounds;
        for (sum, count) in self.by_tactic.iter_mut().zip(other.by_tactic) {
            *sum += count;
        }
    }
}

impl Patched {
    /// Records how often the check of a site runs per millisecond of the lane.
    pub fn set_rate(&mut self, site: u64, per_ms: u64) {
        if let Some(known) = self.sites.get_mut(&site) {
            known.per_ms = per_ms;
        }
    }

    /// Whether a site is on although it runs too often.
    pub fn is_put_back(&self, site: u64) -> bool {
        self.sites.get(&site).is_some_and(|known| known.state == State::PutBack)
    }

    /// Each site with the number of times that its check has run, as far as it can be read.
    pub fn counts(&self) -> Vec<(u64, u64)> {
        let of = |used: &UsedArena| {
            let counts = used.arena.counts(&self.memory, used.checks.len());
            used.checks.iter().copied().zip(counts).collect::<Vec<_>>()
        };
        self.arenas.iter().flat_map(of).collect()
    }

    /// Addresses of the sites whose checks are on.
    pub fn sites_on(&self) -> impl Iterator<Item = u64> {
        self.sites.iter().filter(|(_, known)| known.is_on()).map(|(&at, _)| at)
    }

    pub fn is_on(&self, site: u64) -> bool {
        self.sites.get(&site).is_some_and(KnownSite::is_on)
    }

    pub fn site_counts(&self) -> SiteCounts {
        let arenas = self.arenas.len() as u64;
        let processes = u64::from(arenas > 0);
        let mut sites = SiteCounts { processes, arenas, ..SiteCounts::default() };
        for known in self.sites.values() {
            match known.state {
                State::On | State::PutBack => {
                    sites.on += 1;
                    sites.dense += u64::from(known.state != State::On);
                    sites.compiled += u64::from(known.compiled.is_some());
                    sites.rounds += u64::from(known.has_rounds);
                    sites.by_tactic[match known.tactic {
                        _ if known.is_several => 1,
                        Tactic::One | Tactic::Several => 0,
                        Tactic::Memory => 2,
                        Tactic::Flags => 3,
                    }] += 1;
                }
                State::TooDense => sites.too_dense += 1,
                State::Refused => sites.refused += 1,
            }
        }
        sites
    }
}
