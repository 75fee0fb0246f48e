//! Machine code in, machine code out: basic blocks of a program, copied into a code cache.
//!
//! ```text
//! the program's code        the cache, within 2 GiB                           the host
//!
//!   A: cmp; jne C           hot    A': cmp; jne a                              translates a block
//!   B: call f                      B': push [return]; jmp f'    (no counter)   when its address
//!   ...                     cold   a:  incq %gs:counter; jmp C'                is first reached
//!                                  x:  int3                     (an exit) ---> patches the jumps
//! ```
//!
//! The program never decodes. A jump to a block that was not translated yet goes to an exit, a trap
//! that stops the thread. The host translates the block and its neighbourhood
//! ([`Cache::translate`]), and patches the jump.
//!
//! The copied code keeps every register, flag and byte of the stack as the original does. Return
//! addresses are those of the original, so unwinding and longjmp(3) work. At each instruction
//! boundary the original state of a thread can be told ([`Cache::original`]).
//!
//! Edges are counted, not blocks: [`counts`] derives the rest. A thread's words are addressed
//! through `%gs` ([`layout`]), because no program for Linux uses that register on its own.
//!
//! This crate has no unsafe code and no I/O. `elfen-profile` runs programs in the cache.

#![forbid(unsafe_code)]

mod addresses;
mod assembly;
mod block;
mod cache;
pub mod counts;
mod emit;
pub mod layout;
mod leave;
mod lookup;
mod results;
mod site;

pub use addresses::{ACCESSES_MAX, Access, Accesses, NotedAddress};
pub use block::{Block, Exit, INSTRUCTIONS_MAX, Indirect, Source};
pub use cache::{BlockId, Cache, Cluster, CodeMemory, Counted, Original, Stop, Translated, Trap};
pub use results::Outcome;
