//! `borrow-idle`: mutual exclusion. Figure 5.9(a).

use super::{Lane, Verdict};

/// Naps whenever the request lane is busy, with whatever.
#[inline]
pub fn check(lane: &Lane) -> Verdict {
    if lane.busy { Verdict::Nap } else { Verdict::Run }
}
