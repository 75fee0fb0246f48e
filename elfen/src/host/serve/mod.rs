//! Keeping a service on the request lanes, without its help.
//!
//! Threads and children inherit the affinity mask, so a service that was started on the request
//! lanes, or moved there as a whole, stays there by itself. What is left are threads that choose
//! CPUs on their own (nginx's `worker_cpu_affinity`, Redis's `bio-cpulist`): a watcher looks at all
//! threads once a second and brings those back, ever less often the more a thread insists.
//!
//! A service that is started here *becomes* this process: the watcher is forked off, and what is
//! left executes the program. Its process id, signals, input, output and exit status are its own
//! because nothing stands between it and whoever started it, and it lives on when the watcher is
//! killed.
//!
//! Not a cpuset: the kernel would hold every thread without a watcher, but a cgroup belongs to
//! whoever manages services on the machine, and is root's to change. Where that is wanted,
//! `systemctl set-property NAME AllowedCPUs=LIST` does it.

mod idle;
mod keeping;
mod launch;
mod service;
mod watch;

use std::time::Duration;

pub(crate) use idle::NeverIdle;
pub(crate) use launch::become_program;
pub(crate) use service::{Refused, Service};
pub(crate) use watch::{Figures, keep_existing};

use super::cpulist::CpuSet;

/// Everything that is decided before anything is moved.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) request_lanes: CpuSet,
    pub(crate) look_every: Duration,
}

/// What the watcher has to say while it watches.
#[derive(Debug)]
pub(crate) enum Notice<'a> {
    /// An existing service is where it should be.
    Moved(&'a Figures),
    /// A thread had chosen other CPUs and was brought back.
    BroughtBack {
        thread: u32,
        name: String,
        cpus: CpuSet,
        times: u32,
    },
    /// A thread could not be moved. Said once.
    Refused {
        thread: u32,
        name: String,
        error: std::io::Error,
    },
    /// Said once of each request lane.
    NeverIdle(NeverIdle),
    /// The cgroup is gone, as when a service is restarted.
    CgroupGone,
    /// The service runs on the request lanes, and nobody brings back who leaves them.
    Unwatched(&'a std::io::Error),
    /// So many processes go on without the one that was started, or without the watcher.
    LeftBehind(usize),
    /// After each look.
    Looked(&'a Figures),
    Ended(&'a Figures),
}
