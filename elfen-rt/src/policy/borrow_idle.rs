//! `borrow-idle`: mutual exclusion. Figure 5.9(a).

use super::state::{Sample, Verdict};

/// Naps whenever the request lane is busy, whichever task it runs.
#[inline]
pub fn check(lane: &Sample) -> Verdict {
    if lane.busy { Verdict::Nap } else { Verdict::Run }
}
