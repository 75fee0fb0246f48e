//! Makes a program set a word before it requests a system call filter (seccomp).
//!
//! ```text
//! the program                 the arena
//!   jmp notice   ---------->  mov   $157, %eax         the instruction that the jump replaced
//!                             is it seccomp, or prctl(PR_SET_SECCOMP)?  then  movq $1, WORD
//!   syscall      <----------  jmp   back
//! ```
//!
//! The jump replaces one instruction of the same length, so no thread can stand inside it. Before a
//! system call, the flags and `%r11` are free: the kernel overwrites `%r11`, and no compiler keeps
//! flags across the call.

use crate::code::JUMP_BYTES;
use crate::trampoline::{Code, Patch};

/// The longest code that [`notice`] makes.
pub const NOTICE_BYTES: u64 = 64;

const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The instructions before such a call, each as long as a jump.
const BEFORE: [[u8; JUMP_BYTES]; 3] = [
    // mov $SYS_prctl, %eax; mov $SYS_seccomp, %eax
    [0xb8, 0x9d, 0, 0, 0],
    [0xb8, 0x3d, 1, 0, 0],
    // mov 8(%rsp), %r9: the last argument of the C library's syscall()
    [0x4c, 0x8b, 0x4c, 0x24, 8],
];

/// Finds the instructions before system calls that may request a filter, and returns their offsets.
/// The search compares bytes. A match that may be the end of a longer instruction is left out.
pub fn notice_sites(code: &[u8]) -> impl Iterator<Item = usize> {
    memchr::memmem::find_iter(code, &SYSCALL).filter_map(|call| {
        let site = call.checked_sub(JUMP_BYTES)?;
        let before = code.get(site.checked_sub(1)?)?;
        let is_prefix = matches!(before, 0x40..=0x4f | 0x66 | 0xf2 | 0xf3);
        let is_known = BEFORE.iter().any(|known| code[site..call] == *known);
        (is_known && !is_prefix).then_some(site)
    })
}

/// Makes a jump from the instruction at `site` to `at`, and the code at `at`. That code sets `word`
/// when the program requests a filter. `None` if the instruction is not one of [`notice_sites`], or
/// is more than 2 GiB away.
pub fn notice(site: u64, original: &[u8], at: u64, word: u64) -> Option<[Patch; 2]> {
    if !BEFORE.iter().any(|known| original == known) {
        return None;
    }
    let mut code = Code::at(at);
    code.push(original);
    // cmp $SYS_seccomp, %eax; je; cmp $SYS_prctl, %eax; jne; cmp $PR_SET_SECCOMP, %edi; jne
    code.push(&[0x3d, 0x3d, 1, 0, 0]);
    let asks = code.push_forward_jump(&[0x0f, 0x84]);
    code.push(&[0x3d, 0x9d, 0, 0, 0]);
    let other = code.push_forward_jump(&[0x0f, 0x85]);
    code.push(&[0x83, 0xff, 22]);
    let other_option = code.push_forward_jump(&[0x0f, 0x85]);
    code.end_jump(asks)?;
    // movabs $word, %r11; movq $1, (%r11)
    code.push(&[0x49, 0xbb]);
    code.push(&word.to_le_bytes());
    code.push(&[0x49, 0xc7, 0x03, 1, 0, 0, 0]);
    code.end_jump(other)?;
    code.end_jump(other_option)?;
    code.push_relative(&[0xe9], site.checked_add(JUMP_BYTES as u64)?, &[])?;
    let mut jump = Code::at(site);
    jump.push_relative(&[0xe9], at, &[])?;
    Some([jump.patch(), code.patch()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, Register};

    #[test]
    fn sites_are_found_by_the_instruction_before_the_call() {
        let code = |before: u8, one: &[u8]| [&[0x90, before], one, &SYSCALL, &[0xc3]].concat();
        for known in BEFORE {
            assert_eq!(notice_sites(&code(0x90, &known)).collect::<Vec<_>>(), [2]);
            // mov $157, %r8d ends in the same bytes.
            assert_eq!(notice_sites(&code(0x41, &known)).count(), 0);
        }
        assert_eq!(notice_sites(&code(0x90, &[0xb8, 0x9e, 0, 0, 0])).count(), 0, "arch_prctl");
        assert_eq!(notice_sites(&[&BEFORE[0][..], &SYSCALL].concat()).count(), 0, "no byte before");
        assert_eq!(notice_sites(&SYSCALL).count(), 0);
    }

    /// Whether the code sets the word for a system call with this number and first argument.
    fn sets_word(code: &[Instruction], number: u64, first: u64) -> bool {
        let (mut at, mut is_equal) = (1, false);
        loop {
            let one = &code[at];
            at += 1;
            let target = || {
                let to = one.near_branch_target();
                code.iter().position(|other| other.ip() == to).expect("inside")
            };
            match one.mnemonic() {
                Mnemonic::Cmp => {
                    let register = if one.op0_register() == Register::EAX { number } else { first };
                    is_equal = one.immediate(1) == register;
                }
                Mnemonic::Je if is_equal => at = target(),
                Mnemonic::Jne if !is_equal => at = target(),
                Mnemonic::Mov if one.memory_base() == Register::R11 => return true,
                Mnemonic::Jmp => return false,
                _ => {}
            }
        }
    }

    #[test]
    fn only_requests_for_a_filter_set_the_word() {
        for original in BEFORE {
            let [jump, code] = notice(0x1000, &original, 0x2000, 0x3000).unwrap();
            assert!((code.bytes.len() as u64) < NOTICE_BYTES && jump.bytes.len() == JUMP_BYTES);
            assert_eq!(code.bytes[..JUMP_BYTES], original, "it runs first");
            let code: Vec<Instruction> =
                Decoder::with_ip(64, &code.bytes, 0x2000, DecoderOptions::NONE).iter().collect();
            assert!(sets_word(&code, 317, 0) && sets_word(&code, 157, 22));
            assert!(
                !sets_word(&code, 157, 15) && !sets_word(&code, 202, 22) && !sets_word(&code, 0, 0)
            );
            let last = code.last().unwrap();
            assert_eq!((last.mnemonic(), last.near_branch_target()), (Mnemonic::Jmp, 0x1005));
            let word = code.iter().find(|one| one.op0_register() == Register::R11).unwrap();
            assert_eq!(word.immediate(1), 0x3000);
        }
        assert_eq!(notice(0x1000, &[0x90; JUMP_BYTES], 0x2000, 0x3000), None);
        assert_eq!(notice(0x1000, &BEFORE[0], 1 << 33, 0x3000), None, "out of reach");
    }
}
