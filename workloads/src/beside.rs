//! An emulated core: on CPUs that share no core, a thread that ran beside its neighbour is slowed
//! down as if they shared one.
//!
//! The thread works at full speed, and afterwards does nothing until it is as late as it would have
//! been. On a shared core, time beside the neighbour does `1 / slowdown` of its length in work. So
//! of each stretch beside the neighbour, whether the thread works or waits, `1 - 1 / slowdown` is
//! owed; waiting pays all of its length. What runs beside its neighbour from beginning to end takes
//! `slowdown` times as long, and what the neighbour leaves in the middle is paid at full speed.
//!
//! No clock here and no kernel: [`Neighbour`]s read both. [`kernel`] has those that go by the
//! kernel's own count of what ran on a lane.

pub mod kernel;

use crate::units::Nanos;
use std::fmt;
use std::str::FromStr;

/// How many times as long work takes beside a neighbour: 1 to 10.
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

    /// How much work a stretch is, in nanoseconds of work alone.
    pub fn work_ns(self, stretch: Stretch) -> Nanos {
        let Stretch { long_ns, beside_ns } = stretch;
        let beside = u128::from(beside_ns) * u128::from(ALONE_MILLI) / u128::from(self.milli);
        long_ns - beside_ns + u64::try_from(beside).expect("no more than `beside_ns`")
    }
}

/// Which lanes are taken to share a core: pairs of a request lane and its batch lanes, as in `0:1`,
/// `0:1,2:3`, or `0:1,2,3` on a core of four lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// Every batch lane after its request lane, those of a request lane in one row.
    pairs: Vec<(u32, u32)>,
}

/// Beyond any machine's.
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
    /// The batch lanes beside a request lane.
    pub fn batches_of(&self, request: u32) -> Vec<u32> {
        self.pairs().filter(|pair| pair.0 == request).map(|(_, batch)| batch).collect()
    }

    /// The request lane beside a batch lane.
    pub fn request_of(&self, batch: u32) -> Option<u32> {
        self.pairs().find(|pair| pair.1 == batch).map(|(request, _)| request)
    }

    /// Every batch lane with its request lane.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.pairs.iter().copied()
    }
}

/// A thread's clock, and how long its neighbour had run by then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub at_ns: Nanos,
    pub beside_ns: Nanos,
}

/// What lies between two readings: how long it is, and how much of that the neighbour ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    pub long_ns: Nanos,
    pub beside_ns: Nanos,
}

impl Reading {
    fn since(self, before: Self) -> Stretch {
        let long_ns = self.at_ns.saturating_sub(before.at_ns);
        // Clock and count are read one after the other, and a count may begin anew.
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

/// What a thread still has to wait, from one reading to the next.
#[derive(Clone, Copy, Debug)]
pub struct Debt {
    slowdown: Slowdown,
    last: Reading,
    /// In units of a nanosecond divided by the slowdown in thousandths: nothing is rounded.
    owed: u128,
}

impl Debt {
    pub fn begin(slowdown: Slowdown, now: Reading) -> Self {
        Self { slowdown, last: now, owed: 0 }
    }

    /// Since the last reading the thread worked.
    pub fn worked(&mut self, now: Reading) -> Stretch {
        let stretch = self.pass(now);
        self.owed += u128::from(stretch.beside_ns) * u128::from(self.slowdown.milli - ALONE_MILLI);
        stretch
    }

    /// Since the last reading the thread did nothing.
    pub fn waited(&mut self, now: Reading) -> Stretch {
        let stretch = self.worked(now);
        let paid = u128::from(stretch.long_ns) * u128::from(self.slowdown.milli);
        self.owed = self.owed.saturating_sub(paid);
        stretch
    }

    /// Since the last reading the thread did not have its lane: no work, and nothing paid.
    pub fn pass(&mut self, now: Reading) -> Stretch {
        now.since(std::mem::replace(&mut self.last, now))
    }

    pub fn is_paid(&self) -> bool {
        self.owed == 0
    }
}

/// Reads a thread's clock and what ran beside it.
pub trait Neighbour {
    fn look(&mut self) -> Reading;

    /// Looks anew which neighbours there are: what takes longer than a look, and need not be now.
    fn refresh(&mut self) {}
}

/// What a slowed thread did in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Work and waiting.
    pub all: Stretch,
    /// Of that, how long it waited to be as late as on a shared core.
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

/// A debt is paid in steps of this length; between two of them the caller has its say.
const STEP_NS: Nanos = 1_000;

impl<N: Neighbour> Slowed<N> {
    pub fn new(slowdown: Slowdown, mut neighbour: N) -> Self {
        let debt = Debt::begin(slowdown, neighbour.look());
        Self { slowdown, neighbour, debt, tally: Tally::default() }
    }

    /// What was since the last look was no work, and pays for nothing.
    pub fn pass(&mut self) {
        self.debt.pass(self.neighbour.look());
    }

    /// Work ends, or is in its midst.
    pub fn worked(&mut self) {
        let stretch = self.debt.worked(self.neighbour.look());
        self.tally.all.add(stretch);
    }

    /// Waits for one step. False: there was nothing left to wait for.
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

    /// To be called now and then, when nothing is waited for.
    pub fn refresh(&mut self) {
        self.neighbour.refresh();
    }

    pub fn slowdown(&self) -> Slowdown {
        self.slowdown
    }

    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Instructions and cycles, as a core that runs at 1 GHz would count them: an IPC of 1 alone,
    /// and of 1 / slowdown beside the neighbour.
    pub fn counts(&self) -> (u64, u64) {
        (self.slowdown.work_ns(self.tally.all), self.tally.all.long_ns)
    }
}

#[cfg(test)]
mod tests;
