//! What was recorded in a span of time: events of each CPU, the names of threads, and what was
//! lost.
//!
//! A `.tale` file is a magic number and a version, then blocks: kind, length, CRC-32C, content. It
//! is written while it is recorded, so a file that ends anywhere is read up to its last whole
//! block, and says that it is cut.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use elfen_rt::signal::event::{Event, Words};
use elfen_rt::signal::mark::Mark;
use serde::{Deserialize, Serialize};

/// The detail of a recording in which the kernel showed nothing.
pub const MARKS_ALONE: &str = "marks";
/// The detail of one with interrupts, page faults and the kernel's own waits.
pub const FULL: &str = "full";

const MAGIC: [u8; 8] = *b"ELFNTALE";
const VERSION: u32 = 1;

const HEAD: u32 = 1;
const EVENTS: u32 = 2;
const NAMES: u32 = 3;
const GAPS: u32 = 4;
const END: u32 = 5;
const MARKS: u32 = 6;
const BATCHES: u32 = 7;
const FUNCTIONS: u32 = 8;

/// No block is longer: the recorder writes each ring at once.
const LONGEST: u32 = 64 << 20;

/// Where and how it was recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Head {
    pub kernel: String,
    pub cpus: u32,
    /// `sched` or `full`; `marks` if the kernel showed nothing.
    pub detail: String,
    /// 0 where requests are told by the service's own marks.
    pub port: u16,
    pub service: String,
    /// CLOCK_MONOTONIC.
    pub began_ns: u64,
    /// The CPUs of each core that has several lanes, or is taken to.
    #[serde(default)]
    pub cores: Vec<Vec<u32>>,
    /// Tracepoints of the detail that the kernel did not have.
    #[serde(default)]
    pub lacks: Vec<String>,
}

/// A thread, as it was called at a time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Named {
    pub thread: u32,
    pub at_ns: u64,
    pub name: String,
}

/// A thread, told from others that had its number before or after.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Who {
    pub thread: u32,
    /// Which of the names of this number.
    name: usize,
}

/// A thread of a batch that `elfen run` has put beside a service, and the batch's program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lent {
    pub thread: u32,
    pub at_ns: u64,
    pub program: String,
}

/// A function of the kernel, by the lower half of an address in it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Function {
    pub address: u32,
    pub name: String,
}

/// A thread is looked up so often, and for so long it is what it was.
const LOOKED_UP_NS: u64 = 2_000_000_000;

/// Events that are missing, on one CPU or, if nobody knows, on any.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Gap {
    pub cpu: Option<u32>,
    pub count: u64,
    pub from_ns: u64,
    pub to_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tale {
    pub head: Head,
    /// By CPU, in the order of their times.
    pub events: Vec<Vec<Event>>,
    /// By thread: until when it was called so, in the order of these times.
    pub names: BTreeMap<u32, Vec<(u64, String)>>,
    /// By thread: until when it was of the batch.
    pub batches: BTreeMap<u32, (u64, String)>,
    /// The service's processes, from first to last.
    pub processes: Vec<u32>,
    pub gaps: Vec<Gap>,
    /// Functions of the kernel that threads slept in, by the lower halves of addresses in them.
    pub functions: BTreeMap<u32, String>,
    /// By request lane, in the order of their times: what the service says of its requests.
    pub marks: BTreeMap<u32, Vec<Mark>>,
    /// When the recorder ended; `None` if the file is cut.
    pub ended_ns: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Read(io::Error),
    #[error("it is no tale")]
    Foreign,
    #[error("it is a tale of version {0}, and this program reads version {VERSION}")]
    Version(u32),
    #[error("its block at byte {0} is damaged")]
    Damaged(u64),
}

#[derive(Serialize, Deserialize)]
struct NamesBlock {
    names: Vec<Named>,
    processes: Vec<u32>,
}

/// Writes a tale, block by block.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
}

impl<W: Write> Writer<W> {
    pub fn new(mut out: W, head: &Head) -> io::Result<Self> {
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        let mut writer = Self { out };
        writer.json(HEAD, head)?;
        Ok(writer)
    }

    pub fn events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()> {
        self.words(EVENTS, cpu, events)
    }

