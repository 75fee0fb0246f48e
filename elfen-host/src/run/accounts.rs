//! Accounts of a run without privileges: elfend claims them on its behalf.
//!
//! A process that can write claims can falsify every account of the machine. So members of group
//! elfen receive the task map without claims. elfend claims for the process that asks, and takes
//! its id from the kernel.

use elfen_kernel::task_map;
use elfen_rt::signal::account::Claim;

use crate::fence::status::{Answer, Request, ask};

/// The claim that elfend has made, and which account of each pair's batch lane it has.
pub(super) fn claimed_by_elfend(
    pairs: &[(u32, u32)],
    claim: Claim,
) -> Option<(Claim, Vec<Option<usize>>)> {
    let Claim::Processes { front, .. } = claim else { return None };
    let request = Request::Count { pairs: pairs.to_vec(), front };
    let Ok(Answer::Counted { claim, accounts }) = ask(&task_map::elfend(), &request) else {
        return None;
    };
    let accounts = accounts.into_iter().map(|one| one.and_then(|one| usize::try_from(one).ok()));
    Some((Claim::from_word(claim)?, accounts.collect()))
}
