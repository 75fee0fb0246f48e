//! The buffers of one event, which the kernel writes and this process reads.
//!
//! The first page tells where the kernel has written (`data_head`) and where this process has read
//! (`data_tail`); both only grow. Arm's SPE writes into a second buffer, with positions of its
//! own. The layout is that of `struct perf_event_mmap_page`.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

const PAGE_BYTES: usize = 4096;
/// Of the buffer for records; a power of two.
const DATA_PAGES: usize = 8;
const DATA_BYTES: usize = DATA_PAGES * PAGE_BYTES;

/// Offsets in the first page.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;
const AUX_TAIL: usize = 1064;
const AUX_OFFSET: usize = 1072;
const AUX_SIZE: usize = 1080;

/// Where `length` bytes from a position on are, in a ring. Of more bytes than the ring has, the
/// last ones are left.
fn pieces(ring_bytes: usize, from: u64, length: u64) -> [Range<usize>; 2] {
    let Ok(ring) = u64::try_from(ring_bytes) else { return [0..0, 0..0] };
    if ring == 0 {
        return [0..0, 0..0];
    }
    let kept = length.min(ring);
    let start = from.wrapping_add(length - kept) % ring;
    let first = kept.min(ring - start);
    let index = |at: u64| usize::try_from(at).unwrap_or(0);
    [index(start)..index(start + first), 0..index(kept - first)]
}

/// Memory of a ring, which is written while it is read.
#[derive(Debug)]
struct Area {
    start: *const u8,
    bytes: usize,
}

impl Area {
    /// Copies bytes that the writer does not change any more.
    fn copy(&self, from: u64, length: u64) -> Vec<u8> {
        let mut found = Vec::new();
        for piece in pieces(self.bytes, from, length) {
            let at = found.len();
            found.resize(at + piece.len(), 0);
            // SAFETY: `pieces` keeps within the memory, which lives as long as this value: it is
            // that of a mapping in the same `Ring`, or of an array in a test.
            let source = unsafe { self.start.add(piece.start) };
            // SAFETY: as above. The target was made as long as the piece.
            unsafe { source.copy_to_nonoverlapping(found[at..].as_mut_ptr(), piece.len()) };
        }
        found
    }
}

#[derive(Debug)]
pub(super) struct Ring {
    page: MmapRaw,
    data: Area,
    /// Its memory is the mapping next to it.
    aux: Option<(Area, MmapRaw)>,
}

impl Ring {
    /// Maps the buffers of an event, the second one with this number of pages.
    pub(super) fn map(event: &impl AsRawFd, aux_pages: usize) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        let page = options.len(PAGE_BYTES + DATA_BYTES).map_raw(event.as_raw_fd())?;
        let start = page.as_ptr().wrapping_add(PAGE_BYTES);
        let mut ring = Self { page, data: Area { start, bytes: DATA_BYTES }, aux: None };
        if aux_pages > 0 {
            let bytes = aux_pages * PAGE_BYTES;
            let from = (PAGE_BYTES + DATA_BYTES) as u64;
            ring.word(AUX_OFFSET).store(from, Ordering::Relaxed);
            ring.word(AUX_SIZE).store(bytes as u64, Ordering::Relaxed);
            let mut options = MmapOptions::new();
            let aux = options.offset(from).len(bytes).map_raw(event.as_raw_fd())?;
            ring.aux = Some((Area { start: aux.as_ptr(), bytes }, aux));
        }
        Ok(ring)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let at = self.page.as_mut_ptr().wrapping_add(offset);
        // SAFETY: the offsets are within the first page, which is mapped as long as `self` lives,
        // and multiples of 8. The kernel accesses these words as atomic ones.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Takes all records that are there.
    pub(super) fn take(&mut self) -> Vec<u8> {
        // Pairs with the kernel's barrier between writing records and writing the head.
        let head = self.word(DATA_HEAD).load(Ordering::Acquire);
        let tail = self.word(DATA_TAIL).load(Ordering::Relaxed);
        let bytes = self.data.copy(tail, head.wrapping_sub(tail));
        // Pairs with the kernel's reading of the tail before it writes over what was read.
        self.word(DATA_TAIL).store(head, Ordering::Release);
        bytes
    }

    /// Takes bytes of the second buffer, and gives their room back.
    pub(super) fn take_aux(&mut self, from: u64, length: u64) -> Vec<u8> {
        let Some((area, _)) = &self.aux else { return Vec::new() };
        let bytes = area.copy(from, length);
        self.word(AUX_TAIL).store(from.wrapping_add(length), Ordering::Release);
        bytes
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::precise::records::{AUX_COLLISION, AUX_TRUNCATED, AuxPiece};
    use crate::precise::spe;

    #[test]
    fn pieces_wrap_around_at_the_end() {
        let of = |from, length| pieces(64, from, length).map(|piece| (piece.start, piece.end));
        assert_eq!(of(8, 8), [(8, 16), (0, 0)]);
        assert_eq!(of(60, 8), [(60, 64), (0, 4)]);
        assert_eq!(of(64 * 5 + 60, 4), [(60, 64), (0, 0)]);
        assert_eq!(of(4, 64), [(4, 64), (0, 4)]);
        assert_eq!(of(3, 70), [(9, 64), (0, 9)], "more than the ring has");
        assert_eq!(of(u64::MAX - 3, 8), [(60, 64), (0, 4)], "the position begins again at 0");
        assert_eq!(pieces(0, 5, 8), [0..0, 0..0]);
    }

    /// An operation of SPE: its address, its events, and its end.
    fn operation(pc: u64) -> Vec<u8> {
        let mut bytes = vec![0xb0];
        bytes.extend(pc.to_le_bytes());
        bytes.extend([0x42, 0x02, 0x01]);
        bytes
    }

    /// Goal: samples of SPE survive the end of the buffer, and lost ones are counted. Method: a
    /// ring of 64 bytes whose operations go over its end, and pieces with each flag.
    #[test]
    fn operations_go_over_the_end_of_the_buffer() {
        let mut memory = [0; 64];
        let (from, mut at) = (64 * 3 + 48, 48);
        for byte in [operation(1), operation(2), operation(3)].concat() {
            memory[at % 64] = byte;
            at += 1;
        }
        let area = Area { start: memory.as_ptr(), bytes: memory.len() };
        let whole = AuxPiece { from, bytes: 36, flags: 0 };
        let read = |piece: AuxPiece| {
            let bytes = area.copy(piece.from, piece.bytes);
            spe::decode_piece(&bytes, &piece, 1)
        };
        let pcs = |found: &spe::SpeSamples| -> Vec<u64> {
            found.samples.iter().map(|sample| sample.pc).collect()
        };
        let found = read(whole);
        assert_eq!((pcs(&found), found.damaged), (vec![1, 2, 3], 0));
        // The buffer was full within the third operation.
        let cut = AuxPiece { bytes: 30, flags: AUX_TRUNCATED, ..whole };
        let found = read(cut);
        assert_eq!((pcs(&found), found.damaged), (vec![1, 2], 2));
        let found = read(AuxPiece { flags: AUX_COLLISION, ..whole });
        assert_eq!((pcs(&found), found.damaged), (vec![1, 2, 3], 1));
        // A piece that is longer than the buffer: what was written over is gone.
        let long = AuxPiece { from: from - 64, bytes: 100, flags: 0 };
        assert_eq!(pcs(&read(long)).last(), Some(&3));
    }
}
