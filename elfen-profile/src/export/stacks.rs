//! The stacks of a profile, as viewers show them.

use crate::profile::{FIRST_CALLER, Place, Profile, StackCount, StackEnd, UNKNOWN_CALLER};
use crate::symbols::{FunctionId, ProfileSymbols};

/// The name of what calls a stack whose outer part was not found.
pub(crate) const UNKNOWN: &str = "[unknown callers]";

/// A frame of a stack: a function, and where in it the next frame was called, or which block ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StackFrame {
    pub(crate) function: FunctionId,
    pub(crate) at: Place,
}

pub(crate) struct Stacks<'a> {
    profile: &'a Profile,
    symbols: &'a ProfileSymbols,
    /// The functions of the profile's callers.
    functions: Vec<FunctionId>,
}

impl<'a> Stacks<'a> {
    pub(crate) fn new(profile: &'a Profile, symbols: &'a ProfileSymbols) -> Self {
        let functions = profile.callers.iter().map(|caller| symbols.function_of(caller.call));
        Self { profile, symbols, functions: functions.collect() }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&'a StackEnd, &'a StackCount)> + use<'a> {
        self.profile.stacks.iter()
    }

    /// Puts the frames of a stack into a list, from the innermost. Returns whether its outer part
    /// is not known.
    pub(crate) fn frames(&self, end: &StackEnd, frames: &mut Vec<StackFrame>) -> bool {
        frames.clear();
        frames.push(StackFrame { function: self.symbols.function_of(end.block), at: end.block });
        let mut number = end.caller;
        while let Some(caller) = self.profile.caller(number) {
            let index = usize::try_from(number - FIRST_CALLER).unwrap_or(usize::MAX);
            if let Some(function) = self.functions.get(index) {
                frames.push(StackFrame { function: function.clone(), at: caller.call });
            }
            number = caller.caller;
        }
        number == UNKNOWN_CALLER
    }

    /// The name of a function; with its file, if it has no symbol.
    pub(crate) fn name(&self, function: &FunctionId) -> String {
        let name = self.symbols.name(function);
        if name.starts_with("0x") || name.starts_with('[') {
            format!("{}:{name}", self.symbols.file_name(function.file))
        } else {
            name
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::profile::{Caller, NO_CALLER};

    /// Two stacks: a block of the second file, called from the first, and one with unknown callers.
    pub(crate) fn profile() -> (Profile, ProfileSymbols) {
        let mut profile = Profile { program: vec!["a".into()], ..Profile::default() };
        let [a, b] = ["/nowhere/a", "/nowhere/b"].map(|path| profile.file(path));
        let call = Place { file: a, offset: 0x104 };
        profile.callers.push(Caller { caller: NO_CALLER, call });
        for (caller, instructions) in [(FIRST_CALLER, 70), (UNKNOWN_CALLER, 30)] {
            let end = StackEnd { caller, block: Place { file: b, offset: 0x200 } };
            profile.stacks.insert(end, StackCount { instructions, bursts: 2 });
        }
        let (symbols, _) = ProfileSymbols::read(&profile);
        (profile, symbols)
    }

    #[test]
    fn frames_are_listed_from_the_innermost() {
        let (profile, symbols) = profile();
        let stacks = Stacks::new(&profile, &symbols);
        let mut frames = Vec::new();
        let all: Vec<(bool, Vec<u64>)> = stacks
            .all()
            .map(|(end, _)| {
                let is_cut = stacks.frames(end, &mut frames);
                (is_cut, frames.iter().map(|frame| frame.at.offset).collect())
            })
            .collect();
        assert_eq!(all, [(true, vec![0x200]), (false, vec![0x200, 0x104])]);
    }
}
