//! Decides whether a guard gets its lane as soon as it wakes, from the ranks of cgroups.
//!
//! The scheduler divides a CPU among the children of each cgroup, from the root down. So guard and
//! batch compete only at one level: the children of their deepest common cgroup. The child on the
//! batch's side must be idle: then it gets 3 parts while the guard's side gets 1024. Cgroups
//! further down only divide the time of their own side.

use crate::cgroup::{CgroupPath, Error, Rank};

/// With less weight of the guard's side, an idle batch would get more than a hundredth of the lane.
pub const LEAST_WEIGHT: u64 = 30;

/// Why a guard does not outrank a fence.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Outranked {
    #[error("the guard, in {home}, is inside of the fence")]
    Inside { home: CgroupPath },
    #[error("cgroup {child} ranks equal to the guard in {home}: it is not idle (cpu.idle)")]
    NotIdle { child: CgroupPath, home: CgroupPath },
    #[error(
        "the guard, in {home}, does not outrank the fence: {child} is not idle, although the fence \
         in it is; start elfend in {parent}"
    )]
    TooFar { child: CgroupPath, home: CgroupPath, parent: CgroupPath },
    #[error("the guard's own cgroup {0} is idle")]
    GuardIdle(CgroupPath),
    #[error("the guard's own cgroup {path} has weight {weight}, less than {LEAST_WEIGHT}")]
    GuardLight { path: CgroupPath, weight: u64 },
}

/// Where two paths part: their deepest common cgroup, and its child on the way to each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parting {
    pub above: CgroupPath,
    pub to_home: Option<CgroupPath>,
    pub to_fence: Option<CgroupPath>,
}

pub fn parting(home: &CgroupPath, fence: &CgroupPath) -> Parting {
    let mut above = CgroupPath::root();
    let mut to_home = home.parts().peekable();
    let mut to_fence = fence.parts().peekable();
    while let (Some(one), Some(other)) = (to_home.peek(), to_fence.peek()) {
        if one != other {
            break;
        }
        above = above.child(one);
        to_home.next();
        to_fence.next();
    }
    let child = |name: Option<&str>| name.map(|name| above.child(name));
    Parting { to_home: child(to_home.next()), to_fence: child(to_fence.next()), above }
}

/// The first reason why a guard in `home` does not rank above `fence`; `None` if it does.
pub fn outranked(
    home: &CgroupPath,
    fence: &CgroupPath,
    rank: impl Fn(&CgroupPath) -> Result<Rank, Error>,
) -> Result<Option<Outranked>, Error> {
    let Parting { to_home, to_fence, .. } = parting(home, fence);
    let Some(child) = to_fence else {
        return Ok(Some(Outranked::Inside { home: home.clone() }));
    };
    if !rank(&child)?.idle {
        let home = home.clone();
        let too_far = child != *fence && rank(fence)?.idle;
        return Ok(Some(if too_far {
            Outranked::TooFar { child, home, parent: fence.parent() }
        } else {
            Outranked::NotIdle { child, home }
        }));
    }
    let mut path = home.clone();
    while to_home.as_ref().is_some_and(|top| path.is_within(top)) {
        let Rank { idle, weight } = rank(&path)?;
        if idle {
            return Ok(Some(Outranked::GuardIdle(path)));
        }
        if weight < LEAST_WEIGHT {
            return Ok(Some(Outranked::GuardLight { path, weight }));
        }
        path = path.parent();
    }
    Ok(None)
}

