//! Loops of a function, and which instructions run on every round of a loop.

use core::ops::Range;

use crate::code::Function;

/// The instructions from the target of a backward jump to that jump.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Loop {
    /// The target of the backward jumps.
    pub start: u64,
    /// The last of these jumps.
    pub back: u64,
}

impl Loop {
    pub fn contains(&self, ip: u64) -> bool {
        (self.start..=self.back).contains(&ip)
    }

    pub(crate) fn indices(&self, function: &Function) -> Option<Range<usize>> {
        Some(function.index(self.start)?..function.index(self.back)? + 1)
    }
}

impl Function {
    /// The loops around an address, outermost first. Backward jumps to the same target are one
    /// loop.
    pub fn loops_around(&self, ip: u64) -> Vec<Loop> {
        let mut loops: Vec<Loop> = Vec::new();
        for (instruction, next) in self.code.iter().zip(&self.next) {
            let Some(to) = next.goes_to else { continue };
            let (start, back) = (self.code[to].ip(), instruction.ip());
            if start > back {
                continue;
            }
            match loops.iter_mut().find(|known| known.start == start) {
                Some(known) => known.back = known.back.max(back),
                None => loops.push(Loop { start, back }),
            }
        }
        loops.retain(|around| around.contains(ip));
        loops.sort_by_key(|around| (around.start, core::cmp::Reverse(around.back)));
        loops
    }
}

/// Whether every round of the loop runs instruction `index`: without that instruction, no path from
/// the start of the loop leads back to it.
pub(crate) fn is_on_every_round(function: &Function, around: &Loop, index: usize) -> bool {
    let Some(inside) = around.indices(function) else { return false };
    if index == inside.start {
        return true;
    }
    let mut seen = vec![false; inside.len()];
    let mut open = vec![inside.start];
    while let Some(at) = open.pop() {
        if at == index || std::mem::replace(&mut seen[at - inside.start], true) {
            continue;
        }
        let next = &function.next[at];
        // The target is unknown, and may be the start of the loop.
        if next.is_unknown {
            return false;
        }
        for next in next.indices(at, function.code.len()) {
            if next == inside.start {
                return false;
            }
            if inside.contains(&next) {
                open.push(next);
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// xor %eax,%eax; A: inc %ecx; B: add %ecx,%eax; jnp C; nop; C: dec %edx;
    /// jnz B; dec %edi; jnz A; ret
    const NESTED: [u8; 18] = [
        0x31, 0xc0, 0xff, 0xc1, 0x01, 0xc8, 0x7b, 0x01, 0x90, 0xff, 0xca, 0x75, 0xf7, 0xff, 0xcf,
        0x75, 0xf1, 0xc3,
    ];

    fn nested() -> Function {
        Function::decode(&NESTED, 0x1000, None).unwrap()
    }

    #[test]
    fn the_outermost_loop_comes_first() {
        let function = nested();
        let (outer, inner) =
            (Loop { start: 0x1002, back: 0x100f }, Loop { start: 0x1004, back: 0x100b });
        assert_eq!(function.loops_around(0x1008), [outer, inner]);
        assert_eq!(function.loops_around(0x1002), [outer]);
        assert_eq!(function.loops_around(0x1000), []);
        assert_eq!(function.loops_around(0x1011), []);
    }

    #[test]
    fn skippable_instructions_are_not_on_every_round() {
        let function = nested();
        let [outer, inner] = function.loops_around(0x1008)[..] else { panic!("two loops") };
        let on_every =
            |one: &Loop, ip: u64| is_on_every_round(&function, one, function.index(ip).unwrap());
        // Only the nop can be skipped.
        for (ip, is_on) in [(0x1004, true), (0x1006, true), (0x1008, false), (0x1009, true)] {
            assert_eq!(on_every(&inner, ip), is_on, "{ip:#x}");
            assert_eq!(on_every(&outer, ip), is_on, "{ip:#x}");
        }
        assert!(on_every(&outer, 0x1002) && on_every(&outer, 0x100d));
    }
}
