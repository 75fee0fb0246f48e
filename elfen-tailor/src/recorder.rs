//! Collects a service's events. Polls the rings fifty times per second, looks up the names of
//! threads before they end, and passes everything to a sink.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use crate::segment::RECORDER;
use crate::trace::{BatchThread, FULL, Gap, Header, MARKS_ALONE, Note, Sink, ThreadName};
use elfen_console::failure::to_stderr;
use elfen_kernel::events::{Detail, Error, Events, Lost};
use elfen_machine::process::{below, name_of, threads_of};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, EventKind, Words};
use elfen_run::batches::{self, Batch};

use crate::code_names::CodeNames;
use crate::duty::{DutyChange, DutyCycle};
use crate::jvm::Jvms;
use crate::kernel_functions::FunctionNames;
use crate::marks::MarkedService;
use crate::service::Service;

/// Interval of polls of the rings.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval at which the service's processes and the names of threads are looked up.
const REFRESH_NS: u64 = 1_000_000_000;
/// The most threads whose names are looked up at once. Other threads appear as numbers.
const NAMES_MAX: usize = 4096;

/// Names this thread, so that the report can tell when requests waited for the recorder.
fn name_this_thread() {
    let name = std::ffi::CString::new(RECORDER).expect("a name without a zero");
    // Recording also works without this name.
    let _unnamed = nix::sys::prctl::set_name(&name);
}

#[derive(Debug)]
pub struct Recorder {
    /// `None` if the kernel refused to provide events.
    events: Option<Events>,
    /// `None` for a service that is found by its port.
    marked: Option<MarkedService>,
    service: Service,
    jvms: Jvms,
    functions: FunctionNames,
    code: CodeNames,
    /// Names that were not passed to the sink yet.
    names: Vec<ThreadName>,
    /// Threads seen since the last refresh, and threads seen before it.
    seen: BTreeSet<u32>,
    seen_before: BTreeSet<u32>,
    refreshed_ns: u64,
    buffer: Vec<Words>,
    marks_taken_ns: u64,
    /// Set if only a part of the time is recorded.
    pub duty_cycle: Option<DutyCycle>,
    pub taken: u64,
    pub lost: u64,
}

impl Recorder {
    pub fn attach(service: Service, detail: Detail, ring: u32) -> Result<Self, Error> {
        name_this_thread();
        let events = Events::attach(detail, ring, &service.watched())?;
        Ok(Self::of(Some(events), None, service))
    }

