//! Records kernel events around a service's requests: attaches the programs of
//! `kernel/bpf/events.bpf.c`, configures what they watch, and reads their rings.
//!
//! The kernel never waits for a reader. A late reader finds events overwritten, and learns how many
//! there were and in which interval.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering::*, fence};

use aya::programs::perf_event::{PerfEventLink, SoftwareEvent};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Runtime, Words, lap, lap_of};

use crate::bpf_call;
pub use crate::error::Error;
use crate::mapped::Mapped;
use crate::object::Object;
use crate::task_map::possible_cpus;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/events.bpf.o");

const CONFIG: &str = "elfen_ev_config";
const CPUS: &str = "elfen_ev_cpus";
const RING: &str = "elfen_ev_ring";

const CPU_WORDS: usize = 64;
const WATCHED_WORDS: usize = 64;
/// Words of state that each CPU has for its writers.
const CPU_STATE_WORDS: usize = 8;

/// Which kinds of events are recorded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Detail {
    /// Switches, wake-ups, the service's sockets, and samples of its code.
    Sched,
    /// Also interrupts, page faults, and waits for the kernel's own locks and memory, as far as the
    /// kernel has tracepoints for them.
    Full,
}

/// A program, its tracepoint, the Linux version that introduced it, and the detail that needs it.
#[derive(Clone, Copy)]
struct Program(&'static str, &'static str, &'static str, Detail);

impl Program {
    fn needs(self) -> Needs {
        match (self.3, self.1) {
            (Detail::Full, _) => Needs::Full,
            (Detail::Sched, name) if name.starts_with("sched_") => Needs::Sched,
            (Detail::Sched, _) => Needs::Sockets,
        }
    }
}

const PROGRAMS: [Program; 18] = [
    Program("elfen_ev_switch", "sched_switch", "5.18", Detail::Sched),
    Program("elfen_ev_waking", "sched_waking", "5.5", Detail::Sched),
    Program("elfen_ev_exit", "sched_process_exit", "5.5", Detail::Sched),
    Program("elfen_ev_ready", "sk_data_ready", "6.3", Detail::Sched),
    Program("elfen_ev_recv", "sock_recv_length", "6.3", Detail::Sched),
    Program("elfen_ev_send", "sock_send_length", "6.3", Detail::Sched),
    Program("elfen_ev_transmit", "net_dev_queue", "5.5", Detail::Sched),
    Program("elfen_ev_irq_in", "irq_handler_entry", "5.5", Detail::Full),
    Program("elfen_ev_irq", "irq_handler_exit", "5.5", Detail::Full),
    Program("elfen_ev_soft_in", "softirq_entry", "5.5", Detail::Full),
    Program("elfen_ev_soft", "softirq_exit", "5.5", Detail::Full),
    Program("elfen_ev_contend", "contention_begin", "5.19", Detail::Full),
    Program("elfen_ev_contended", "contention_end", "5.19", Detail::Full),
    Program("elfen_ev_reclaim_in", "mm_vmscan_direct_reclaim_begin", "5.5", Detail::Full),
    Program("elfen_ev_reclaim", "mm_vmscan_direct_reclaim_end", "5.5", Detail::Full),
    Program("elfen_ev_compact_in", "mm_compaction_begin", "5.5", Detail::Full),
    Program("elfen_ev_compact", "mm_compaction_end", "5.5", Detail::Full),
    Program("elfen_ev_fault", "page_fault_user", "5.5", Detail::Full),
];

/// What a tracepoint is needed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    Sched,
    /// To recognize the requests of services that do not publish them.
    Sockets,
    Full,
}

/// All tracepoints that this module attaches to.
pub fn tracepoints() -> impl Iterator<Item = (&'static str, Needs)> {
    PROGRAMS.into_iter().map(|program| (program.1, program.needs()))
}

/// A program that runs after every `every` software events, and the name of these for lists of
/// tracepoints.
#[derive(Debug)]
struct Software {
    program: &'static str,
    events: &'static [SoftwareEvent],
    every: u64,
    lacking: &'static str,
    detail: Detail,
}

