//! Tags: a thread publishes its current activity with one store, and `elfen shim` samples it.
//!
//! The first tag of a thread claims a slot of the process's page ([`crate::signal::thread`]). The
//! first tag of a process opens that page with system calls, so it should not be in a signal
//! handler. If `elfen shim` started the process, the page comes from it. Otherwise the process
//! makes a page without a name, which an observer finds among the process's mappings, and which
//! ends with the process.
//!
//! A thread that finds no slot stores into words of its own, which no observer reads. Code patched
//! into function entries ([`words_at`]) claims no slot: a thread without a slot stores into words
//! that all such threads share.
//!
//! `include/elfen_tag.h` is the same in C, and both find a thread's slot by the thread's id.

use core::arch::{asm, global_asm};
use core::ffi::{CStr, c_int};
use core::marker::PhantomData;
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

use crate::check::once::{Made, Once};
use crate::inherit;
use crate::memory::{Access, Memory};
use crate::process::{errno, parse_u64, pid_namespace, set_errno};
use crate::signal::page::Page;
use crate::signal::thread::{THREADS, ThreadSlot, ThreadWords, claim, thread_word};

/// The variable that `elfen shim` sets for a program: `1 SEGMENT FRONT`, and more for the preload
/// library. Only children of the process FRONT use it, so processes that the program starts are not
/// observed.
pub const VARIABLE: &CStr = c"ELFEN_SHIM";
const PROTOCOL: u64 = 1;

/// A thread's block: a pointer to the thread's words, and words for a thread without a slot.
#[repr(C)]
#[derive(Debug)]
struct Block {
    /// Points at [`NOWHERE`] before the thread's first tag.
    words: AtomicPtr<ThreadWords>,
    own: ThreadWords,
}

const _: () = assert!(size_of::<Block>() == 136 && offset_of!(Block, own) == 8);

/// Aligned to cache lines of its own, because all threads without a slot write it.
#[repr(C, align(128))]
struct Nowhere(ThreadWords);

/// The words that threads share before they claim a slot.
static NOWHERE: Nowhere = Nowhere(ThreadWords::empty());

// Defined in assembly as in `check::thread`: stable Rust has no thread-locals without std.
global_asm!(
    ".pushsection .tdata,\"awT\",@progbits",
    ".balign 8",
    ".globl elfen_tag_block_rt",
    ".hidden elfen_tag_block_rt",
    ".type elfen_tag_block_rt, @object",
    ".size elfen_tag_block_rt, 136",
    "elfen_tag_block_rt:",
    ".quad {nowhere}",
    ".zero 128",
    ".popsection",
    nowhere = sym NOWHERE,
);

impl Block {
    #[inline(always)]
    fn with_own<R>(with: impl FnOnce(&Self) -> R) -> R {
        let own: *const Self;
        // SAFETY: reads the thread pointer, which every thread has at %fs:0, and the block's
        // distance from it, which the loader has filled in.
        unsafe {
            asm!(
                "mov {own}, qword ptr fs:[0]",
                "add {own}, qword ptr [rip + elfen_tag_block_rt@GOTTPOFF]",
                own = out(reg) own,
                options(pure, nomem, nostack),
            );
        }
        // SAFETY: the block lives as long as its thread, which is in this function. Only signal
        // handlers of the same thread access it as well, and every field is atomic.
        with(unsafe { &*own })
    }

    #[inline(always)]
    fn words(&self) -> &ThreadWords {
        let mut words = self.words.load(Relaxed);
        if ptr::eq(words, &NOWHERE.0) {
            words = self.find_words();
        }
        // SAFETY: `find_words` stores the address of a slot in a page that is never unmapped, or of
        // the block's own words.
        unsafe { &*words }
    }

    #[cold]
    #[inline(never)]
    fn find_words(&self) -> *mut ThreadWords {
        let errno = errno();
        let slot = own_slot().map_or(&self.own, |slot| &slot.words);
        let words = ptr::from_ref(slot).cast_mut();
        self.words.store(words, Relaxed);
        set_errno(errno);
        words
    }
}

