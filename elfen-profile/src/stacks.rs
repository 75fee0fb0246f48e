//! The stacks of a profile.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::rc::Rc;

use elfen_instrument::symbols::demangled;

use crate::lines::{Lines, SourceFile};
use crate::profile::{FIRST_CALLER, NO_CALLER, Place, Profile, StackCount, StackEnd};
use crate::symbols::{FunctionId, ProfileSymbols};

/// The name of what calls a stack whose outer part was not found.
pub(crate) const UNKNOWN: &str = "[unknown callers]";

/// More frames of a stack than any viewer shows.
const FRAMES_MAX: usize = 512;

/// A frame of a stack: a function, and where in it the next frame was called, or which block ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StackFrame {
    pub(crate) function: FunctionId,
    pub(crate) at: Place,
}

/// A function of a frame, and where in its source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ShownFrame {
    pub(crate) name: String,
    pub(crate) source: Option<String>,
    pub(crate) line: u32,
}

/// The source lines of a profile's files.
#[derive(Default)]
pub(crate) struct Sources {
    lines: Vec<Option<Lines>>,
    shown: RefCell<HashMap<Place, Rc<[ShownFrame]>>>,
}

impl Sources {
    pub(crate) fn read(profile: &Profile) -> Self {
        let lines = profile.files.iter().map(|file| Lines::read(Path::new(&file.path)));
        Self { lines: lines.collect(), shown: RefCell::default() }
    }

    /// The source file and the line of an address.
    pub(crate) fn line(&self, file: u32, address: u64) -> Option<(&str, u32)> {
        let lines = self.lines.get(usize::try_from(file).ok()?)?.as_ref()?;
        let row = lines.row_at(address)?;
        Some((&lines.source(row)?.path, row.line))
    }
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
        while frames.len() < FRAMES_MAX
            && let Some(caller) = self.profile.caller(number)
        {
            let index = usize::try_from(number - FIRST_CALLER).unwrap_or(usize::MAX);
            if let Some(function) = self.functions.get(index) {
                frames.push(StackFrame { function: function.clone(), at: caller.call });
            }
            number = caller.caller;
        }
        number != NO_CALLER
    }

    /// The instructions of functions with those of all that they call, and the sum of all.
    pub(crate) fn totals(&self) -> (HashMap<FunctionId, u64>, u64) {
        let mut totals: HashMap<FunctionId, u64> = HashMap::new();
        let (mut all, mut frames) = (0_u64, Vec::new());
        for (end, count) in self.all() {
            all = all.saturating_add(count.instructions);
            self.frames(end, &mut frames);
            let functions: HashSet<&FunctionId> =
                frames.iter().map(|frame| &frame.function).collect();
            for function in functions {
                match totals.get_mut(function) {
                    Some(total) => *total = total.saturating_add(count.instructions),
                    None => drop(totals.insert(function.clone(), count.instructions)),
                }
            }
        }
        (totals, all)
    }

    /// What viewers show for a frame, from the innermost of the functions that are inlined there.
    pub(crate) fn shown(&self, frame: &StackFrame, sources: &Sources) -> Rc<[ShownFrame]> {
        if let Some(known) = sources.shown.borrow().get(&frame.at) {
            return known.clone();
        }
        let found = self.inlined(frame, sources).unwrap_or_else(|| {
            vec![ShownFrame { name: self.name(&frame.function), source: None, line: 0 }]
        });
        let found: Rc<[ShownFrame]> = found.into();
        sources.shown.borrow_mut().insert(frame.at, found.clone());
        found
    }

    fn inlined(&self, frame: &StackFrame, sources: &Sources) -> Option<Vec<ShownFrame>> {
        let table = self.symbols.table(frame.at.file)?;
        let lines = sources.lines.get(usize::try_from(frame.at.file).ok()?)?.as_ref()?;
        let row = lines.row_at(table.address_of(frame.at.offset)?)?;
        let mut inner = lines.frames(row).into_iter().rev();
        let shown = |name: &str, source: Option<&SourceFile>, line| ShownFrame {
            name: in_one_line(&demangled(name)),
            source: source.map(|source| in_one_line(&source.path)),
            line,
        };
        let mut all = vec![shown(inner.next()?.function, lines.source(row), row.line)];
        all.extend(inner.map(|outer| shown(outer.function, None, 0)));
        Some(all)
    }

    /// The name of a function; with its file, if it has no symbol.
    pub(crate) fn name(&self, function: &FunctionId) -> String {
        let name = in_one_line(&self.symbols.name(function));
        if name.starts_with("0x") || name.starts_with('[') {
            format!("{}:{name}", self.symbols.file_name(function.file))
        } else {
            name
        }
    }
}

/// A name of a file that may be hostile, in formats that are read by lines.
pub(crate) fn in_one_line(name: &str) -> String {
    name.replace(char::is_control, " ")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::profile::{Caller, UNKNOWN_CALLER};

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
        let (totals, sum) = stacks.totals();
        let [a, b] = [0, 1].map(|file| totals[&FunctionId { file, start: None }]);
        assert_eq!((a, b, sum), (70, 100, 100));
    }
}
