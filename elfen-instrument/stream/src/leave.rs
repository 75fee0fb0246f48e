//! The routine by which a burst ends.
//!
//! It writes all registers to a frame as the kernel builds it for a signal handler, and returns
//! from that handler, rt_sigreturn(2). So the thread continues in the program's own code, and its
//! signals are unblocked, in one step. Signals that came during the burst find the thread there.

use elfen_rewrite::Code;

use crate::assembly::{Gs, INT3, Word};
use crate::layout::{
    DONE, ENDED_TICKS, FEATURES, FRAME, FRAME_AT, LEFT_AT, SAVED_RCX, STACK_AT, STATE, VECTORS,
};

/// Where a frame has its registers, as `ucontext` of Linux defines it.
const REGISTERS: i32 = FRAME + 40;
const RCX: i32 = REGISTERS + 14 * 8;
const RSP: i32 = REGISTERS + 15 * 8;
const RIP: i32 = REGISTERS + 16 * 8;
const FLAGS: i32 = REGISTERS + 17 * 8;
/// Numbers of the registers, in the order in which a frame has them.
const ORDER: [u8; 14] = [8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 3, 2, 0];
const RSP_NUMBER: u8 = 4;
const SYS_RT_SIGRETURN: u8 = 15;

/// Appends the routine. On entry `%rcx`, which has been saved, holds the address to go on at.
pub(crate) fn push_leave_routine(code: &mut Code) -> Option<u64> {
    let entry = code.end()?;
    code.store(LEFT_AT, Word::Rcx);
    code.store(RIP, Word::Rcx);
    code.load(Word::Rcx, SAVED_RCX);
    code.store(RCX, Word::Rcx);
    for (index, number) in (0..).zip(ORDER) {
        push_store(code, number, REGISTERS + 8 * index);
    }
    push_store(code, RSP_NUMBER, RSP);
    push_load_stack(code, STACK_AT);
    // pushfq; pop %gs:FLAGS
    code.push(&[0x9c, 0x65, 0x8f, 0x04, 0x25]);
    code.push(&FLAGS.to_le_bytes());
    // rdtsc; shl $32,%rdx; or %rdx,%rax
    code.push(&[0x0f, 0x31, 0x48, 0xc1, 0xe2, 32, 0x48, 0x09, 0xd0]);
    code.store(ENDED_TICKS, Word::Rax);
    code.load(Word::Rax, FEATURES);
    // mov %rax,%rdx; shr $32,%rdx; xsave64 %gs:VECTORS
    code.push(&[0x48, 0x89, 0xc2, 0x48, 0xc1, 0xea, 32, 0x65, 0x48, 0x0f, 0xae, 0x24, 0x25]);
    code.push(&VECTORS.to_le_bytes());
    // movq $DONE,%gs:STATE
    code.push(&[0x65, 0x48, 0xc7, 0x04, 0x25]);
    code.push(&STATE.to_le_bytes());
    code.push(&DONE.to_le_bytes());
    push_load_stack(code, FRAME_AT);
    // xor %eax,%eax; wrgsbase %rax: the program finds its own value again
    code.push(&[0x31, 0xc0, 0xf3, 0x48, 0x0f, 0xae, 0xd8]);
    // mov $SYS_RT_SIGRETURN,%eax; syscall
    code.push(&[0xb8, SYS_RT_SIGRETURN, 0, 0, 0, 0x0f, 0x05, INT3]);
    Some(entry)
}

/// Moves any register to a word of the thread.
fn push_store(code: &mut Code, number: u8, at: i32) {
    let high = number >> 3;
    code.push(&[0x65, 0x48 | high << 2, 0x89, 0x04 | (number & 7) << 3, 0x25]);
    code.push(&at.to_le_bytes());
}

/// Moves a word of the thread to the stack pointer.
fn push_load_stack(code: &mut Code, at: i32) {
    code.push(&[0x65, 0x48, 0x8b, 0x24, 0x25]);
    code.push(&at.to_le_bytes());
}
