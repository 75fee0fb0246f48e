//! Profiles of programs as they run, from bursts: at random points of its CPU time, a thread goes
//! through the code cache for some thousand edges.
//!
//! ```text
//! the program                                        the host
//!   own code  <---- rt_sigreturn(2) ----.              perf event of each thread, set once
//!      | SIGURG, after random CPU time  |              reads events, translates what is new,
//!      v                                |              sets the next random time
//!   inside.c: to the cache  ---->  blocks, events
//! ```
//!
//! The program is stopped once, when it is prepared, and each thread once for a look at its stack.
//! Otherwise no tracer is attached. If the host
//! is killed, no further signal comes.

mod clock;
mod inside;
mod recorder;
mod refusal;
mod removal;
mod sites;
mod stack;
mod target;

pub(crate) use clock::IOC_PERIOD;
pub(crate) use recorder::{Attempt, attempt, check};
pub use recorder::{BurstError, Order, record};
