//! Caches and TLBs. They see accesses in the order of fetch.

use crate::machine::{CacheSize, Machine, TlbSize};

#[derive(Clone, Copy, Debug)]
struct Way {
    tag: u64,
    mark: u64,
}

const FREE: Way = Way { tag: u64::MAX, mark: 0 };

/// Sets of ways, the one that was used last in front.
#[derive(Clone, Debug)]
struct Sets {
    ways: Vec<Way>,
    of_one: usize,
    mask: u64,
    /// Bits of an address inside a line or page.
    shift: u32,
}

impl Sets {
    fn new(count: u32, ways: u32, line_bytes: u32) -> Self {
        let sets = (count / ways.max(1)).max(1);
        let of_one = ways.max(1) as usize;
        Self {
            ways: vec![FREE; of_one * sets as usize],
            of_one,
            mask: u64::from(sets) - 1,
            shift: line_bytes.trailing_zeros(),
        }
    }

    fn cache(size: &CacheSize) -> Option<Self> {
        let lines = size.bytes / size.line_bytes.max(1);
        (lines > 0).then(|| Self::new(lines, size.ways, size.line_bytes))
    }

    fn tlb(size: &TlbSize) -> Self {
        Self::new(size.entries, size.ways, size.page_bytes)
    }

    fn set(&mut self, address: u64) -> (&mut [Way], u64) {
        let tag = address >> self.shift;
        let first = usize::try_from(tag & self.mask).unwrap_or(0) * self.of_one;
        (self.ways.get_mut(first..first + self.of_one).unwrap_or(&mut []), tag)
    }

    /// The mark of a line, which is brought in if it is absent: then `None`.
    fn access(&mut self, address: u64) -> Option<u64> {
        let (set, tag) = self.set(address);
        match set.iter().position(|way| way.tag == tag) {
            Some(0) => {}
            Some(at) => set[..=at].rotate_right(1),
            None => {
                set.rotate_right(1);
                if let Some(first) = set.first_mut() {
                    *first = Way { tag, mark: 0 };
                }
                return None;
            }
        }
        set.first().map(|first| first.mark)
    }

    fn mark(&mut self, address: u64, mark: u64) {
        let (set, tag) = self.set(address);
        if let Some(way) = set.iter_mut().find(|way| way.tag == tag) {
            way.mark = mark;
        }
    }
}

/// What an access found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Lookup {
    /// Until data is there; for instructions, cycles that fetch loses.
    pub latency: u32,
    /// The part of it that translation takes.
    pub translation: u32,
    pub is_cache_miss: bool,
    pub is_tlb_miss: bool,
    /// The number that [`Caches::mark`] keeps with the line; 0 for none.
    pub mark: u64,
}

/// All caches of a core.
#[derive(Clone, Debug)]
pub struct Caches {
    instructions: Option<Sets>,
    data: Option<Sets>,
    itlb: Sets,
    dtlb: Sets,
    shared: [Option<Sets>; 2],
    /// Latencies of the caches behind the first, and of memory.
    behind: [u32; 3],
    hits: [u32; 2],
    tlb_misses: [u32; 2],
}

impl Caches {
    pub fn new(machine: &Machine) -> Self {
        let Machine { l1i, l1d, l2, l3, itlb, dtlb, memory_latency, .. } = machine;
        Self {
            instructions: Sets::cache(l1i),
            data: Sets::cache(l1d),
            itlb: Sets::tlb(itlb),
            dtlb: Sets::tlb(dtlb),
            shared: [Sets::cache(l2), Sets::cache(l3)],
            behind: [l2.latency, l3.latency, *memory_latency],
            hits: [l1i.latency, l1d.latency],
            tlb_misses: [itlb.miss, dtlb.miss],
        }
    }

    /// Reads instructions at an address.
    pub fn fetch(&mut self, address: u64) -> Lookup {
        let is_tlb_miss = self.itlb.access(address).is_none();
        let found = self.instructions.as_mut().and_then(|cache| cache.access(address));
        self.lookup(0, address, found, is_tlb_miss)
    }

    /// Reads or writes data at an address.
    pub fn access(&mut self, address: u64) -> Lookup {
        let is_tlb_miss = self.dtlb.access(address).is_none();
        let found = self.data.as_mut().and_then(|cache| cache.access(address));
        self.lookup(1, address, found, is_tlb_miss)
    }

    /// Keeps a number with the line of an address, until the line leaves the first data cache.
    pub fn mark(&mut self, address: u64, mark: u64) {
        if let Some(data) = &mut self.data {
            data.mark(address, mark);
        }
    }

    fn lookup(&mut self, side: usize, at: u64, found: Option<u64>, is_tlb_miss: bool) -> Lookup {
        let translation = if is_tlb_miss { self.tlb_misses[side] } else { 0 };
        let data = if found.is_some() { self.hits[side] } else { self.latency_behind(at) };
        Lookup {
            latency: data + translation,
            translation,
            is_cache_miss: found.is_none(),
            is_tlb_miss,
            mark: found.unwrap_or(0),
        }
    }

    /// The latency of a line that the first cache does not have.
    fn latency_behind(&mut self, address: u64) -> u32 {
        let [second, third, memory] = self.behind;
        for (cache, latency) in self.shared.iter_mut().zip([second, third]) {
            if let Some(cache) = cache
                && cache.access(address).is_some()
            {
                return latency;
            }
        }
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_was_used_last_stays() {
        // Two sets of two lines of 64 bytes.
        let mut sets = Sets::new(4, 2, 64);
        let found: Vec<bool> = [0, 128, 63, 256, 0, 128, 64, 256]
            .into_iter()
            .map(|address| sets.access(address).is_some())
            .collect();
        assert_eq!(found, [false, false, true, false, true, false, false, false]);
    }

    #[test]
    fn a_miss_costs_what_the_next_cache_that_has_it_takes() {
        let mut machine = Machine::built_in("21264").unwrap();
        machine.l1d.bytes = 128;
        machine.l1d.ways = 1;
        machine.l2.bytes = 256;
        let mut caches = Caches::new(&machine);
        let latencies: Vec<u32> =
            [0, 0, 128, 0, 256, 0].into_iter().map(|at| caches.access(at).latency).collect();
        // The first access also misses the TLB. 256 takes the place of 0 in both caches.
        assert_eq!(latencies, [130, 3, 100, 16, 100, 100]);
        let first = caches.access(0);
        assert_eq!((first.is_cache_miss, first.mark), (false, 0));
        caches.mark(8, 7);
        assert_eq!(caches.access(16).mark, 7);
        // The mark leaves with the line.
        caches.access(128);
        assert_eq!(caches.access(0).mark, 0);
    }
}
