//! A recording of a span of time: the events of each CPU, the names of threads, and where events
//! were lost.
//!
//! A `.trace` file is a magic number and a version, then blocks: kind, length, CRC-32, content.
//! Events and marks are binary words; each [`Note`] is JSON. The recorder writes blocks while it
//! records. So a file that ends at any byte can be read up to its last whole block, and is known to
//! be cut off.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use elfen_rt::signal::event::{Event, Words};
use elfen_rt::signal::mark::Mark;
use serde::{Deserialize, Serialize};

/// The detail of a recording without events of the kernel.
pub const MARKS_ALONE: &str = "marks";
/// The detail of a recording with interrupts, page faults and waits inside the kernel.
pub const FULL: &str = "full";

const MAGIC: [u8; 8] = *b"ELFTRACE";
const VERSION: u32 = 1;

/// Kinds of blocks.
const EVENTS: u32 = 1;
const MARKS: u32 = 2;
const NOTE: u32 = 3;

/// The longest possible block. The recorder writes the content of each ring as one block.
const BLOCK_MAX_BYTES: u32 = 64 << 20;

/// Where and how a trace was recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Header {
    pub kernel: String,
    pub cpus: u32,
    /// `sched`, `full`, or `marks` for a recording without events of the kernel.
    pub detail: String,
    /// The port; 0 if the service reports its requests itself, by marks.
    pub port: u16,
    pub service: String,
    /// The begin in CLOCK_MONOTONIC.
    pub began_ns: u64,
    /// The CPUs of each core with several lanes, as the machine shows them or the user gives them.
    pub cores: Vec<Vec<u32>>,
    /// Tracepoints of this detail that the kernel does not have.
    pub lacks: Vec<String>,
}

/// The name that a thread had at a time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ThreadName {
    pub thread: u32,
    pub at_ns: u64,
    pub name: String,
}

/// One thread. The kernel reuses thread numbers, so the number alone does not identify a thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ThreadIdentity {
    pub thread: u32,
    /// Index into the names that this number had.
    name: usize,
}

/// A thread of a batch of `elfen run`, with the program of the batch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BatchThread {
    pub thread: u32,
    pub at_ns: u64,
    pub program: String,
}

/// A function of the kernel, and the lower half of an address within it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KernelFunction {
    pub address: u32,
    pub name: String,
}

/// A function of a process, and an address within it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CodeName {
    pub process: u32,
    pub address: u64,
    pub name: String,
}

/// How long an entry of a batch thread is valid after its time. The recorder looks the threads up
/// more often than that.
const BATCH_LOOKUP_NS: u64 = 2_000_000_000;

/// A span with missing events: on one CPU, or on an unknown CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Gap {
    pub cpu: Option<u32>,
    pub count: u64,
    pub from_ns: u64,
    pub to_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trace {
    pub head: Header,
    /// The events of each CPU, in the order of time.
    pub events: Vec<Vec<Event>>,
    /// The names of each thread. Each name comes with the last time at which it was seen, and names
    /// are sorted by these times.
    pub names: BTreeMap<u32, Vec<(u64, String)>>,
    /// For each batch thread: the last time at which it was seen, and the batch's program.
    pub batches: BTreeMap<u32, (u64, String)>,
    /// All processes that the service had during the recording.
    pub processes: Vec<u32>,
    pub gaps: Vec<Gap>,
    /// Kernel functions in which threads slept, by the lower halves of addresses within them.
    pub functions: BTreeMap<u32, String>,
    /// Functions of the service, by process and by addresses within them.
    pub code: BTreeMap<(u32, u64), String>,
    /// The marks of each request lane, in the order of time: what the service reports of its
    /// requests.
    pub marks: BTreeMap<u32, Vec<Mark>>,
    /// When the recording ended; `None` if the file is cut off.
    pub ended_ns: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Read(io::Error),
    #[error("it is not a trace of `elfen tailor record`")]
    Foreign,
    #[error("it is a trace of version {0}, and this program reads version {VERSION}")]
    Version(u32),
    #[error("its block at byte {0} is damaged")]
    Damaged(u64),
}

/// The parts of a recording other than events and marks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Note {
    /// The first block of a file, and only the first.
    Header(Header),
    Names(Vec<ThreadName>),
    /// All processes of the service that run now.
    Processes(Vec<u32>),
    Batches(Vec<BatchThread>),
    Functions(Vec<KernelFunction>),
    Code(Vec<CodeName>),
    Gap(Gap),
    End(u64),
}

