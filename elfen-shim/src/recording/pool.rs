//! Memory for chunks, had before the first sample, so that an observer asks the kernel for nothing;
//! of a large recording, the first part.

use super::form::{CHUNK_BYTES, ChunkHead};

/// All chunks of a recording while it is made.
#[derive(Debug)]
pub struct Pool {
    memory: Vec<u8>,
    chunks: Vec<ChunkHead>,
    /// Chunks in the order in which they were begun; with `keeps_last` a ring.
    begun: u64,
    keeps_last: bool,
    /// Asks for more memory when it is full: what was recorded is written, and nobody looks.
    grows: bool,
    /// The chunk that each signal writes.
    open: Vec<Option<usize>>,
    /// Of other observers of the same run: their signals follow this one's.
    others: Vec<Pool>,
}

/// Memory that is written once before the first sample, so that no page is missing later. That
/// takes 2 s a gigabyte in a virtual machine. Behind it, pages are had as they are reached, which
/// takes some microseconds for 4 KiB of runs.
const PREPARED_BYTES: usize = 64 << 20;

/// There is no chunk left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

const NONE: ChunkHead = ChunkHead { series: 0, first_ticks: 0, runs: 0, bytes: 0 };

impl Pool {
    /// At most `bytes`, and a few chunks for each signal at least. With `keeps_last`, the newest
    /// chunks take the place of the oldest.
    pub fn new(bytes: usize, signals: usize, keeps_last: bool) -> Self {
        let count = (bytes / CHUNK_BYTES).max(signals * 2 + 2);
        let mut memory = vec![0_u8; count * CHUNK_BYTES];
        let prepared = memory.iter_mut().take(PREPARED_BYTES).step_by(4096);
        prepared.for_each(|byte| *byte = std::hint::black_box(1));
        let (chunks, open) = (vec![NONE; count], vec![None; signals]);
        Self { memory, chunks, begun: 0, keeps_last, grows: false, open, others: Vec::new() }
    }

    /// Of as many chunks as it takes.
    pub(super) fn growing(signals: usize) -> Self {
        let (memory, chunks, open) = (Vec::new(), Vec::new(), vec![None; signals]);
        let (keeps_last, grows, others) = (false, true, Vec::new());
        Self { memory, chunks, begun: 0, keeps_last, grows, open, others }
    }

    /// Both, each as it is; the other's signals are numbered behind this one's.
    pub fn beside(mut self, other: Self) -> Self {
        self.others.push(other);
        self
    }

    /// Whether some more samples of all signals could fill it.
    pub fn is_nearly_full(&self) -> bool {
        self.begun + 2 * self.open.len() as u64 > self.chunks.len() as u64
    }

    /// Forgets all chunks; who writes one must begin another.
    pub fn clear(&mut self) {
        self.chunks.fill(NONE);
        self.open.fill(None);
        self.begun = 0;
    }

    /// A chunk for a signal, in place of the one that it has.
    pub(super) fn begin(&mut self, series: u8, first_ticks: u64) -> Result<usize, Full> {
        if self.grows {
            self.memory.resize(self.memory.len() + CHUNK_BYTES, 0);
            self.chunks.push(NONE);
        }
        let count = self.chunks.len() as u64;
        let chunk = loop {
            if self.begun >= count && !self.keeps_last {
                return Err(Full);
            }
            let chunk = usize::try_from(self.begun % count).unwrap_or(0);
            self.begun += 1;
            // Others may be at work on an old one.
            let taken = self.open.iter().enumerate();
            let mut taken = taken.filter(|(index, _)| *index != usize::from(series));
            if !taken.any(|(_, open)| *open == Some(chunk)) {
                break chunk;
            }
        };
        self.chunks[chunk] = ChunkHead { series, first_ticks, runs: 0, bytes: 0 };
        if let Some(open) = self.open.get_mut(usize::from(series)) {
            *open = Some(chunk);
        }
        Ok(chunk)
    }

    /// The bytes of a chunk that are not written yet, and its head.
    #[inline(always)]
    pub(super) fn rest(&mut self, chunk: usize) -> (&mut ChunkHead, &mut [u8]) {
        let head = &mut self.chunks[chunk];
        let at = chunk * CHUNK_BYTES;
        let written = usize::try_from(head.bytes).unwrap_or(CHUNK_BYTES);
        (head, &mut self.memory[at + written..at + CHUNK_BYTES])
    }

    /// All chunks that have runs, each signal's in order.
    pub fn chunks(&self) -> Vec<(ChunkHead, &[u8])> {
        let mut found: Vec<(ChunkHead, &[u8])> = self
            .chunks
            .iter()
            .enumerate()
            .filter(|(_, head)| head.runs > 0)
            .map(|(index, head)| {
                let bytes = usize::try_from(head.bytes).unwrap_or(0);
                (*head, &self.memory[index * CHUNK_BYTES..][..bytes])
            })
            .collect();
        let mut signals = self.open.len();
        for other in &self.others {
            let behind = u8::try_from(signals).unwrap_or(u8::MAX);
            found.extend(other.chunks().into_iter().map(|(head, bytes)| {
                (ChunkHead { series: head.series.saturating_add(behind), ..head }, bytes)
            }));
            signals += other.open.len();
        }
        found.sort_by_key(|(head, _)| head.first_ticks);
        found
    }
}
