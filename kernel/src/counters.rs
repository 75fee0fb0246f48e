//! The hardware counters of request lanes. `kernel/bpf/counters.bpf.c` copies them on the lanes
//! themselves.
//!
//! A reader gets the counts of the lane's last context switch or timer interrupt. Reading costs the
//! lane nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use perf_event::events::{Event, Hardware};
use perf_event::{Builder, Counter};

use crate::bpf_call;
use crate::object::Object;
use crate::task_map::{self, possible_cpus};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/counters.bpf.o");

const INSTRUCTIONS: &str = "elfen_instr";
const CYCLES: &str = "elfen_cycles";
const COUNTED: &str = "elfen_counted";
/// The programs that copy the counters, their tracepoints, and whether each is required. Kernels
/// for other architectures lack this timer interrupt.
const PROGRAMS: [(&str, &str, bool); 2] =
    [("elfen_count_sw", "sched_switch", true), ("elfen_count_tick", "local_timer_entry", false)];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("CPU {cpu} has no hardware counters to read: {error}")]
    NoCounter { cpu: u32, error: io::Error },
    #[error(transparent)]
    Program(#[from] task_map::Error),
}

/// A lane's counts since counting began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counted {
    pub instructions: u64,
    pub cycles: u64,
    /// When the lane was last read, CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// The counters of some CPUs. They count as long as this value exists.
#[derive(Debug)]
pub struct Counters {
    counted: OwnedFd,
    /// Kept open: the kernel removes events from an array when the file through which they were
    /// added is closed.
    _maps: [OwnedFd; 2],
    _links: Vec<OwnedFd>,
    _events: Vec<Counter>,
}

impl Counters {
    pub fn open(cpus: &[u32]) -> Result<Self, Error> {
        Self::of(cpus, Hardware::INSTRUCTIONS, Hardware::CPU_CYCLES)
    }

    /// Opens any two events, so that the code can be tested on a machine without a PMU.
    fn of<E: Event + Clone>(cpus: &[u32], instructions: E, cycles: E) -> Result<Self, Error> {
        // The counters first, because virtual machines lack them most often.
        let mut events = Vec::new();
        for &cpu in cpus {
            let pair = [&instructions, &cycles].map(|event| count(event, cpu));
            for event in pair {
                events.push((cpu, event.map_err(|error| Error::NoCounter { cpu, error })?));
            }
        }
        let possible = possible_cpus()?;
        let sizes = [INSTRUCTIONS, CYCLES, COUNTED].map(|map| (map, possible));
        let mut object = Object::load(OBJECT, &sizes)?;
        let maps = [object.map(INSTRUCTIONS)?, object.map(CYCLES)?];
        for (index, (cpu, event)) in events.iter().enumerate() {
            let put = bpf_call::put_event(maps[index % 2].as_fd(), *cpu, borrowed(event));
            put.map_err(task_map::Error::call("counting a lane"))?;
        }
        let mut links = Vec::new();
        for (program, tracepoint, needed) in PROGRAMS {
            match attach(&mut object, program, tracepoint) {
                Ok(link) => links.push(link),
                Err(task_map::Error::Refused(_)) if !needed => {}
                Err(error) => return Err(error.into()),
            }
        }
        let events = events.into_iter().map(|(_, event)| event).collect();
        Ok(Self { counted: object.map(COUNTED)?, _maps: maps, _links: links, _events: events })
    }

    /// A lane's latest counts; `None` before the lane was first read.
    pub fn read(&self, cpu: u32) -> Option<Counted> {
        /// Copying takes less time than passes between two updates by the lane.
        const TRIES: u32 = 3;
        for _ in 0..TRIES {
            let mut words = [0; 5];
            bpf_call::look_up_element(self.counted.as_fd(), cpu, &mut words).ok()?;
            if let Some(counted) = whole(words) {
                return (words[0] != 0).then_some(counted);
            }
        }
        None
    }
}

