//! Pinning the calling thread to one CPU, and which CPUs there are to choose from.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::io;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum PinError {
    #[error("pinning to CPU {cpu}: {error}; name a CPU that this process may run on")]
    Pin { cpu: usize, error: io::Error },
    #[error("asking which CPUs this process may run on: {0}")]
    Ask(io::Error),
}

pub(crate) fn pin(cpu: usize) -> Result<(), PinError> {
    let mut set = CpuSet::new();
    set.set(cpu)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .map_err(|errno| PinError::Pin { cpu, error: errno.into() })
}

/// The CPUs that this process may run on, in order.
pub(crate) fn allowed() -> Result<Vec<usize>, PinError> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).map_err(|e| PinError::Ask(e.into()))?;
    Ok((0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect())
}
