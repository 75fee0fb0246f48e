//! The service that is hurt: one thread that answers lines of text, each of which says how much
//! work it is, and perhaps that it is to say when that began, or that its file is to be read, or
//! that it is to spin and say what kept it from that, or that the answer goes out in two pieces;
//! and a second thread that holds its lock when it is told to. Where it has several threads that
//! answer, clients are dealt out to them.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use elfen_machine::affinity;
use elfen_rt::clock::monotonic_ns;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::inject::{Injured, own_cpu_ns, take_precedence};

/// The name of the thread that holds the lock.
pub const HOLDER: &str = "elfen-holder";

/// Serves on a port of its own, which it prints, until its standard input ends. A line of a number
/// there has the lock held for so many microseconds; when that was, is printed.
pub fn serve(cpu: u32, ordinary: bool, workers: usize) -> io::Result<()> {
    affinity::pin(cpu)?;
    if !ordinary {
        // Below the hog and above everybody else: what is scored is what was injected, and while
        // somebody waits for a CPU he waits for no lock.
        take_precedence(10)?;
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // The command holds the lock of `io::stdout`, which the holder would wait for.
    let mut told = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    writeln!(told, "{}", listener.local_addr()?.port())?;
    let lock = Arc::new(Mutex::new(()));
    let held = Arc::clone(&lock);
    let holder = std::thread::Builder::new().name(HOLDER.to_owned());
    holder.spawn(move || {
        let ended = hold(&held, &mut told);
        // Whoever started us is gone, or wants us to go.
        std::process::exit(i32::from(ended.is_err()));
    })?;
    let index = Index::new()?;
    if workers == 1 {
        return answer(&Door::Own(listener), &lock, index);
    }
    deal(&listener, workers, &lock, index)
}

/// Deals out clients to threads, in turns.
fn deal(
    listener: &TcpListener,
    workers: usize,
    lock: &Arc<Mutex<()>>,
    index: Index,
) -> io::Result<()> {
    let mut all = Vec::new();
    for number in 0..workers {
        let ((bell, rings), (hands, handed)) = (io::pipe()?, channel());
        let (door, lock) = (Door::Dealt(bell, handed), Arc::clone(lock));
        let worker = std::thread::Builder::new().name(format!("elfen-worker-{number}"));
        worker.spawn(move || {
            let ended = answer(&door, &lock, index);
            std::process::exit(i32::from(ended.is_err()));
        })?;
        all.push((rings, hands));
    }
    for number in 0.. {
        let (rings, hands) = &mut all[number % workers];
        let (stream, _) = listener.accept()?;
        hands.send(stream).map_err(io::Error::other)?;
        rings.write_all(&[0])?;
    }
    Ok(())
}

/// Where a thread's clients come from.
enum Door {
    Own(TcpListener),
    /// A byte for each.
    Dealt(io::PipeReader, Receiver<TcpStream>),
}

impl Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(listener) => listener.as_fd(),
            Self::Dealt(bell, _) => bell.as_fd(),
        }
    }

    fn next(&self) -> io::Result<TcpStream> {
        match self {
            Self::Own(listener) => Ok(listener.accept()?.0),
            Self::Dealt(bell, handed) => {
                let mut bell = bell;
                bell.read_exact(&mut [0])?;
                handed.recv().map_err(io::Error::other)
            }
        }
    }
}

fn hold(lock: &Mutex<()>, told: &mut File) -> io::Result<()> {
    for line in io::stdin().lines() {
        let us = line?.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let from_ns = monotonic_ns();
        std::thread::sleep(Duration::from_micros(us));
        let to_ns = monotonic_ns();
        drop(guard);
        let held = Injured::all(from_ns, to_ns);
        writeln!(told, "{}", serde_json::to_string(&held)?)?;
    }
    Ok(())
}

struct Client {
    stream: TcpStream,
    line: Vec<u8>,
}

fn answer(door: &Door, lock: &Mutex<()>, index: Index) -> io::Result<()> {
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let mut wanted = vec![PollFd::new(door.as_fd(), PollFlags::POLLIN)];
        wanted.extend(clients.iter().map(|c| PollFd::new(c.stream.as_fd(), PollFlags::POLLIN)));
        poll(&mut wanted, PollTimeout::NONE)?;
        let ready: Vec<bool> = wanted.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        drop(wanted);
        let mut at = 0;
        clients.retain_mut(|client| {
            at += 1;
            !ready[at] || client.serve(lock, index).is_ok()
        });
        if ready[0] {
            let stream = door.next()?;
            stream.set_nodelay(true)?;
            clients.push(Client { stream, line: Vec::new() });
        }
    }
}

