//! The hardware counters of request lanes, as `kernel/bpf/counters.bpf.c` copies
//! them on the lanes themselves.
//!
//! A reader's figures are as old as the lane's last context switch or timer interrupt; reading
//! costs the lane nothing.

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
/// Where the lanes read, and whether they have to: a kernel for another architecture
/// has no such timer interrupt.
const PROGRAMS: [(&str, &str, bool); 2] =
    [("elfen_count_sw", "sched_switch", true), ("elfen_count_tick", "local_timer_entry", false)];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("CPU {cpu} has no hardware counters to read: {error}")]
    NoCounter { cpu: u32, error: io::Error },
    #[error(transparent)]
    Program(#[from] task_map::Error),
}

/// What a lane has executed since it is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counted {
    pub instructions: u64,
    pub cycles: u64,
    /// When, CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// The counters of some CPUs, counted as long as this lives.
#[derive(Debug)]
pub struct Counters {
    counted: OwnedFd,
    /// The kernel takes events out of an array when the file closes through which they were put in.
    _maps: [OwnedFd; 2],
    _links: Vec<OwnedFd>,
    _events: Vec<Counter>,
}

impl Counters {
    pub fn open(cpus: &[u32]) -> Result<Self, Error> {
        Self::of(cpus, Hardware::INSTRUCTIONS, Hardware::CPU_CYCLES)
    }

    /// With any two events, so that a machine without a PMU can test the way they take.
    fn of<E: Event + Clone>(cpus: &[u32], instructions: E, cycles: E) -> Result<Self, Error> {
        // First the counters, which a virtual machine lacks most often.
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

    /// What a lane has executed, by its latest reading; `None` before the first.
    pub fn read(&self, cpu: u32) -> Option<Counted> {
        /// The copy is made in less time than the next reading takes to come.
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

/// The words as the kernel copied them, from the first to the last: the one that the lane
/// stores last was read first.
fn whole([done, instructions, cycles, at_ns, begun]: [u64; 5]) -> Option<Counted> {
    (begun == done).then_some(Counted { instructions, cycles, at_ns })
}

fn count<E: Event + Clone>(event: &E, cpu: u32) -> io::Result<Counter> {
    let mut builder = Builder::new(event.clone());
    builder.one_cpu(cpu as usize).any_pid().include_kernel().enabled(true).build()
}

/// Counts the cycles of this thread, or of all that a CPU runs, for a
/// moment, and says why it can't.
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
    use std::io::Write;
    use std::time::{Duration, Instant};

    /// Goal: no reading that mixes two is accepted. Method: every moment at which a copy can stop
    /// in the middle of the lane's stores, in the order in which `counters.bpf.c` makes them.
    #[test]
    fn a_torn_reading_is_refused() {
        const OLD: [u64; 5] = [7, 100, 200, 300, 7];
        const NEW: [u64; 5] = [8, 110, 220, 330, 8];
        /// Places of the words, as the lane stores them: begun, instructions, cycles, at, done.
        const STORED: [usize; 5] = [4, 1, 2, 3, 0];
        let after = |stores: usize| {
            let mut words = OLD;
            STORED[..stores].iter().for_each(|&at| words[at] = NEW[at]);
            words
        };
        // A copy reads upwards; the lane goes on storing meanwhile.
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

    /// Goal: what a CPU counts arrives, from CPUs that were asked for and from no others. Method: a
    /// software clock stands for both counters, so that their ratio is known; a thread works on the
    /// CPU without giving it up.
    #[test]
    fn a_lane_reads_its_own_counters() {
        let counters = match Counters::of(&[0], Software::CPU_CLOCK, Software::CPU_CLOCK) {
            Ok(counters) => counters,
            Err(
                error @ Error::Program(
                    task_map::Error::NotPermitted | task_map::Error::NoKernelTypes,
                ),
            )
            | Err(error @ Error::NoCounter { .. }) => {
                writeln!(io::stderr(), "skipped: counters of a lane: {error}").unwrap();
                return;
            }
            Err(error) => panic!("{error}"),
        };
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
        assert_eq!(counters.read(1), None, "nobody asked for CPU 1");
        assert_eq!(counters.read(u32::MAX), None);
    }
}
