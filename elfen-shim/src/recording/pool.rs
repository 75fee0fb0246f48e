//! The memory of a recording's chunks. It is allocated before the first sample, so that the
//! observer makes no requests to the kernel. Of a large pool, only the first part is touched in
//! advance.

use super::form::{CHUNK_BYTES, ChunkHead};

/// All chunks of a recording that is being made.
#[derive(Debug, Default)]
pub struct Pool {
    memory: Vec<u8>,
    chunks: Vec<ChunkHead>,
    /// The number of chunks begun so far. Chunks are used in order, or with `keeps_last` as a ring.
    begun: u64,
    keeps_last: bool,
    /// Whether to allocate more memory when the pool is full. Only used while no samples are taken.
    grows: bool,
    /// The chunk that each signal writes to.
    open: Vec<Option<usize>>,
    /// Pools of other observers of the same run. Their signals follow those of this pool.
    others: Vec<Pool>,
}

/// The number of bytes that are written before the first sample, so that they cause no page faults
/// later. Writing takes 2 s per gigabyte in a virtual machine. Later pages are faulted in when they
/// are needed, which takes some microseconds for 4 KiB of runs.
const PREPARED_BYTES: usize = 64 << 20;

/// The pool has no free chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

const NONE: ChunkHead = ChunkHead { series: 0, first_ticks: 0, runs: 0, bytes: 0 };

impl Pool {
    /// Allocates `bytes`, but at least a few chunks for each signal. With `keeps_last`, new chunks
    /// replace the oldest ones.
    pub fn new(bytes: usize, signals: usize, keeps_last: bool) -> Self {
        let count = (bytes / CHUNK_BYTES).max(signals * 2 + 2);
        let mut memory = vec![0_u8; count * CHUNK_BYTES];
        let prepared = memory.iter_mut().take(PREPARED_BYTES).step_by(4096);
        prepared.for_each(|byte| *byte = std::hint::black_box(1));
        Self {
            memory,
            chunks: vec![NONE; count],
            keeps_last,
            open: vec![None; signals],
            ..Self::default()
        }
    }

    /// Creates a pool that allocates chunks as they are needed.
    pub(super) fn growing(signals: usize) -> Self {
        Self { grows: true, open: vec![None; signals], ..Self::default() }
    }

    /// Adds the pool of another observer. Its signals are numbered after those of this pool.
    pub fn with_observer(mut self, other: Self) -> Self {
        self.others.push(other);
        self
    }

    /// Returns whether a few more samples of all signals could fill the pool.
    pub fn is_nearly_full(&self) -> bool {
        self.begun + 2 * self.open.len() as u64 > self.chunks.len() as u64
    }

    /// Discards all chunks. Each series must then begin a new chunk.
    pub fn clear(&mut self) {
        self.chunks.fill(NONE);
        self.open.fill(None);
        self.begun = 0;
    }

    /// Begins a new chunk for a signal, which replaces its current chunk.
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
            // In a ring, an old chunk may still be the current chunk of another signal.
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

    /// The head of a chunk, and its unwritten bytes.
    #[inline(always)]
    pub(super) fn rest(&mut self, chunk: usize) -> (&mut ChunkHead, &mut [u8]) {
        let head = &mut self.chunks[chunk];
        let at = chunk * CHUNK_BYTES;
        let written = usize::try_from(head.bytes).unwrap_or(CHUNK_BYTES);
        (head, &mut self.memory[at + written..at + CHUNK_BYTES])
    }

    /// All chunks with runs, sorted by their first tick.
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
            let first = u8::try_from(signals).unwrap_or(u8::MAX);
            found.extend(other.chunks().into_iter().map(|(head, bytes)| {
                (ChunkHead { series: head.series.saturating_add(first), ..head }, bytes)
            }));
            signals += other.open.len();
        }
        found.sort_by_key(|(head, _)| head.first_ticks);
        found
    }
}
