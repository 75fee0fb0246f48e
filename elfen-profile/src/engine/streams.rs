//! Hot data streams of a process: which sequences of references repeat.
//!
//! A reference is an instruction and an address that it used. The references of threads go into a
//! grammar ([`Grammar`]), with a boundary between threads and between bursts. A grammar has a
//! bounded size: when it is full, its hot streams are added to a table, and the next one begins.
//! The table is bounded, too.

use elfen_stream::{BlockId, NotedAddress, Translated};
use rustc_hash::FxHashMap;

use super::objects::Places;
use super::regions::{Located, Regions};
use crate::hot_streams::{Grammar, HeatLimits, Reference, Units, first_rotation};
use crate::overlap::float;
use crate::profile::{DataReference, DataStream, Profile, STREAM_REFERENCES_MAX, StreamCount};

/// Which streams a profile has.
const LIMITS: HeatLimits =
    HeatLimits { length_min: 2, length_max: STREAM_REFERENCES_MAX as u64, share_min: 1e-4 };
/// Symbols of a grammar. With its references, each takes about 100 bytes.
const SYMBOLS_MAX: usize = 1 << 19;
/// Streams of a table. The hottest half of them stays when there are more.
const FOUND_MAX: usize = 20_000;

/// A memory access of a block that ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    /// Where the instruction is, as a distance from the start of its block.
    pub(crate) offset: u16,
    /// The number of the instruction.
    site: u32,
    address: u64,
    is_thread_local: bool,
}

/// An instruction, in an image.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Site {
    object: u32,
    at: u64,
}

/// The instructions that use memory, and what they have used.
#[derive(Debug, Default)]
pub(crate) struct References {
    sites: Vec<Site>,
    numbers: FxHashMap<Site, u32>,
    /// For each block the sites of its addresses; `None` for a branch, which is not a memory
    /// operation.
    by_block: Vec<Option<Vec<Option<u32>>>>,
    used: Vec<Used>,
    pub(crate) regions: Regions,
}

impl References {
    /// A block ran, from an address in it on. Takes its addresses from the front of `words`; the
    /// last block that ran may have fewer. Returns those of memory operations.
    pub(crate) fn take(
        &mut self,
        id: BlockId,
        block: &Translated,
        from: u64,
        words: &mut &[u64],
    ) -> (&[Used], &mut Regions) {
        self.used.clear();
        let number = usize::try_from(id).unwrap_or(usize::MAX);
        if number != usize::MAX && number >= self.by_block.len() {
            self.by_block.resize(number + 1, None);
        }
        let Self { sites, numbers, by_block, used, .. } = self;
        if let Some(known) = by_block.get_mut(number) {
            let known = known.get_or_insert_with(|| sites_of(block, sites, numbers));
            let is_before = |one: &NotedAddress| block.start + u64::from(one.offset) < from;
            // A burst may begin inside a block.
            let first = match from == block.start {
                true => 0,
                false => block.addresses.partition_point(is_before),
            };
            let known = known.get(first..).unwrap_or_default();
            let (own, rest) = words.split_at(known.len().min(words.len()));
            *words = rest;
            let noted = block.addresses.iter().skip(first);
            for ((site, noted), &address) in known.iter().zip(noted).zip(own) {
                let Some(site) = *site else { continue };
                let (offset, is_thread_local) = (noted.offset, noted.is_thread_local);
                used.push(Used { offset, site, address, is_thread_local });
            }
        }
        (&self.used, &mut self.regions)
    }
}

fn sites_of(
    block: &Translated,
    sites: &mut Vec<Site>,
    numbers: &mut FxHashMap<Site, u32>,
) -> Vec<Option<u32>> {
    let mut of = |offset: u16| {
        let number = block.offsets.iter().position(|&one| one == offset)?;
        let is_memory = block.memory_mask & 1_u64.checked_shl(u32::try_from(number).ok()?)? != 0;
        let site = Site { object: block.object, at: block.start + u64::from(offset) };
        is_memory.then(|| {
            *numbers.entry(site).or_insert_with(|| {
                sites.push(site);
                u32::try_from(sites.len() - 1).unwrap_or(u32::MAX)
            })
        })
    };
    block.addresses.iter().map(|noted| of(noted.offset)).collect()
}

