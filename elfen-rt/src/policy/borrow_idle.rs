//! `borrow-idle`: mutual exclusion of batch and requests. Figure 5.9(a).

use super::state::{Sample, Verdict};

/// Naps whenever the request lane is busy with any task.
#[inline]
pub fn check(lane: &Sample) -> Verdict {
    if lane.busy { Verdict::Nap } else { Verdict::Run }
}
