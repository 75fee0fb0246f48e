//! Decides whether several instructions of a function may be replaced together. They may if control
//! enters the middle of the function only from its own code.
//!
//! `elfen-rewrite` knows the function's own jumps. It already excludes functions with computed
//! jumps and functions that jump to other parts of themselves. This module searches the rest of the
//! object for references into the function: as a distance relative to the instruction, or as an
//! address.

use std::ops::Range;

use elfen_rewrite::{Function, Loop, Permitted};

use super::arena::Pages;
use super::patched::{Patched, code_at};
use crate::process::Status;
use crate::remote::Mapping;

/// Objects with more code are not searched.
const CODE_MAX: u64 = 1 << 25;
/// The reach of a short jump, and a little more.
const NEAR: u64 = 144;

impl Patched {
    /// Extends `permitted` to several instructions, if that is safe and gives a loop around `ip` a
    /// site.
    pub(super) fn permit_several<'a>(
        &mut self,
        function: &Function,
        ip: u64,
        permitted: &Permitted<'a>,
        mapped: &[Mapping],
        pages: &Pages,
    ) -> Option<Permitted<'a>> {
        let all = Permitted { several: true, ..*permitted };
        let range = function.range();
        let status = Status::of(self.process)?;
        // With several lanes, the position of a thread that left another lane is unknown.
        let is_allowed = pages.lanes.len() == 1 && permitted.hotspot.is_none();
        if !is_allowed
            || status.threads != 1
            || status.catches
            || self.functions.entered.get(&range.start) == Some(&true)
        {
            return None;
        }
        let gains_site = |around: &Loop| {
            let found = || function.site_in_loop(around, &all);
            function.site_in_loop(around, permitted).is_none()
                && found().is_some_and(|site| !self.sites.contains_key(&site.at))
        };
        if !function.loops_around(ip).iter().any(gains_site) {
            return None;
        }
        let is_entered = match self.functions.entered.get(&range.start) {
            Some(&known) => known,
            None => {
                let code = code_at(mapped, range.start).ok()?;
                let mut own = mapped.iter().filter(|mapping| mapping.file == code.file);
                let is_entered = self.has_landing_pads(mapped, code, &range)
                    || self.is_reached_by_neighbours(mapped, code, &range)
                    || own.any(|mapping| self.refers_into(mapping, &range).unwrap_or(true));
                self.functions.entered.insert(range.start, is_entered);
                is_entered
            }
        };
        (!is_entered).then_some(all)
    }

    fn has_landing_pads(&mut self, mapped: &[Mapping], code: &Mapping, range: &Range<u64>) -> bool {
        let found =
            self.objects.function_around(self.process, &self.memory, mapped, code, range.start);
        !found.is_ok_and(|found| found.range == *range && !found.has_landing_pads)
    }

    /// Whether a neighbouring function jumps into this one. Functions within reach of a short jump
    /// are decoded, because a one-byte distance alone proves nothing.
    fn is_reached_by_neighbours(
        &mut self,
        mapped: &[Mapping],
        code: &Mapping,
        range: &Range<u64>,
    ) -> bool {
        let inside = range.start + 1..range.end;
        let before = range.start.saturating_sub(NEAR).max(code.range.start)..range.start;
        let after = range.end..range.end.saturating_add(NEAR).min(code.range.end);
        let mut last_start = None;
        before.chain(after).any(|near| {
            let found =
                self.objects.function_around(self.process, &self.memory, mapped, code, near);
            // No code runs between functions.
            let Ok(found) = found else { return false };
            if last_start.replace(found.range.start) == Some(found.range.start) {
                return false;
            }
            let Ok(bytes) = self.original_code(&found.range) else { return true };
            let other = self.functions.decode(&bytes, found.range.start, None);
            other.map_or(true, |other| other.refers_into(&inside))
        })
    }

    /// Whether any bytes of a mapping may refer to the inside of a function. `None` if the mapping
    /// cannot be read.
    fn refers_into(&self, mapping: &Mapping, range: &Range<u64>) -> Option<bool> {
        let bytes = mapping.range.end - mapping.range.start;
        if bytes > CODE_MAX {
            return None;
        }
        let bytes = self.memory.read_vec(mapping.range.start, usize::try_from(bytes).ok()?).ok()?;
        let start = mapping.range.start;
        let by_distance = mapping.executable && contains_distance(&bytes, start, range);
        Some(by_distance || contains_address(&bytes, range))
    }
}

