//! Loops, and what runs on every way round one.

use core::ops::Range;

use crate::code::Function;

/// The instructions between a jump back and what it goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Loop {
    /// Where the loop begins: what is jumped back to.
    pub start: u64,
    /// The last of the jumps back there.
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
    /// The loops around an address, the outermost first: jumps back to one place are one loop.
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
        loops.retain(|one| one.contains(ip));
        loops.sort_by_key(|one| (one.start, core::cmp::Reverse(one.back)));
        loops
    }
}

/// Whether every way round the loop runs instruction `index`: without it, nothing that the loop's
/// start leads to jumps back there.
pub(crate) fn is_on_every_round(function: &Function, one: &Loop, index: usize) -> bool {
    let Some(inside) = one.indices(function) else { return false };
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
        // Where it goes from there nobody knows; perhaps back.
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
    fn what_can_be_passed_by_is_not_on_every_round() {
        let function = nested();
        let [outer, inner] = function.loops_around(0x1008)[..] else { panic!("two loops") };
        let on_every =
            |one: &Loop, ip: u64| is_on_every_round(&function, one, function.index(ip).unwrap());
        // The nop alone is passed by.
        for (ip, is_on) in [(0x1004, true), (0x1006, true), (0x1008, false), (0x1009, true)] {
            assert_eq!(on_every(&inner, ip), is_on, "{ip:#x}");
            assert_eq!(on_every(&outer, ip), is_on, "{ip:#x}");
        }
        assert!(on_every(&outer, 0x1002) && on_every(&outer, 0x100d));
    }
}
