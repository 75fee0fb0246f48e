//! Where a check can go into code that runs already, and the machine code that goes there.
//!
//! Bytes in, places and bytes out: no unsafe, no input or output, no knowledge of processes. Who
//! reads the code of a program, and writes to it, does that elsewhere.
//!
//! ```text
//! the program                 the arena, within 2 GiB
//!                             count:  incq  COUNT(%rip)       while the place is on trial
//!   ...                               cmpq  $0, TASK(%rip)
//!   jmp  trampoline  ------>          jne   ring
//!   int3 ...                          cmpq  $0, DRILL(%rip)
//!   ...              <--+             jne   ring
//!                       |     moved:  what the jump was written over
//!                       +------       jmp   back
//!                             ring:   saves a register, and goes to where the bell is rung
//! ```
//!
//! Where a thread may be on one of several lanes, the check looks up the words of the one that it
//! is on ([`OfCpu`]), by the number that the kernel keeps for each thread.
//!
//! A wrong place is a wrong result in somebody else's program. So a function is taken whole or not
//! at all ([`Function::decode`]), a place is taken for a reason that can be named ([`Tactic`]), and
//! each rule has a test that fails without it.

#![forbid(unsafe_code)]

mod code;
mod doorbell;
mod effects;
mod flow;
mod hotspot;
mod loops;
mod notice;
mod patch_site;
mod rounds;
mod trampoline;

pub use code::{Function, JUMP_BYTES, MAX_BYTES};
pub use doorbell::{Doorbell, LaneDoorbell};
pub use flow::DecodeError;
pub use hotspot::HotSpot;
pub use loops::Loop;
pub use notice::{NOTICE_BYTES, notice, notice_sites};
pub use patch_site::{PatchSite, Permitted, Tactic};
pub use trampoline::{BLOCK_BYTES, CpuWords, Hooks, Patch, Words};
