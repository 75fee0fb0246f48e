//! Why one of Elfen's eBPF programs is not available.

use std::io;

use elfen_rt::signal::task::TaskMapError;

/// The kernel's type information. Every process can read it, and it exists wherever Elfen's
/// programs can run.
pub(crate) const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel was not built with BTF.
    #[error("the kernel has no {KERNEL_TYPES}")]
    NoKernelTypes,
    /// This process is not in elfend's group, and lacks the capabilities to attach.
    #[error("not permitted to attach an eBPF program")]
    NotPermitted,
    /// For example, the running program belongs to another build.
    #[error(transparent)]
    Map(#[from] TaskMapError),
    #[error("the kernel refused the sched_switch program: {0}")]
    Refused(String),
    /// The kernel is older, or was built without the tracepoint.
    #[error("the kernel lacks the tracepoint {tracepoint} of Linux {since} and later: {why}")]
    Lacks { tracepoint: &'static str, since: &'static str, why: String },
    #[error("cannot determine the number of CPUs: {0}")]
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
