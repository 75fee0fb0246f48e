//! An emulated core. On CPUs that share no core, a thread that ran next to its neighbour is slowed
//! down as if both shared a core.
//!
//! The thread first works at full speed. Then it waits until it is as late as it would be on a
//! shared core. On a shared core, work next to the neighbour progresses at `1 / slowdown` of full
//! speed. So each stretch next to the neighbour adds a debt of `1 - 1 / slowdown` of its length.
//! This holds for working and for waiting. Waiting pays its whole length. Work that has its
//! neighbour from beginning to end takes `slowdown` times as long. If the neighbour stops in
//! between, the rest of the debt is paid at full speed.
//!
//! This module reads no clock and makes no system calls: [`Neighbour`]s do both. [`kernel`]
//! contains the neighbours that use the kernel's own account of what ran on a lane.

pub mod kernel;

use crate::units::Nanos;
use std::fmt;
use std::str::FromStr;

/// How many times as long work takes next to a neighbour: 1 to 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slowdown {
    milli: u32,
}

const ALONE_MILLI: u32 = 1_000;
const MOST_MILLI: u32 = 10_000;

impl FromStr for Slowdown {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "a slowdown is a factor from 1 to 10, as in 1.5".to_owned();
        let factor: f64 = text.parse().map_err(|_| expected())?;
        if !(1.0..=10.0).contains(&factor) {
            return Err(expected());
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most 10,000, just checked")]
        #[expect(clippy::cast_sign_loss, reason = "at least 1,000, just checked")]
        let milli = (factor * 1e3).round() as u32;
        Ok(Self { milli: milli.clamp(ALONE_MILLI, MOST_MILLI) })
    }
}

impl fmt::Display for Slowdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.factor().fmt(f)
    }
}

impl Slowdown {
    pub fn factor(self) -> f64 {
        f64::from(self.milli) / 1e3
    }

    /// How much work the thread did in a stretch, as the nanoseconds that it takes without a
    /// neighbour.
    pub fn work_ns(self, stretch: Stretch) -> Nanos {
        let Stretch { long_ns, beside_ns } = stretch;
        let beside = u128::from(beside_ns) * u128::from(ALONE_MILLI) / u128::from(self.milli);
        long_ns - beside_ns + u64::try_from(beside).expect("no more than `beside_ns`")
    }
}

/// The lanes that are treated as sharing a core. Each pair has a request lane and its batch lanes,
/// as in `0:1`, `0:1,2:3`, or `0:1,2,3` on a core of four lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// Pairs of request lane and batch lane. The batch lanes of a request lane follow each other.
    pairs: Vec<(u32, u32)>,
}

/// Higher than the CPU numbers of any machine.
const HIGHEST: u32 = 1 << 16;

impl FromStr for Lanes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || format!("`{text}` names no pairs of lanes: write them as in 0:1 or 0:1,2:3");
        let cpu = |text: &str| text.parse().ok().filter(|cpu| *cpu < HIGHEST).ok_or_else(expected);
        let (mut pairs, mut all, mut request) = (Vec::new(), Vec::new(), None);
        for word in text.split(',') {
            let batch = match word.split_once(':') {
                Some((before, batch)) => {
                    request = Some(cpu(before)?);
                    all.extend(request);
                    batch
                }
                None => word,
            };
            pairs.push((request.ok_or_else(expected)?, cpu(batch)?));
            all.push(cpu(batch)?);
        }
        all.sort_unstable();
        match all.windows(2).find(|two| two[0] == two[1]) {
            Some(two) => Err(format!("`{text}` names lane {} twice", two[0])),
            None => Ok(Self { pairs }),
        }
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = None;
        for (request, batch) in &self.pairs {
            let comma = if last.is_none() { "" } else { "," };
            match last.replace(request) == Some(request) {
                true => write!(f, "{comma}{batch}")?,
                false => write!(f, "{comma}{request}:{batch}")?,
            }
        }
        Ok(())
    }
}

impl Lanes {
    /// The batch lanes that share the core of a request lane.
    pub fn batches_of(&self, request: u32) -> Vec<u32> {
        self.pairs().filter(|pair| pair.0 == request).map(|(_, batch)| batch).collect()
    }

    /// The request lane that shares the core of a batch lane.
    pub fn request_of(&self, batch: u32) -> Option<u32> {
        self.pairs().find(|pair| pair.1 == batch).map(|(request, _)| request)
    }

    /// Every batch lane with its request lane.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().copied()
    }
}