impl Client {
    fn serve(&mut self, lock: &Mutex<()>, index: Index) -> io::Result<()> {
        let mut bytes = [0; 256];
        let count = self.stream.read(&mut bytes)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.line.extend(&bytes[..count]);
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            match &line[..] {
                READ => self.waited(index.read())?,
                PIECES => {
                    self.stream.set_nodelay(false)?;
                    self.stream.write_all(b"do")?;
                    self.stream.write_all(b"ne\n")?;
                }
                line => {
                    let text = std::str::from_utf8(line).map_err(io::Error::other)?;
                    let us = |text: &str| text.trim().parse::<u64>().map_err(io::Error::other);
                    if let Some(text) = text.strip_prefix(SPIN) {
                        self.waited(spin(us(text)?))?;
                        continue;
                    }
                    let (turn_ns, us) = match text.strip_prefix(TURN) {
                        Some(text) => (Some(monotonic_ns()), us(text)?),
                        None => (None, us(text)?),
                    };
                    let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
                    work(us);
                    drop(guard);
                    match turn_ns {
                        Some(ns) => self.waited(ns)?,
                        None => self.stream.write_all(b"done\n")?,
                    }
                }
            }
        }
        Ok(())
    }

    fn waited(&mut self, ns: u64) -> io::Result<()> {
        self.stream.write_all(format!("{ns:020}\n").as_bytes())
    }
}

/// Asks for the index to be read; the answer is how long that took beyond its work.
pub const READ: &[u8] = b"read\n";
/// Asks for so many microseconds of spinning; the answer is what kept the service from it.
pub const SPIN: &str = "spin ";
/// Asks for so many microseconds of work; the answer is when its turn came.
pub const TURN: &str = "turn ";
/// So long is an answer to these.
pub const WAITED: usize = 21;
/// Asks for an answer in two pieces, of which Nagle's algorithm holds the second.
pub const PIECES: &[u8] = b"pieces\n";

/// Data of a file that the service has mapped.
#[derive(Clone, Copy)]
struct Index(&'static [u8]);

/// On a disk, unlike what lies in memory.
const INDEX: &str = "/var/tmp";
const INDEX_BYTES: usize = 2 << 20;

impl Index {
    fn new() -> io::Result<Self> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).custom_flags(libc::O_TMPFILE).open(INDEX)?;
        file.write_all(&vec![1; INDEX_BYTES])?;
        // What is not on the disk yet could not be put out of memory.
        file.sync_all()?;
        let (read, shared, fd) = (libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd());
        // SAFETY: a new mapping, wherever the kernel puts it, of a file that is open.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), INDEX_BYTES, read, shared, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has mapped so many bytes there and nobody unmaps them; the file has no
        // name, so nobody else writes or cuts it.
        Ok(Self(unsafe { std::slice::from_raw_parts(at.cast(), INDEX_BYTES) }))
    }

    /// Touches every page; how long that took but for its own work.
    fn read(self) -> u64 {
        let (from_ns, cpu_ns) = (monotonic_ns(), own_cpu_ns());
        let sum: u64 = self.0.iter().step_by(4096).map(|byte| u64::from(*byte)).sum();
        assert_eq!(sum, (INDEX_BYTES / 4096) as u64, "as it was written");
        (monotonic_ns() - from_ns).saturating_sub(own_cpu_ns() - cpu_ns)
    }
}

/// Of a loop that looks at the clock, a turn takes less.
const GAP_NS: u64 = 2_000;

/// Spins until a time, and says for how long it did not: by its own clock, so whoever kept it from
/// that has no part in what is said.
fn spin(us: u64) -> u64 {
    let mut last_ns = monotonic_ns();
    let (until_ns, mut kept_ns) = (last_ns + us * 1_000, 0);
    while last_ns < until_ns {
        let now_ns = monotonic_ns();
        if now_ns - last_ns >= GAP_NS {
            kept_ns += now_ns - last_ns;
        }
        last_ns = now_ns;
    }
    kept_ns
}

/// Uses so much of a CPU, however long that takes.
fn work(us: u64) {
    let until_ns = own_cpu_ns() + us * 1_000;
    while own_cpu_ns() < until_ns {
        std::hint::spin_loop();
    }
}

/// The service in a process of its own; it ends with this.
#[derive(Debug)]
pub struct Served {
    process: std::process::Child,
    told: BufReader<std::process::ChildStdout>,
    pub port: u16,
}

impl Served {
    /// At an ordinary priority, or before all others on its CPU; with so many threads that answer.
    pub fn start(cpu: u32, ordinary: bool, workers: usize) -> io::Result<Self> {
        let mut process = std::process::Command::new(std::env::current_exe()?)
            .args(["tailor", "serve", &cpu.to_string(), "--workers", &workers.to_string()])
            .args(ordinary.then_some("--ordinary"))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()?;
        let told = process.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut served = Self { process, told: BufReader::new(told), port: 0 };
        served.port = served.line()?.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(served)
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn hold_lock(&mut self, time: Duration) -> io::Result<Injured> {
        let input = self.process.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(input, "{}", time.as_micros())?;
        Ok(serde_json::from_str(&self.line()?)?)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.told.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill, and waiting takes it away.
        let _gone = self.process.kill();
        let _ended = self.process.wait();
    }
}
