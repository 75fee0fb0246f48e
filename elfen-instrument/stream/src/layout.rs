//! The words of one thread, as distances from the base of its `%gs`.
//!
//! One writer: the thread itself. The host writes [`LOG_END`] back to [`LOG_AT`] while the thread
//! is stopped, and the tables and ranges of system calls before the thread enters the cache.

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

/// System calls that need the host, and calls that need it if they change mapped code: one bit per
/// number.
pub const HOST_CALLS: i32 = 0x80;
pub const RANGE_CALLS: i32 = 0xc0;
pub const CALLS: i32 = 512;
/// Two ranges that hold all code in the cache: first and last address of each.
pub const CODE_RANGES: [[i32; 2]; 2] = [[0x100, 0x108], [0x110, 0x118]];

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

const _: () = assert!(LOG_END <= RETURNS && BYTES.is_multiple_of(4096));
