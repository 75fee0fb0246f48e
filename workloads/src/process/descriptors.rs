//! Room for many connections: the soft limit on open files, raised as far as it must be.

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use thiserror::Error;

/// Descriptors that are no connections: an index's files, epoll, a listener, standard streams.
const OTHERS: u64 = 100;

#[derive(Debug, Error)]
#[error(
    "opening {connections} connections: {errno}; raise `ulimit -n`, or use fewer --connections"
)]
pub(crate) struct TooMany {
    connections: usize,
    errno: Errno,
}

pub(crate) fn allow(connections: usize) -> Result<(), TooMany> {
    let failed = |errno| TooMany { connections, errno };
    let wanted = connections as u64 + OTHERS;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(failed)?;
    if soft >= wanted {
        return Ok(());
    }
    setrlimit(Resource::RLIMIT_NOFILE, wanted, hard.max(wanted)).map_err(failed)
}
