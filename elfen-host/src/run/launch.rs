//! Starts the batch program: on its lanes, with its inheritance, and with the signal mask of the
//! launcher.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_instrument::preload;
use elfen_rt::inherit::{Inherited, VARIABLE};
use elfen_rt::process::Identity;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::unistd::{setgid, setgroups, setuid};

use super::Order;
use super::channels::Channels;
use super::event::{Event, LauncherLink};
use super::placement::Placement;
use crate::cpulist::CpuSet;

/// The environment variable that names the libraries to load before all others.
pub const PRELOAD: &str = "LD_PRELOAD";

/// Starts the program. `signals` is the signal mask with which the launcher was started. The child
/// sends its identity to `front`.
pub(super) fn launch(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &Inherited,
    signals: SigSet,
    front: &LauncherLink,
) -> io::Result<Child> {
    let lanes: CpuSet = order.lanes().map(|(batch, _)| batch).collect();
    let placement = Placement::new(&lanes);
    let mut command = Command::new(&order.program);
    let variable = VARIABLE.to_str().unwrap_or_else(|_| unreachable!("ASCII"));
    command.args(&order.arguments).env(variable, inheritance.to_string());
    if let Some(user) = &order.user {
        command.env("HOME", &user.home).env("USER", &user.name).env("LOGNAME", &user.name);
    }
    if let Some(library) = &order.library {
        let before = std::env::var_os(PRELOAD);
        command.env(PRELOAD, preload(library, before.as_deref()));
    }
    let channels = channels.clone();
    let sockets = [Some(front.socket.as_raw_fd()), front.spare.as_ref().map(OwnedFd::as_raw_fd)];
    let user = order.user.clone();
    let settle = move || {
        let batch = Identity::own();
        channels.control().batch.store(batch.map_or(0, Identity::word), Relaxed);
        sockets.iter().flatten().for_each(|&socket| Event::Started { batch }.send(socket));
        placement.apply(0)?;
        if let Some(user) = &user {
            setgroups(&user.groups)?;
            setgid(user.gid)?;
            setuid(user.uid)?;
        }
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signals), None)?;
        Ok(())
    };
    // SAFETY: `settle` only makes system calls, on memory that exists: no allocation, no lock.
    unsafe { command.pre_exec(settle) };
    command.spawn()
}
