//! Whether the request lanes idle at all: a service that polls leaves nothing to borrow.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use crate::host::cpulist::CpuSet;

/// Looks over which a lane must idle at least one part in a hundred.
const LOOKS: u32 = 10;
/// A verdict on less time than this is chance: ticks are 10 ms.
const FEWEST_TICKS: u64 = 50;

/// A lane without idle time, and whose doing that is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NeverIdle {
    pub(crate) cpu: u32,
    /// The service's own share of the time, in percent; the rest is others'.
    pub(crate) service_percent: u64,
}

/// Time of one CPU since boot, in clock ticks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct CpuTime {
    pub(super) idle: u64,
    pub(super) all: u64,
}

impl CpuTime {
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            idle: self.idle.saturating_sub(before.idle),
            all: self.all.saturating_sub(before.all),
        }
    }
}

/// The times of these CPUs, in their order; zero for one that is offline.
pub(super) fn times(cpus: &CpuSet) -> io::Result<Vec<CpuTime>> {
    let text = fs::read_to_string("/proc/stat")?;
    Ok(cpus.iter().map(|cpu| parse(&text, cpu).unwrap_or_default()).collect())
}

/// `cpuN user nice system idle iowait irq softirq steal guest guest_nice`; guests are in user.
fn parse(text: &str, cpu: u32) -> Option<CpuTime> {
    let name = format!("cpu{cpu}");
    let line = text.lines().find(|line| line.split(' ').next() == Some(&name))?;
    let fields: Vec<u64> =
        line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    let idle = fields.get(3)? + fields.get(4).unwrap_or(&0);
    Some(CpuTime { idle, all: fields.iter().take(8).sum() })
}

/// The lanes' times and the service's, at some moment.
#[derive(Debug)]
struct Mark {
    lanes: Vec<CpuTime>,
    service_ticks: u64,
}

/// Compares the lanes every ten looks.
#[derive(Debug)]
pub(super) struct IdleWatch {
    cpus: CpuSet,
    mark: Option<Mark>,
    looks: u32,
    told: BTreeSet<u32>,
}

impl IdleWatch {
    pub(super) fn new(cpus: CpuSet) -> Self {
        Self { cpus, mark: None, looks: 0, told: BTreeSet::new() }
    }

    /// The lanes that did not idle, each told once. `service_ticks` is what the service's processes
    /// have consumed so far.
    pub(super) fn look(&mut self, lanes: &[CpuTime], service_ticks: u64) -> Vec<NeverIdle> {
        self.looks += 1;
        let due = self.looks.is_multiple_of(LOOKS);
        let Some(mark) = &self.mark else {
            self.mark = Some(Mark { lanes: lanes.to_vec(), service_ticks });
            return Vec::new();
        };
        if !due {
            return Vec::new();
        }
        let consumed = service_ticks.saturating_sub(mark.service_ticks);
        let spent: Vec<CpuTime> =
            lanes.iter().zip(&mark.lanes).map(|(now, before)| now.since(*before)).collect();
        let lane_ticks = spent.iter().map(|time| time.all).sum::<u64>().max(1);
        let service_percent = (consumed * 100 / lane_ticks).min(100);
        let never = |(cpu, time): (u32, CpuTime)| {
            (time.all >= FEWEST_TICKS && time.idle * 100 < time.all).then_some(cpu)
        };
        let never: Vec<u32> = self.cpus.iter().zip(spent).filter_map(never).collect();
        self.mark = Some(Mark { lanes: lanes.to_vec(), service_ticks });
        let untold = never.into_iter().filter(|&cpu| self.told.insert(cpu));
        untold.map(|cpu| NeverIdle { cpu, service_percent }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_those_of_proc_stat() {
        let text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 40 5 6 7 8 1 1\ncpu10 1 0 0 2\nintr 5\n";
        assert_eq!(parse(text, 0), Some(CpuTime { idle: 45, all: 72 }));
        assert_eq!(parse(text, 10), Some(CpuTime { idle: 2, all: 3 }));
        assert_eq!(parse(text, 1), None);
    }

    /// Ten looks at two lanes, a second each of 100 ticks: what they said.
    fn ten_looks(idle: [u64; 2], service: u64) -> Vec<NeverIdle> {
        let mut watch = IdleWatch::new([0, 2].into_iter().collect());
        let mut said = Vec::new();
        for look in 0..30 {
            let lanes = idle.map(|idle| CpuTime { idle: idle * look, all: 100 * look });
            said.extend(watch.look(&lanes, service * look));
        }
        said
    }

    /// Goal: a lane that never idles is told once, with whose doing it is; one that idles is not.
    /// Method: a polling service, a busy neighbour, and a lane with one idle tick in a hundred.
    #[test]
    fn polling_is_told_once() {
        assert_eq!(ten_looks([0, 50], 100), [NeverIdle { cpu: 0, service_percent: 50 }]);
        assert_eq!(ten_looks([0, 50], 4), [NeverIdle { cpu: 0, service_percent: 2 }]);
        let both = [0, 2].map(|cpu| NeverIdle { cpu, service_percent: 100 });
        assert_eq!(ten_looks([0, 0], 200), both);
        assert_eq!(ten_looks([1, 99], 100), []);
    }

    /// Goal: no verdict on too short a time. Method: looks a tick apart.
    #[test]
    fn short_windows_say_nothing() {
        let mut watch = IdleWatch::new([0].into_iter().collect());
        for look in 0..30 {
            assert_eq!(watch.look(&[CpuTime { idle: 0, all: look }], look), []);
        }
    }
}
