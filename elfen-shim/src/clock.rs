//! The clock of samples: the time stamp counter, its rate and its step.
//!
//! A counter that stops or changes its rate measures nothing, so the CPU has to say that it does
//! neither. Between two CPUs it is the kernel that keeps them together, and that uses it as its own
//! clock only then.

use std::arch::x86_64::{__cpuid, __rdtscp, _mm_lfence, _rdtsc};
use std::collections::BTreeMap;
use std::fs;
use std::time::SystemTime;

use elfen_console::duration::number;
use elfen_rt::clock::monotonic_ns;

/// How long the rate is measured before a run; over a run it is measured again.
const CALIBRATION_NS: u64 = 4_000_000;

/// The time; what is read next may be read earlier.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: every x86-64 has a time stamp counter, and Linux lets programs read it.
    unsafe { _rdtsc() }
}

/// The time, before what is read next.
#[inline(always)]
pub fn before() -> u64 {
    let ticks = now();
    fence();
    ticks
}

/// What is behind it does not begin before all before it has ended, not even on a guess.
#[inline(always)]
pub fn fence() {
    // SAFETY: every x86-64 has SSE2.
    unsafe { _mm_lfence() };
}

/// The time, after what was read before.
#[inline(always)]
pub fn after() -> u64 {
    let mut cpu = 0;
    // SAFETY: CPUs that Linux runs on as x86-64 have rdtscp since 2007; `of_this_machine` asks.
    unsafe { __rdtscp(&mut cpu) }
}

/// Why there is no clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClockError {
    #[error("this CPU's time stamp counter may stop or change its rate")]
    NotInvariant,
    #[error("the kernel does not trust the time stamp counter: it is not its clock")]
    NotTrusted,
    #[error("this CPU has no rdtscp instruction")]
    NoRdtscp,
}

/// Rate and step.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Clock {
    pub ticks_per_second: u64,
    /// Differences of two readings are multiples of this.
    pub step_ticks: u64,
    /// What times of a recording are multiples of, if that is more than a step; earlier recordings
    /// have steps.
    #[serde(default)]
    pub unit_ticks: u64,
}

/// Finer than any two samples are apart, and than a line is from CPU to CPU, whatever the clock can
/// tell apart: what is written finer takes a byte a run, and says nothing.
const UNIT_NS: u64 = 8;
/// In a period at least. A run ends somewhere between two samples, which are half a period to one
/// and a half apart: an eighth of one is little beside that, and most lengths are of a few dozen.
const UNITS_A_PERIOD: u64 = 8;

impl Clock {
    /// Takes 4 ms.
    pub fn of_this_machine() -> Result<Self, ClockError> {
        invariant()?;
        let rate = Rate::begin();
        let step_ticks = step();
        while monotonic_ns() - rate.at_ns < CALIBRATION_NS {
            std::hint::spin_loop();
        }
        let ticks_per_second = rate.ticks_per_second();
        Ok(Self { ticks_per_second, step_ticks, unit_ticks: 0 }.in_units(0))
    }

    /// With times of recordings as coarse as they may be where samples are so far apart.
    pub fn in_units(self, period_ticks: u64) -> Self {
        let step = self.step_ticks.max(1);
        let unit = self.ticks(UNIT_NS).max(period_ticks / UNITS_A_PERIOD);
        Self { unit_ticks: (unit / step * step).max(step), ..self }
    }

    /// Of times in a recording.
    pub fn unit(&self) -> u64 {
        self.unit_ticks.max(self.step_ticks)
    }