    fn words(&mut self, kind: u32, of: u32, words: &[Words]) -> io::Result<()> {
        if words.is_empty() {
            return Ok(());
        }
        let mut content = Vec::with_capacity(4 + size_of_val(words));
        content.extend(of.to_le_bytes());
        content.extend(words.as_flattened().iter().flat_map(|word| word.to_le_bytes()));
        self.block(kind, &content)
    }

    /// What the service has said of one request lane.
    pub fn marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()> {
        self.words(MARKS, lane, marks)
    }

    pub fn names(&mut self, names: Vec<Named>, processes: &[u32]) -> io::Result<()> {
        self.json(NAMES, &NamesBlock { names, processes: processes.to_vec() })
    }

    pub fn batches(&mut self, lent: &[Lent]) -> io::Result<()> {
        if lent.is_empty() { Ok(()) } else { self.json(BATCHES, &lent) }
    }

    pub fn functions(&mut self, found: &[Function]) -> io::Result<()> {
        if found.is_empty() { Ok(()) } else { self.json(FUNCTIONS, &found) }
    }

    pub fn gap(&mut self, gap: &Gap) -> io::Result<()> {
        self.json(GAPS, gap)
    }

    pub fn end(mut self, ended_ns: u64) -> io::Result<W> {
        self.json(END, &ended_ns)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn json(&mut self, kind: u32, content: &impl Serialize) -> io::Result<()> {
        self.block(kind, &serde_json::to_vec(content)?)
    }

    fn block(&mut self, kind: u32, content: &[u8]) -> io::Result<()> {
        let length = u32::try_from(content.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let head = [kind, length, crc32c(content)].map(u32::to_le_bytes);
        self.out.write_all(head.as_flattened())?;
        self.out.write_all(content)?;
        // Whoever reads a file that is still written, or was cut, finds whole blocks.
        self.out.flush()
    }
}

impl Tale {
    /// A tale that begins: events come by [`Tale::add`].
    pub fn begin(head: Head) -> Self {
        let events = vec![Vec::new(); head.cpus as usize];
        Self { head, events, ..Self::default() }
    }

    /// Takes over events of one CPU; a CPU that there is not has none.
    pub fn add(&mut self, cpu: u32, words: &[Words]) {
        let Some(events) = self.events.get_mut(cpu as usize) else { return };
        let known = events.len();
        events.extend(words.iter().filter_map(Event::decode));
        // What a JVM's counters tell is told late.
        let new = &events[known.saturating_sub(1)..];
        if !new.is_sorted_by_key(|event| event.at_ns) {
            events.sort_by_key(|event| event.at_ns);
        }
    }

    /// Takes over marks of one request lane.
    pub fn mark(&mut self, lane: u32, words: &[Words]) {
        let marks = self.marks.entry(lane).or_default();
        marks.extend(words.iter().filter_map(Mark::decode));
    }

    pub fn name(&mut self, names: Vec<Named>, processes: &[u32]) {
        for Named { thread, at_ns, name } in names {
            let known = self.names.entry(thread).or_default();
            match known.last_mut() {
                Some((until_ns, last)) if *last == name => *until_ns = at_ns.max(*until_ns),
                _ => known.push((at_ns, name)),
            }
        }
        for process in processes {
            if !self.processes.contains(process) {
                self.processes.push(*process);
            }
        }
    }

    pub fn lend(&mut self, lent: Vec<Lent>) {
        for Lent { thread, at_ns, program } in lent {
            self.batches.insert(thread, (at_ns, program));
        }
    }

    pub fn learn(&mut self, found: Vec<Function>) {
        self.functions.extend(found.into_iter().map(|of| (of.address, of.name)));
    }

    pub fn read(mut from: impl Read) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).map_err(Error::Read)?;
        let mut rest = bytes.strip_prefix(&MAGIC).ok_or(Error::Foreign)?;
        match take(&mut rest).ok_or(Error::Foreign)? {
            VERSION => {}
            version => return Err(Error::Version(version)),
        }
        let mut tale = None;
        while !rest.is_empty() {
            let at = (bytes.len() - rest.len()) as u64;
            let Some((kind, content)) = block(&mut rest).map_err(|()| Error::Damaged(at))? else {
                break;
            };
            let taken = match (&mut tale, kind) {
                (None, HEAD) => serde_json::from_slice(content).ok().and_then(|head: Head| {
                    // No kernel has more, and a foreign file could ask for any number.
                    (head.cpus <= 8192).then(|| tale = Some(Self::begin(head)))
                }),
                (Some(tale), kind) => tale.take(kind, content),
                (None, _) => None,
            };
            taken.ok_or(Error::Damaged(at))?;
        }
        let mut tale = tale.ok_or(Error::Foreign)?;
        tale.marks.values_mut().for_each(|marks| marks.sort_by_key(|mark| mark.at_ns));
        Ok(tale)
    }

