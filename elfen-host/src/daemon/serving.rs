//! What elfend serves to Prometheus, by a process of its own: whatever clients send, guards and
//! promises are seen to.
//!
//! It is what `elfen metrics` serves, of the whole machine, and asks the daemon over its socket as
//! any other would.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getppid};

use super::log::{Level, say};
use crate::metrics::machine::Machine;
use crate::metrics::server;

/// One that ends again and again is started this often.
const LEAST_LIFE: Duration = Duration::from_secs(1);

/// Served at an address, or not at all.
#[derive(Debug, Default)]
pub(super) struct Serving(Option<Server>);

#[derive(Debug)]
struct Server {
    listener: TcpListener,
    address: SocketAddr,
    process: Option<Pid>,
    began: Option<Instant>,
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
        Ok(Self(Some(Server { listener, address, process: None, began: None })))
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
        if let Some(process) = server.process {
            let ended = waitpid(process, Some(WaitPidFlag::WNOHANG));
            if ended == Ok(WaitStatus::StillAlive) {
                return;
            }
            say(Level::Warning, format_args!("who serves metrics has ended: {ended:?}"));
            server.process = None;
        }
        if server.began.is_some_and(|began| began.elapsed() < LEAST_LIFE) {
            return;
        }
        server.began = Some(Instant::now());
        match start(&server.listener, socket) {
            Ok(process) => server.process = Some(process),
            Err(error) => say(Level::Error, format_args!("nobody serves metrics: {error}")),
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let Some(process) = self.0.as_ref().and_then(|server| server.process) else { return };
        // The daemon's child; both can fail only if it is gone already.
        let _ended = kill(process, Signal::SIGKILL);
        let _reaped = waitpid(process, None);
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
