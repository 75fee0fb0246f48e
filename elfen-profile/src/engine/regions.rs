//! Addresses of data, as distances in a region: the same in each run of a program.
//!
//! The kernel places files, heap and stack at random addresses. A distance from the start of a
//! mapped file or of the heap stays the same. So does that from where the stack pointer began.
//! Other memory is mapped downwards, and the kernel joins neighbours: its distance is that from the
//! end.

use std::ops::Range;

use elfen_instrument::process::stat;
use elfen_instrument::remote::mappings;

/// Different regions of one program. All others have the name [`OTHER`].
const REGIONS_MAX: usize = 1 << 12;
const STACK: &str = "[stack]";
const ANONYMOUS: &str = "[anonymous]";
/// Data of a thread, from the base of its `%fs`.
const THREAD: &str = "[thread]";
/// Memory of no mapping. The distance is the address.
const OTHER: &str = "[other]";
/// A place in memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) struct Located {
    /// Index in [`Regions::names`].
    pub(crate) region: u32,
    pub(crate) distance: i64,
}

#[derive(Clone, Debug)]
struct Region {
    range: Range<u64>,
    number: u32,
    /// What distances are from.
    anchor: u64,
    is_of_file: bool,
}

/// The regions of one address space, as it was when the last new one was seen.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    process: u32,
    /// In the order of addresses.
    regions: Vec<Region>,
    names: Vec<String>,
    /// Where the last address was.
    last: usize,
    /// The mappings were read since [`Self::begin`].
    is_fresh: bool,
}

impl Regions {
    /// What follows are addresses of this process.
    pub(crate) fn begin(&mut self, process: u32) {
        self.process = process;
        self.is_fresh = false;
    }

    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// The place of an address.
    pub(crate) fn locate(&mut self, address: u64) -> Located {
        if let Some(found) = self.find(address) {
            return found;
        }
        if !self.is_fresh {
            self.read();
            self.is_fresh = true;
        }
        let other = |regions: &mut Self| Located {
            region: regions.number(OTHER),
            distance: address.cast_signed(),
        };
        self.find(address).unwrap_or_else(|| other(self))
    }

    /// The place of data at a distance from the base of `%fs`.
    pub(crate) fn locate_of_thread(&mut self, distance: u64) -> Located {
        Located { region: self.number(THREAD), distance: distance.cast_signed() }
    }

    fn find(&mut self, address: u64) -> Option<Located> {
        let holds = |one: &&Region| one.range.contains(&address);
        let at = match self.regions.get(self.last).filter(holds) {
            Some(_) => self.last,
            None => self.regions.partition_point(|one| one.range.end <= address),
        };
        let found = self.regions.get(at).filter(holds)?;
        self.last = at;
        let distance = address.wrapping_sub(found.anchor).cast_signed();
        Some(Located { region: found.number, distance })
    }

    fn number(&mut self, name: &str) -> u32 {
        let known = self.names.iter().position(|one| one == name);
        let number = known.unwrap_or_else(|| {
            let name = if self.names.len() < REGIONS_MAX { name } else { OTHER };
            let other = self.names.iter().position(|one| one == name);
            other.unwrap_or_else(|| {
                self.names.push(name.to_owned());
                self.names.len() - 1
            })
        });
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    fn read(&mut self) {
        let stack_start = stack_start(self.process);
        let mut regions: Vec<Region> = Vec::new();
        for one in mappings(self.process).unwrap_or_default() {
            let range = one.range;
            let before = regions.last().filter(|last| last.range.end == range.start);
            let region = match (&*one.name, before) {
                // Data of a file that begins as zeros follow the others.
                ("", Some(last)) if last.is_of_file => Region { range, ..last.clone() },
                ("", _) => {
                    let anchor = range.end;
                    Region { range, number: self.number(ANONYMOUS), anchor, is_of_file: false }
                }
                (name, _) => {
                    let number = self.number(name);
                    let is_of_file = one.file.is_some();
                    let first = regions.iter().find(|known| known.number == number);
                    let anchor = match first {
                        _ if name == STACK => stack_start.unwrap_or(range.end),
                        Some(first) => first.anchor,
                        None => range.start.wrapping_sub(one.offset),
                    };
                    Region { range, number, anchor, is_of_file }
                }
            };
            regions.push(region);
        }
        // Those of a process that has ended are gone.
        if !regions.is_empty() {
            self.regions = regions;
        }
    }
}

/// Where the stack pointer of a program was at its start.
fn stack_start(process: u32) -> Option<u64> {
    stat(process).map(|stat| stat.stack).filter(|&at| at != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(regions: &mut Regions, address: u64) -> (String, i64) {
        let found = regions.locate(address);
        (regions.names()[found.region as usize].clone(), found.distance)
    }

    /// Goal: data have their region, and distances in it. Method: data of this program.
    #[test]
    fn data_are_in_their_regions() {
        static TABLE: [u64; 2] = [7; 2];
        let mut regions = Regions::default();
        regions.begin(std::process::id());
        let at = |one: &u64| std::ptr::from_ref(one).expose_provenance() as u64;
        let [first, second] = [&TABLE[0], &TABLE[1]].map(|one| located(&mut regions, at(one)));
        let program = std::env::current_exe().unwrap();
        assert_eq!((first.0.as_str(), first.1 + 8), (program.to_str().unwrap(), second.1));
        assert_eq!(located(&mut regions, 0x10), (OTHER.to_owned(), 0x10));
        let start = stack_start(std::process::id()).unwrap();
        assert_eq!(located(&mut regions, start - 64), (STACK.to_owned(), -64));
        let thread = regions.locate_of_thread(0x28);
        assert_eq!((&*regions.names()[thread.region as usize], thread.distance), (THREAD, 0x28));
    }

    #[test]
    fn the_number_of_regions_is_bounded() {
        let mut regions = Regions::default();
        for number in 0..2 * REGIONS_MAX {
            regions.number(&format!("/file/{number}"));
        }
        assert_eq!(regions.names().len(), REGIONS_MAX + 1);
        assert_eq!(regions.number("/another") as usize, REGIONS_MAX);
    }
}
