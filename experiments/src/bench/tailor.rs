//! What recording for `elfen tailor` costs those who are recorded: a hand-over between two threads,
//! and a request over a socket.
//!
//! Batches alternate between nothing attached and everything attached, and each is held against the
//! two detached ones beside it. The reader sleeps meanwhile: its own cost is measured apart, as its
//! CPU time for each event that it took.

mod counted;
mod perf;
pub(crate) mod reader;
pub(crate) mod served;

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};

use elfen_console::duration::number;
use elfen_kernel::events::{Detail, Error as Refused, Events, Watched};
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, Words};

use self::perf::PerfSched;
use super::distribution::Distribution;
use crate::live::scratch::Scratch;

/// Attaching and detaching takes most of the time: half a second where much else runs.
const ROUNDS: usize = 12;
const TURNS_A_BATCH: u32 = 2_000;
/// `perf` takes longer to begin, and what it adds is many times as much.
const PERF_ROUNDS: usize = 6;
/// Holds the events of a batch.
const RING: u32 = 65_536;

#[derive(Debug)]
pub(crate) struct Costs {
    /// A byte there and back between two threads of one CPU: two switches, two wake-ups.
    pub(crate) pipe: Distribution,
    pub(crate) pipe_added: Distribution,
    /// What `perf sched record` adds to it; or why that is not known.
    pub(crate) pipe_added_perf: Result<Distribution, String>,
    /// A request and its answer over loopback, between two threads of one CPU.
    pub(crate) request: Distribution,
    pub(crate) request_added: Distribution,
    pub(crate) request_added_full: Distribution,
    /// What the reader uses of a CPU for one event.
    pub(crate) reader: Distribution,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Events(#[from] Refused),
    #[error("handing bytes between two threads: {0}")]
    Io(#[from] io::Error),
    #[error("asking it for its count: {0}")]
    Count(io::Error),
    #[error("it finished no request")]
    Idle,
    #[error("nothing was recorded")]
    Nothing,
}

pub(crate) fn measure(cpu: u32) -> Result<Costs, Error> {
    let elsewhere = affinity::allowed()?;
    affinity::pin(cpu)?;
    let mut pipe = Turns::pipe()?;
    let mut socket = Turns::socket()?;
    let mut reader = Vec::new();
    let whole = |values| Distribution::of(values).ok_or(Error::Nothing);
    let [hand_over, hand_over_added] = pipe.compare(cpu, Detail::Sched, &mut reader)?;
    let perf = pipe.beside_perf(&elsewhere)?;
    let [request, request_added] = socket.compare(cpu, Detail::Sched, &mut reader)?;
    let [_, request_added_full] = socket.compare(cpu, Detail::Full, &mut reader)?;
    Ok(Costs {
        pipe: whole(hand_over)?,
        pipe_added: whole(hand_over_added)?,
        pipe_added_perf: perf,
        request: whole(request)?,
        request_added: whole(request_added)?,
        request_added_full: whole(request_added_full)?,
        reader: whole(reader)?,
    })
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// Two ends of one thing to read and write.
struct Ends<R, W>(R, W);

impl<R: Read, W> Read for Ends<R, W> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl<R, W: Write> Write for Ends<R, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

/// This thread asks, and a partner on the same CPU answers.
struct Turns {
    ours: Box<dyn Stream>,
    port: u16,
}

impl Turns {
    fn pipe() -> io::Result<Self> {
        let (theirs_in, ours_out) = io::pipe()?;
        let (ours_in, theirs_out) = io::pipe()?;
        answer(Ends(theirs_in, theirs_out));
        Ok(Self { ours: Box::new(Ends(ours_in, ours_out)), port: 0 })
    }

    fn socket() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let ours = TcpStream::connect(("127.0.0.1", port))?;
        let (theirs, _) = listener.accept()?;
        ours.set_nodelay(true)?;
        theirs.set_nodelay(true)?;
        answer(theirs);
        Ok(Self { ours: Box::new(ours), port })
    }

    fn ns_a_turn(&mut self) -> io::Result<f64> {
        let mut byte = [0];
        let start = monotonic_ns();
        for _ in 0..TURNS_A_BATCH {
            self.ours.write_all(&byte)?;
            self.ours.read_exact(&mut byte)?;
        }
        Ok(number(monotonic_ns() - start) / f64::from(TURNS_A_BATCH))
    }

    /// A turn with nothing attached, and what is added to it; and for `reader`, the CPU time of an
    /// event.
    fn compare(
        &mut self,
        cpu: u32,
        detail: Detail,
        reader: &mut Vec<f64>,
    ) -> Result<[Vec<f64>; 2], Error> {
        let watched =
            Watched { port: self.port, processes: vec![std::process::id()], cpus: vec![cpu] };
        let (mut detached, mut added) = (vec![self.ns_a_turn()?], Vec::new());
        for _ in 0..ROUNDS {
            let before = self.ns_a_turn()?;
            let mut events = Events::attach(detail, RING, &watched)?;
            let attached = self.ns_a_turn()?;
            reader.push(ns_an_event(&mut events, cpu)?);
            drop(events);
            let beside = f64::midpoint(before, self.ns_a_turn()?);
            detached.push(beside);
            added.push(attached - beside);
        }
        Ok([detached, added])
    }
}

impl Turns {
    /// What `perf sched record` adds, which may run wherever we might.
    fn beside_perf(&mut self, elsewhere: &CpuSet) -> Result<Result<Distribution, String>, Error> {
        let scratch = Scratch::new(1)?;
        let mut added = Vec::new();
        for _ in 0..PERF_ROUNDS {
            let before = self.ns_a_turn()?;
            let mut perf = match PerfSched::start(&scratch.path("perf.data"), elsewhere) {
                Ok(perf) => perf,
                Err(why) => return Ok(Err(why)),
            };
            if let Err(why) = perf.begins(|| self.ns_a_turn().map(drop)) {
                return Ok(Err(why));
            }
            let attached = self.ns_a_turn()?;
            drop(perf);
            added.push(attached - f64::midpoint(before, self.ns_a_turn()?));
        }
        Ok(Distribution::of(added).ok_or_else(|| "nothing was measured".to_owned()))
    }
}

/// What taking the events of a batch costs, for each.
fn ns_an_event(events: &mut Events, cpu: u32) -> Result<f64, Error> {
    let mut words: Vec<Words> = Vec::new();
    let start = monotonic_ns();
    events.read(cpu, &mut words);
    for event in words.iter().filter_map(Event::decode) {
        black_box(event);
    }
    let took_ns = monotonic_ns() - start;
    if words.is_empty() {
        return Err(Error::Nothing);
    }
    Ok(number(took_ns) / number(words.len() as u64))
}

/// Answers each byte until the other end is gone.
fn answer(mut theirs: impl Stream + 'static) {
    // Inherits our affinity.
    std::thread::spawn(move || {
        let mut byte = [0];
        while theirs.read_exact(&mut byte).and_then(|()| theirs.write_all(&byte)).is_ok() {}
    });
}
