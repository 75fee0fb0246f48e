//! Checks that the parts of the settings do not contradict each other: each lane has one role,
//! fences are apart from each other and from services, and one cgroup outranks all fences.

use std::collections::BTreeSet;

use super::parts::{CgroupSelector, Fence, Lent};
use elfen_machine::cgroup::CgroupPath;
use elfen_machine::fence::rank;
use elfen_machine::pair::Pair;

/// Requires that each CPU is one lane of one service.
pub(super) fn require_one_role(lent: &[Lent]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let lanes = lent.iter().flat_map(|lent| &lent.pairs).flat_map(Pair::lanes);
    match lanes.into_iter().find(|cpu| !seen.insert(*cpu)) {
        Some(cpu) => Err(format!("CPU {cpu} is named twice, and a lane has one role")),
        None => Ok(()),
    }
}

/// Requires that fences have different names and cgroups, none inside another, and one cgroup from
/// which guards outrank them all.
pub(super) fn require_apart(fences: &[Fence]) -> Result<(), String> {
    let mut names = BTreeSet::new();
    if let Some(twice) = fences.iter().find(|fence| !names.insert(&fence.name)) {
        return Err(format!("fence {:?}: two fences have this name", twice.name));
    }
    let is_again = |at: usize| fences[..at].iter().any(|fence| fence.which == fences[at].which);
    if let Some(again) = (0..fences.len()).find(|&at| is_again(at)) {
        return Err(format!("two fences name {}", fences[again].which));
    }
    let paths: Vec<CgroupPath> = fences
        .iter()
        .filter_map(|fence| match &fence.which {
            CgroupSelector::Cgroup(path) | CgroupSelector::Cgroups(path) => Some(path.clone()),
            CgroupSelector::Unit(_) => None,
        })
        .collect();
    for (at, one) in paths.iter().enumerate() {
        if let Some(other) = paths[..at].iter().find(|o| one.is_within(o) || o.is_within(one)) {
            return Err(format!("cgroups {other} and {one}: one is inside of the other"));
        }
    }
    rank::home_of(&paths).map(drop).map_err(|(one, other)| {
        format!("no cgroup outranks both {one} and {other}: their parents are not in one chain")
    })
}

/// Requires that no fence contains a service, or is inside of one.
pub(super) fn require_beside(fences: &[Fence], lent: &[Lent]) -> Result<(), String> {
    for fence in fences {
        for (lent, place) in lent.iter().flat_map(|lent| lent.places.iter().map(move |p| (lent, p)))
        {
            let both = match (&fence.which, place) {
                (CgroupSelector::Cgroup(one), CgroupSelector::Cgroup(other)) => {
                    one.is_within(other) || other.is_within(one)
                }
                (one, other) => one == other,
            };
            if both {
                let service = lent.service.as_deref().unwrap_or_default();
                return Err(format!(
                    "fence {:?}, {}: it would hold service {service:?}, {place}",
                    fence.name, fence.which
                ));
            }
        }
    }
    Ok(())
}