/// About 251 times a second, so not in step with the kernel's own clock.
const SAMPLE_NS: u64 = 3_984_063;

static SOFTWARE: [Software; 2] = [
    Software {
        program: "elfen_ev_faulted",
        events: &[SoftwareEvent::PageFaultsMin, SoftwareEvent::PageFaultsMaj],
        every: 1,
        lacking: "page-faults (a software event)",
        detail: Detail::Full,
    },
    Software {
        program: "elfen_ev_sampled",
        events: &[SoftwareEvent::CpuClock],
        every: SAMPLE_NS,
        lacking: "cpu-clock (a software event)",
        detail: Detail::Sched,
    },
];
const RUNTIME: &str = "elfen_ev_runtime";

/// A probe point in a file of a language's runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbePoint {
    pub step: Runtime,
    pub offset: u64,
    /// The index in the kernel's `pt_regs` of the register with the address of a name.
    pub register: Option<u8>,
}

impl ProbePoint {
    /// The point's cookie for the eBPF program.
    fn cookie(self) -> u64 {
        let register = self.register.map_or(0, |register| 1 << 16 | u64::from(register) << 8);
        register | u64::from(self.step.number())
    }
}

/// Shorter interrupts are not recorded, because they explain no tail latency.
const LEAST_NS: u64 = 2_000;

/// Which events are recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Watched {
    /// Connections to this port; 0 for none.
    pub port: u16,
    /// Wake-ups of these processes.
    pub processes: Vec<u32>,
    /// Switches of these CPUs.
    pub cpus: Vec<u32>,
}

impl Watched {
    fn words(&self, ring: u64, epoch: u64) -> Vec<u64> {
        let mut words = vec![ring, u64::from(self.port), LEAST_NS, epoch];
        let bits = |numbers: &[u32], words: usize| {
            let mut set = vec![0_u64; words];
            for number in numbers {
                let number = *number as usize;
                set[number / 64 % words] |= 1 << (number % 64);
            }
            set
        };
        words.extend(bits(&self.cpus, CPU_WORDS));
        words.extend(bits(&self.processes, WATCHED_WORDS));
        words
    }
}

/// Events of a CPU that were overwritten before they were read, or that were not recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lost {
    pub count: u64,
    pub from_ns: u64,
    pub to_ns: u64,
}

/// The reader's position in a CPU's ring.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    next: u64,
    /// The time of the last event that was read.
    last_ns: u64,
}

/// The programs and their rings. The programs are attached as long as this value exists.
#[derive(Debug)]
pub struct Events {
    /// Keeps the probes of runtimes attached.
    object: Object,
    config: OwnedFd,
    watched: Watched,
    /// Waits that began in an earlier epoch are forgotten.
    epoch: u64,
    /// Requested tracepoints that the kernel lacks.
    lacks: Vec<&'static str>,
    cpus: Mapped,
    ring: Mapped,
    events: u64,
    cursors: Vec<Cursor>,
    programs: Vec<OwnedFd>,
    /// The links of the first programs, in the same order; empty while paused.
    links: Vec<OwnedFd>,
    /// How many of the programs are attached to tracepoints.
    traced: usize,
    /// Attached to software events.
    software: Vec<&'static Software>,
    /// Empty while paused.
    software_links: Vec<PerfEventLink>,
    missed: u64,
    missed_at_ns: u64,
}

impl Events {
    /// Attaches the programs for `detail`, with `events` in the ring of each CPU, a power of two.
    ///
    /// The socket programs are attached only if there is a port now. For a service that marks its
    /// requests they add no information, and they cost time for every packet.
    pub fn attach(detail: Detail, events: u32, watched: &Watched) -> Result<Self, Error> {
        let mut all = Self::load(events, watched)?;
        let is_requested = |program: &Program| {
            program.3 <= detail && (program.needs() != Needs::Sockets || watched.port != 0)
        };
        all.attach_to(PROGRAMS.into_iter().filter(is_requested))?;
        for one in SOFTWARE.iter().filter(|one| one.detail <= detail) {
            // A sandbox may refuse perf_event_open(2) alone. Everything else works without.
            if all.add_software(one).is_err() {
                all.lacks.push(one.lacking);
            }
        }
        Ok(all)
    }