/// Receives what is recorded: a file, or a trace in memory.
pub trait Sink {
    fn add_events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()>;
    /// Adds what the service reported on one request lane.
    fn add_marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()>;
    fn add_note(&mut self, note: Note) -> io::Result<()>;
}

/// Writes a trace, block by block.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
}

impl<W: Write> Writer<W> {
    pub fn new(mut out: W, head: Header) -> io::Result<Self> {
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        let mut writer = Self { out };
        writer.add_note(Note::Header(head))?;
        Ok(writer)
    }

    pub fn end(mut self, ended_ns: u64) -> io::Result<W> {
        self.add_note(Note::End(ended_ns))?;
        Ok(self.out)
    }

    fn write_words(&mut self, kind: u32, of: u32, words: &[Words]) -> io::Result<()> {
        if words.is_empty() {
            return Ok(());
        }
        let mut content = Vec::with_capacity(4 + size_of_val(words));
        content.extend(of.to_le_bytes());
        content.extend(words.as_flattened().iter().flat_map(|word| word.to_le_bytes()));
        self.write_block(kind, &content)
    }

    fn write_block(&mut self, kind: u32, content: &[u8]) -> io::Result<()> {
        let length = u32::try_from(content.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let head = [kind, length, crc32fast::hash(content)].map(u32::to_le_bytes);
        self.out.write_all(head.as_flattened())?;
        self.out.write_all(content)?;
        // Flushes, so that readers of an unfinished file find whole blocks.
        self.out.flush()
    }
}

impl<W: Write> Sink for Writer<W> {
    fn add_events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()> {
        self.write_words(EVENTS, cpu, events)
    }

    fn add_marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()> {
        self.write_words(MARKS, lane, marks)
    }

    fn add_note(&mut self, note: Note) -> io::Result<()> {
        self.write_block(NOTE, &serde_json::to_vec(&note)?)
    }
}

impl Sink for Trace {
    fn add_events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()> {
        Self::add_events(self, cpu, events);
        Ok(())
    }

    fn add_marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()> {
        Self::add_marks(self, lane, marks);
        Ok(())
    }

    fn add_note(&mut self, note: Note) -> io::Result<()> {
        Self::add_note(self, note);
        Ok(())
    }
}

impl Trace {
    /// An empty trace. [`Trace::add_events`] adds events.
    pub fn new(head: Header) -> Self {
        let events = vec![Vec::new(); head.cpus as usize];
        Self { head, events, ..Self::default() }
    }

    /// Adds events of one CPU. Ignores events of a CPU that the header does not have.
    pub fn add_events(&mut self, cpu: u32, words: &[Words]) {
        let Some(events) = self.events.get_mut(cpu as usize) else { return };
        let known = events.len();
        events.extend(words.iter().filter_map(Event::decode));
        // Events from a JVM's counters are added after later events.
        let new = &events[known.saturating_sub(1)..];
        if !new.is_sorted_by_key(|event| event.at_ns) {
            events.sort_by_key(|event| event.at_ns);
        }
    }

    /// Adds marks of one request lane.
    pub fn add_marks(&mut self, lane: u32, words: &[Words]) {
        let marks = self.marks.entry(lane).or_default();
        marks.extend(words.iter().filter_map(Mark::decode));
    }

    pub fn add_note(&mut self, note: Note) {
        match note {
            Note::Header(head) => self.head = head,
            Note::Names(names) => names.into_iter().for_each(|name| self.add_name(name)),
            Note::Processes(processes) => {
                let new = |process: &u32| !self.processes.contains(process);
                let new: Vec<u32> = processes.into_iter().filter(new).collect();
                self.processes.extend(new);
            }
            Note::Batches(threads) => {
                let of = |of: BatchThread| (of.thread, (of.at_ns, of.program));
                self.batches.extend(threads.into_iter().map(of));
            }
            Note::Functions(found) => {
                self.functions.extend(found.into_iter().map(|of| (of.address, of.name)));
            }
            Note::Code(found) => {
                let of = |of: CodeName| ((of.process, of.address), of.name);
                self.code.extend(found.into_iter().map(of));
            }
            Note::Gap(gap) => self.gaps.push(gap),
            Note::End(ended_ns) => self.ended_ns = Some(ended_ns),
        }
    }

    fn add_name(&mut self, ThreadName { thread, at_ns, name }: ThreadName) {
        let known = self.names.entry(thread).or_default();
        match known.last_mut() {
            Some((until_ns, last)) if *last == name => *until_ns = at_ns.max(*until_ns),
            _ => known.push((at_ns, name)),
        }
    }