    fn take(&mut self, kind: u32, mut content: &[u8]) -> Option<()> {
        match kind {
            EVENTS | MARKS => {
                let of = take(&mut content)?;
                let (words, rest) = content.as_chunks::<8>();
                let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
                let (words, odd) = words.as_chunks::<4>();
                if kind == EVENTS {
                    self.add(of, words);
                } else if of < elfen_rt::signal::page::SLOTS_MAX {
                    self.mark(of, words);
                }
                (rest.is_empty() && odd.is_empty()).then_some(())
            }
            NAMES => {
                let block: NamesBlock = serde_json::from_slice(content).ok()?;
                self.name(block.names, &block.processes);
                Some(())
            }
            GAPS => {
                self.gaps.push(serde_json::from_slice(content).ok()?);
                Some(())
            }
            BATCHES => {
                self.lend(serde_json::from_slice(content).ok()?);
                Some(())
            }
            FUNCTIONS => {
                self.learn(serde_json::from_slice(content).ok()?);
                Some(())
            }
            END => {
                self.ended_ns = Some(serde_json::from_slice(content).ok()?);
                Some(())
            }
            // Of a later minor version: what it says is not needed to read the rest.
            _ => Some(()),
        }
    }

    /// Who had a thread's number at a time: the first of its names that was seen later, since each
    /// thread is named when it ends.
    pub fn who(&self, thread: u32, at_ns: u64) -> Who {
        let known = self.names.get(&thread).map_or(&[][..], Vec::as_slice);
        let later = known.iter().position(|(until_ns, _)| *until_ns >= at_ns);
        Who { thread, name: later.unwrap_or(known.len().saturating_sub(1)) }
    }

    /// The other lanes of a CPU's core.
    pub fn siblings(&self, cpu: u32) -> impl Iterator<Item = u32> + '_ {
        let core = self.head.cores.iter().find(|core| core.contains(&cpu));
        core.into_iter().flatten().copied().filter(move |&other| other != cpu)
    }

    /// What a thread on another lane is called: a batch by its program.
    pub fn neighbour(&self, thread: u32, at_ns: u64) -> String {
        match self.batches.get(&thread) {
            Some((until_ns, program)) if at_ns < until_ns.saturating_add(LOOKED_UP_NS) => {
                program.clone()
            }
            _ => self.name_of(self.who(thread, at_ns)),
        }
    }

    pub fn name_of(&self, who: Who) -> String {
        let name = self.names.get(&who.thread).and_then(|known| known.get(who.name));
        name.map_or_else(|| format!("thread-{}", who.thread), |(_, name)| name.clone())
    }
}

fn take(rest: &mut &[u8]) -> Option<u32> {
    let (word, after) = rest.split_first_chunk::<4>()?;
    *rest = after;
    Some(u32::from_le_bytes(*word))
}

/// The next block; `None` if the file ends in it.
fn block<'a>(rest: &mut &'a [u8]) -> Result<Option<(u32, &'a [u8])>, ()> {
    let (Some(kind), Some(length), Some(crc)) = (take(rest), take(rest), take(rest)) else {
        *rest = &[];
        return Ok(None);
    };
    if length > LONGEST {
        return Err(());
    }
    let Some((content, after)) = rest.split_at_checked(length as usize) else {
        *rest = &[];
        return Ok(None);
    };
    *rest = after;
    // The fuzzer changes bytes and knows no checksums.
    if cfg!(fuzzing) || crc32c(content) == crc { Ok(Some((kind, content))) } else { Err(()) }
}

