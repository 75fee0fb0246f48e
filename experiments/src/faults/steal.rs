//! The time that the hypervisor stole from a CPU during a recording: by events, and by the kernel's
//! own count in ticks of 10 ms.

use std::fs;

use elfen_rt::signal::event::Kind;
use elfen_tailor::trace::Trace;
use serde::Serialize;

const TICK_NS: u64 = 10_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Stolen {
    pub by_events_ns: u64,
    pub by_kernel_ns: u64,
}

impl Stolen {
    /// The stolen time since the kernel's count was `before_ns`.
    pub(super) fn since(before_ns: u64, cpu: u32, trace: &Trace) -> Self {
        let events = trace.events.get(cpu as usize).map_or(&[][..], Vec::as_slice);
        let mut seen = events.iter().filter_map(|event| match event.kind {
            Kind::Switch(switch) => Some(switch.stolen_ns),
            _ => None,
        });
        let first_ns = seen.next().unwrap_or(0);
        let by_events_ns = seen.next_back().unwrap_or(first_ns).saturating_sub(first_ns);
        Self { by_events_ns, by_kernel_ns: by_kernel_ns(cpu).saturating_sub(before_ns) }
    }

    /// Whether both agree within two of the kernel's ticks.
    pub fn agrees(self) -> bool {
        self.by_events_ns.abs_diff(self.by_kernel_ns) <= 2 * TICK_NS
    }

    pub(super) fn add(&mut self, other: Self) {
        self.by_events_ns += other.by_events_ns;
        self.by_kernel_ns += other.by_kernel_ns;
    }
}

/// The kernel's count for this CPU so far.
pub(super) fn by_kernel_ns(cpu: u32) -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().find(|line| line.split(' ').next() == Some(&format!("cpu{cpu}")));
    line.and_then(ticks).map_or(0, |ticks| ticks * TICK_NS)
}

/// `cpu0 user nice system idle iowait irq softirq steal ..`
fn ticks(line: &str) -> Option<u64> {
    line.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::event::{Event, Switch};
    use elfen_tailor::trace::Header;

    #[test]
    fn stolen_time_is_counted_from_the_first_switch_to_the_last() {
        let mut trace = Trace::new(Header { cpus: 1, ..Header::default() });
        for stolen_ns in [7_000, 7_000, 90_000] {
            let switch = Switch {
                previous: 1,
                process: 1,
                preempted: true,
                iowait: false,
                state: 0,
                call: None,
                stolen_ns,
            };
            let kind = Kind::Switch(switch);
            trace.events[0].push(Event { at_ns: stolen_ns, thread: 2, kind });
        }
        assert_eq!(Stolen::since(0, 0, &trace).by_events_ns, 83_000);
        assert_eq!(Stolen::since(u64::MAX, 9, &trace), Stolen::default());
        let stolen = |by_events_ns, by_kernel_ns| Stolen { by_events_ns, by_kernel_ns };
        assert!(stolen(35_000_000, 50_000_000).agrees() && stolen(70_000_000, 50_000_000).agrees());
        assert!(!stolen(29_000_000, 50_000_000).agrees());
        assert_eq!(ticks("cpu0 1 2 3 4 5 6 7 88 9 10"), Some(88));
        assert_eq!(ticks("cpu0 1 2"), None);
    }
}