/// A thread's clock, and how long its neighbour had run at that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub at_ns: Nanos,
    pub beside_ns: Nanos,
}

/// The time between two readings: its length, and for how much of it the neighbour ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    pub long_ns: Nanos,
    pub beside_ns: Nanos,
}

impl Reading {
    fn since(self, before: Self) -> Stretch {
        let long_ns = self.at_ns.saturating_sub(before.at_ns);
        // Clock and count are read one after the other, and a count may restart at 0.
        let beside_ns = self.beside_ns.saturating_sub(before.beside_ns).min(long_ns);
        Stretch { long_ns, beside_ns }
    }
}

impl Stretch {
    fn add(&mut self, other: Self) {
        self.long_ns += other.long_ns;
        self.beside_ns += other.beside_ns;
    }
}

/// How long a thread still has to wait. Each reading updates it.
#[derive(Clone, Copy, Debug)]
pub struct Debt {
    slowdown: Slowdown,
    last: Reading,
    /// In units of a nanosecond divided by the slowdown in thousandths, so that nothing is rounded.
    owed: u128,
}

impl Debt {
    pub fn begin(slowdown: Slowdown, now: Reading) -> Self {
        Self { slowdown, last: now, owed: 0 }
    }

    /// The thread worked since the last reading.
    pub fn worked(&mut self, now: Reading) -> Stretch {
        let stretch = self.pass(now);
        self.owed += u128::from(stretch.beside_ns) * u128::from(self.slowdown.milli - ALONE_MILLI);
        stretch
    }

    /// The thread waited since the last reading.
    pub fn waited(&mut self, now: Reading) -> Stretch {
        let stretch = self.worked(now);
        let paid = u128::from(stretch.long_ns) * u128::from(self.slowdown.milli);
        self.owed = self.owed.saturating_sub(paid);
        stretch
    }

    /// The thread was off its lane since the last reading. This time is neither work nor payment.
    pub fn pass(&mut self, now: Reading) -> Stretch {
        now.since(std::mem::replace(&mut self.last, now))
    }

    pub fn is_paid(&self) -> bool {
        self.owed == 0
    }
}

/// Reads a thread's clock and how long its neighbour ran.
pub trait Neighbour {
    fn look(&mut self) -> Reading;

    /// Updates the list of neighbours. It takes longer than `look`, and is needed less often.
    fn refresh(&mut self) {}
}

/// What a slowed thread did in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Work and waiting time.
    pub all: Stretch,
    /// How long the thread waited to be as late as on a shared core. `all` includes this time.
    pub added_ns: Nanos,
}

/// One thread on an emulated core.
#[derive(Debug)]
pub struct Slowed<N> {
    slowdown: Slowdown,
    neighbour: N,
    debt: Debt,
    tally: Tally,
}

/// A debt is paid in steps of this length. The caller can act between two steps.
const STEP_NS: Nanos = 1_000;

impl<N: Neighbour> Slowed<N> {
    pub fn new(slowdown: Slowdown, mut neighbour: N) -> Self {
        let debt = Debt::begin(slowdown, neighbour.look());
        Self { slowdown, neighbour, debt, tally: Tally::default() }
    }

    /// The time since the last look was not work, and pays for nothing.
    pub fn pass(&mut self) {
        self.debt.pass(self.neighbour.look());
    }

    /// The time since the last look was work. Call this during work or at its end.
    pub fn worked(&mut self) {
        let stretch = self.debt.worked(self.neighbour.look());
        self.tally.all.add(stretch);
    }

    /// Waits for one step. Returns false if no debt was left to pay.
    pub fn wait(&mut self) -> bool {
        let mut waited_ns = 0;
        while waited_ns < STEP_NS && !self.debt.is_paid() {
            let stretch = self.debt.waited(self.neighbour.look());
            self.tally.all.add(stretch);
            self.tally.added_ns += stretch.long_ns;
            waited_ns += stretch.long_ns;
        }
        waited_ns > 0
    }

    /// Call this from time to time, while the thread has no debt to pay.
    pub fn refresh(&mut self) {
        self.neighbour.refresh();
    }

    pub fn slowdown(&self) -> Slowdown {
        self.slowdown
    }

    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Instructions and cycles, as a core at 1 GHz would count them. The IPC is 1 without the
    /// neighbour, and 1 / slowdown next to it.
    pub fn counts(&self) -> (u64, u64) {
        (self.slowdown.work_ns(self.tally.all), self.tally.all.long_ns)
    }
}

#[cfg(test)]
mod tests;
