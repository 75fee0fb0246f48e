//! Records one signal: joins equal samples to a run, and encodes each run when it ends.

use super::file::Recording;
use super::form::{
    GAP, Kind, NOT_RUNNING, NUMBER_BYTES, OTHER, Run, State, TAGS_MAX, VALUE, put, zigzag,
};
use super::join::PROVEN;
use super::pool::{Full, Pool};

/// The maximum number of bytes of an encoded run: its length, its samples with its state, and a new
/// tag's number and value.
const RUN_BYTES: usize = 4 * NUMBER_BYTES;

/// The encoder of one signal.
#[derive(Debug)]
pub struct Series {
    index: u8,
    unit_ticks: u64,
    /// The current run, which has not ended yet.
    now: Run,
    chunk: Option<usize>,
    /// The end and the value of the last encoded run. The next run is encoded as a difference from
    /// them.
    written_ticks: u64,
    written_value: u64,
    tags: Option<Tags>,
    /// Whether each sample becomes a separate run.
    singly: bool,
}

impl Series {
    /// A series that begins with a gap.
    pub fn new(index: u8, kind: Kind, unit_ticks: u64, start_ticks: u64) -> Self {
        Self {
            index,
            unit_ticks: unit_ticks.max(1),
            now: Run { start_ticks, state: State::Gap, samples: 0 },
            chunk: None,
            written_ticks: start_ticks,
            written_value: 0,
            tags: (kind == Kind::Tags).then(Tags::new),
            singly: false,
        }
    }

    /// Makes each sample a separate run.
    pub fn singly(self) -> Self {
        Self { singly: true, ..self }
    }

    /// Encodes runs of an existing recording. The last run only marks the end.
    pub(super) fn write_all(mut self, runs: &[Run], pool: &mut Pool) -> Result<(), Full> {
        let ends = runs.iter().skip(1).map(|run| run.start_ticks);
        runs.iter().zip(ends.chain(runs.last().map(|run| run.start_ticks))).try_for_each(
            |(run, end)| {
                self.now = *run;
                self.write(end, pool)
            },
        )
    }

    /// Adds a sample.
    #[inline(always)]
    pub fn see(&mut self, at: u64, state: State, pool: &mut Pool) -> Result<(), Full> {
        if state == self.now.state && !self.singly {
            self.now.samples += 1;
            return Ok(());
        }
        self.change(at, state, pool)
    }

    /// Begins a gap: no samples are taken from `at` on. With `proven`, nothing changes until the
    /// next sample.
    pub fn gap(&mut self, at: u64, proven: bool, pool: &mut Pool) -> Result<(), Full> {
        if self.now.state == State::Gap {
            return Ok(());
        }
        let gap = Run { start_ticks: at, state: State::Gap, samples: u64::from(proven) * PROVEN };
        if self.now.start_ticks == at {
            // The sample before the gap is the only one of its run, so it becomes part of the gap.
            // The observer may have been delayed between the clock and the word, and have read the
            // word during the gap.
            self.now = gap;
            return Ok(());
        }
        self.write(at, pool)?;
        self.now = gap;
        Ok(())
    }

    /// The current state.
    pub fn state(&self) -> State {
        self.now.state
    }

    /// Ends the recording of this signal.
    pub fn end(&mut self, at: u64, pool: &mut Pool) -> Result<(), Full> {
        self.gap(at, false, pool)?;
        self.write(at, pool)
    }

    /// Begins a new chunk with the next run, after the pool was cleared.
    pub fn restart_chunk(&mut self) {
        self.chunk = None;
    }

    fn change(&mut self, at: u64, state: State, pool: &mut Pool) -> Result<(), Full> {
        self.write(at, pool)?;
        self.now = Run { start_ticks: at, state, samples: 1 };
        Ok(())
    }