/// Whether an aligned word is an address inside the function. If the function lies below 4 GiB, any
/// four bytes count as well.
fn contains_address(bytes: &[u8], range: &Range<u64>) -> bool {
    let inside = range.start + 1..range.end;
    let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let short = |four: &[u8]| four.first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
    words.any(|at| inside.contains(&at))
        || u32::try_from(range.end).is_ok()
            && bytes.windows(4).any(|four| inside.contains(&short(four).into()))
}

/// Whether an instruction outside the function refers to its inside by a distance. That is any four
/// bytes with such a distance after the opcode of a jump, a call or an address computation. Every
/// offset counts as a possible instruction.
fn contains_distance(bytes: &[u8], start: u64, range: &Range<u64>) -> bool {
    let inside = range.start + 1..range.end;
    (start..).zip(bytes.windows(6)).any(|(at, six)| {
        let Some((&[first, second], distance)) = six.split_first_chunk() else { return false };
        let distance = distance.first_chunk().map_or(0, |four| i32::from_le_bytes(*four));
        let to = (at + 6).wrapping_add_signed(distance.into());
        let is_long = first == 0x0f && second & 0xf0 == 0x80;
        let is_short = matches!(second, 0xe8 | 0xe9);
        // An operand relative to the instruction pointer.
        let computes = second & 0xc7 == 0x05;
        inside.contains(&to) && !range.contains(&at) && (is_long || is_short || computes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    /// Goal: an address inside a function is found, as a table would hold it. Method: words at both
    /// edges, and a 32-bit word for a program at low addresses.
    #[test]
    fn addresses_inside_a_function_are_found() {
        let names = |at: u64, range: &Range<u64>| {
            let words = [[0; 8], at.to_le_bytes(), [0; 8]].concat();
            contains_address(&words, range)
        };
        let high = 0x5555_0000_1100..0x5555_0000_1140;
        assert!(names(high.start + 1, &high) && names(high.end - 1, &high));
        assert!(!names(high.start, &high) && !names(high.end, &high));
        let half = [&[0; 3][..], &0x40_1101_u32.to_le_bytes(), &[7]].concat();
        assert!(contains_address(&half, &(0x40_1100..0x40_1140)));
        assert!(!contains_address(&half, &high));
    }

    /// Goal: jumps into the middle of a function are found; calls of the function, and its own
    /// jumps, are not. Method: each kind of instruction, with a distance made for it.
    #[test]
    fn distances_to_the_inside_are_found() {
        let range = 0x1100..0x1140;
        let names = |opcode: [u8; 2], at: u64, to: u64| {
            let mut bytes = vec![0xcc; 0x400];
            let site = usize::try_from(at - 0x1000).unwrap();
            let distance = i32::try_from(to.cast_signed() - (at + 6).cast_signed()).unwrap();
            let written = [&opcode[..], &distance.to_le_bytes()].concat();
            bytes[site..site + 6].copy_from_slice(&written);
            contains_distance(&bytes, 0x1000, &range)
        };
        // jmp, call, jne, lea (%rip),%rdi
        let kinds = [[0x90, 0xe9], [0x90, 0xe8], [0x0f, 0x85], [0x8d, 0x3d]];
        for kind in kinds {
            assert!(names(kind, 0x1003, 0x1101) && names(kind, 0x1301, 0x113f), "{kind:x?}");
            assert!(!names(kind, 0x1003, 0x1100), "{kind:x?}: its beginning");
            assert!(!names(kind, 0x1003, 0x1140), "{kind:x?}: what follows it");
            assert!(!names(kind, 0x1110, 0x1120), "{kind:x?}: its own");
        }
        // mov $..,%eax: the distance is a number here.
        assert!(!names([0x90, 0xb8], 0x1003, 0x1101));
    }
}
