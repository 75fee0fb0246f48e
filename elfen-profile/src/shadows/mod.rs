//! Runs forked copies of a program in the code cache: shadows.
//!
//! ```text
//! the program            a thread is stopped for some 100 us; no tracer is attached otherwise
//!   its copier           shares its memory, has no descriptors, and never executes its code
//!     a shadow           a copy of that memory; runs in the cache under ptrace, then is killed
//!       system calls  -> calls.rs: executed, answered, or the end of the shadow
//! ```
//!
//! A shadow is a child of the copier, so neither the program nor its parent can wait for it or is
//! told of its end. Shared memory is read-only in a shadow, and a seccomp filter kills it if it
//! executes a system call that is not on the list.

mod calls;
mod copier;
mod files;
mod filter;
mod lent;
mod limits;
mod recorder;
mod shadow;

pub use calls::{INPUT, KINDS};
pub(crate) use recorder::continue_by_shadows;
pub use recorder::{Order, ShadowError, Shadows, record};
