//! The kinds of checks, and what each is held against.

/// A way to have checks, as the compiler is asked for it.
#[derive(Debug)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(super) flags: &'static [&'static str],
    pub(super) library: Library,
    /// Batch lanes of the run: with one, patched functions need not know where they run.
    pub(super) lanes: u32,
    pub(crate) what: &'static str,
}

/// The library that is preloaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Library {
    Ours,
    /// Hooks that return at once: what a call costs, whatever is called.
    Returning,
}

const FENTRY: &[&str] = &["-pg", "-mfentry"];
const MCOUNT: &[&str] = &["-pg"];
const CYG: &[&str] = &["-finstrument-functions"];

pub(crate) static KINDS: [Kind; 10] = [
    ours("inline", &["-DINLINE"], 2, "elfen_check() in the source"),
    ours("patch", &["-fpatchable-function-entry=43"], 2, "written over 43 bytes of NOPs"),
    ours("patch-pair", &["-fpatchable-function-entry=19"], 1, "over 19, with one batch lane"),
    ours("patch-jump", &["-fpatchable-function-entry=5"], 2, "a jump over 5, the check elsewhere"),
    returning("fentry-return", FENTRY, "a hook that only returns, before the prologue"),
    ours("fentry", FENTRY, 2, "the hook that checks there"),
    returning("mcount-return", MCOUNT, "a hook that only returns, behind the prologue"),
    ours("mcount", MCOUNT, 2, "the hook that checks there"),
    returning("cyg-return", CYG, "two hooks that only return, at entry and exit"),
    ours("cyg", CYG, 2, "a hook that checks at entry, and one that returns"),
];

const fn ours(
    name: &'static str,
    flags: &'static [&'static str],
    lanes: u32,
    what: &'static str,
) -> Kind {
    Kind { name, flags, library: Library::Ours, lanes, what }
}

const fn returning(name: &'static str, flags: &'static [&'static str], what: &'static str) -> Kind {
    Kind { name, flags, library: Library::Returning, lanes: 1, what }
}
