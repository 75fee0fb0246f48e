//! The scheduler's own account of who ran where and when: its trace of context switches.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::borrower::Stretch;

/// Room for the switches of one measurement, for each CPU.
const BUFFER_KB: &str = "16384";

const BUFFERS: &str = "/sys/kernel/tracing/instances";
/// The process id follows.
const NAME: &str = "elfen-bench-";

/// Removes the buffers of benchmarks that were interrupted.
fn remove_abandoned() -> io::Result<()> {
    for entry in fs::read_dir(BUFFERS)?.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(NAME));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            fs::remove_dir(entry.path())?;
        }
    }
    Ok(())
}

/// The trace of some CPUs, in a buffer of its own that goes with this.
#[derive(Debug)]
pub(super) struct Trace {
    buffer: PathBuf,
}

impl Trace {
    /// Fails without tracefs, or without the right to use it.
    pub(super) fn start(cpus: &[u32]) -> io::Result<Self> {
        remove_abandoned()?;
        let buffer = Path::new(BUFFERS).join(format!("{NAME}{}", std::process::id()));
        fs::create_dir(&buffer)?;
        let trace = Self { buffer };
        let mask = cpus.iter().fold(0_u64, |mask, cpu| mask | 1 << (cpu % 64));
        trace.set("tracing_cpumask", &format!("{mask:x}"))?;
        trace.set("trace_clock", "mono")?;
        trace.set("buffer_size_kb", BUFFER_KB)?;
        trace.set("events/sched/sched_switch/enable", "1")?;
        Ok(trace)
    }

    fn set(&self, file: &str, value: &str) -> io::Result<()> {
        fs::write(self.buffer.join(file), value)
    }

    /// Forgets what was traced so far.
    pub(super) fn clear(&self) -> io::Result<()> {
        self.set("trace", "")
    }

    pub(super) fn read(&self) -> io::Result<Switches> {
        self.set("tracing_on", "0")?;
        let text = fs::read_to_string(self.buffer.join("trace"))?;
        self.set("tracing_on", "1")?;
        Switches::parse(&text).ok_or_else(|| io::Error::other("the scheduler's trace has gaps"))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // A buffer that stays costs memory until the machine restarts; there is nobody to tell.
        let _removed = fs::remove_dir(&self.buffer);
    }
}

/// What each CPU switched to, and when.
#[derive(Debug, Default)]
pub(super) struct Switches(BTreeMap<u32, Vec<(u64, i32)>>);

impl Switches {
    /// `None` if something was lost, or a line is not understood.
    fn parse(text: &str) -> Option<Self> {
        let mut switches = Self::default();
        for line in text.lines() {
            if let Some(counts) = line.strip_prefix("# entries-in-buffer/entries-written: ") {
                let (kept, written) = counts.split_whitespace().next()?.split_once('/')?;
                if kept != written {
                    return None;
                }
            } else if !line.starts_with('#') && !line.is_empty() {
                let (cpu, at_ns, next) = switch(line)?;
                switches.0.entry(cpu).or_default().push((at_ns, next));
            }
        }
        Some(switches)
    }

    /// When a CPU did not idle.
    pub(super) fn busy(&self, cpu: u32) -> Vec<Stretch> {
        self.stretches(cpu, |task| task != 0)
    }

    /// When a CPU ran anything but this task.
    pub(super) fn without(&self, cpu: u32, task: i32) -> Vec<Stretch> {
        self.stretches(cpu, |running| running != task)
    }

    /// From a CPU's first switch to its last: before and after, nothing is known of it.
    pub(super) fn known(&self, cpu: u32) -> Stretch {
        match self.of(cpu) {
            [first, .., last] => (first.0, last.0),
            _ => (0, 0),
        }
    }

    fn of(&self, cpu: u32) -> &[(u64, i32)] {
        self.0.get(&cpu).map_or(&[], Vec::as_slice)
    }

    fn stretches(&self, cpu: u32, wanted: impl Fn(i32) -> bool) -> Vec<Stretch> {
        let pairs = self.of(cpu).windows(2).filter(|pair| wanted(pair[0].1));
        pairs.map(|pair| (pair[0].0, pair[1].0)).collect()
    }
}

/// CPU, time and next task of a line as `trace` prints it: `NAME-PID [001] d..2. 12.345678: sched_switch: ... next_pid=0 ...`.
/// Names of tasks may contain anything, so it is read from where they can't be.
fn switch(line: &str) -> Option<(u32, u64, i32)> {
    let (head, event) = line.rsplit_once(": sched_switch: ")?;
    let mut words = head.split_whitespace().rev();
    let (seconds, micros) = words.next()?.split_once('.')?;
    let at_us = seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?;
    let cpu = words.find_map(|word| word.strip_prefix('[')?.strip_suffix(']')?.parse().ok())?;
    let (_, next) = event.rsplit_once("next_pid=")?;
    Some((cpu, at_us * 1000, next.split_whitespace().next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 4/4   #P:2
#
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
           a b-711   [001] d..2. 100.000001: sched_switch: prev_comm=a b prev_pid=711 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
          <idle>-0   [001] d..2. 100.000005: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=x [9] next_pid=712 next_prio=120
             x-712   [001] d..2. 100.000009: sched_switch: prev_comm=x prev_pid=712 prev_prio=120 prev_state=R ==> next_comm=a b next_pid=711 next_prio=120
           a b-711   [001] d..2. 100.000020: sched_switch: prev_comm=a b prev_pid=711 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
";

    #[test]
    fn who_ran_when() {
        let switches = Switches::parse(TRACE).unwrap();
        assert_eq!(
            switches.busy(1),
            [(100_000_005_000, 100_000_009_000), (100_000_009_000, 100_000_020_000)]
        );
        assert_eq!(
            switches.without(1, 712),
            [(100_000_001_000, 100_000_005_000), (100_000_009_000, 100_000_020_000)]
        );
        assert_eq!(switches.known(1), (100_000_001_000, 100_000_020_000));
        assert_eq!((switches.busy(0), switches.known(0)), (vec![], (0, 0)));
    }

    #[test]
    fn a_trace_with_gaps_is_none() {
        assert!(Switches::parse(&TRACE.replace("4/4", "4/7")).is_none());
        assert!(Switches::parse(&TRACE.replace("next_pid=712", "next_pid=")).is_none());
    }
}
