//! Waits for descriptors other than sockets.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Wakes a task when a descriptor becomes readable.
#[derive(Debug)]
pub(crate) struct Readable(AsyncFd<OwnedFd>);

impl Readable {
    pub(crate) fn new(descriptor: &impl AsFd) -> io::Result<Self> {
        let copy = descriptor.as_fd().try_clone_to_owned()?;
        // SAFETY: an OwnedFd is the same open descriptor until it is dropped.
        let registered = unsafe { AsyncFd::register_with_interest(copy, Interest::READABLE) };
        Ok(Self(registered?))
    }

    /// Waits until there is something to read that came after the last time.
    pub(crate) async fn next(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}
