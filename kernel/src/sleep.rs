//! Sleeps in the kernel until a CPU idles. `kernel/bpf/wake.bpf.c` wakes the sleepers.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use perf_event::events::Software;
use perf_event::{Builder, Sampler};

use crate::bpf_call;
use crate::counters::borrowed;
use crate::error::Error;
use crate::object::Object;
use crate::task_map::possible_cpus;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/wake.bpf.o");

const SLEEPERS: &str = "elfen_sleepers";

/// The program that wakes sleepers. It is attached as long as this value exists.
#[derive(Debug)]
pub struct Alarm {
    sleepers: OwnedFd,
    _link: OwnedFd,
}

impl Alarm {
    pub fn attach() -> Result<Self, Error> {
        let mut object = Object::load(OBJECT, &[(SLEEPERS, possible_cpus()?)])?;
        let program = object.program("elfen_wake", "sched_switch")?;
        let link = bpf_call::attach(program.as_fd()).map_err(Error::call("attaching"))?;
        Ok(Self { sleepers: object.map(SLEEPERS)?, _link: link })
    }

    /// Makes the one sleeper that `cpu` wakes whenever it goes idle.
    pub fn sleeper(&self, cpu: u32) -> Result<Sleeper<'_>, Error> {
        const OPENING: &str = "opening an event";
        let mut builder = Builder::new(Software::BPF_OUTPUT);
        // Each event wakes the sleeper. Only recorded events do, so each event is recorded.
        builder.one_cpu(cpu as usize).any_pid().sample_period(1).wakeup_events(1).enabled(true);
        builder.sample(perf_event::SampleFlag::RAW);
        let event = builder.build().map_err(Error::call(OPENING))?;
        let event = event.sampled(RING_BYTES).map_err(Error::call(OPENING))?;
        bpf_call::put_event(self.sleepers.as_fd(), cpu, borrowed(event.as_counter()))
            .map_err(Error::call(OPENING))?;
        Ok(Sleeper { cpu, event, _alarm: self })
    }
}

/// Room for some hundred records. A full ring wakes no thread, so [`Sleeper::sleep`] empties it.
const RING_BYTES: usize = 4096;

pub struct Sleeper<'a> {
    cpu: u32,
    event: Sampler,
    _alarm: &'a Alarm,
}

impl fmt::Debug for Sleeper<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleeper").field("cpu", &self.cpu).finish_non_exhaustive()
    }
}

impl Sleeper<'_> {
    /// Sleeps until the CPU has gone idle since the last call, at most for `at_most`. Returns
    /// whether the CPU has gone idle.
    pub fn sleep(&mut self, at_most: Duration) -> bool {
        let idled = self.event.next_blocking(Some(at_most)).is_some();
        while self.event.next_record().is_some() {}
        idled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The idle time of CPU 0 so far, in the kernel's ticks.
    fn idle_ticks() -> u64 {
        let stat = std::fs::read_to_string("/proc/stat").unwrap();
        let line = stat.lines().find(|line| line.starts_with("cpu0 ")).unwrap();
        line.split_whitespace().nth(4).unwrap().parse().unwrap()
    }

    /// Goal: a CPU that goes idle wakes its sleeper. Method: sleep until CPU 0 idles, compared with
    /// the kernel's own count of idle time. A CPU that does not exist has no sleeper.
    #[test]
    #[ignore = "needs root, two idle CPUs and eBPF"]
    fn a_cpu_that_idles_wakes_its_sleeper() {
        let alarm = Alarm::attach().unwrap_or_else(|error| panic!("needs root and eBPF: {error}"));
        let mut sleeper = alarm.sleeper(0).unwrap();
        // More wake-ups than the ring has room for.
        for _ in 0..120 {
            let before = idle_ticks();
            if !sleeper.sleep(Duration::from_secs(20)) {
                assert_eq!(idle_ticks(), before, "CPU 0 has idled without waking its sleeper");
                panic!("needs two idle CPUs: others keep CPU 0 busy");
            }
        }
        assert!(alarm.sleeper(u32::MAX).is_err());
    }
}