    /// Records a service that reports its requests by marks. If the kernel refuses its events, this
    /// records marks only, and also returns the reason.
    pub fn of_marks(
        marked: MarkedService,
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

    fn of(events: Option<Events>, marked: Option<MarkedService>, service: Service) -> Self {
        let mut new = Self {
            events,
            marked,
            service,
            jvms: Jvms::none(),
            functions: FunctionNames::default(),
            code: CodeNames::default(),
            names: Vec::new(),
            seen: BTreeSet::new(),
            seen_before: BTreeSet::new(),
            refreshed_ns: 0,
            buffer: Vec::new(),
            marks_taken_ns: monotonic_ns(),
            duty_cycle: None,
            taken: 0,
            lost: 0,
        };
        new.find_jvms();
        new
    }

    /// Starts to read new JVMs among the service's processes.
    fn find_jvms(&mut self) {
        for text in self.jvms.refresh(&self.service.processes, self.events.as_mut()) {
            to_stderr(&text);
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

    /// Tracepoints of the chosen detail that this kernel does not have.
    pub fn lacks(&self) -> &[&'static str] {
        self.events.as_ref().map_or(&[], Events::lacks)
    }

    /// How long the next poll may be delayed. While recording is paused, the delay lasts until the
    /// end of the pause, unless marks or a JVM are read. Looking up names is not urgent.
    pub fn next_poll_in(&self) -> Duration {
        let Some(cycle) = &self.duty_cycle else { return POLL_INTERVAL };
        let left = cycle.until_change(monotonic_ns());
        let others_report = self.marked.is_some() || self.jvms.any();
        if cycle.paused_ns().is_some() && !others_report { left } else { left.min(POLL_INTERVAL) }
    }

    /// Takes all events since the last poll.
    pub fn poll(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        self.apply_duty_cycle(sink)?;
        self.poll_marks(sink)?;
        for cpu in 0..self.cpus() {
            self.buffer.clear();
            let events = self.events.as_mut();
            let lost = events.and_then(|events| events.read(cpu, &mut self.buffer));
            if let Some(lost) = lost {
                self.lose(Some(cpu), lost, sink)?;
            }
            self.taken += self.buffer.len() as u64;
            sink.add_events(cpu, &self.buffer)?;
            self.note_threads();
        }
        self.buffer.clear();
        self.jvms.poll(&mut self.buffer);
        sink.add_events(0, &self.buffer)?;
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(self.refreshed_ns) >= REFRESH_NS {
            self.refreshed_ns = now_ns;
            self.refresh(sink)?;
        }
        Ok(())
    }

    /// Pauses or resumes recording, if only a part of the time is recorded.
    fn apply_duty_cycle(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        let change = self.duty_cycle.as_mut().and_then(|cycle| cycle.change_at(monotonic_ns()));
        let (Some(events), Some(change)) = (&mut self.events, change) else { return Ok(()) };
        match change {
            DutyChange::Pause => events.pause(),
            DutyChange::Resume(from_ns) => {
                events.resume().map_err(io::Error::other)?;
                sink.add_note(pause(from_ns))?;
            }
        }
        Ok(())
    }

    /// Writes the names of functions that are still looked up.
    pub fn write_last_names(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        add_all(sink, Note::Code, self.code.take_last())
    }

    /// Writes the last pause as a gap, if the recording ends during a pause.
    pub fn write_last_pause(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        match self.duty_cycle.and_then(|cycle| cycle.paused_ns()) {
            Some(from_ns) => sink.add_note(pause(from_ns)),
            None => Ok(()),
        }
    }

    fn poll_marks(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        let Some(marked) = &mut self.marked else { return Ok(()) };
        let from_ns = self.marks_taken_ns;
        let to_ns = monotonic_ns();
        self.marks_taken_ns = to_ns;
        let mut count = 0;
        for lane in 0..marked.lanes() {
            self.buffer.clear();
            count += marked.take(lane, &mut self.buffer);
            self.taken += self.buffer.len() as u64;
            sink.add_marks(lane, &self.buffer)?;
        }
        match count {
            0 => Ok(()),
            _ => self.lose(None, Lost { count, from_ns, to_ns }, sink),
        }
    }

    fn lose(&mut self, cpu: Option<u32>, lost: Lost, sink: &mut impl Sink) -> io::Result<()> {
        let Lost { count, from_ns, to_ns } = lost;
        self.lost += count;
        sink.add_note(Note::Gap(Gap { cpu, count, from_ns, to_ns }))
    }

    /// Remembers the threads and kernel functions that the events in the buffer name. A thread that
    /// ends reports its own name.
    fn note_threads(&mut self) {
        for event in self.buffer.iter().filter_map(Event::decode) {
            match event.kind {
                EventKind::Switch(_) if event.thread != 0 && self.seen.len() < NAMES_MAX => {
                    self.seen.insert(event.thread);
                }
                EventKind::Blocked { frames, .. } => self.functions.note(frames),
                EventKind::Sample { process, address, .. } => self.code.note(process, address),
                EventKind::Exit { name } if self.is_known(event.thread) => {
                    self.seen.remove(&event.thread);
                    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                    let name = String::from_utf8_lossy(&name[..end]).into_owned();
                    let thread = event.thread;
                    let at_ns = event.at_ns;
                    self.names.push(ThreadName { thread, at_ns, name });
                }
                _ => {}
            }
        }
    }

    fn is_known(&self, thread: u32) -> bool {
        self.seen.contains(&thread) || self.seen_before.contains(&thread)
    }

    /// Looks up the service's processes, and passes them to the kernel. Also looks up the names of
    /// seen threads, because a thread that executed another program has a new name.
    pub fn refresh(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        match self.marked.as_ref().map(MarkedService::processes) {
            None => self.service.refresh(),
            // If the service is down, its last processes are kept.
            Some(processes) if processes.is_empty() => {}
            Some(processes) => self.service.processes = processes,
        }
        if let Some(events) = &mut self.events {
            let missed = events.missed();
            // An error here is unexpected: a kernel that refuses to watch does so at the start.
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
        add_all(sink, Note::Functions, self.functions.take_new())?;
        self.code.ask();
        add_all(sink, Note::Code, self.code.take_new())?;
        if !self.service.cores.is_empty() {
            add_all(sink, Note::Batches, batches())?;
        }
        add_all(sink, Note::Names, std::mem::take(&mut self.names))?;
        sink.add_note(Note::Processes(self.service.processes.clone()))
    }
}

fn pause(from_ns: u64) -> Note {
    Note::Gap(Gap { cpu: None, count: 0, from_ns, to_ns: monotonic_ns() })
}

/// Adds a note, unless its list is empty.
fn add_all<T>(sink: &mut impl Sink, note: fn(Vec<T>) -> Note, all: Vec<T>) -> io::Result<()> {
    if all.is_empty() { Ok(()) } else { sink.add_note(note(all)) }
}

/// The threads of all batches of `elfen run` that this user can see.
fn batches() -> Vec<BatchThread> {
    // If the machine has no list of segments, it has no batches.
    let runs = batches::runs().unwrap_or_default();
    let at_ns = monotonic_ns();
    let of_run = |run: Batch| {
        let processes = [vec![run.pid], below(run.pid)].concat();
        let threads = processes.into_iter().flat_map(threads_of);
        threads.map(move |thread| BatchThread { thread, at_ns, program: run.program.clone() })
    };
    runs.into_iter().flat_map(of_run).collect()
}