    pub fn ns(&self, ticks: u64) -> u64 {
        let ns = u128::from(ticks) * 1_000_000_000 / u128::from(self.ticks_per_second.max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    pub fn ticks(&self, ns: u64) -> u64 {
        let ticks = u128::from(ns) * u128::from(self.ticks_per_second) / 1_000_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    pub fn step_ns(&self) -> f64 {
        self.exact_ns(self.step_ticks)
    }

    /// With what is less than a nanosecond.
    pub fn exact_ns(&self, ticks: u64) -> f64 {
        number(ticks) * 1e9 / number(self.ticks_per_second.max(1))
    }
}

/// CPUID leaf 80000007H, EDX; and 80000001H, EDX.
const INVARIANT: u32 = 1 << 8;
const RDTSCP: u32 = 1 << 27;
const KERNELS_CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// Whether samples can be told apart by the counter here.
pub fn invariant() -> Result<(), ClockError> {
    if __cpuid(0x8000_0001).edx & RDTSCP == 0 {
        return Err(ClockError::NoRdtscp);
    }
    if __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & INVARIANT != 0 {
        return Ok(());
    }
    // Hypervisors hide the bit. The kernel offers the counter as a clock only if it found no fault.
    match fs::read_to_string(KERNELS_CLOCK) {
        Ok(clocks) if clocks.split_whitespace().any(|clock| clock == "tsc") => Ok(()),
        Ok(_) => Err(ClockError::NotTrusted),
        Err(_) => Err(ClockError::NotInvariant),
    }
}

/// A measurement of the counter's rate.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    at_ticks: u64,
    at_ns: u64,
}

impl Rate {
    pub fn begin() -> Self {
        let (at_ticks, at_ns) = both();
        Self { at_ticks, at_ns }
    }

    /// Since it began, which must be a while ago.
    pub fn ticks_per_second(&self) -> u64 {
        let (ticks, ns) = both();
        let (ticks, ns) = (ticks - self.at_ticks, (ns - self.at_ns).max(1));
        u64::try_from(u128::from(ticks) * 1_000_000_000 / u128::from(ns)).unwrap_or(u64::MAX)
    }
}

/// Both clocks at one moment, in ticks and in nanoseconds of the kernel's: the nearest of some
/// tries, as any may be interrupted.
pub fn both() -> (u64, u64) {
    let one = |_| {
        let (first, ns, last) = (before(), monotonic_ns(), before());
        (last - first, first + (last - first) / 2, ns)
    };
    let (_, ticks, ns) = (0..16).map(one).min().expect("sixteen tries");
    (ticks, ns)
}

/// A moment by the counter and by both of the kernel's clocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Moment {
    pub ticks: u64,
    /// CLOCK_MONOTONIC.
    pub monotonic_ns: u64,
    /// CLOCK_REALTIME: since 1970, UTC.
    pub realtime_ns: u64,
}

impl Moment {
    pub fn now() -> Self {
        let (ticks, at_ns) = both();
        let since_1970 = || {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
        };
        // The nearest of some tries: see `both`.
        let one = |_| {
            let (before, realtime_ns, after) = (monotonic_ns(), since_1970(), monotonic_ns());
            (after - before, realtime_ns.saturating_sub(before + (after - before) / 2))
        };
        let (_, apart_ns) = (0..16).map(one).min().expect("sixteen tries");
        Self { ticks, monotonic_ns: at_ns, realtime_ns: at_ns + apart_ns }
    }

    /// The same clocks when the counter was at `ticks`, earlier or later.
    pub fn at(self, ticks: u64, clock: &Clock) -> Self {
        let shift = |ns: u64| match ticks.checked_sub(self.ticks) {
            Some(later) => ns.saturating_add(clock.ns(later)),
            None => ns.saturating_sub(clock.ns(self.ticks - ticks)),
        };
        let (monotonic_ns, realtime_ns) = (shift(self.monotonic_ns), shift(self.realtime_ns));
        Self { ticks, monotonic_ns, realtime_ns }
    }
}

/// What the differences that are met most are multiples of: a few others come from the host, which
/// may move us in between.
fn step() -> u64 {
    let readings: Vec<u64> = (0..4096).map(|_| before()).collect();
    let mut met: BTreeMap<u64, u32> = BTreeMap::new();
    for pair in readings.windows(2) {
        *met.entry(pair[1].wrapping_sub(pair[0])).or_default() += 1;
    }
    met.remove(&0);
    const OFTEN: u32 = 40;
    let often = met.iter().filter(|(_, count)| **count >= OFTEN).map(|(difference, _)| *difference);
    often.fold(0, common_divisor).max(1)
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_both_ways() {
        let of = |step_ticks| Clock { ticks_per_second: 2_600_000_000, step_ticks, unit_ticks: 0 };
        let units = |period| [1, 2, 3, 26].map(|step| of(step).in_units(period).unit());
        assert_eq!((units(0), of(26).unit()), ([20, 20, 18, 26], 26));
        assert_eq!(units(2_600), [325, 324, 324, 312]);
        let clock = of(26);
        assert_eq!((clock.ticks(1_000), clock.ns(2_600)), (2_600, 1_000));
        assert_eq!((clock.ticks(0), clock.ns(0), clock.step_ns()), (0, 0, 10.0));
        assert_eq!(clock.ns(u64::MAX) / 1_000_000_000, u64::MAX / 2_600_000_000, "no overflow");
        assert_eq!(
            [(0, 26), (26, 0), (52, 78), (7, 3)].map(|(a, b)| common_divisor(a, b)),
            [26, 26, 26, 1]
        );
    }

    #[test]
    fn moments_are_the_same_on_all_clocks() {
        let clock = Clock { ticks_per_second: 2_000_000_000, step_ticks: 1, unit_ticks: 0 };
        let moment = Moment { ticks: 1_000, monotonic_ns: 50_000, realtime_ns: 9_000_000 };
        let of = |moment: Moment| (moment.ticks, moment.monotonic_ns, moment.realtime_ns);
        assert_eq!(of(moment.at(3_000, &clock)), (3_000, 51_000, 9_001_000));
        assert_eq!(of(moment.at(200, &clock)), (200, 49_600, 8_999_600));
        let now = Moment::now();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let off = since.as_nanos().abs_diff(now.realtime_ns.into());
        assert!(off < 60_000_000_000 && now.monotonic_ns <= monotonic_ns(), "{now:?}");
    }

    #[test]
    fn this_machines_clock_runs() {
        let clock = Clock::of_this_machine().unwrap();
        assert!(clock.ticks_per_second > 100_000_000, "{clock:?}");
        let (first, last) = (before(), after());
        assert!(last >= first && clock.step_ticks >= 1, "{clock:?}");
    }
}