/// Where a thread's pointer to its words lies, as a distance from its thread pointer. The distance
/// is the same in all threads of a process. For code that is patched into entries and returns.
pub fn words_at() -> isize {
    let distance: isize;
    // SAFETY: reads an entry of the global offset table, which the loader has filled in.
    unsafe {
        asm!(
            "mov {distance}, qword ptr [rip + elfen_tag_block_rt@GOTTPOFF]",
            distance = out(reg) distance,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    distance
}

/// Makes the calling thread find its words, at a moment when system calls do no harm.
pub fn begin_thread() {
    Block::with_own(|block| _ = block.words());
}

/// The process's page. The first call opens it.
pub fn page() -> Option<&'static Page<ThreadSlot>> {
    static PAGE: Once<Page<ThreadSlot>> = Once::new();
    match PAGE.get_or_make(open) {
        Made::Value(page) => Some(page),
        _ => None,
    }
}

/// The calling thread's slot; `None` if the page has none left, or without a page.
pub fn own_slot() -> Option<&'static ThreadSlot> {
    let page = page()?;
    // SAFETY: both calls take nothing and cannot fail.
    let (process, thread) = (unsafe { libc::getpid() }, unsafe { libc::gettid() });
    claim(page, thread_word(process.unsigned_abs(), thread.unsigned_abs()))
}

fn open() -> Option<Page<ThreadSlot>> {
    // SAFETY: the handler stores one word. It lives as long as the program, because code with
    // initial-exec thread-locals is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if let Some(page) = inherited() {
        return Some(page);
    }
    let bytes = Page::<ThreadSlot>::bytes(THREADS);
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).ok()?;
    memory.remove_name().ok()?;
    Page::format(memory, THREADS, pid_namespace(), &[0; 32]).ok()
}

/// Makes a forked child's thread look for a slot again, because it has another id.
unsafe extern "C" fn in_child() {
    let nowhere = ptr::from_ref(&NOWHERE.0).cast_mut();
    Block::with_own(|block| block.words.store(nowhere, Relaxed));
}

fn inherited() -> Option<Page<ThreadSlot>> {
    let order = Order::own()?;
    Page::open(Memory::attach_id(order.segment, Access::Write).ok()?).ok()
}

/// The contents of [`VARIABLE`]: what `elfen shim` orders this process to publish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order<'a> {
    pub segment: c_int,
    pub parent: c_int,
    /// Fields for the preload library.
    pub rest: &'a [u8],
}

impl Order<'static> {
    /// The order for this process; `None` if `elfen shim` did not start it.
    pub fn own() -> Option<Self> {
        let order = Order::parse(inherit::value(VARIABLE)?)?;
        // SAFETY: getppid takes nothing and cannot fail.
        (unsafe { libc::getppid() } == order.parent).then_some(order)
    }
}

impl<'a> Order<'a> {
    /// How functions publish that they run: by patched `entries`, by the `hooks` that they call, or
    /// not at all.
    pub fn functions(&self) -> &'a [u8] {
        self.of_functions().next().unwrap_or_default()
    }

    /// The addresses of the functions that publish their thread's instructions and cycles.
    pub fn counted(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.of_functions().skip(1)
    }

    /// The descriptor of the globals' file, and the addresses of its pages.
    pub fn globals(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.rest.split(|&byte| byte == b' ').skip(1)
    }

    fn of_functions(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let first = self.rest.split(|&byte| byte == b' ').next().unwrap_or_default();
        first.split(|&byte| byte == b',')
    }

    fn parse(text: &'a [u8]) -> Option<Self> {
        let mut fields = text.splitn(4, |&byte| byte == b' ');
        let mut number = || parse_u64(fields.next()?);
        if number()? != PROTOCOL {
            return None;
        }
        let [segment, parent] = [number()?, number()?].map(|n| c_int::try_from(n).ok());
        let rest = fields.next().unwrap_or_default();
        Some(Self { segment: segment?, parent: parent?, rest })
    }
}

/// Publishes `name` as the thread's activity until the end of the scope, and then the previous one
/// again.
///
/// ```
/// let _parsing = elfen_rt::tag!("parse");
/// ```
#[macro_export]
macro_rules! tag {
    ($name:literal) => {{
        #[used]
        #[unsafe(link_section = "elfen_tags")]
        static NAME: [u8; concat!($name, "\0").len()] = $crate::tag::bytes(concat!($name, "\0"));
        $crate::tag::Tag::enter(&NAME)
    }};
}

/// A name's bytes, for a static in a section of its own.
pub const fn bytes<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut at = 0;
    while at < N {
        bytes[at] = text.as_bytes()[at];
        at += 1;
    }
    bytes
}

