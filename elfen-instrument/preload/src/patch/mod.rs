//! Writes checks over the NOPs that `-fpatchable-function-entry` left, in the program and in the
//! libraries loaded with it.
//!
//! ```text
//!     in the function, where there is room           where there is not
//!
//!     f:  check, else jump to f's stub               f:  jmp f's stub
//!     back:                                          back:
//!
//!     stub:  call *hook                              stub:  check, else jump to `ask`
//!            jmp back                                       jmp back
//!                                                    ask:   call *hook
//!                                                           jmp back
//! ```
//!
//! Before the program starts, and only while no other thread runs: a thread in the middle of the
//! NOPs would find half an instruction. Libraries that are opened later keep their NOPs.

mod object;
mod section;
mod write;

use core::ffi::{c_int, c_void};

use elfen_entries::{
    CHECK_BYTES, Check, FunctionStarts, JUMP_BYTES, call_through, filling, is_entry, jump,
};
use elfen_rt::check;

use object::Object;
use write::{Opened, Stubs};

/// Patches all that is loaded. Does nothing if this process belongs to no run.
pub(crate) fn patch_all() {
    if write::threads() != Some(1) {
        return;
    }
    // SAFETY: `patch_one` has the type that is asked for, and needs no data.
    unsafe { libc::dl_iterate_phdr(Some(patch_one), core::ptr::null_mut()) };
}

unsafe extern "C" fn patch_one(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the loader hands out its description of a loaded object, for the time of this call.
    let object = unsafe { Object::of(info) };
    let _patched = object.and_then(|object| patch(&object));
    0
}

/// `None` if there is nothing to patch, or no way to do it: the object stays as it is.
fn patch(object: &Object<'_>) -> Option<()> {
    let listed = object.listed_entries()?;
    let starts = object.function_starts()?;
    let sites = || listed.iter().filter_map(|&entry| Site::at(object, &starts, entry));
    // The least of all: NOPs behind the compiler's own may be a loop of the program's.
    let room = sites().map(|site| site.room).min().filter(|room| *room >= JUMP_BYTES)?;
    let form = Form { check: check_of_this_process()?, room };
    let stubs = Stubs::near(object.text()?, sites().count(), form.stub_bytes())?;
    for (index, site) in sites().enumerate() {
        form.write_stub(&stubs, index, site.address)?;
    }
    let stubs = stubs.finish()?;
    let open = Opened::open(object.text()?)?;
    for (index, site) in sites().enumerate() {
        let stub = stubs.address(index);
        let code = if form.is_in_place() {
            form.check.code(site.address, stub)
        } else {
            jump(site.address, stub)
        };
        if let Some(code) = code {
            open.write(site.address, code.bytes());
            form.fill(&open, site.address, code.bytes().len());
        }
    }
    Some(())
}

/// The words that a check in this process reads.
fn check_of_this_process() -> Option<Check> {
    let words = check::words()?;
    let near = |distance: isize| i32::try_from(distance).ok();
    let moved = match words.moved {
        Some([cpu, chosen_on]) => Some([near(cpu)?, near(chosen_on)?]),
        None => None,
    };
    Some(Check { word: near(words.word)?, moved })
}

/// Where a check can go.
#[derive(Clone, Copy)]
struct Site {
    address: u64,
    /// Bytes of NOPs.
    room: usize,
}

impl Site {
    fn at(object: &Object<'_>, starts: &FunctionStarts<'_>, address: u64) -> Option<Self> {
        let code = object.code_at(address)?;
        let before = object.code_at(address.checked_sub(4)?)?.first_chunk::<4>();
        if !is_entry(address, before.copied().unwrap_or_default(), starts) {
            return None;
        }
        Some(Self { address, room: elfen_entries::nop_run(code) }).filter(|site| site.room > 0)
    }
}

/// How the sites of one object are written.
#[derive(Clone, Copy)]
struct Form {
    check: Check,
    room: usize,
}

/// `call *hook; jmp back`.
const ASK_BYTES: usize = 6 + JUMP_BYTES;

impl Form {
    fn is_in_place(&self) -> bool {
        self.room >= self.check.size()
    }

    fn stub_bytes(&self) -> usize {
        if self.is_in_place() { ASK_BYTES } else { CHECK_BYTES + JUMP_BYTES + ASK_BYTES }
    }

    fn write_stub(&self, stubs: &Stubs, index: usize, site: u64) -> Option<()> {
        let stub = stubs.address(index);
        let back = site.checked_add(self.room as u64)?;
        if self.is_in_place() {
            return ask(stubs, stub, back);
        }
        let on = stub.checked_add(self.check.size() as u64)?;
        let ask_at = on.checked_add(JUMP_BYTES as u64)?;
        stubs.write(stub, self.check.code(stub, ask_at)?.bytes());
        stubs.write(on, jump(on, back)?.bytes());
        ask(stubs, ask_at, back)
    }

    /// Writes the rest of the NOPs as fewer and longer ones. Behind a jump no thread executes them.
    fn fill(&self, open: &Opened, site: u64, written: usize) {
        if !self.is_in_place() {
            return;
        }
        let mut at = site.saturating_add(written as u64);
        for nop in filling(self.room.saturating_sub(written)) {
            open.write(at, nop);
            at = at.saturating_add(nop.len() as u64);
        }
    }
}

fn ask(stubs: &Stubs, at: u64, back: u64) -> Option<()> {
    let call = call_through(at, stubs.hook())?;
    let end = at.checked_add(call.bytes().len() as u64)?;
    stubs.write(at, call.bytes());
    stubs.write(end, jump(end, back)?.bytes());
    Some(())
}
