//! Writes checks and function tags over the NOPs of `-fpatchable-function-entry`, in the program
//! and in the libraries that are loaded with it.
//!
//! ```text
//!     enough NOPs for the code                       too few NOPs
//!
//!     f:  tag, check, else jump to f's stub          f:  jmp f's stub
//!     back:                                          back:
//!
//!     stub:  call *hook                              stub:  tag, check, else jump to `call`
//!            jmp back                                       jmp back
//!                                                    call:  call *hook
//!                                                           jmp back
//! ```
//!
//! Functions that publish their thread's counters always have a stub. It makes the call for that
//! after the tag.
//!
//! Functions built with `-mfunction-return=thunk-extern` and linked with `libelfen_return.a` share
//! one `ret`. It is replaced by code that tags the return. Two functions whose addresses have the
//! same lower half cannot be distinguished, so the second gets no tag and is counted.
//!
//! All this happens before the program starts, and only if there is one thread: a thread among the
//! NOPs would execute half an instruction. Libraries that are opened later keep their NOPs.

mod object;
mod section;
mod write;

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::Ordering::Relaxed;

use elfen_entries::{
    Check, Entry, FunctionStarts, JUMP_BYTES, Tag, call_through, is_entry, jump, lower_half,
    padding_nops,
};
use elfen_rt::check;
use elfen_rt::tag::{self, Order};

use object::{MemoryRange, Object};
use write::{Stubs, WritableText};

/// What is written where functions have room.
#[derive(Clone, Copy)]
pub(crate) struct Patches {
    /// Tags on entry and return, and the call that publishes counters in functions that the order
    /// names.
    pub(crate) tags: Option<Order<'static>>,
    pub(crate) checks: bool,
}

/// One walk over all loaded objects.
struct Walk<'a> {
    patches: Patches,
    tagged: TaggedFunctions<'a>,
}

/// Patches all loaded objects, and publishes the number of tagged functions.
pub(crate) fn patch_all(patches: Patches) {
    if !(patches.tags.is_some() || patches.checks) || write::threads() != Some(1) {
        return;
    }
    let mut walk = Walk { patches, tagged: TaggedFunctions::default() };
    // SAFETY: `patch_one` has the required type, and the walk outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(patch_one), ptr::from_mut(&mut walk).cast()) };
    if patches.tags.is_some() {
        walk.tagged.publish();
    }
}

