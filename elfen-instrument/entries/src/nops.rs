//! Measures runs of NOPs, and makes them. gcc writes single bytes, LLVM the longest NOPs of the
//! CPU.

/// The number of bytes of whole NOP instructions at the start of `code`.
pub fn nop_run(code: &[u8]) -> usize {
    let mut run = 0;
    while let Some(length) = code.get(run..).and_then(nop) {
        run += length;
    }
    run
}

/// The forms that the manuals of Intel and AMD recommend, by their length less one.
const FORMS: [&[u8]; 9] = [
    &[0x90],
    &[0x66, 0x90],
    &[0x0f, 0x1f, 0x00],
    &[0x0f, 0x1f, 0x40, 0x00],
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x0f, 0x1f, 0x80, 0, 0, 0, 0],
    &[0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
    &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
];

/// The fewest NOPs that fill this many bytes, because a NOP of one byte costs as much as a long
/// one.
pub fn padding_nops(mut bytes: usize) -> impl Iterator<Item = &'static [u8]> {
    core::iter::from_fn(move || {
        let longest = bytes.min(FORMS.len()).checked_sub(1)?;
        let form = FORMS.get(longest)?;
        bytes -= form.len();
        Some(*form)
    })
}

/// The length of the NOP at the start of `code`.
fn nop(code: &[u8]) -> Option<usize> {
    let prefixes = code.iter().take_while(|&&byte| byte == 0x66 || byte == 0x2e).count();
    let length = match code.get(prefixes..)? {
        [0x90, ..] => 1,
        [0x0f, 0x1f, operand, ..] => 3 + operand_bytes(*operand)?,
        _ => return None,
    };
    // No instruction is longer than 15 bytes.
    let whole = prefixes + length;
    (whole <= 15 && whole <= code.len()).then_some(whole)
}

/// The number of bytes after the ModRM byte of a NOP's operand. The operand of `0f 1f /0` is memory
/// at a register, with or without index and offset.
fn operand_bytes(modrm: u8) -> Option<usize> {
    let (mode, digit, register) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    if digit != 0 {
        return None;
    }
    let index = usize::from(register == 4);
    match mode {
        0 if register != 5 => Some(index),
        1 => Some(index + 1),
        2 => Some(index + 4),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// The longer forms of LLVM.
    const LONGER: [&[u8]; 3] = [
        &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
        &[0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
        &[0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0, 0, 0, 0],
    ];

    #[test]
    fn any_room_is_filled_with_few_nops() {
        for bytes in 0..=60 {
            let filled: Vec<&[u8]> = padding_nops(bytes).collect();
            let code = filled.concat();
            assert_eq!((code.len(), nop_run(&code)), (bytes, bytes));
            assert_eq!(filled.len(), bytes.div_ceil(9));
        }
    }

    #[test]
    fn every_form_is_one_nop_and_its_prefix_is_none() {
        for form in FORMS.into_iter().chain(LONGER) {
            assert_eq!(nop_run(form), form.len(), "{form:x?}");
            let half = &form[..form.len() - 1];
            assert!(nop_run(half) < half.len() || half.is_empty(), "{half:x?}");
        }
    }

    #[test]
    fn other_instructions_end_the_run() {
        for other in [
            &[0x55][..],                     // push %rbp
            &[0xf3, 0x90],                   // pause
            &[0xf3, 0x0f, 0x1e, 0xfa],       // endbr64
            &[0x0f, 0x1f, 0xc0],             // a register operand, which no compiler pads with
            &[0x0f, 0x1f, 0x05, 0, 0, 0, 0], // relative to the instruction pointer
            &[0x0f, 0x1f, 0x08],             // another opcode extension
            &[0x0f],                         // cut
            &[0x66; 16],                     // only prefixes
            &[0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66],
        ] {
            let code: Vec<u8> = [0x90, 0x66, 0x90].iter().chain(other).copied().collect();
            assert_eq!(nop_run(&code), 3, "{other:x?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn nop_runs_stay_within_their_bytes(code: Vec<u8>) {
            proptest::prop_assert!(nop_run(&code) <= code.len());
        }
    }
}
