//! Where memory for code goes: within 2 GiB of the code that it is for.

use elfen_instrument::remote::Mapping;

/// Distances of a cluster from its object, in the order of preference. Libraries have free space
/// below; the heap of a program without relocation begins within a gibibyte above it.
const BELOW: [u64; 2] = [768 << 20, 256 << 20];
const ABOVE: [u64; 3] = [1200 << 20, 768 << 20, 256 << 20];
/// Distance to neighbouring mappings.
pub(crate) const MARGIN: u64 = 16 << 20;
/// Below this address nothing is mapped by default (vm.mmap_min_addr).
const LOWEST: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// A free range within reach of an object.
pub(crate) fn free_near(mapped: &[Mapping], object: u64, bytes: u64) -> Option<u64> {
    let below = BELOW.into_iter().filter_map(|distance| object.checked_sub(distance + bytes));
    let above = ABOVE.into_iter().filter_map(|distance| object.checked_add(distance));
    below.chain(above).map(|at| at / PAGE * PAGE).find(|&at| {
        let range = at.saturating_sub(MARGIN)..at + bytes + MARGIN;
        at >= LOWEST
            && mapped.iter().all(|one| one.range.end <= range.start || range.end <= one.range.start)
    })
}
