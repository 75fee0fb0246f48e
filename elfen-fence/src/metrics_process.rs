//! The process that serves metrics to Prometheus. It is apart from the daemon, so that no client
//! can keep the daemon from checking guards and guarantees.
//!
//! It serves what `elfen metrics` serves, for the whole machine, and queries the daemon over its
//! socket as any other client does.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use elfen_console::failure::{Failure, Status};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::{ForkResult, Pid, fork, getppid};

use super::log::{Level, report};
use super::respawned::RespawnedChild;
use crate::metrics::machine::Machine;
use crate::metrics::server;

/// The metrics server, if the settings have an address for it.
#[derive(Debug, Default)]
pub(super) struct MetricsProcess(Option<Server>);

#[derive(Debug)]
struct Server {
    listener: TcpListener,
    address: SocketAddr,
    process: RespawnedChild,
}

impl MetricsProcess {
    /// Binds the address. `ensure_running` starts the process that serves it.
    pub(super) fn bind(address: Option<SocketAddr>) -> Result<Self, Failure> {
        let Some(address) = address else { return Ok(Self(None)) };
        let listener = TcpListener::bind(address).map_err(|error| {
            let fix = "choose another address in the settings, or omit it";
            Failure::new(Status::Failed, format!("metrics at {address}"), error, fix)
        })?;
        let address = listener.local_addr().unwrap_or(address);
        if !address.ip().is_loopback() {
            let why = format!("any client that reaches {address} sees which programs run here");
            report(Level::Warning, why);
        }
        report(Level::Info, format_args!("metrics at http://{address}/metrics"));
        Ok(Self(Some(Server { listener, address, process: RespawnedChild::default() })))
    }

    /// Binds another address; `None` if the address has not changed.
    pub(super) fn rebind(&mut self, address: Option<SocketAddr>) -> Result<Option<Self>, Failure> {
        let is_same = |server: &Server| Some(server.address) == address;
        if self.0.as_ref().is_some_and(is_same) || self.0.is_none() && address.is_none() {
            return Ok(None);
        }
        Self::bind(address).map(Some)
    }

    /// Starts the process that serves, if it does not run.
    pub(super) fn ensure_running(&mut self, socket: &Path) {
        let Some(server) = &mut self.0 else { return };
        let start = || start(&server.listener, socket);
        if let Err(error) = server.process.ensure_running("metrics server", start) {
            report(Level::Error, format_args!("starting the metrics server: {error}"));
        }
    }
}

impl Drop for Server {
    /// Other children of the daemon have copies of this listener, which would keep the address
    /// bound. Shutting it down frees the address.
    fn drop(&mut self) {
        self.process.end();
        // Fails only if it no longer listens.
        let _deaf = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }
}

fn start(listener: &TcpListener, socket: &Path) -> io::Result<Pid> {
    let daemon = nix::unistd::getpid();
    // SAFETY: the daemon's other threads only make system calls, so the child may run any code.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            // SAFETY: this prctl takes a number.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let unblocked = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None);
            if getppid() == daemon && unblocked.is_ok() {
                let error = server::serve(listener, &Arc::new(Machine::new(socket.to_owned())));
                report(Level::Error, format_args!("metrics are no longer served: {error}"));
            }
            // SAFETY: ends the process without dropping its copies of the daemon's values.
            unsafe { libc::_exit(1) }
        }
    }
}
