//! When the kernel made a thread wait for a kernel lock, or for memory that the kernel had to
//! reclaim or compact first. Also the page faults of each thread, from the access until the memory
//! was present.

use std::collections::HashMap;

use elfen_rt::signal::event::{Event, EventKind, Stall};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stalled {
    pub from_ns: u64,
    pub to_ns: u64,
    pub what: Stall,
}

#[derive(Debug, Default)]
pub struct Stalls {
    /// The stalls of each thread, in the order of their ends.
    of: HashMap<u32, Vec<Stalled>>,
    /// The page faults of each thread as (begin, end), in the order of their ends.
    faults: HashMap<u32, Vec<(u64, u64)>>,
}

impl Stalls {
    pub fn add(&mut self, event: &Event) {
        match event.kind {
            EventKind::Stall { since_ns, what } if since_ns < event.at_ns => {
                let stalled = Stalled { from_ns: since_ns, to_ns: event.at_ns, what };
                self.of.entry(event.thread).or_default().push(stalled);
            }
            EventKind::Fault { since_ns, .. } if since_ns <= event.at_ns => {
                self.faults.entry(event.thread).or_default().push((since_ns, event.at_ns));
            }
            _ => {}
        }
    }

    pub fn is_empty(&self) -> bool {
        self.of.is_empty() && self.faults.is_empty()
    }

    /// The stalls of a thread that overlap a span of time. A nested stall precedes the outer one.
    pub fn of(&self, thread: u32, from_ns: u64, to_ns: u64) -> impl Iterator<Item = &Stalled> {
        let all = self.of.get(&thread).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|one| one.to_ns <= from_ns);
        let begins = move |one: &&Stalled| one.from_ns < to_ns;
        let last = all[first..].partition_point(|one| one.to_ns < to_ns);
        // At most three stalls may end after the span and overlap it: there are three kinds, and
        // each may contain the previous one.
        let last = (first + last + 3).min(all.len());
        all[first..last].iter().filter(begins)
    }

    /// The page faults of a thread that overlap a span of time, as (begin, end).
    pub fn faults(&self, thread: u32, from_ns: u64, to_ns: u64) -> &[(u64, u64)] {
        let all = self.faults.get(&thread).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|(_, ended_ns)| *ended_ns <= from_ns);
        let last = all.partition_point(|(_, ended_ns)| *ended_ns < to_ns);
        // A fault ends before the next begins, so at most one ends after the span and overlaps it.
        let behind = all.get(last).is_some_and(|(since_ns, _)| *since_ns < to_ns);
        &all[first..(last + usize::from(behind)).max(first)]
    }
}

/// The kind of a kernel lock, by the flags in its event.
pub fn lock_kind(bits: u8) -> &'static str {
    const SPIN: u8 = 1;
    const PERCPU: u8 = 16;
    const MUTEX: u8 = 32;
    match bits {
        // A thread may spin on a mutex first, so the flag of a mutex decides.
        bits if bits & MUTEX != 0 => "mutex",
        bits if bits & SPIN != 0 => "spinlock",
        bits if bits & PERCPU != 0 => "percpu-rwsem",
        _ => "rwsem",
    }
}