    fn add_software(&mut self, one: &'static Software) -> Result<(), Error> {
        let program = self.object.software(one.program)?;
        self.attach_software(one)?;
        self.programs.push(program);
        self.software.push(one);
        Ok(())
    }

    fn attach_software(&mut self, one: &Software) -> Result<(), Error> {
        let links = self.object.attach_software(one.program, one.events, one.every)?;
        self.software_links.extend(links);
        Ok(())
    }

    fn load(events: u32, watched: &Watched) -> Result<Self, Error> {
        assert!(events.is_power_of_two(), "positions in a ring are computed with a mask");
        let cpus = possible_cpus()?;
        let places = cpus.checked_mul(events).ok_or_else(|| {
            Error::Refused(format!("{cpus} CPUs with {events} events each are too many"))
        })?;
        let object = Object::load(OBJECT, &[(CPUS, cpus), (RING, places)])?;
        let config = object.map(CONFIG)?;
        let map = |name, words: usize| -> Result<Mapped, Error> {
            let fd = object.map(name)?;
            Mapped::new(fd.as_fd(), words).map_err(Error::call("mapping events"))
        };
        let mapped = (map(CPUS, cpus as usize * CPU_STATE_WORDS)?, map(RING, places as usize * 4)?);
        let now_ns = monotonic_ns();
        let mut all = Self {
            object,
            config,
            watched: Watched::default(),
            epoch: 1,
            lacks: Vec::new(),
            cpus: mapped.0,
            ring: mapped.1,
            events: u64::from(events),
            cursors: vec![Cursor { next: 0, last_ns: now_ns }; cpus as usize],
            programs: Vec::new(),
            links: Vec::new(),
            traced: 0,
            software: Vec::new(),
            software_links: Vec::new(),
            missed: 0,
            missed_at_ns: now_ns,
        };
        all.watch(watched)?;
        Ok(all)
    }

    fn attach_to(&mut self, programs: impl Iterator<Item = Program>) -> Result<(), Error> {
        for Program(name, tracepoint, since, detail) in programs {
            let program = match (self.object.program(name, tracepoint), detail) {
                (Ok(program), _) => program,
                (Err(Error::Refused(_)), Detail::Full) => {
                    self.lacks.push(tracepoint);
                    continue;
                }
                (Err(Error::Refused(why)), Detail::Sched) => {
                    return Err(Error::Lacks { tracepoint, since, why });
                }
                (Err(other), _) => return Err(other),
            };
            let link = bpf_call::attach(program.as_fd()).map_err(Error::call("attaching"))?;
            self.programs.push(program);
            self.links.push(link);
            self.traced += 1;
        }
        Ok(())
    }

    /// Detaches the programs, so that they cost nothing.
    pub fn pause(&mut self) {
        self.links.clear();
        self.software_links.clear();
    }

    /// Attaches the programs again. Begins a new epoch, because waits may have ended unseen
    /// meanwhile.
    pub fn resume(&mut self) -> Result<(), Error> {
        self.epoch += 1;
        self.watch(&self.watched.clone())?;
        for program in &self.programs[self.links.len()..self.traced] {
            let link = bpf_call::attach(program.as_fd()).map_err(Error::call("attaching"))?;
            self.links.push(link);
        }
        self.software.clone().into_iter().try_for_each(|one| self.attach_software(one))
    }

    /// The requested tracepoints that the kernel lacks.
    pub fn lacks(&self) -> &[&'static str] {
        &self.lacks
    }

    /// Replaces the set of watched ports, processes and CPUs.
    pub fn watch(&mut self, watched: &Watched) -> Result<(), Error> {
        if self.watched != *watched {
            // Waits of threads that were not watched for a while may have ended unseen.
            self.epoch += 1;
            self.watched = watched.clone();
        }
        let words = watched.words(self.events, self.epoch);
        bpf_call::update_element(self.config.as_fd(), 0, &words)
            .map_err(Error::call("setting what to watch"))
    }

