//! A listening socket whose queue of unaccepted clients is long.
//!
//! The usual 128 overflow when thousands connect at once, and each client that is turned away tries
//! again after a second.

use nix::sys::socket::{Backlog, listen};
use std::io;
use std::net::{SocketAddr, TcpListener};

const LONGEST: i32 = 4096;

/// Binds a listener that never blocks.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // A second time, with a longer queue: Linux takes it as a change.
    listen(&listener, Backlog::new(LONGEST)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
