//! Pinning the calling thread to one CPU, and which CPUs there are to choose from.

use core_affinity::{CoreId, get_core_ids, set_for_current};
use nix::sched::CpuSet;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum PinError {
    #[error("pinning to CPU {cpu}: the kernel refused; name a CPU that this process may run on")]
    Refused { cpu: usize },
    #[error("pinning to CPU {cpu}: no CPU above {} can be named", CpuSet::count() - 1)]
    TooHigh { cpu: usize },
    #[error("the kernel does not tell which CPUs this process may run on; name one")]
    Untold,
}

pub(crate) fn pin(cpu: usize) -> Result<(), PinError> {
    // Beyond the set's end, `set_for_current` panics.
    if cpu >= CpuSet::count() {
        return Err(PinError::TooHigh { cpu });
    }
    if set_for_current(CoreId { id: cpu }) { Ok(()) } else { Err(PinError::Refused { cpu }) }
}

/// The CPUs that this process may run on, in order.
pub(crate) fn allowed() -> Result<Vec<usize>, PinError> {
    Ok(get_core_ids().ok_or(PinError::Untold)?.into_iter().map(|core| core.id).collect())
}