    /// Encodes the current run, which ends at `end_ticks`.
    fn write(&mut self, end_ticks: u64, pool: &mut Pool) -> Result<(), Full> {
        let Run { start_ticks, state, samples } = self.now;
        let chunk = match self.chunk {
            Some(chunk) if pool.rest(chunk).1.len() >= RUN_BYTES => chunk,
            _ => {
                // In whole units of the clock, so that a moment has the same time in all signals
                // and chunks.
                let first_ticks = start_ticks - start_ticks % self.unit_ticks;
                let chunk = pool.begin(self.index, first_ticks)?;
                self.chunk = Some(chunk);
                self.written_ticks = first_ticks;
                self.written_value = 0;
                if let Some(tags) = &mut self.tags {
                    tags.forget();
                }
                chunk
            }
        };
        let steps = end_ticks.saturating_sub(self.written_ticks) / self.unit_ticks;
        // The remainder of the division is added to the next length.
        self.written_ticks += steps * self.unit_ticks;
        let (code, value, new_tag) = match (state, &mut self.tags) {
            (State::Gap, _) => (GAP, None, None),
            (State::NotRunning, _) => (NOT_RUNNING, None, None),
            (State::Other, _) => (OTHER, None, None),
            (State::Value(value), None) => {
                let difference = value.wrapping_sub(self.written_value);
                self.written_value = value;
                (VALUE, Some(zigzag(difference)), None)
            }
            (State::Value(value), Some(tags)) => match tags.find(value) {
                Some((number, is_new)) => (VALUE, Some(number), is_new.then_some(value)),
                None => (OTHER, None, None),
            },
        };
        let (head, rest) = pool.rest(chunk);
        let mut at = put(steps, rest);
        at += put(samples.min(u64::MAX >> 2) << 2 | code, &mut rest[at..]);
        for number in [value, new_tag].into_iter().flatten() {
            at += put(number, &mut rest[at..]);
        }
        head.bytes += u32::try_from(at).unwrap_or(0);
        head.runs += 1;
        Ok(())
    }
}

impl Recording {
    /// Encodes the runs again, to write a recording that was cut to a part.
    pub fn to_pool(&self) -> Pool {
        let mut pool = Pool::growing(self.runs.len());
        let signals = self.head.signals.iter().zip(&self.runs).zip(0..);
        for ((signal, runs), index) in signals {
            let start_ticks = runs.first().map_or(0, |run| run.start_ticks);
            let series = Series::new(index, signal.kind, self.head.clock.unit(), start_ticks);
            series.write_all(runs, &mut pool).expect("a pool that grows is never full");
        }
        pool
    }
}

/// The number of slots of the hash table of tags: a power of two. Half of them stay free.
const SLOTS: usize = 2 * TAGS_MAX;

/// The tags of a chunk, numbered in the order of their definition. Each chunk has its own numbers,
/// so that it can be read separately.
#[derive(Debug)]
struct Tags {
    /// Value, number, and the chunk that defines it.
    slots: Vec<(u64, u32, u32)>,
    count: u32,
    chunk: u32,
}

impl Tags {
    fn new() -> Self {
        Self { slots: vec![(0, 0, 0); SLOTS], count: 0, chunk: 1 }
    }

    fn forget(&mut self) {
        self.count = 0;
        self.chunk = self.chunk.wrapping_add(1);
    }

    /// Returns the number of a tag, and whether this is its definition. Returns `None` if the chunk
    /// has no free number.
    fn find(&mut self, value: u64) -> Option<(u64, bool)> {
        let hash = value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let mut at = usize::try_from(hash).unwrap_or(0) % SLOTS;
        loop {
            let (known, number, chunk) = self.slots[at];
            if chunk != self.chunk {
                if self.count as usize >= TAGS_MAX {
                    return None;
                }
                let number = self.count;
                self.slots[at] = (value, number, self.chunk);
                self.count += 1;
                return Some((number.into(), true));
            }
            if known == value {
                return Some((number.into(), false));
            }
            at = (at + 1) % SLOTS;
        }
    }
}