/// Castagnoli's polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut at = 0;
    let mut byte = 0_u32;
    while at < 256 {
        let (mut crc, mut bit) = (byte, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
        byte += 1;
    }
    table
};

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        let [low, ..] = (crc ^ u32::from(*byte)).to_le_bytes();
        TABLE[usize::from(low)] ^ crc >> 8
    };
    !bytes.iter().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::event::Kind;
    use elfen_rt::signal::mark::Step;
    use proptest::prelude::*;

    fn written() -> (Vec<u8>, Tale) {
        let (cores, lacks) = (vec![vec![0, 1]], vec!["contention_end".to_owned()]);
        let head = Head { cpus: 2, port: 80, began_ns: 5, cores, lacks, ..Head::default() };
        let kind = Kind::Waking { waker: 1, waker_process: 1, process: 2 };
        let event = |at_ns| Event { at_ns, thread: 3, kind };
        let mut tale = Tale::begin(head.clone());
        tale.events[1] = vec![event(7), event(9)];
        tale.gaps = vec![Gap { cpu: None, count: 3, from_ns: 8, to_ns: 9 }];
        tale.name(vec![Named { thread: 3, at_ns: 9, name: "three".to_owned() }], &[2]);
        tale.ended_ns = Some(11);
        let mark = |at_ns| Mark { at_ns, thread: 3, request: 1, step: Step::Stage(2) };
        tale.marks = [(4, vec![mark(6), mark(8)])].into();
        let lent = vec![Lent { thread: 4, at_ns: 9, program: "loop".to_owned() }];
        tale.lend(lent.clone());
        let found = vec![Function { address: 0x8123_4567, name: "filemap_fault".to_owned() }];
        tale.learn(found.clone());
        let mut writer = Writer::new(Vec::new(), &head).unwrap();
        writer.batches(&lent).unwrap();
        writer.batches(&[]).unwrap();
        writer.functions(&found).unwrap();
        writer.functions(&[]).unwrap();
        writer.events(1, &[event(9).encode(), event(7).encode()]).unwrap();
        writer.events(0, &[]).unwrap();
        writer.gap(&tale.gaps[0]).unwrap();
        writer.marks(4, &[mark(8).encode(), mark(6).encode()]).unwrap();
        writer.names(vec![Named { thread: 3, at_ns: 9, name: "three".to_owned() }], &[2]).unwrap();
        (writer.end(11).unwrap(), tale)
    }

    #[test]
    fn a_tale_is_read_as_it_was_written() {
        let (bytes, tale) = written();
        assert_eq!(Tale::read(&bytes[..]).unwrap(), tale);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283, "the polynomial's known check value");
    }

    /// Goal: a file that was cut is read as far as it goes, and says so; one that was changed is
    /// refused. Method: every length, and every byte turned.
    #[test]
    fn cut_and_damaged_files() {
        let (bytes, tale) = written();
        for length in 0..bytes.len() {
            match Tale::read(&bytes[..length]) {
                Ok(cut) => assert!(cut.ended_ns.is_none() && cut.head == tale.head, "{length}"),
                Err(error) => assert!(matches!(error, Error::Foreign), "{length}: {error}"),
            }
        }
        for at in 12..bytes.len() {
            let mut turned = bytes.clone();
            turned[at] ^= 0x40;
            let read = Tale::read(&turned[..]);
            assert!(read.is_err() || read.is_ok_and(|read| read != tale), "byte {at}");
        }
        let mut other = bytes;
        other[8] = 9;
        assert!(matches!(Tale::read(&other[..]), Err(Error::Version(9))));
    }

    /// Numbers of threads are given again.
    #[test]
    fn a_number_has_the_name_of_its_time() {
        let mut tale = Tale::default();
        let named = |at_ns, name: &str| Named { thread: 3, at_ns, name: name.to_owned() };
        tale.name(vec![named(10, "hog"), named(20, "hog"), named(30, "cc1")], &[]);
        let name = |at_ns| tale.name_of(tale.who(3, at_ns));
        assert_eq!([5, 20, 21, 30, 99].map(name), ["hog", "hog", "cc1", "cc1", "cc1"]);
        assert_eq!(tale.name_of(tale.who(4, 5)), "thread-4");
        let lent = Lent { thread: 3, at_ns: 12, program: "loop".to_owned() };
        tale.lend(vec![lent]);
        let neighbour = |at_ns| tale.neighbour(3, at_ns);
        assert_eq!([5, 12, LOOKED_UP_NS + 13].map(neighbour), ["loop", "loop", "cc1"]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let behind = [&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat();
            let _either = (Tale::read(&bytes[..]).is_ok(), Tale::read(&behind[..]).is_ok());
        }
    }
}
