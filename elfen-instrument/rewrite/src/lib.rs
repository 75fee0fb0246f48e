//! Where a check fits into existing machine code, and the machine code of that check.
//!
//! This crate maps bytes to patch sites and to bytes. It has no unsafe code and no I/O, and knows
//! nothing of processes. `elfen-instrument` reads and writes the code of programs.
//!
//! ```text
//! the program                 the arena, within 2 GiB
//!                             count:  incq  COUNT(%rip)       runs of this check
//!   ...                               cmpq  $0, TASK(%rip)
//!   jmp  trampoline  ------>          jne   ring
//!   int3 ...                          cmpq  $0, PROBE(%rip)
//!   ...              <--+             jne   ring
//!                       |     moved:  the instructions that the jump replaced
//!                       +------       jmp   back
//!                             ring:   saves a register, and jumps to the doorbell routine
//! ```
//!
//! In a run with several lanes, a check looks up the words of its thread's current lane
//! ([`CpuWords`]). The kernel stores the CPU number of each thread for that.
//!
//! A wrong patch site corrupts the results of another program. So a function is decoded as a whole
//! or rejected ([`Function::decode`]), and each site states why it is safe ([`Tactic`]). Each rule
//! has a test that fails without the rule.

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
pub use effects::{ARITHMETIC_FLAGS, flags_read, flags_written};
pub use flow::DecodeError;
pub use hotspot::HotSpot;
pub use loops::Loop;
pub use notice::{NOTICE_BYTES, notice, notice_sites};
pub use patch_site::{PatchSite, Permitted, Tactic};
pub use trampoline::{BLOCK_BYTES, Code, CpuWords, Hooks, Patch, Words};
