//! Keeps a service's events: looks at the rings fifty times a second, learns the names of threads
//! before they are gone, and hands everything on.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use elfen_kernel::events::{Detail, Error, Events, Lost};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, Kind, Words};
use elfen_tailor::tale::{Gap, Head, Named};

use crate::service::{Service, name_of};

/// Between two looks at the rings.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Between two looks at who serves, and how threads are called.
const REFRESH_NS: u64 = 1_000_000_000;
/// Threads whose names are looked up at once: one that comes with more has the rest as numbers.
const MOST_NAMES: usize = 4096;

/// If the recorder itself is what requests wait for, its name says so.
fn name_this_thread() {
    // SAFETY: the kernel copies the text, which is shorter than a name can be.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"elfen-tailor".as_ptr()) };
}

/// What takes the events: a file, or memory.
pub trait Sink {
    fn events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()>;
    fn gap(&mut self, gap: Gap) -> io::Result<()>;
    fn names(&mut self, names: Vec<Named>, processes: &[u32]) -> io::Result<()>;
}

#[derive(Debug)]
pub struct Recorder {
    events: Events,
    service: Service,
    /// Names that nobody has been told yet.
    names: Vec<Named>,
    /// Threads that were seen since names were looked up, and those before.
    seen: BTreeSet<u32>,
    seen_before: BTreeSet<u32>,
    refreshed_ns: u64,
    buffer: Vec<Words>,
    pub taken: u64,
    pub lost: u64,
}

impl Recorder {
    pub fn attach(service: Service, detail: Detail, ring: u32) -> Result<Self, Error> {
        name_this_thread();
        let events = Events::attach(detail, ring, &service.watched())?;
        Ok(Self {
            events,
            service,
            names: Vec::new(),
            seen: BTreeSet::new(),
            seen_before: BTreeSet::new(),
            refreshed_ns: 0,
            buffer: Vec::new(),
            taken: 0,
            lost: 0,
        })
    }

    pub fn head(&self, detail: Detail) -> Head {
        Head {
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .map(|text| text.trim().to_owned())
                .unwrap_or_else(|_| "unknown".to_owned()),
            cpus: self.events.cpus(),
            detail: match detail {
                Detail::Sched => "sched",
                Detail::Full => "full",
            }
            .to_owned(),
            port: self.service.port,
            service: self.service.name.clone(),
            began_ns: monotonic_ns(),
        }
    }

    /// Takes what has happened since the last look.
    pub fn look(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        for cpu in 0..self.events.cpus() {
            self.buffer.clear();
            let lost = self.events.read(cpu, &mut self.buffer);
            if let Some(lost) = lost {
                self.lose(Some(cpu), lost, sink)?;
            }
            self.taken += self.buffer.len() as u64;
            sink.events(cpu, &self.buffer)?;
            self.meet();
        }
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(self.refreshed_ns) >= REFRESH_NS {
            self.refreshed_ns = now_ns;
            self.refresh(sink)?;
        }
        Ok(())
    }

    fn lose(&mut self, cpu: Option<u32>, lost: Lost, sink: &mut impl Sink) -> io::Result<()> {
        let Lost { count, from_ns, to_ns } = lost;
        self.lost += count;
        sink.gap(Gap { cpu, count, from_ns, to_ns })
    }

    /// Remembers who was seen in the buffer; who ends says its name itself.
    fn meet(&mut self) {
        for event in self.buffer.iter().filter_map(Event::decode) {
            match event.kind {
                Kind::Switch(_) if event.thread != 0 && self.seen.len() < MOST_NAMES => {
                    self.seen.insert(event.thread);
                }
                Kind::Exit { name } if self.has_met(event.thread) => {
                    self.seen.remove(&event.thread);
                    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                    let name = String::from_utf8_lossy(&name[..end]).into_owned();
                    let (thread, at_ns) = (event.thread, event.at_ns);
                    self.names.push(Named { thread, at_ns, name });
                }
                _ => {}
            }
        }
    }

    fn has_met(&self, thread: u32) -> bool {
        self.seen.contains(&thread) || self.seen_before.contains(&thread)
    }

    /// Looks who serves, says so to the kernel, and how the threads are called that were seen: one
    /// that has executed a program since has another name.
    pub fn refresh(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        self.service.refresh();
        // The map is ours as long as we live; a kernel that refuses says so at the start.
        self.events.watch(&self.service.watched()).map_err(io::Error::other)?;
        if let Some(lost) = self.events.missed() {
            self.lose(None, lost, sink)?;
        }
        for thread in &self.seen {
            if let Some(name) = name_of(*thread) {
                self.names.push(Named { thread: *thread, at_ns: monotonic_ns(), name });
            }
        }
        self.seen_before = std::mem::take(&mut self.seen);
        sink.names(std::mem::take(&mut self.names), &self.service.processes)
    }
}