    /// Also records the steps of a watched process's runtime, at these points of its library.
    pub fn probe(&mut self, process: u32, file: &Path, points: &[ProbePoint]) -> Result<(), Error> {
        let process = NonZeroU32::new(process)
            .ok_or_else(|| Error::Refused("0 is no process id".to_owned()))?;
        for point in points {
            self.object.probe(RUNTIME, (file, point.offset, point.cookie()), process)?;
        }
        Ok(())
    }

    pub fn cpus(&self) -> u32 {
        u32::try_from(self.cursors.len()).unwrap_or(u32::MAX)
    }

    /// How many events a CPU has written.
    pub fn written(&self, cpu: u32) -> u64 {
        // Acquire: events whose index was taken before this count are seen as they were then, or as
        // overwritten later.
        self.cpus.words()[cpu as usize * CPU_STATE_WORDS].load(Acquire)
    }

    /// Reads the events of a CPU since the last call. Returns what was overwritten before it was
    /// read.
    pub fn read(&mut self, cpu: u32, into: &mut Vec<Words>) -> Option<Lost> {
        let began = into.len();
        let Cursor { mut next, last_ns } = self.cursors[cpu as usize];
        let head = self.written(cpu);
        let mut lost = (head - next).saturating_sub(self.events);
        next += lost;
        let first = next;
        while next < head {
            let words = self.at(cpu, next);
            // A writer was interrupted before it finished this event: the rest is read next time.
            // If the head is more than a lap ahead, the event was overwritten, which is counted
            // below.
            if lap(&words) != lap_of(next, self.events) && self.written(cpu) - next <= self.events {
                break;
            }
            into.push(words);
            next += 1;
        }
        // Events that a writer overwrote while they were copied may be mixed.
        let overtaken = self.written(cpu).saturating_sub(self.events);
        let mixed = usize::try_from(overtaken.saturating_sub(first)).unwrap_or(usize::MAX);
        let mixed = mixed.min(into.len() - began);
        into.drain(began..began + mixed);
        lost += mixed as u64;
        // A nested writer takes its index first and has the later time, so the order is restored.
        into[began..].sort_by_key(|words| words[0]);
        let found_ns = into.get(began).map_or_else(monotonic_ns, |words| words[0]);
        let last_ns_now = into[began..].last().map_or(last_ns, |words| words[0]);
        self.cursors[cpu as usize] = Cursor { next, last_ns: last_ns_now.max(last_ns) };
        (lost > 0).then_some(Lost { count: lost, from_ns: last_ns, to_ns: found_ns.max(last_ns) })
    }

    /// Events that the kernel skipped since the last call, because the same program was already
    /// running. The kernel does not report on which CPU. A wait may have ended in a skipped event,
    /// so the caller must call [`Events::watch`] next.
    pub fn missed(&mut self) -> Option<Lost> {
        let missed = self.programs.iter().map(|program| {
            // A kernel that does not count skipped events counts as having none.
            bpf_call::recursion_misses(program.as_fd()).unwrap_or(0)
        });
        let missed: u64 = missed.sum();
        let (count, from_ns) = (missed.saturating_sub(self.missed), self.missed_at_ns);
        self.missed = missed;
        self.missed_at_ns = monotonic_ns();
        self.epoch += u64::from(count > 0);
        (count > 0).then_some(Lost { count, from_ns, to_ns: self.missed_at_ns })
    }

