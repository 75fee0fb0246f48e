//! The stack of a thread. The kernel writes a frame to it for each signal, so a stack of a few
//! kilobytes, as some coroutines have, would overflow.

use std::ops::Range;

use elfen_instrument::process::status_mask;
use elfen_instrument::remote::{Paused, TouchError, mappings};

/// The largest frame has 11 KB; its handler and those of the program come on top.
const ROOM: u64 = 32 << 10;
/// The kernel lets the first stack grow as far as its limit allows, and keeps others away.
const FIRST_MAX: u64 = 64 << 20;

/// What is known of a thread before its first signal.
pub(super) struct Found {
    /// Where its stack pointer may be for a signal.
    pub(super) places: Range<u64>,
    pub(super) fs_base: u64,
    pub(super) blocks_signal: bool,
}

/// Whether a thread blocks the signal of its clock.
pub(super) fn blocks_signal(thread: u32) -> bool {
    status_mask(thread, "SigBlk") & 1 << (libc::SIGURG - 1) != 0
}

/// Stops a thread for a moment. `Ok(None)` if its stack is not its own, or has no room left.
pub(super) fn of_thread(process: u32, thread: u32) -> Result<Option<Found>, TouchError> {
    let (registers, blocks_signal) = {
        let paused = Paused::stop(thread)?;
        (paused.registers, blocks_signal(thread))
    };
    let all = mappings(process).map_err(TouchError::Refused)?;
    let Some(stack) = all.iter().find(|one| one.range.contains(&registers.rsp)) else {
        return Ok(None);
    };
    let end = stack.range.end;
    let places = if stack.name == "[stack]" {
        end.saturating_sub(FIRST_MAX)..end
    } else if thread != process && stack.range.contains(&registers.fs_base) {
        // The words of a thread lie at the end of the stack that it was created with. Those of the
        // first thread do not, and may lie beside any memory.
        stack.range.start + ROOM..registers.fs_base
    } else {
        return Ok(None);
    };
    let found = Found { places, fs_base: registers.fs_base, blocks_signal };
    Ok(Some(found).filter(|found| found.places.contains(&registers.rsp)))
}
