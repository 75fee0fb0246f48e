//! Folded stacks, as flame graphs are drawn from: the functions of a stack from the outermost, and
//! the instructions that it executed.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::profile::Profile;
use crate::stacks::{Sources, Stacks, UNKNOWN};
use crate::symbols::ProfileSymbols;

pub(crate) fn stacks(profile: &Profile, symbols: &ProfileSymbols, sources: &Sources) -> String {
    let stacks = Stacks::new(profile, symbols);
    let mut folded: BTreeMap<String, u64> = BTreeMap::new();
    let mut frames = Vec::new();
    for (end, count) in stacks.all() {
        let is_cut = stacks.frames(end, &mut frames);
        let mut line = String::from(if is_cut { UNKNOWN } else { "" });
        for frame in frames.iter().rev() {
            for one in stacks.shown(frame, sources).iter().rev() {
                if !line.is_empty() {
                    line.push(';');
                }
                line += &one.name.replace(';', ":");
            }
        }
        let sum = folded.entry(line).or_default();
        *sum = sum.saturating_add(count.instructions);
    }
    let mut text = String::new();
    for (line, instructions) in folded {
        let _written = writeln!(text, "{line} {instructions}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::tests::profile;

    #[test]
    fn a_line_has_a_stack_from_the_outermost_function() {
        let (profile, symbols) = profile();
        let expected = "[unknown callers];b:[no symbol] 30\na:[no symbol];b:[no symbol] 70\n";
        assert_eq!(stacks(&profile, &symbols, &Sources::default()), expected);
    }
}
