//! Keeps a service's events: looks at the rings fifty times a second, learns the names of threads
//! before they are gone, and hands everything on.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use elfen_console::failure::to_stderr;
use elfen_host::process::{below, threads_of};
use elfen_host::run::find::{self, Batch};
use elfen_kernel::events::{Detail, Error, Events, Lost};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, Kind, Words};
use elfen_tailor::segment::RECORDER;
use elfen_tailor::trace::{
    BatchThread, FULL, Gap, Header, KernelFunction, MARKS_ALONE, ThreadName,
};

use crate::duty::{Turn, Turns};
use crate::jvm::Jvms;
use crate::kernel_functions::Functions;
use crate::marks::Marked;
use crate::service::{Service, name_of};

/// Between two looks at the rings.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Between two looks at who serves, and how threads are called.
const REFRESH_NS: u64 = 1_000_000_000;
/// Threads whose names are looked up at once: one that comes with more has the rest as numbers.
const MOST_NAMES: usize = 4096;

/// If the recorder itself is what requests wait for, its name says so.
fn name_this_thread() {
    let name = std::ffi::CString::new(RECORDER).expect("a name without a zero");
    // SAFETY: the kernel copies the text, which lives here and is shorter than a name can be.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// What takes the events: a file, or memory.
pub trait Sink {
    fn events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()>;
    fn gap(&mut self, gap: Gap) -> io::Result<()>;
    fn marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()>;
    fn names(&mut self, names: Vec<ThreadName>, processes: &[u32]) -> io::Result<()>;
    fn batches(&mut self, lent: Vec<BatchThread>) -> io::Result<()>;
    fn functions(&mut self, found: Vec<KernelFunction>) -> io::Result<()>;
}

#[derive(Debug)]
pub struct Recorder {
    /// `None` where the kernel shows us nothing.
    events: Option<Events>,
    /// `None` of a service that is known by its port.
    marked: Option<Marked>,
    service: Service,
    jvms: Jvms,
    functions: Functions,
    /// Names that nobody has been told yet.
    names: Vec<ThreadName>,
    /// Threads that were seen since names were looked up, and those before.
    seen: BTreeSet<u32>,
    seen_before: BTreeSet<u32>,
    refreshed_ns: u64,
    buffer: Vec<Words>,
    marks_taken_ns: u64,
    /// If it records a part of the time alone.
    pub turns: Option<Turns>,
    pub taken: u64,
    pub lost: u64,
}

impl Recorder {
    pub fn attach(service: Service, detail: Detail, ring: u32) -> Result<Self, Error> {
        name_this_thread();
        let events = Events::attach(detail, ring, &service.watched())?;
        Ok(Self::of(Some(events), None, service))
    }

    /// Records a service that says itself what it does; where the kernel refuses its events, with
    /// the reason and without them.
    pub fn of_marks(
        marked: Marked,
        cores: Vec<Vec<u32>>,
        detail: Detail,
        ring: u32,
    ) -> (Self, Option<Error>) {
        name_this_thread();
        let mut service = Service::named(&marked.name, marked.processes());
        service.cores = cores;
        let (events, refused) = match Events::attach(detail, ring, &service.watched()) {
            Ok(events) => (Some(events), None),
            Err(error) => (None, Some(error)),
        };
        (Self::of(events, Some(marked), service), refused)
    }

    fn of(events: Option<Events>, marked: Option<Marked>, service: Service) -> Self {
        let mut new = Self {
            events,
            marked,
            service,
            jvms: Jvms::none(),
            functions: Functions::default(),
            names: Vec::new(),
            seen: BTreeSet::new(),
            seen_before: BTreeSet::new(),
            refreshed_ns: 0,
            buffer: Vec::new(),
            marks_taken_ns: monotonic_ns(),
            turns: None,
            taken: 0,
            lost: 0,
        };
        new.find_jvms();
        new
    }

    /// Has JVMs among the processes tell what they do.
    fn find_jvms(&mut self) {
        for told in self.jvms.refresh(&self.service.processes, self.events.as_mut()) {
            to_stderr(&told);
        }
    }

    fn cpus(&self) -> u32 {
        self.events.as_ref().map_or(0, Events::cpus)
    }

    pub fn head(&self, detail: Detail) -> Header {
        Header {
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .map(|text| text.trim().to_owned())
                .unwrap_or_else(|_| "unknown".to_owned()),
            cpus: self.cpus(),
            detail: match detail {
                _ if self.events.is_none() => MARKS_ALONE,
                Detail::Sched => "sched",
                Detail::Full => FULL,
            }
            .to_owned(),
            port: self.service.port,
            service: self.service.name.clone(),
            began_ns: monotonic_ns(),
            cores: self.service.cores.clone(),
            lacks: self.lacks().iter().map(|&tracepoint| tracepoint.to_owned()).collect(),
        }
    }

    /// What was asked for and the kernel does not tell.
    pub fn lacks(&self) -> &[&'static str] {
        self.events.as_ref().map_or(&[], Events::lacks)
    }

    /// How long it may be until the next look: while the kernel writes nothing, until it does, and
    /// names can wait as long.
    pub fn rests(&self) -> Duration {
        let Some(turns) = &self.turns else { return LOOK_EVERY };
        let left = turns.left(monotonic_ns());
        let is_told = self.marked.is_some() || self.jvms.any();
        if turns.paused_ns().is_some() && !is_told { left } else { left.min(LOOK_EVERY) }
    }

    /// Takes what has happened since the last look.
    pub fn look(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        self.turn(sink)?;
        self.look_at_marks(sink)?;
        for cpu in 0..self.cpus() {
            self.buffer.clear();
            let events = self.events.as_mut();
            let lost = events.and_then(|events| events.read(cpu, &mut self.buffer));
            if let Some(lost) = lost {
                self.lose(Some(cpu), lost, sink)?;
            }
            self.taken += self.buffer.len() as u64;
            sink.events(cpu, &self.buffer)?;
            self.meet();
        }
        self.buffer.clear();
        self.jvms.look(&mut self.buffer);
        sink.events(0, &self.buffer)?;
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(self.refreshed_ns) >= REFRESH_NS {
            self.refreshed_ns = now_ns;
            self.refresh(sink)?;
        }
        Ok(())
    }

    /// Stops or goes on, if it records a part of the time alone.
    fn turn(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        let turn = self.turns.as_mut().and_then(|turns| turns.at(monotonic_ns()));
        let (Some(events), Some(turn)) = (&mut self.events, turn) else { return Ok(()) };
        match turn {
            Turn::Pause => events.pause(),
            Turn::Resume(from_ns) => {
                events.resume().map_err(io::Error::other)?;
                sink.gap(Gap { cpu: None, count: 0, from_ns, to_ns: monotonic_ns() })?;
            }
        }
        Ok(())
    }

    /// Says what was not recorded at the end.
    pub fn end(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        match self.turns.and_then(|turns| turns.paused_ns()) {
            Some(from_ns) => sink.gap(Gap { cpu: None, count: 0, from_ns, to_ns: monotonic_ns() }),
            None => Ok(()),
        }
    }

    fn look_at_marks(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        let Some(marked) = &mut self.marked else { return Ok(()) };
        let (from_ns, to_ns) = (self.marks_taken_ns, monotonic_ns());
        self.marks_taken_ns = to_ns;
        let mut count = 0;
        for lane in 0..marked.lanes() {
            self.buffer.clear();
            count += marked.take(lane, &mut self.buffer);
            self.taken += self.buffer.len() as u64;
            sink.marks(lane, &self.buffer)?;
        }
        match count {
            0 => Ok(()),
            _ => self.lose(None, Lost { count, from_ns, to_ns }, sink),
        }
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
                Kind::Blocked { frames, .. } => self.functions.meet(frames),
                Kind::Exit { name } if self.has_met(event.thread) => {
                    self.seen.remove(&event.thread);
                    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                    let name = String::from_utf8_lossy(&name[..end]).into_owned();
                    let (thread, at_ns) = (event.thread, event.at_ns);
                    self.names.push(ThreadName { thread, at_ns, name });
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
        match self.marked.as_ref().map(Marked::processes) {
            None => self.service.refresh(),
            // One that is down keeps its last ones.
            Some(processes) if processes.is_empty() => {}
            Some(processes) => self.service.processes = processes,
        }
        if let Some(events) = &mut self.events {
            let missed = events.missed();
            // The map is ours as long as we live; a kernel that refuses says so at the start.
            events.watch(&self.service.watched()).map_err(io::Error::other)?;
            if let Some(lost) = missed {
                self.lose(None, lost, sink)?;
            }
        }
        self.find_jvms();
        for thread in &self.seen {
            if let Some(name) = name_of(*thread) {
                self.names.push(ThreadName { thread: *thread, at_ns: monotonic_ns(), name });
            }
        }
        self.seen_before = std::mem::take(&mut self.seen);
        sink.functions(self.functions.learned())?;
        if !self.service.cores.is_empty() {
            sink.batches(batches())?;
        }
        sink.names(std::mem::take(&mut self.names), &self.service.processes)
    }
}

/// The threads of all batches of `elfen run` that we may see.
fn batches() -> Vec<BatchThread> {
    // Where the kernel lists no segments there are none.
    let runs = find::runs().unwrap_or_default();
    let at_ns = monotonic_ns();
    let of_run = |run: Batch| {
        let processes = [vec![run.pid], below(run.pid)].concat();
        let threads = processes.into_iter().flat_map(threads_of);
        threads.map(move |thread| BatchThread { thread, at_ns, program: run.program.clone() })
    };
    runs.into_iter().flat_map(of_run).collect()
}
