//! Starting the batch program: in its place, with its inheritance, and with the signals as the front found them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_instrument::preload;
use elfen_rt::process::Identity;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

use super::Order;
use super::channels::{Channels, VARIABLE};
use super::place::Place;
use crate::host::cpulist::CpuSet;

/// The loader's list of libraries that come before all others.
const PRELOAD: &str = "LD_PRELOAD";

/// Starts the program. `signals` is the mask that the front was started with. The child itself says in the control page
/// who it is: whoever started it may be killed before it can.
pub(crate) fn launch(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &str,
    signals: SigSet,
) -> io::Result<Child> {
    let lanes: CpuSet = order.lanes().map(|(batch, _)| batch).collect();
    let place = Place::new(&lanes);
    let mut command = Command::new(&order.program);
    command.args(&order.arguments).env(VARIABLE, inheritance);
    if let Some(library) = &order.library {
        let before = std::env::var_os(PRELOAD);
        command.env(PRELOAD, preload(library, before.as_deref()));
    }
    let channels = channels.clone();
    let settle = move || {
        let batch = Identity::own().map_or(0, Identity::word);
        channels.control().batch.store(batch, Relaxed);
        place.take(0)?;
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signals), None)?;
        Ok(())
    };
    // SAFETY: `settle` makes system calls on memory that exists already: no allocation, no lock.
    unsafe { command.pre_exec(settle) };
    command.spawn()
}
