//! Writes over the NOPs that `-fpatchable-function-entry` left, in the program and in the libraries
//! loaded with it: checks, and for `elfen shim` that a function was entered.
//!
//! ```text
//!     in the function, where there is room           where there is not
//!
//!     f:  say, check, else jump to f's stub          f:  jmp f's stub
//!     back:                                          back:
//!
//!     stub:  call *hook                              stub:  say, check, else jump to `ask`
//!            jmp back                                       jmp back
//!                                                    ask:   call *hook
//!                                                           jmp back
//! ```
//!
//! Functions that are to publish what their thread has executed call for that in their stubs,
//! behind what they say, and have one also where there is room.
//!
//! And over the `ret` that functions share which are built with `-mfunction-return=thunk-extern`
//! and linked with `libelfen_return.a`: that they return. Two functions whose addresses have one
//! lower half cannot be told apart, so the second says nothing, and is counted.
//!
//! Before the program starts, and only while no other thread runs: a thread in the middle of the
//! NOPs would find half an instruction. Libraries that are opened later keep their NOPs.

mod object;
mod said;
mod section;
mod write;

use core::ffi::{c_int, c_void};
use core::ptr;

use elfen_entries::{
    Check, Entry, FunctionStarts, JUMP_BYTES, Say, call_through, filling, is_entry, jump,
};
use elfen_rt::check;
use elfen_rt::tag::{self, Order};

use object::Object;
use said::Said;
use write::{Opened, Stubs};

/// What is written, where functions leave room for it.
#[derive(Clone, Copy)]
pub(crate) struct Ways {
    /// That they are entered and return, and of those that the order names what was executed.
    pub(crate) says: Option<Order<'static>>,
    pub(crate) checks: bool,
}

/// One walk over all that is loaded.
struct Walk<'a> {
    ways: Ways,
    said: Said<'a>,
}

/// Patches all that is loaded; gives what says now that it runs.
pub(crate) fn patch_all(ways: Ways) {
    if !(ways.says.is_some() || ways.checks) || write::threads() != Some(1) {
        return;
    }
    let mut walk = Walk { ways, said: Said::default() };
    // SAFETY: `patch_one` has the type that is asked for, and the walk lives longer than the call.
    unsafe { libc::dl_iterate_phdr(Some(patch_one), ptr::from_mut(&mut walk).cast()) };
    if ways.says.is_some() {
        walk.said.publish();
    }
}

unsafe extern "C" fn patch_one(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    walk: *mut c_void,
) -> c_int {
    // SAFETY: `patch_all` handed this out, and it lives until the call returns.
    let walk = unsafe { &mut *walk.cast::<Walk<'_>>() };
    // SAFETY: the loader hands out its description of a loaded object. What is kept of it is the
    // object's memory, which stays as long as no library is closed: not before the program runs.
    let object = unsafe { Object::of(info) };
    let _patched = object.and_then(|object| patch(&object, walk));
    0
}

/// `None` if there is nothing to patch, or no way to do it: the object stays as it is.
fn patch<'a>(object: &Object<'a>, walk: &mut Walk<'a>) -> Option<()> {
    let listed = object.listed_entries()?;
    let starts = object.function_starts()?;
    let sites = || listed.iter().filter_map(|&entry| Site::at(object, &starts, entry));
    // The least of all: NOPs behind the compiler's own may be a loop of the program's.
    let room = sites().map(|site| site.room).min().filter(|room| *room >= JUMP_BYTES)?;
    let say = if walk.ways.says.is_some() { say_of_this_process() } else { None };
    let check = if walk.ways.checks { check_of_this_process() } else { None };
    let form = Form { entry: Entry { say, count: None, check }, room };
    if form.entry.size() == 0 {
        return None;
    }
    let text = object.text()?;
    let counted = walk.ways.says.filter(|_| say.is_some()).and_then(|order| object.counted(order));
    let counts = |site: Site| counted.is_some_and(|counted| counted.names(site.address));
    let any = sites().any(counts);
    let counting =
        |pointer: u64| Form { entry: Entry { count: Some(pointer), ..form.entry }, room };
    let stub_bytes = if any { counting(0).stub_bytes() } else { form.stub_bytes() };
    let stubs = Stubs::near(text, sites().count(), stub_bytes)?;
    let counting = counting(stubs.publish());
    let form_of = |site: Site| if any && counts(site) { counting } else { form };
    for (index, site) in sites().enumerate() {
        form_of(site).write_stub(&stubs, index, site.address)?;
    }
    let stubs = stubs.finish()?;
    let shared_return = say.and_then(|say| Some((object.shared_return()?, say.exit()?)));
    let open = Opened::open(text)?;
    for (index, site) in sites().enumerate() {
        let form = form_of(site);
        let mut entry = form.entry;
        if say.is_some() && !walk.said.may(site.address, entry.count.is_some()) {
            entry.say = None;
            // A stub would say it as well.
            if entry.check.is_none() || !form.is_in_place() {
                continue;
            }
        }
        let stub = stubs.address(index);
        let code = if form.is_in_place() {
            entry.code(site.address, site.address, stub)
        } else {
            jump(site.address, stub)
        };
        if let Some(code) = code {
            open.write(site.address, code.bytes());
            form.fill(&open, site.address, code.bytes().len());
        }
    }
    if let Some((address, code)) = &shared_return {
        open.write(*address, code.bytes());
    }
    walk.said.add(listed, text, shared_return.is_some());
    Some(())
}

fn say_of_this_process() -> Option<Say> {
    Some(Say { words: i32::try_from(tag::words_at()).ok()? })
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
    entry: Entry,
    room: usize,
}

/// `call *hook; jmp back`.
const ASK_BYTES: usize = 6 + JUMP_BYTES;

impl Form {
    fn is_in_place(&self) -> bool {
        self.room >= self.entry.size() && self.entry.count.is_none()
    }

    fn stub_bytes(&self) -> usize {
        match (self.is_in_place(), self.entry.check) {
            (true, None) => 0,
            (true, Some(_)) => ASK_BYTES,
            (false, None) => self.entry.size() + JUMP_BYTES,
            (false, Some(_)) => self.entry.size() + JUMP_BYTES + ASK_BYTES,
        }
    }

    fn write_stub(&self, stubs: &Stubs, index: usize, site: u64) -> Option<()> {
        let stub = stubs.address(index);
        let back = site.checked_add(self.room as u64)?;
        let mut ask_at = stub;
        if !self.is_in_place() {
            let on = stub.checked_add(self.entry.size() as u64)?;
            ask_at = on.checked_add(JUMP_BYTES as u64)?;
            stubs.write(stub, self.entry.code(stub, site, ask_at)?.bytes());
            stubs.write(on, jump(on, back)?.bytes());
        }
        match self.entry.check {
            Some(_) => ask(stubs, ask_at, back),
            None => Some(()),
        }
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
