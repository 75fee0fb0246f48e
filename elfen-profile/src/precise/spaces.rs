//! Which files the processes of a program have mapped where.

use std::collections::HashMap;
use std::ops::Range;

use elfen_instrument::remote::mappings;

use crate::profile::{Place, Profile};

/// More than one process maps. A program that maps code without end may be hostile.
const MAPPINGS_MAX: usize = 10_000;
const VDSO: &str = "[vdso]";

#[derive(Clone, PartialEq, Eq, Debug)]
struct Mapped {
    range: Range<u64>,
    /// Offset in the file of the first byte.
    offset: u64,
    /// Index in [`Profile::files`]; `None` for code of no file.
    file: Option<u32>,
}

/// The code of processes. Of two mappings at an address, the later one holds.
#[derive(Default, Debug)]
pub(super) struct Spaces(HashMap<u32, Vec<Mapped>>);

/// What is at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Place(Place),
    NoFile,
    Unknown,
}

impl Spaces {
    /// Reads what a process has mapped by now.
    pub(super) fn read(&mut self, process: u32, profile: &mut Profile) {
        self.0.remove(&process);
        for one in mappings(process).unwrap_or_default() {
            if one.executable {
                self.map(process, one.range, one.offset, &one.name, profile);
            }
        }
    }

    pub(super) fn map(
        &mut self,
        process: u32,
        range: Range<u64>,
        offset: u64,
        path: &str,
        profile: &mut Profile,
    ) {
        let mapped = self.0.entry(process).or_default();
        mapped.retain(|old| old.range.start < range.start || range.end < old.range.end);
        // The kernel writes `//anon` for memory of no file.
        let is_file = path.starts_with('/') && !path.starts_with("//") || path == VDSO;
        let file = is_file.then(|| profile.file(path));
        if mapped.len() < MAPPINGS_MAX {
            mapped.push(Mapped { range, offset, file });
        }
    }

    /// A process was forked, and has what its parent has.
    pub(super) fn fork(&mut self, process: u32, parent: u32) {
        if process != parent
            && let Some(mapped) = self.0.get(&parent).cloned()
        {
            self.0.insert(process, mapped);
        }
    }

    /// A process has ended, or executes another program.
    pub(super) fn clear(&mut self, process: u32) {
        self.0.remove(&process);
    }

    pub(super) fn find(&self, process: u32, address: u64) -> Found {
        let mapped = self.0.get(&process).into_iter().flatten();
        let Some(found) = mapped.rev().find(|one| one.range.contains(&address)) else {
            return Found::Unknown;
        };
        match found.file {
            Some(file) => {
                let offset = found.offset.saturating_add(address - found.range.start);
                Found::Place(Place { file, offset })
            }
            None => Found::NoFile,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mapping_of_an_address_holds() {
        let mut profile = Profile::default();
        let mut spaces = Spaces::default();
        spaces.map(1, 0x1000..0x9000, 0x400, "/a", &mut profile);
        spaces.map(1, 0x3000..0x4000, 0, "/b", &mut profile);
        spaces.map(1, 0x5000..0x6000, 0, "//anon", &mut profile);
        let [a, b] = ["/a", "/b"].map(|path| profile.file(path));
        let place = |file, offset| Found::Place(Place { file, offset });
        assert_eq!(spaces.find(1, 0x1010), place(a, 0x410));
        assert_eq!(spaces.find(1, 0x3010), place(b, 0x10));
        assert_eq!(spaces.find(1, 0x5010), Found::NoFile);
        assert_eq!(spaces.find(1, 0x6000), place(a, 0x5400));
        assert_eq!(spaces.find(1, 0x9000), Found::Unknown);
        spaces.fork(2, 1);
        spaces.clear(1);
        assert_eq!(spaces.find(1, 0x1010), Found::Unknown);
        spaces.map(2, 0..0x10000, 0, "/b", &mut profile);
        assert_eq!(spaces.find(2, 0x5010), place(b, 0x5010), "it covers all others");
        assert_eq!(spaces.0[&2].len(), 1);
    }

    #[test]
    fn own_code_is_found() {
        let mut profile = Profile::default();
        let mut spaces = Spaces::default();
        let own = std::process::id();
        spaces.read(own, &mut profile);
        let address = own_code_is_found as *const () as u64;
        let Found::Place(place) = spaces.find(own, address) else { panic!("{spaces:?}") };
        let path = &profile.files[usize::try_from(place.file).unwrap()].path;
        assert_eq!(std::path::Path::new(path), std::env::current_exe().unwrap());
    }
}