/// Returns the counts if no update overlapped the copy. The kernel copies the words from first to
/// last, so the word that the lane stores last is copied first.
fn whole([done, instructions, cycles, at_ns, begun]: [u64; 5]) -> Option<Counted> {
    (begun == done).then_some(Counted { instructions, cycles, at_ns })
}

fn count<E: Event + Clone>(event: &E, cpu: u32) -> io::Result<Counter> {
    let mut builder = Builder::new(event.clone());
    builder.one_cpu(cpu as usize).any_pid().include_kernel().enabled(true).build()
}

/// Tries to count the cycles of this thread, or of everything that a CPU runs.
pub fn try_cycles(cpu: Option<u32>) -> io::Result<()> {
    let mut builder = Builder::new(Hardware::CPU_CYCLES);
    if let Some(cpu) = cpu {
        builder.one_cpu(cpu as usize).any_pid();
    }
    builder.build().map(drop)
}

fn attach(
    object: &mut Object,
    program: &str,
    tracepoint: &str,
) -> Result<OwnedFd, task_map::Error> {
    let program = object.program(program, tracepoint)?;
    bpf_call::attach(program.as_fd()).map_err(task_map::Error::call("attaching"))
}

pub(crate) fn borrowed(event: &Counter) -> BorrowedFd<'_> {
    // SAFETY: the counter owns the descriptor and lives as long as the borrow.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_event::events::Software;
    use std::time::{Duration, Instant};

    /// Goal: no mixture of two updates is accepted. Method: every point at which a copy can overlap
    /// the lane's stores, in the order in which `counters.bpf.c` makes them.
    #[test]
    fn a_torn_reading_is_refused() {
        const OLD: [u64; 5] = [7, 100, 200, 300, 7];
        const NEW: [u64; 5] = [8, 110, 220, 330, 8];
        /// The index of each word in the order of the stores: begun, instructions, cycles, at,
        /// done.
        const STORED: [usize; 5] = [4, 1, 2, 3, 0];
        let after = |stores: usize| {
            let mut words = OLD;
            STORED[..stores].iter().for_each(|&at| words[at] = NEW[at]);
            words
        };
        // The copy reads upwards while the lane continues its stores.
        for before in 0..=5 {
            for (copied, meanwhile) in (0..=5).flat_map(|c| (before..=5).map(move |m| (c, m))) {
                let (first, then) = (after(before), after(meanwhile));
                let words =
                    std::array::from_fn(|at| if at < copied { first[at] } else { then[at] });
                if let Some(read) = whole(words) {
                    let one =
                        |w: [u64; 5]| Counted { instructions: w[1], cycles: w[2], at_ns: w[3] };
                    assert!(read == one(OLD) || read == one(NEW), "{words:?}");
                }
            }
        }
    }

    /// Goal: counts arrive from the requested CPUs and from no others. Method: a software clock
    /// stands in for both counters, so that their ratio is known. A thread works on the CPU without
    /// a pause.
    #[test]
    #[ignore = "needs root and eBPF"]
    fn a_lane_reads_its_own_counters() {
        let counters = Counters::of(&[0], Software::CPU_CLOCK, Software::CPU_CLOCK)
            .unwrap_or_else(|error| panic!("needs root and eBPF: {error}"));
        let later = |than: u64| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(60) {
                match counters.read(0) {
                    Some(counted) if counted.cycles > than => return counted,
                    _ => std::hint::spin_loop(),
                }
            }
            panic!("CPU 0 has read nothing after {than}");
        };
        let first = later(0);
        let second = later(first.cycles + 20_000_000);
        let [instructions, cycles] =
            [second.instructions - first.instructions, second.cycles - first.cycles];
        assert!(instructions.abs_diff(cycles) * 10 < cycles, "one clock: {first:?} {second:?}");
        assert_eq!(counters.read(1), None, "CPU 1 was not requested");
        assert_eq!(counters.read(u32::MAX), None);
    }
}
