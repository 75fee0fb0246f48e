//! Folded stacks, as flame graphs are drawn from: the functions of a stack from the outermost, and
//! the instructions that it executed.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use super::stacks::{Stacks, UNKNOWN};
use crate::profile::Profile;
use crate::symbols::{FunctionId, ProfileSymbols};

pub(crate) fn stacks(profile: &Profile, symbols: &ProfileSymbols) -> String {
    let stacks = Stacks::new(profile, symbols);
    let mut names: HashMap<FunctionId, String> = HashMap::new();
    let mut folded: BTreeMap<String, u64> = BTreeMap::new();
    let mut frames = Vec::new();
    for (end, count) in stacks.all() {
        let is_cut = stacks.frames(end, &mut frames);
        let mut line = String::from(if is_cut { UNKNOWN } else { "" });
        for frame in frames.iter().rev() {
            let name = names.entry(frame.function.clone());
            let name = name.or_insert_with(|| stacks.name(&frame.function).replace(';', ":"));
            if !line.is_empty() {
                line.push(';');
            }
            line += name;
        }
        *folded.entry(line).or_default() += count.instructions;
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
    use crate::export::stacks::tests::profile;

    #[test]
    fn a_line_has_a_stack_from_the_outermost_function() {
        let (profile, symbols) = profile();
        let expected = "[unknown callers];b:[no symbol] 30\na:[no symbol];b:[no symbol] 70\n";
        assert_eq!(stacks(&profile, &symbols), expected);
    }
}