    pub fn read(mut from: impl Read) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).map_err(Error::Read)?;
        let mut rest = bytes.strip_prefix(&MAGIC).ok_or(Error::Foreign)?;
        match take_u32(&mut rest).ok_or(Error::Foreign)? {
            VERSION => {}
            version => return Err(Error::Version(version)),
        }
        let mut trace = None;
        while !rest.is_empty() {
            let at = (bytes.len() - rest.len()) as u64;
            let damaged = || Error::Damaged(at);
            let block = next_block(&mut rest).map_err(|()| damaged())?;
            let Some((kind, content)) = block else { break };
            match &mut trace {
                Some(trace) => Self::add_block(trace, kind, content),
                None => first_block(kind, content).map(|head| trace = Some(Self::new(head))),
            }
            .ok_or_else(damaged)?;
        }
        let mut trace = trace.ok_or(Error::Foreign)?;
        for marks in trace.marks.values_mut() {
            marks.sort_by_key(|mark| mark.at_ns);
        }
        Ok(trace)
    }

    fn add_block(&mut self, kind: u32, mut content: &[u8]) -> Option<()> {
        if kind == NOTE {
            match serde_json::from_slice(content).ok()? {
                Note::Header(_) => return None,
                note => self.add_note(note),
            }
            return Some(());
        }
        let of = take_u32(&mut content)?;
        let (words, rest) = content.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let (words, odd) = words.as_chunks::<4>();
        match kind {
            EVENTS => self.add_events(of, words),
            MARKS if of < elfen_rt::signal::page::SLOTS_MAX => self.add_marks(of, words),
            MARKS => {}
            _ => return None,
        }
        (rest.is_empty() && odd.is_empty()).then_some(())
    }

    /// Finds which thread had a number at a time. A thread's name is recorded at its end at the
    /// latest. So it is the first thread whose name was seen at that time or later.
    pub fn identify(&self, thread: u32, at_ns: u64) -> ThreadIdentity {
        let known = self.names.get(&thread).map_or(&[][..], Vec::as_slice);
        let later = known.iter().position(|(until_ns, _)| *until_ns >= at_ns);
        ThreadIdentity { thread, name: later.unwrap_or(known.len().saturating_sub(1)) }
    }

    /// All events with their CPUs, by time. Events of the same time are in the order of their CPUs.
    pub fn events_in_order(&self) -> Vec<(u32, Event)> {
        let mut all: Vec<(u32, Event)> = (0..)
            .zip(&self.events)
            .flat_map(|(cpu, events)| events.iter().map(move |event| (cpu, *event)))
            .collect();
        all.sort_by_key(|(_, event)| event.at_ns);
        all
    }

    /// The other lanes of a CPU's core.
    pub fn siblings(&self, cpu: u32) -> impl Iterator<Item = u32> + '_ {
        let core = self.head.cores.iter().find(|core| core.contains(&cpu));
        core.into_iter().flatten().copied().filter(move |&other| other != cpu)
    }

    /// The name of a thread on another lane, or the program of its batch.
    pub fn neighbour(&self, thread: u32, at_ns: u64) -> String {
        match self.batches.get(&thread) {
            Some((until_ns, program)) if at_ns < until_ns.saturating_add(BATCH_LOOKUP_NS) => {
                program.clone()
            }
            _ => self.name_of(self.identify(thread, at_ns)),
        }
    }

    pub fn name_of(&self, thread: ThreadIdentity) -> String {
        let name = self.names.get(&thread.thread).and_then(|known| known.get(thread.name));
        name.map_or_else(|| format!("thread-{}", thread.thread), |(_, name)| name.clone())
    }
}

fn first_block(kind: u32, content: &[u8]) -> Option<Header> {
    match serde_json::from_slice(content).ok()? {
        // A damaged file could claim any number of CPUs, and no kernel has more than this.
        Note::Header(head) if kind == NOTE && head.cpus <= 8192 => Some(head),
        _ => None,
    }
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (word, after) = rest.split_first_chunk::<4>()?;
    *rest = after;
    Some(u32::from_le_bytes(*word))
}