/// A published tag. Made by [`tag!`](crate::tag!).
#[derive(Debug)]
#[must_use = "the tag ends when this is dropped"]
pub struct Tag {
    before: u32,
    of_this_thread: PhantomData<*const ()>,
}

impl Tag {
    /// Publishes `name`, which ends with a NUL.
    #[inline(always)]
    pub fn enter(name: &'static [u8]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half of an address")]
        let half = name.as_ptr().addr() as u32;
        let before = Block::with_own(|block| {
            let tag = &block.words().tag;
            let before = tag.load(Relaxed);
            // Relaxed: nothing is published through a tag.
            tag.store(half, Relaxed);
            before
        });
        Self { before, of_this_thread: PhantomData }
    }
}

impl Drop for Tag {
    #[inline(always)]
    fn drop(&mut self) {
        Block::with_own(|block| block.words().tag.store(self.before, Relaxed));
    }
}

/// Publishes a value of the thread, for example a length, a depth, or the id of a request.
#[inline(always)]
pub fn value(value: u64) {
    set(|words| &words.value, value);
}

/// Publishes how many calls the thread has made so far, for rates.
#[inline(always)]
pub fn calls(calls: u64) {
    set(|words| &words.calls, calls);
}

/// Publishes the thread's instructions and cycles so far, for threads that count these themselves.
#[inline(always)]
pub fn count(instructions: u64, cycles: u64) {
    set(|words| &words.instructions, instructions);
    set(|words| &words.cycles, cycles);
}

/// Publishes the thread's current code address, for hooks at entries and returns of functions.
#[inline(always)]
pub fn function(address: usize) {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half of an address")]
    let half = address as u32;
    Block::with_own(|block| block.words().function.store(half, Relaxed));
}

/// Counts a call of the thread.
#[inline(always)]
pub fn called() {
    Block::with_own(|block| {
        let calls = &block.words().calls;
        // Relaxed, and not one atomic addition: only the thread itself writes the word.
        calls.store(calls.load(Relaxed).wrapping_add(1), Relaxed);
    });
}

#[inline(always)]
fn set(word: impl Fn(&ThreadWords) -> &AtomicU64, value: u64) {
    // Relaxed: each word is read on its own.
    Block::with_own(|block| word(block.words()).store(value, Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_parsed_into_their_fields() {
        let order = Order { segment: 12, parent: 34, rest: &b"hooks 8 1:99:40"[..] };
        assert_eq!(Order::parse(b"1 12 34 hooks 8 1:99:40"), Some(order));
        assert_eq!((order.functions(), order.counted().count()), (&b"hooks"[..], 0));
        assert!(order.globals().eq([&b"8"[..], b"1:99:40"]));
        let counts = Order { rest: b"entries,1:99:64,1:99:80 -", ..order };
        assert!(counts.counted().eq([&b"1:99:64"[..], b"1:99:80"]));
        assert_eq!(counts.functions(), b"entries");
        let none = Order { rest: b"", ..order };
        assert_eq!((Order::parse(b"1 12 34"), none.functions()), (Some(none), &b""[..]));
        for text in ["", "1", "1 12", "2 12 34", "1 -1 34", "1 12 99999999999", "1  12 34"] {
            assert_eq!(Order::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    fn now() -> (u32, u64) {
        Block::with_own(|block| {
            let words = block.words();
            (words.tag.load(Relaxed), words.value.load(Relaxed))
        })
    }

    /// Goal: tags nest, each thread has its own, and the stored word identifies the name. Method:
    /// two threads with a page of their process.
    #[test]
    fn tags_nest_and_end() {
        static OUTER: [u8; 6] = bytes("outer\0");
        let low = |name: &[u8]| u32::try_from(name.as_ptr().addr() & 0xffff_ffff).unwrap();
        assert_eq!(now().0, 0);
        let outer = Tag::enter(&OUTER);
        assert_eq!(now().0, low(&OUTER));
        {
            let _inner = crate::tag!("inner");
            value(42);
            assert!(now().0 != low(&OUTER) && now().0 != 0);
            let (other, slots) =
                std::thread::spawn(|| (now(), own_slot().is_some())).join().expect("it only looks");
            assert_eq!((other, slots), ((0, 0), true));
        }
        assert_eq!(now(), (low(&OUTER), 42));
        drop(outer);
        assert_eq!(now().0, 0);
    }
}
