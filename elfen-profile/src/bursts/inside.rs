//! The code inside the program, and the header that it shares with the host.

use elfen_stream::{Cache, layout};

use crate::engine::region::{CLUSTERS_MAX, CONTEXTS_BYTES, CONTEXTS_MAX, Region};

/// The descriptors of the threads' clocks follow each other from this one on: a signal carries the
/// number of its descriptor.
pub(super) const FIRST_FD: i32 = 256;

/// The code, and distances from its start. `inside.c` says what each part is.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) code: Vec<u8>,
    pub(super) header: u64,
    pub(super) on_tick: u64,
    pub(super) on_fault: u64,
    pub(super) restore: u64,
    pub(super) on_change: u64,
    pub(super) on_sigaction: u64,
}

unsafe extern "C" {
    fn elfen_inside_parts(parts: *mut [u64; 8]);
}

impl Inside {
    pub(super) fn new() -> Self {
        let mut parts = [0; 8];
        // SAFETY: the function fills eight words.
        unsafe { elfen_inside_parts(&raw mut parts) };
        let [start, end, rest @ ..] = parts;
        let length = usize::try_from(end - start).unwrap_or(0);
        let from = std::ptr::with_exposed_provenance::<u8>(usize::try_from(start).unwrap_or(0));
        // SAFETY: the section lies between its two symbols, and is never written.
        let code = unsafe { std::slice::from_raw_parts(from, length) }.to_vec();
        let parts = rest.map(|part| part - start);
        let [header, on_tick, on_fault, restore, on_change, on_sigaction] = parts;
        Self { code, header, on_tick, on_fault, restore, on_change, on_sigaction }
    }
}

/// The header: `struct header` of `inside.c`, by the numbers of its words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) at: u64,
}

const CHANGES: u64 = 9;
const CHANGES_KNOWN: u64 = 10;
const CLUSTERS: u64 = 11;
const CLUSTER_WORDS: u64 = 4;
const OWN: u64 = CLUSTERS + CLUSTERS_MAX * CLUSTER_WORDS;
const IS_ORIGIN: u64 = OWN + 1;
/// Behind the words of `inside.c`: what is needed to take everything out again.
pub(super) const RECORD: u64 = 1024;
/// Behind that: room for arguments of system calls.
pub(super) const SCRATCH: u64 = 3072;

const _: () = assert!((IS_ORIGIN + 1) * 8 <= RECORD);

impl Header {
    pub(super) fn set_up(self, region: &Region, contexts: u64, table: u64) {
        let words = [
            contexts,
            layout::BYTES,
            contexts + CONTEXTS_BYTES,
            FIRST_FD.unsigned_abs().into(),
            CONTEXTS_MAX.into(),
            table,
            Cache::TABLE_MASK,
            Cache::TABLE_SHIFT,
            Cache::TABLE_MULTIPLIER,
        ];
        for (number, value) in (0..).zip(words) {
            region.set_word(self.word(number), value);
        }
    }

    fn word(self, number: u64) -> u64 {
        self.at + 8 * number
    }

    pub(super) fn scratch(self) -> u64 {
        self.at + SCRATCH
    }

    /// How often the program has begun or ended to change its libraries.
    pub(super) fn changes(self, region: &Region) -> u64 {
        region.word(self.word(CHANGES))
    }

    pub(super) fn changes_known(self, region: &Region) -> u64 {
        region.word(self.word(CHANGES_KNOWN))
    }

    pub(super) fn set_changes_known(self, region: &Region, changes: u64) {
        region.set_word(self.word(CHANGES_KNOWN), changes);
    }

    /// Names the points of faults of a cluster.
    pub(super) fn set_points(
        self,
        region: &Region,
        cluster: u64,
        [from, to, at, length]: [u64; 4],
    ) {
        let first = CLUSTERS + cluster * CLUSTER_WORDS;
        // The range last: with it, the points are used.
        for (number, value) in [(2, at), (3, length), (1, to), (0, from)] {
            region.set_word(self.word(first + number), value);
        }
    }

    /// Names the memory that a forked child gets a copy of, and the word that is 0 in children.
    pub(super) fn set_own(self, region: &Region, own: u64, is_origin: u64) {
        region.set_word(self.word(OWN), own);
        region.set_word(self.word(IS_ORIGIN), is_origin);
    }
}
