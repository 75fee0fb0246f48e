//! The words of one thread, as distances from the base of its `%gs`.
//!
//! One writer: the thread itself. The host writes [`LOG_END`] back to [`LOG_AT`] while the thread
//! is stopped, and the tables and ranges of system calls before the thread enters the cache. In
//! bursts, the owner of the words changes with [`STATE`].

/// Registers of the program, while its thread executes code between two of its instructions.
pub const SAVED_RCX: i32 = 0x00;
pub const SAVED_RDX: i32 = 0x08;
pub const SAVED_RAX: i32 = 0x10;
pub const SAVED_RBX: i32 = 0x18;
/// `%ah`: the flags but the overflow flag; `%al`: the overflow flag.
pub const SAVED_FLAGS: i32 = 0x20;
/// Where a computed branch goes: in the program, and in the cache.
pub const TARGET: i32 = 0x28;
pub const JUMP: i32 = 0x30;
/// The next free entry of the log, as a distance from the base.
pub const LOG_AT: i32 = 0x38;
/// How many addresses of memory operands can still be appended.
pub const ADDRESSES_LEFT: i32 = 0x40;

/// System calls that need the host, and calls that need it if they change mapped code: one bit per
/// number.
pub const HOST_CALLS: i32 = 0x80;
pub const RANGE_CALLS: i32 = 0xc0;
pub const CALLS: i32 = 512;
/// Two ranges that hold all code in the cache: first and last address of each.
pub const CODE_RANGES: [[i32; 2]; 2] = [[0x100, 0x108], [0x110, 0x118]];

/// The owner of the words of a burst. The host takes them from a thread that is armed or done; so
/// does the thread itself at its next signal.
pub const STATE: i32 = 0x120;
pub const IDLE: i32 = 0;
pub const ARMED: i32 = 1;
pub const RUNS: i32 = 2;
pub const DONE: i32 = 3;
/// The thread uses `%gs` itself, or its state does not fit: no bursts.
pub const REFUSED: i32 = 4;
/// How many events a burst may have.
pub const EVENTS_GIVEN: i32 = 0x128;
/// The eight words of a burst: how many events are left,
pub const EVENTS_LEFT: i32 = 0x130;
/// where it began, in the program and in the cache; 0 without code for it;
pub const BEGAN_AT: i32 = 0x138;
pub const BEGAN_CODE: i32 = 0x140;
/// where it left the cache,
pub const LEFT_AT: i32 = 0x148;
/// the time stamp counter at its beginning and end,
pub const BEGAN_TICKS: i32 = 0x150;
pub const ENDED_TICKS: i32 = 0x158;
/// and [`ADDRESSES_LEFT`] and the stack pointer at its beginning.
pub const BEGAN_ADDRESSES: i32 = 0x160;
pub const BEGAN_STACK: i32 = 0x168;
pub const BURST_WORDS: i32 = 8;
/// The parts of the processor's state that the kernel saves for a signal.
pub const FEATURES: i32 = 0x188;
/// The address of [`FRAME`], and the end of a small stack.
pub const FRAME_AT: i32 = 0x170;
pub const STACK_AT: i32 = 0x178;
pub const STACK_END: i32 = 0x200;
/// How many earlier bursts are kept.
pub const KEPT: i32 = 0x180;
/// What distinguishes the thread of the words from others: the base of its `%fs`.
pub const THREAD: i32 = 0x1a0;
/// The stack of the program's thread: its first address, and the one behind it. The latter is 0 if
/// stacks are not copied, and 1 as long as the host does not know where the stack is.
pub const STACK_START: i32 = 0x190;
pub const STACK_LIMIT: i32 = 0x198;
/// The frame by which a burst ends, as rt_sigreturn(2) expects it: a `ucontext` of Linux.
pub const FRAME: i32 = 0x400;
/// The vector registers of that frame.
pub const VECTORS: i32 = LOG;
pub const VECTORS_BYTES: i32 = LOG_END - LOG;
/// The events of a burst, from its end backwards, 8 bytes each: the complement of the number of a
/// counter, or an address that a computed branch went to.
pub const EVENTS: i32 = COUNTERS;
pub const EVENTS_MAX: i32 = 8192;
/// Earlier bursts: their words, and their events in the order of addresses.
pub const KEPT_AT: i32 = EVENTS + EVENTS_MAX * 8;
pub const KEPT_BYTES: i32 = 64 + EVENTS_MAX * 8;
pub const KEPT_MAX: i32 = 31;
/// Where each kept burst and the last one began: bytes of the stack, 17 registers in the order of
/// the kernel's frames, and the stack from its red zone on, which a signal leaves as it is.
pub const STACKS: i32 = KEPT_AT + KEPT_MAX * KEPT_BYTES;
pub const STACK_BELOW: i32 = 128;
pub const STACK_COPY: i32 = 18 * 8;
pub const STACK_COPY_BYTES: i32 = 8192;
pub const STACK_BYTES: i32 = STACK_COPY + STACK_COPY_BYTES;
/// Addresses of memory operands, from their end backwards, if a cache appends them: those of all
/// bursts until the host reads them.
pub const ADDRESSES: i32 = STACKS + (KEPT_MAX + 1) * STACK_BYTES;
pub const ADDRESSES_MAX: i32 = 0x3_ffff;
/// A block may append as many. With fewer places, a thread stops at its start.
pub const ADDRESSES_ROOM: i32 = 256;

/// Executions of computed branches that no counter counts: site and target, 8 bytes each.
pub const LOG: i32 = 0x1000;
pub const LOG_ENTRIES: i32 = 4096;
pub const LOG_ENTRY_BYTES: i32 = 16;
pub const LOG_END: i32 = LOG + LOG_ENTRIES * LOG_ENTRY_BYTES;

/// Where calls return to in the cache, by the lower 16 bits of their return address in the program:
/// words of 8 bytes, of which each has to hold an address of code.
pub const RETURNS: i32 = 0x1_2000;
pub const RETURNS_ENTRIES: i32 = 1 << 16;

/// Counters of 8 bytes.
pub const COUNTERS: i32 = RETURNS + RETURNS_ENTRIES * 8;
pub const COUNTER_BYTES: i32 = 8;
/// More edges than the largest programs of Debian execute.
pub const COUNTERS_MAX: i32 = 2 << 20;
pub const BYTES: u64 = (COUNTERS + COUNTERS_MAX * COUNTER_BYTES) as u64;

const _: () =
    assert!(ADDRESSES + 8 * (ADDRESSES_MAX + 1) <= COUNTERS + COUNTERS_MAX * COUNTER_BYTES);
const _: () = assert!(LOG_END <= RETURNS && BYTES.is_multiple_of(4096));
