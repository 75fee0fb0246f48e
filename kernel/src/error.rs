//! Why one of our eBPF programs is not to be had.

use std::io;

use elfen_rt::signal::task::TaskMapError;

/// The kernel describes itself here. Readable by all, and there wherever a program of ours can run.
pub(crate) const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel was not built with BTF.
    #[error("the kernel has no {KERNEL_TYPES}")]
    NoKernelTypes,
    /// Neither in elfend's group, nor with the capabilities to attach.
    #[error("not permitted to attach an eBPF program")]
    NotPermitted,
    /// A running program of another build.
    #[error(transparent)]
    Map(#[from] TaskMapError),
    #[error("the kernel refused the sched_switch program: {0}")]
    Refused(String),
    /// An older kernel, or one that was built without it.
    #[error("the kernel has no {tracepoint} as it is since Linux {since}: {why}")]
    Lacks { tracepoint: &'static str, since: &'static str, why: String },
    #[error("cannot tell how many CPUs there are: {0}")]
    Cpus(io::Error),
    #[error("{doing}: {error}")]
    Call { doing: &'static str, error: io::Error },
}

impl Error {
    pub(crate) fn call(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NotPermitted,
            _ => Self::Call { doing, error },
        }
    }
}
