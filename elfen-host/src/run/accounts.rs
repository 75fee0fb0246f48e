//! Accounts of a run without privileges: elfend claims them for it.
//!
//! A process that can write claims can falsify every account of the machine. So members of group
//! elfen are handed the task map without them, and elfend claims for the process that asks, as the
//! kernel names it.

use elfen_kernel::task_map;
use elfen_rt::signal::account::Claim;

use crate::fence::status::{Answer, Request, ask};

/// The claim as elfend has made it, and of each pair which account of its batch lane it is.
pub(super) fn claimed_by_elfend(
    pairs: &[(u32, u32)],
    claim: Claim,
) -> Option<(Claim, Vec<Option<usize>>)> {
    let Claim::Processes { launcher: front, .. } = claim else { return None };
    let request = Request::Count { pairs: pairs.to_vec(), front };
    let Ok(Answer::Counted { claim, accounts }) = ask(&task_map::elfend_socket(), &request) else {
        return None;
    };
    let accounts = accounts.into_iter().map(|one| one.and_then(|one| usize::try_from(one).ok()));
    Some((Claim::from_word(claim)?, accounts.collect()))
}