/// A reference: the number of a site, and the place that it has used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Key {
    site: u32,
    data: Located,
}

/// A stream in the table.
#[derive(Clone, Copy, Default, Debug)]
struct Found {
    times: u64,
    units: u64,
    /// The number of a unit that is counted, and may go on.
    open_unit: Option<u64>,
    /// Where it began when it was found first.
    first: u32,
}

impl Found {
    /// Adds what one grammar has shown.
    fn add(&mut self, times: u64, units: Units, first_unit: u64, last_unit: u64) {
        self.times = self.times.saturating_add(times);
        let is_counted = units.in_first && self.open_unit == Some(first_unit);
        self.units += units.count.saturating_sub(u64::from(is_counted));
        self.open_unit = units.in_last.then_some(last_unit);
    }
}

/// Finds the hot streams of a sequence of references.
#[derive(Debug, Default)]
pub(crate) struct Finder {
    grammar: Grammar,
    /// The numbers of the references in the grammar.
    numbers: FxHashMap<(u32, u64), Reference>,
    keys: Vec<Key>,
    found: FxHashMap<Box<[Key]>, Found>,
    references: u64,
    /// References since the last boundary.
    since: u64,
    units: u64,
    /// The number of the first unit in the grammar.
    first_unit: u64,
}

impl Finder {
    pub(crate) fn add(&mut self, used: &Used, regions: &mut Regions) {
        let (site, address) = (used.site, used.address);
        let keys = &mut self.keys;
        let number = *self.numbers.entry((site, address)).or_insert_with(|| {
            let data = match used.is_thread_local {
                true => regions.locate_of_thread(address),
                false => regions.locate(address),
            };
            keys.push(Key { site, data });
            Reference::try_from(keys.len() - 1).unwrap_or(Reference::MAX)
        });
        self.grammar.push(number);
        self.references += 1;
        self.since += 1;
        if self.grammar.size() >= SYMBOLS_MAX {
            self.harvest();
        }
    }

    /// No stream goes on from here.
    pub(crate) fn cut(&mut self) {
        if self.since > 0 {
            self.since = 0;
            self.grammar.cut(false);
        }
    }

    /// Ends bursts of at least this many references.
    pub(crate) fn cut_at(&mut self, references: u64) {
        if self.since >= references {
            self.cut();
        }
    }

    /// What was added since the last call is one observation.
    pub(crate) fn end_unit(&mut self) {
        self.since = 0;
        self.units += 1;
        self.grammar.cut(true);
    }

    pub(crate) fn references(&self) -> u64 {
        self.references
    }

    /// Adds the hot streams of the grammar to the table, and begins another one.
    fn harvest(&mut self) {
        let grammar = std::mem::take(&mut self.grammar);
        let first_unit = std::mem::replace(&mut self.first_unit, self.units);
        let mut found: FxHashMap<Box<[Key]>, (u32, u64, Units)> = FxHashMap::default();
        for stream in grammar.hot_streams(LIMITS) {
            let numbers = stream.references.iter();
            let keys: Option<Vec<Key>> =
                numbers.map(|&one| self.keys.get(one as usize).copied()).collect();
            let Some(keys) = keys else { continue };
            let (first, keys) = rotated(&keys);
            let (_, times, units) = found.entry(keys).or_insert((first, 0, Units::default()));
            *times = times.saturating_add(stream.times);
            // Which units is not known, so these may be the same ones.
            units.count = units.count.max(stream.units.count);
            units.in_first |= stream.units.in_first;
            units.in_last |= stream.units.in_last;
        }
        for (keys, (first, times, units)) in found {
            let known = self.found.entry(keys).or_insert(Found { first, ..Found::default() });
            known.add(times, units, first_unit, self.units);
        }
        if self.found.len() > FOUND_MAX {
            let heat = |keys: &[Key], one: &Found| one.times.saturating_mul(keys.len() as u64);
            let heats = self.found.iter().map(|(keys, one)| heat(keys, one));
            let mut heats: Vec<u64> = heats.collect();
            heats.sort_unstable();
            let least = heats[heats.len() - FOUND_MAX / 2];
            self.found.retain(|keys, one| heat(keys, one) > least);
        }
        self.numbers.clear();
        self.keys.clear();
        self.since = 0;
    }