unsafe extern "C" fn patch_one(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    walk: *mut c_void,
) -> c_int {
    // SAFETY: `patch_all` passed this pointer, which is valid until the call returns.
    let walk = unsafe { &mut *walk.cast::<Walk<'_>>() };
    // SAFETY: the loader passes its description of a loaded object. The walk keeps references to
    // the object's memory, which stays mapped: no library is closed before the program runs.
    let object = unsafe { Object::of(info) };
    let _patched = object.and_then(|object| patch(&object, walk));
    0
}

/// Patches one object. `None` if there is nothing to patch or no way to do it; the object then
/// stays unchanged.
fn patch<'a>(object: &Object<'a>, walk: &mut Walk<'a>) -> Option<()> {
    let listed = object.listed_entries()?;
    let starts = object.function_starts()?;
    let sites = || listed.iter().filter_map(|&entry| Site::at(object, &starts, entry));
    // The minimum, because NOPs after the compiler's own may be the start of a loop of the program.
    let room = sites().map(|site| site.room).min().filter(|room| *room >= JUMP_BYTES)?;
    let tag = if walk.patches.tags.is_some() { tag_of_this_process() } else { None };
    let check = if walk.patches.checks { check_of_this_process() } else { None };
    let form = Form { entry: Entry { tag, count: None, check }, room };
    if form.entry.size() == 0 {
        return None;
    }
    let text = object.text()?;
    let counted =
        walk.patches.tags.filter(|_| tag.is_some()).and_then(|order| object.counted(order));
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
    let shared_return = tag.and_then(|tag| Some((object.shared_return()?, tag.return_code()?)));
    let open = WritableText::open(text)?;
    for (index, site) in sites().enumerate() {
        let form = form_of(site);
        let mut entry = form.entry;
        if tag.is_some() && !walk.tagged.register(site.address, entry.count.is_some()) {
            entry.tag = None;
            // A stub would contain the tag.
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
    walk.tagged.add(listed, text, shared_return.is_some());
    Some(())
}

fn tag_of_this_process() -> Option<Tag> {
    Some(Tag { words: i32::try_from(tag::words_at()).ok()? })
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

/// A function entry that can be patched.
#[derive(Clone, Copy)]
struct Site {
    address: u64,
    /// Length of its NOPs.
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

/// How the entries of one object are written.
#[derive(Clone, Copy)]
struct Form {
    entry: Entry,
    room: usize,
}

/// Length of `call *hook; jmp back`.
const CALL_BYTES: usize = 6 + JUMP_BYTES;

impl Form {
    fn is_in_place(&self) -> bool {
        self.room >= self.entry.size() && self.entry.count.is_none()
    }

    fn stub_bytes(&self) -> usize {
        match (self.is_in_place(), self.entry.check) {
            (true, None) => 0,
            (true, Some(_)) => CALL_BYTES,
            (false, None) => self.entry.size() + JUMP_BYTES,
            (false, Some(_)) => self.entry.size() + JUMP_BYTES + CALL_BYTES,
        }
    }

    fn write_stub(&self, stubs: &Stubs, index: usize, site: u64) -> Option<()> {
        let stub = stubs.address(index);
        let back = site.checked_add(self.room as u64)?;
        let mut call_at = stub;
        if !self.is_in_place() {
            let on = stub.checked_add(self.entry.size() as u64)?;
            call_at = on.checked_add(JUMP_BYTES as u64)?;
            stubs.write(stub, self.entry.code(stub, site, call_at)?.bytes());
            stubs.write(on, jump(on, back)?.bytes());
        }
        match self.entry.check {
            Some(_) => write_call(stubs, call_at, back),
            None => Some(()),
        }
    }

    /// Writes the remaining NOPs as fewer, longer ones. After a jump this is not needed, because no
    /// thread executes them.
    fn fill(&self, open: &WritableText, site: u64, written: usize) {
        if !self.is_in_place() {
            return;
        }
        let mut at = site.saturating_add(written as u64);
        for nop in padding_nops(self.room.saturating_sub(written)) {
            open.write(at, nop);
            at = at.saturating_add(nop.len() as u64);
        }
    }
}

fn write_call(stubs: &Stubs, at: u64, back: u64) -> Option<()> {
    let call = call_through(at, stubs.hook())?;
    let end = at.checked_add(call.bytes().len() as u64)?;
    stubs.write(at, call.bytes());
    stubs.write(end, jump(end, back)?.bytes());
    Some(())
}

/// How many objects are tracked. Functions of further objects get no tag.
const OBJECTS: usize = 64;

/// An object whose functions are tagged.
#[derive(Clone, Copy)]
struct TaggedObject<'a> {
    entries: &'a [u64],
    text: MemoryRange,
}

/// The functions that have been tagged so far.
struct TaggedFunctions<'a> {
    objects: [Option<TaggedObject<'a>>; OBJECTS],
    entries: u64,
    ambiguous: u64,
    counting: u64,
    returns: u64,
}

impl Default for TaggedFunctions<'_> {
    fn default() -> Self {
        Self { objects: [None; OBJECTS], entries: 0, ambiguous: 0, counting: 0, returns: 0 }
    }
}

impl<'a> TaggedFunctions<'a> {
    /// Whether a function may be tagged. Counts tagged functions, ambiguous ones, and ones that
    /// publish counters.
    fn register(&mut self, address: u64, counts: bool) -> bool {
        let is_full = self.objects.iter().all(Option::is_some);
        let mut objects = self.objects.iter().flatten();
        let is_ambiguous = is_full || objects.any(|object| object.tags(address));
        let counted = if is_ambiguous { &mut self.ambiguous } else { &mut self.entries };
        *counted = counted.saturating_add(1);
        self.counting = self.counting.saturating_add(u64::from(counts && !is_ambiguous));
        !is_ambiguous
    }

    fn add(&mut self, entries: &'a [u64], text: MemoryRange, returns: bool) {
        if let Some(free) = self.objects.iter_mut().find(|object| object.is_none()) {
            *free = Some(TaggedObject { entries, text });
        }
        self.returns = self.returns.saturating_add(returns.into());
    }

    /// Publishes the counts for the launcher.
    fn publish(&self) {
        let Some(first) = tag::page().and_then(|page| page.slot(0)) else { return };
        // Relaxed: each word is meaningful by itself.
        first.entries.store(self.entries, Relaxed);
        first.ambiguous.store(self.ambiguous, Relaxed);
        first.counting.store(self.counting, Relaxed);
        first.returns.store(self.returns, Relaxed);
    }
}

impl TaggedObject<'_> {
    fn tags(&self, address: u64) -> bool {
        let half = lower_half(address);
        // A quick test: the lower half lies outside of most objects.
        let offset = half.wrapping_sub(lower_half(self.text.address));
        (offset as usize) < self.text.len
            && self.entries.iter().any(|&entry| lower_half(entry) == half)
    }
}