    fn at(&self, cpu: u32, index: u64) -> Words {
        let place = u64::from(cpu) * self.events + (index & (self.events - 1));
        let at = usize::try_from(place).unwrap_or(usize::MAX) * 4;
        let words = &self.ring.words()[at..at + 4];
        // Acquire: the words that were stored before the last word are seen with it.
        let last = words[3].load(Acquire);
        let [at_ns, a, b] = [0, 1, 2].map(|word: usize| words[word].load(Relaxed));
        // A writer that overwrites the event clears the last word first. If that happened, these
        // words are invalid.
        fence(Acquire);
        if words[3].load(Relaxed) == last { [at_ns, a, b, last] } else { [0; 4] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Read, Write};
    use std::time::{Duration, Instant};

    use elfen_rt::signal::event::{Event, EventKind, Stall};

    #[track_caller]
    fn load() -> Events {
        let watched =
            Watched { port: 0, processes: vec![std::process::id()], cpus: (0..64).collect() };
        Events::load(65_536, &watched)
            .unwrap_or_else(|error| panic!("needs root and eBPF: {error}"))
    }

    fn own_thread() -> u32 {
        // SAFETY: gettid takes nothing and cannot fail.
        unsafe { libc::gettid() }.unsigned_abs()
    }

    /// Goal: if the kernel lacks a tracepoint of the full detail, the others are recorded, and the
    /// missing one is reported. A kernel that lacks a required tracepoint is refused. Method:
    /// tracepoints that no kernel has.
    #[test]
    #[ignore = "needs root and eBPF"]
    fn missing_tracepoints_are_reported() {
        let mut events = load();
        let none = "no_kernel_has_this";
        let programs = [
            Program("elfen_ev_compact", none, "99.0", Detail::Full),
            Program("elfen_ev_soft", "softirq_exit", "5.5", Detail::Full),
        ];
        events.attach_to(programs.into_iter()).unwrap();
        assert_eq!((events.lacks(), events.programs.len()), (&[none][..], 1));
        let needed = Program("elfen_ev_exit", none, "99.0", Detail::Sched);
        let refused = events.attach_to([needed].into_iter());
        assert!(matches!(refused, Err(Error::Lacks { tracepoint, .. }) if tracepoint == none));
    }

    /// Goal: a wait whose end was not seen neither hides later waits nor changes their times.
    /// Method: such a wait is noted for this thread. Then this thread waits for a pipe's lock that
    /// another thread takes. While other tests attach programs, this one waits to attach its own:
    /// that wait has ended before, and is ignored.
    #[test]
    #[ignore = "needs root and eBPF of Linux 6.3"]
    fn a_wait_without_a_seen_end_is_forgotten() {
        let mut events = load();
        let attached = events.attach_to(PROGRAMS.into_iter());
        attached.unwrap_or_else(|error| panic!("needs eBPF of Linux 6.3: {error}"));
        let waits = events.object.map("elfen_ev_waits").unwrap();
        let (epoch, since_ns, lock) = (events.epoch, 1, 77);
        let note = [epoch, since_ns, lock, 0, since_ns, since_ns, since_ns, 0];
        bpf_call::update_element(waits.as_fd(), own_thread(), &note).unwrap();
        events.epoch += 1;
        events.watch(&events.watched.clone()).unwrap();
        let began_ns = monotonic_ns();
        let (mut from, mut to) = io::pipe().unwrap();
        let mut other = to.try_clone().unwrap();
        let ends = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let until = std::sync::Arc::clone(&ends);
        let reads = std::thread::spawn(move || while from.read(&mut [0; 4096]).unwrap() > 0 {});
        let writes = std::thread::spawn(move || {
            while !until.load(Relaxed) {
                other.write_all(&[0; 4096]).unwrap();
            }
        });
        let (mut words, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        let found = loop {
            for _ in 0..100 {
                to.write_all(&[0; 4096]).unwrap();
            }
            words.clear();
            for cpu in 0..events.cpus() {
                events.read(cpu, &mut words);
            }
            let own = words.iter().filter_map(Event::decode).find_map(|event| match event.kind {
                EventKind::Stall { since_ns, what: Stall::Contention(_) }
                    if event.thread == own_thread() && event.at_ns >= began_ns =>
                {
                    Some((since_ns, event.at_ns))
                }
                _ => None,
            });
            if own.is_some() || Instant::now() > deadline {
                break own;
            }
        };
        ends.store(true, Relaxed);
        writes.join().unwrap();
        drop(to);
        reads.join().unwrap();
        let (since_ns, at_ns) = found.expect("a wait within a minute");
        assert!(began_ns <= since_ns && since_ns < at_ns, "{since_ns} to {at_ns}");
    }
}
