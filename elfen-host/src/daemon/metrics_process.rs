//! What elfend serves to Prometheus, by a process of its own: whatever clients send, guards and
//! promises are seen to.
//!
//! It is what `elfen metrics` serves, of the whole machine, and asks the daemon over its socket as
//! any other would.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use elfen_console::failure::{Failure, Status};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::{ForkResult, Pid, fork, getppid};

use super::log::{Level, say};
use super::respawned::Respawned;
use crate::metrics::machine::Machine;
use crate::metrics::server;

/// Served at an address, or not at all.
#[derive(Debug, Default)]
pub(super) struct Serving(Option<Server>);

#[derive(Debug)]
struct Server {
    listener: TcpListener,
    address: SocketAddr,
    process: Respawned,
}

impl Serving {
    /// Takes the address; `start` has it served.
    pub(super) fn bind(address: Option<SocketAddr>) -> Result<Self, Failure> {
        let Some(address) = address else { return Ok(Self(None)) };
        let listener = TcpListener::bind(address).map_err(|error| {
            let fix = "choose another address in the settings, or leave it out";
            Failure::new(Status::Failed, format!("metrics at {address}"), error, fix)
        })?;
        let address = listener.local_addr().unwrap_or(address);
        if !address.ip().is_loopback() {
            let why = format!("whoever reaches {address} can see which programs run here");
            say(Level::Warning, why);
        }
        say(Level::Info, format_args!("metrics at http://{address}/metrics"));
        Ok(Self(Some(Server { listener, address, process: Respawned::default() })))
    }

    /// The same listener goes on where the address has stayed.
    pub(super) fn rebind(&mut self, address: Option<SocketAddr>) -> Result<Option<Self>, Failure> {
        let is_same = |server: &Server| Some(server.address) == address;
        if self.0.as_ref().is_some_and(is_same) || self.0.is_none() && address.is_none() {
            return Ok(None);
        }
        Self::bind(address).map(Some)
    }

    /// A process that serves, where there is none.
    pub(super) fn mind(&mut self, socket: &Path) {
        let Some(server) = &mut self.0 else { return };
        let start = || start(&server.listener, socket);
        if let Err(error) = server.process.mind("metrics server", start) {
            say(Level::Error, format_args!("nobody serves metrics: {error}"));
        }
    }
}

impl Drop for Server {
    /// Other children of the daemon have this listener too, and would keep the address.
    fn drop(&mut self) {
        self.process.end();
        // It fails only if it listens no more.
        let _deaf = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }
}

fn start(listener: &TcpListener, socket: &Path) -> io::Result<Pid> {
    let daemon = nix::unistd::getpid();
    // SAFETY: as for the keeper: the daemon's other threads make system calls alone.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            // SAFETY: this prctl takes a number.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let unblocked = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None);
            if getppid() == daemon && unblocked.is_ok() {
                let error = server::serve(listener, &Arc::new(Machine::new(socket.to_owned())));
                say(Level::Error, format_args!("metrics are served no more: {error}"));
            }
            // SAFETY: ends the process; what else the daemon has open is the daemon's.
            unsafe { libc::_exit(1) }
        }
    }
}
