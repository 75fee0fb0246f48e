//! Runs a program in the code cache from its first instruction to its last.
//!
//! ```text
//! the program (traced)                          the host
//!   code      r-x  hot and cold parts  <------  writes blocks and links
//!   table     r--  blocks by address   <------  writes entries
//!   contexts  rw-  words of threads    <----->  reads counters
//!   int3, signals, fork, exec          ------>  waitpid(2)
//! ```
//!
//! The host is the tracer. A thread stops at a trap where the cache has no code, or in front of a
//! system call that creates threads, changes code or returns from a signal handler. For those calls
//! and for instructions that cannot be moved, the host sets the original registers and lets the
//! thread step once where it is.
//!
//! A signal finds the thread at an original address: the host steps it to the next instruction
//! boundary first. So handlers, core files and unwinders see what they would see without Elfen.
//!
//! No page is writable and executable, and no code of ours runs outside the cache.

mod collect;
mod start;
mod tracer;

pub use crate::engine::trace_recorder::TraceLimits;
pub use start::StartError;
pub use tracer::{Ended, Recorded, RecordedTrace, TraceError, record, record_trace};
