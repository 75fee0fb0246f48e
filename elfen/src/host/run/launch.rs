//! Starting the batch program: in its place, with its inheritance, and with the signals as the front found them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

use super::Order;
use super::channels::VARIABLE;
use super::tree::Place;
use crate::host::cpulist::CpuSet;

/// Starts the program. `signals` is the mask that the front was started with.
pub(crate) fn launch(order: &Order, inheritance: &str, signals: SigSet) -> io::Result<Child> {
    let lanes: CpuSet = order.lanes().map(|(batch, _)| batch).collect();
    let place = Place::new(&lanes);
    let mut command = Command::new(&order.program);
    command.args(&order.arguments).env(VARIABLE, inheritance);
    let settle = move || {
        place.take(0)?;
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signals), None)?;
        Ok(())
    };
    // SAFETY: `settle` makes system calls on memory that exists already: no allocation, no lock.
    unsafe { command.pre_exec(settle) };
    command.spawn()
}