/// The cgroup from which guards rank above all of these fences, if each fence is idle in its
/// parent. An error names two fences that have no such cgroup in common.
pub fn home_of(fences: &[CgroupPath]) -> Result<CgroupPath, (CgroupPath, CgroupPath)> {
    let Some(deepest) = fences.iter().max_by_key(|fence| fence.parts().count()) else {
        return Ok(CgroupPath::root());
    };
    let home = deepest.parent();
    match fences.iter().find(|fence| !home.is_within(&fence.parent()) || home.is_within(fence)) {
        Some(other) => Err((deepest.clone(), other.clone())),
        None => Ok(home),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn path(text: &str) -> CgroupPath {
        CgroupPath::parse(text).unwrap()
    }

    fn reason_of(home: &str, fence: &str, ranks: &[(&str, bool, u64)]) -> Option<Outranked> {
        let rank = |at: &CgroupPath| {
            let known = ranks.iter().find(|(name, ..)| path(name) == *at);
            let (_, idle, weight) = known.copied().unwrap_or(("", false, 100));
            Ok(Rank { idle, weight })
        };
        outranked(&path(home), &path(fence), rank).unwrap()
    }

    #[test]
    fn a_fence_must_be_idle_where_its_path_parts_from_the_guards() {
        let idle = ("elfen.slice", true, 100);
        assert_eq!(reason_of("/", "elfen.slice", &[idle]), None);
        assert_eq!(reason_of("system.slice/elfend", "elfen.slice", &[idle]), None);
        let not = reason_of("/", "elfen.slice", &[]);
        assert!(matches!(not, Some(Outranked::NotIdle { .. })), "{not:?}");
        let inner = ("system.slice/slurm", true, 100);
        assert_eq!(reason_of("system.slice/elfend", "system.slice/slurm", &[inner]), None);
        let far = reason_of("/", "system.slice/slurm", &[inner]);
        assert!(
            matches!(&far, Some(Outranked::TooFar { child, .. }) if *child == path("system.slice"))
        );
        let inside = reason_of("elfen.slice/x", "elfen.slice", &[idle]);
        assert!(matches!(inside, Some(Outranked::Inside { .. })), "{inside:?}");
        for (weight, holds) in [(1, false), (29, false), (30, true), (100, true)] {
            let light = ("system.slice", false, weight);
            let found = reason_of("system.slice/elfend", "elfen.slice", &[idle, light]);
            assert_eq!(found.is_none(), holds, "{weight}: {found:?}");
        }
        let asleep = ("system.slice", true, 100);
        let found = reason_of("system.slice/elfend", "elfen.slice", &[idle, asleep]);
        assert_eq!(found, Some(Outranked::GuardIdle(path("system.slice"))));
    }

    #[test]
    fn all_fences_have_one_home_or_two_of_them_have_none() {
        let home = |fences: &[&str]| {
            let fences: Vec<CgroupPath> = fences.iter().map(|fence| path(fence)).collect();
            home_of(&fences).map(|home| home.to_string()).map_err(|(a, b)| format!("{a} {b}"))
        };
        assert_eq!(home(&["elfen.slice"]), Ok("/".into()));
        assert_eq!(home(&["elfen.slice", "system.slice/slurm"]), Ok("/system.slice".into()));
        let apart = home(&["system.slice/slurm", "kubepods.slice/besteffort"]);
        assert!(apart.is_err_and(|both| both.contains("slurm") && both.contains("besteffort")));
        assert!(home(&["elfen.slice", "elfen.slice/inner"]).is_err(), "one inside of the other");
    }

    /// The batch's share, per million, of a lane on which only guard and batch run. Computed level
    /// by level, as the scheduler does.
    fn share(home: &CgroupPath, fence: &CgroupPath, ranks: &BTreeMap<CgroupPath, Rank>) -> u64 {
        let mut at = CgroupPath::root();
        loop {
            let next =
                |to: &CgroupPath| to.parts().nth(at.parts().count()).map(|part| at.child(part));
            let weight = |to: &CgroupPath| match (next(to), to.is_within(&at)) {
                (Some(child), _) if ranks[&child].idle => 3,
                (Some(child), _) => ranks[&child].weight * 1024 / 100,
                (None, _) => 1024,
            };
            match (next(home), next(fence)) {
                (Some(ours), Some(theirs)) if ours == theirs => at = ours,
                _ => return weight(fence) * 1_000_000 / (weight(fence) + weight(home)),
            }
        }
    }

    fn some_path() -> impl Strategy<Value = CgroupPath> {
        prop::collection::vec(0..3_u8, 0..4).prop_map(|parts| {
            parts.iter().fold(CgroupPath::root(), |path, part| path.child(&part.to_string()))
        })
    }

    proptest! {
        /// Goal: a batch that ranks below its guard gets at most a hundredth of the lane. Method:
        /// any two paths and weights, compared with a model of the scheduler that does not use the
        /// rule.
        #[test]
        fn a_batch_below_its_guard_gets_at_most_a_hundredth(
            home in some_path(),
            fence in some_path(),
            seeds in prop::collection::vec((any::<bool>(), 1..200_u64), 8),
        ) {
            let mut ranks = BTreeMap::new();
            for to in [&home, &fence] {
                let mut path = to.clone();
                while !path.is_root() {
                    let (idle, weight) = seeds[ranks.len() % seeds.len()];
                    ranks.entry(path.clone()).or_insert(Rank { idle, weight });
                    path = path.parent();
                }
            }
            let rank = |path: &CgroupPath| Ok(ranks[path]);
            if outranked(&home, &fence, rank).unwrap().is_none() {
                prop_assert!(share(&home, &fence, &ranks) <= 10_000);
            } else if !home.is_within(&fence) {
                let Parting { to_home, to_fence, .. } = parting(&home, &fence);
                let light = to_home.is_some() || !ranks[&to_fence.unwrap()].idle;
                prop_assert!(light, "a guard in the parent of an idle fence is refused");
            }
        }
    }
}