    /// Adds all hot streams to a profile, as those of a rule or of the whole program.
    pub(crate) fn add_to(
        &mut self,
        rule: Option<u32>,
        profile: &mut Profile,
        places: &Places<'_>,
        references: &References,
    ) {
        self.harvest();
        let names = references.regions.names().iter();
        let regions: Vec<u32> = names.map(|name| profile.region(name)).collect();
        let data_reference = |key: &Key| {
            let site = references.sites.get(key.site as usize)?;
            let region = *regions.get(key.data.region as usize)?;
            let at = places.in_image(site.object, site.at)?;
            Some(DataReference { at, region, distance: key.data.distance })
        };
        let enough = LIMITS.share_min * float(self.references);
        for (keys, one) in &self.found {
            let heat = one.times.saturating_mul(keys.len() as u64);
            let known: Option<Vec<DataReference>> = keys.iter().map(data_reference).collect();
            let Some(known) = known.filter(|_| float(heat) >= enough) else { continue };
            // The order of places in the profile is another one.
            let begin = known.get(one.first as usize).copied();
            let (_, known) = rotated(&known);
            let known = known.into_vec();
            let first = known.iter().position(|one| Some(*one) == begin).unwrap_or(0);
            let first = u32::try_from(first).unwrap_or(0);
            let (times, bursts) = (one.times, one.units.min(self.units));
            let stream = DataStream { rule, references: known };
            profile.add_stream(stream, StreamCount { times, bursts, first });
        }
        self.found.clear();
    }
}

/// The rotation of a sequence that comes first in order, and where the sequence begins in it.
fn rotated<T: Copy + Ord>(sequence: &[T]) -> (u32, Box<[T]>) {
    let from = first_rotation(sequence);
    let rotated: Vec<T> = sequence[from..].iter().chain(&sequence[..from]).copied().collect();
    let first = (sequence.len() - from) % sequence.len().max(1);
    (u32::try_from(first).unwrap_or(0), rotated.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(finder: &mut Finder, regions: &mut Regions, site: u32, address: u64) {
        finder.add(&Used { offset: 0, site, address, is_thread_local: true }, regions);
    }

    /// Goal: memory is bounded, and a stream of several grammars is one, in one unit. Method: a
    /// stream, and references that never come again.
    #[test]
    fn grammars_are_replaced_when_they_are_full() {
        let (mut finder, mut regions) = (Finder::default(), Regions::default());
        let rounds = SYMBOLS_MAX as u64 * 3 / 4;
        let (mut ended, mut before) = (0, 0);
        for round in 0..rounds {
            (0..4).for_each(|site| add(&mut finder, &mut regions, site, 8));
            add(&mut finder, &mut regions, 9, 100 + round);
            ended += u64::from(finder.keys.len() < before);
            before = finder.keys.len();
            assert!(finder.keys.len() <= SYMBOLS_MAX && finder.grammar.size() < SYMBOLS_MAX);
        }
        assert_eq!(ended, 1);
        finder.end_unit();
        finder.harvest();
        assert_eq!(finder.references(), 5 * rounds);
        let [(keys, one)] = &finder.found.iter().collect::<Vec<_>>()[..] else {
            panic!("{:?}", finder.found.len());
        };
        assert_eq!(keys.iter().map(|key| key.site).collect::<Vec<_>>(), [0, 1, 2, 3]);
        // Each grammar may miss the rounds at its ends.
        assert!((rounds - 4..=rounds).contains(&one.times), "{} of {rounds}", one.times);
        assert_eq!((one.units, finder.units), (1, 1));
    }

    #[test]
    fn the_hottest_streams_stay_in_a_full_table() {
        let mut finder = Finder::default();
        for site in 0..=u32::try_from(FOUND_MAX).unwrap() {
            let keys = vec![Key { site, data: Located::default() }; 2];
            finder.found.insert(keys.into(), Found { times: site.into(), ..Found::default() });
        }
        finder.harvest();
        assert!(finder.found.len() <= FOUND_MAX / 2 && finder.found.len() > FOUND_MAX / 3);
        let least = finder.found.values().map(|one| one.times).min().unwrap();
        assert!(least >= FOUND_MAX as u64 / 2, "{least}");
    }
}
