//! The clock of samples: the time stamp counter (TSC), its rate and its step.
//!
//! A counter that stops or changes its rate is useless here, so the CPU must report that its TSC is
//! invariant. The kernel checks that the counters of all CPUs agree, and offers the TSC as a clock
//! source only if they do.

use std::arch::x86_64::{__cpuid, __rdtscp, _mm_lfence, _rdtsc};
use std::collections::BTreeMap;
use std::fs;
use std::time::SystemTime;

use elfen_console::duration::number;
use elfen_rt::clock::monotonic_ns;

/// How long the rate is measured before a run. It is measured again over the whole run.
const CALIBRATION_NS: u64 = 4_000_000;

/// Reads the time. The CPU may execute later loads earlier.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: every x86-64 has a time stamp counter, and Linux lets programs read it.
    unsafe { _rdtsc() }
}

/// Reads the time before any later load.
#[inline(always)]
pub fn before() -> u64 {
    let ticks = now();
    fence();
    ticks
}

/// Keeps later instructions from executing before all earlier ones have completed, even
/// speculatively.
#[inline(always)]
pub fn fence() {
    // SAFETY: every x86-64 has SSE2.
    unsafe { _mm_lfence() };
}

/// Reads the time after all earlier loads.
#[inline(always)]
pub fn after() -> u64 {
    let mut cpu = 0;
    // SAFETY: x86-64 CPUs have had rdtscp since 2007; `Clock::of_this_machine` checks for it.
    unsafe { __rdtscp(&mut cpu) }
}

/// Why samples cannot be timed on this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClockError {
    #[error("this CPU's time stamp counter may stop or change its rate")]
    NotInvariant,
    #[error("the kernel does not offer the time stamp counter as a clock source")]
    NotTrusted,
    #[error("this CPU has no rdtscp instruction")]
    NoRdtscp,
}

/// The rate of the counter, its step, and the unit of recorded times.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Clock {
    pub ticks_per_second: u64,
    /// The greatest common divisor of differences between readings.
    pub step_ticks: u64,
    /// Recorded times are multiples of this; 0 stands for `step_ticks`.
    pub unit_ticks: u64,
}

/// The smallest unit of recorded times. It is shorter than the time between two samples and than
/// the transfer of a cache line. A finer unit would cost a byte per run and carry no information.
const UNIT_NS: u64 = 8;
/// The minimum number of units per period. A run ends somewhere between two samples, which are half
/// a period to one and a half periods apart. An eighth of a period is small compared with that.
/// Most runs then have a length of a few dozen units.
const UNITS_A_PERIOD: u64 = 8;

impl Clock {
    /// Measures the counter, which takes 4 ms.
    pub fn of_this_machine() -> Result<Self, ClockError> {
        check_invariant()?;
        let rate = Rate::begin();
        let step_ticks = measure_step();
        while monotonic_ns() - rate.at_ns < CALIBRATION_NS {
            std::hint::spin_loop();
        }
        let ticks_per_second = rate.ticks_per_second();
        Ok(Self { ticks_per_second, step_ticks, unit_ticks: 0 }.in_units(0))
    }

    /// Chooses the unit of recorded times for this period.
    pub fn in_units(self, period_ticks: u64) -> Self {
        let step = self.step_ticks.max(1);
        let unit = self.ticks(UNIT_NS).max(period_ticks / UNITS_A_PERIOD);
        Self { unit_ticks: (unit / step * step).max(step), ..self }
    }

    /// The unit of recorded times, in ticks.
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

    /// Nanoseconds, with their fraction.
    pub fn exact_ns(&self, ticks: u64) -> f64 {
        number(ticks) * 1e9 / number(self.ticks_per_second.max(1))
    }
}

/// Bits of CPUID: the first in leaf 80000007H, EDX, and the second in leaf 80000001H, EDX.
const INVARIANT: u32 = 1 << 8;
const RDTSCP: u32 = 1 << 27;
const KERNELS_CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// Checks that the counter of this machine can time samples.
pub fn check_invariant() -> Result<(), ClockError> {
    if __cpuid(0x8000_0001).edx & RDTSCP == 0 {
        return Err(ClockError::NoRdtscp);
    }
    if __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & INVARIANT != 0 {
        return Ok(());
    }
    // Hypervisors hide the bit. The kernel offers the counter as a clock source only if it found no
    // fault with it.
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
        let (at_ticks, at_ns) = read_both();
        Self { at_ticks, at_ns }
    }

    /// The rate since `begin`, which should be milliseconds ago.
    pub fn ticks_per_second(&self) -> u64 {
        let (ticks, ns) = read_both();
        let (ticks, ns) = (ticks - self.at_ticks, (ns - self.at_ns).max(1));
        u64::try_from(u128::from(ticks) * 1_000_000_000 / u128::from(ns)).unwrap_or(u64::MAX)
    }
}

/// Reads the counter (in ticks) and CLOCK_MONOTONIC (in nanoseconds) at one moment. It tries
/// several times and returns the readings that are closest together, because interrupts may delay a
/// try.
pub fn read_both() -> (u64, u64) {
    let one = |_| {
        let (first, ns, last) = (before(), monotonic_ns(), before());
        (last - first, first + (last - first) / 2, ns)
    };
    let (_, ticks, ns) = (0..16).map(one).min().expect("sixteen tries");
    (ticks, ns)
}

/// A moment, by the counter and by two clocks of the kernel.
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
        let (ticks, at_ns) = read_both();
        let since_1970 = || {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
        };
        // The closest of several tries: see `read_both`.
        let one = |_| {
            let (before, realtime_ns, after) = (monotonic_ns(), since_1970(), monotonic_ns());
            (after - before, realtime_ns.saturating_sub(before + (after - before) / 2))
        };
        let (_, apart_ns) = (0..16).map(one).min().expect("sixteen tries");
        Self { ticks, monotonic_ns: at_ns, realtime_ns: at_ns + apart_ns }
    }

    /// The moment when the counter was at `ticks`, earlier or later.
    pub fn at(self, ticks: u64, clock: &Clock) -> Self {
        let shift = |ns: u64| match ticks.checked_sub(self.ticks) {
            Some(later) => ns.saturating_add(clock.ns(later)),
            None => ns.saturating_sub(clock.ns(self.ticks - ticks)),
        };
        let (monotonic_ns, realtime_ns) = (shift(self.monotonic_ns), shift(self.realtime_ns));
        Self { ticks, monotonic_ns, realtime_ns }
    }
}

/// The greatest common divisor of the frequent differences between readings. Rare differences are
/// ignored, because the host may move the virtual CPU between two readings.
fn measure_step() -> u64 {
    let readings: Vec<u64> = (0..4096).map(|_| before()).collect();
    let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
    for pair in readings.windows(2) {
        *counts.entry(pair[1].wrapping_sub(pair[0])).or_default() += 1;
    }
    counts.remove(&0);
    const OFTEN: u32 = 40;
    let often = counts.iter().filter(|(_, count)| **count >= OFTEN);
    let often = often.map(|(difference, _)| *difference);
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
    fn ticks_and_nanoseconds_convert_both_ways() {
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