/// Returns the next block, or `None` if the file ends within it.
fn next_block<'a>(rest: &mut &'a [u8]) -> Result<Option<(u32, &'a [u8])>, ()> {
    let (Some(kind), Some(length), Some(crc)) = (take_u32(rest), take_u32(rest), take_u32(rest))
    else {
        *rest = &[];
        return Ok(None);
    };
    if length > BLOCK_MAX_BYTES {
        return Err(());
    }
    let Some((content, after)) = rest.split_at_checked(length as usize) else {
        *rest = &[];
        return Ok(None);
    };
    *rest = after;
    // A fuzzer changes bytes without adapting checksums.
    if cfg!(fuzzing) || crc32fast::hash(content) == crc {
        Ok(Some((kind, content)))
    } else {
        Err(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::event::EventKind;
    use elfen_rt::signal::mark::Step;
    use proptest::prelude::*;

    fn written() -> (Vec<u8>, Trace) {
        let cores = vec![vec![0, 1]];
        let lacks = vec!["contention_end".to_owned()];
        let head = Header { cpus: 2, port: 80, began_ns: 5, cores, lacks, ..Header::default() };
        let kind = EventKind::Waking { waker: 1, waker_process: 1, process: 2 };
        let event = |at_ns| Event { at_ns, thread: 3, kind };
        let mark = |at_ns| Mark { at_ns, thread: 3, request: 1, step: Step::Stage(2) };
        let notes = [
            Note::Batches(vec![BatchThread { thread: 4, at_ns: 9, program: "loop".to_owned() }]),
            Note::Functions(vec![KernelFunction {
                address: 0x8123_4567,
                name: "filemap_fault".to_owned(),
            }]),
            Note::Code(vec![CodeName { process: 2, address: 0x1234, name: "sum".to_owned() }]),
            Note::Gap(Gap { cpu: None, count: 3, from_ns: 8, to_ns: 9 }),
            Note::Names(vec![ThreadName { thread: 3, at_ns: 9, name: "three".to_owned() }]),
            Note::Processes(vec![2]),
        ];
        let mut trace = Trace::new(head.clone());
        let mut writer = Writer::new(Vec::new(), head).unwrap();
        for note in notes {
            trace.add_note(note.clone());
            writer.add_note(note).unwrap();
        }
        trace.events[1] = vec![event(7), event(9)];
        trace.ended_ns = Some(11);
        trace.marks = [(4, vec![mark(6), mark(8)])].into();
        writer.add_events(1, &[event(9).encode(), event(7).encode()]).unwrap();
        writer.add_events(0, &[]).unwrap();
        writer.add_marks(4, &[mark(8).encode(), mark(6).encode()]).unwrap();
        (writer.end(11).unwrap(), trace)
    }

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let (bytes, trace) = written();
        assert_eq!(Trace::read(&bytes[..]).unwrap(), trace);
    }

    /// Goal: a file that was cut off is read up to the cut and known to be cut off, and a changed
    /// file is rejected. Method: every length, and a flipped bit in every byte.
    #[test]
    fn cut_files_are_read_and_damaged_files_rejected() {
        let (bytes, trace) = written();
        for length in 0..bytes.len() {
            match Trace::read(&bytes[..length]) {
                Ok(cut) => assert!(cut.ended_ns.is_none() && cut.head == trace.head, "{length}"),
                Err(error) => assert!(matches!(error, Error::Foreign), "{length}: {error}"),
            }
        }
        for at in 12..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x40;
            let read = Trace::read(&changed[..]);
            assert!(read.is_err() || read.is_ok_and(|read| read != trace), "byte {at}");
        }
        let mut other = bytes;
        other[8] = 9;
        assert!(matches!(Trace::read(&other[..]), Err(Error::Version(9))));
    }

    /// The kernel reuses thread numbers.
    #[test]
    fn a_reused_thread_number_has_the_name_of_its_time() {
        let mut trace = Trace::default();
        let named = |at_ns, name: &str| ThreadName { thread: 3, at_ns, name: name.to_owned() };
        trace.add_note(Note::Names(vec![named(10, "hog"), named(20, "hog"), named(30, "cc1")]));
        let name = |at_ns| trace.name_of(trace.identify(3, at_ns));
        assert_eq!([5, 20, 21, 30, 99].map(name), ["hog", "hog", "cc1", "cc1", "cc1"]);
        assert_eq!(trace.name_of(trace.identify(4, 5)), "thread-4");
        let batch = BatchThread { thread: 3, at_ns: 12, program: "loop".to_owned() };
        trace.add_note(Note::Batches(vec![batch]));
        let neighbour = |at_ns| trace.neighbour(3, at_ns);
        assert_eq!([5, 12, BATCH_LOOKUP_NS + 13].map(neighbour), ["loop", "loop", "cc1"]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let behind = [&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat();
            let _either = (Trace::read(&bytes[..]).is_ok(), Trace::read(&behind[..]).is_ok());
        }
    }
}
