//! The service that faults are injected into. One thread answers lines of text. A line asks for one
//! of these:
//!
//! - An amount of work. The answer may report when the work began.
//! - A read of the service's file.
//! - A spin. The answer reports the time during which the thread did not run.
//! - An answer in two pieces.
//!
//! A second thread holds the service's lock on request. With several answering threads, the clients
//! are distributed among them.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use elfen_machine::affinity;
use elfen_machine::placement::set_policy;
use elfen_machine::process::own_cpu_ns;
use elfen_rt::clock::monotonic_ns;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::injectors::Injection;

/// The name of the thread that holds the lock.
const HOLDER: &str = "elfen-holder";

/// Serves on a free port until standard input ends. Prints the number of the port.
///
/// For each number on standard input, a thread holds the lock for this many microseconds. It then
/// prints when it held the lock.
pub fn serve(cpu: u32, ordinary: bool, workers: usize) -> io::Result<()> {
    affinity::pin(cpu)?;
    if !ordinary {
        // This priority is below the hog and above all other threads. So the score only shows
        // injected faults, and a thread that waits for its CPU does not wait for the lock.
        set_policy(0, libc::SCHED_FIFO, 10)?;
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // The command has locked `io::stdout`, so this thread uses a descriptor of its own.
    let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    writeln!(output, "{}", listener.local_addr()?.port())?;
    let lock = Arc::new(Mutex::new(()));
    let held = Arc::clone(&lock);
    let holder = std::thread::Builder::new().name(HOLDER.to_owned());
    holder.spawn(move || {
        let ended = hold_on_request(&held, &mut output);
        // The parent process has ended, or it asks this process to end.
        std::process::exit(i32::from(ended.is_err()));
    })?;
    let index = Index::new()?;
    let workers = (0..workers).map(|number| start_worker(number, &lock, index));
    let mut workers = workers.collect::<io::Result<Vec<_>>>()?;
    // Clients are distributed round robin.
    for number in 0.. {
        let at = number % workers.len();
        let (doorbell, sender) = &mut workers[at];
        let (stream, _) = listener.accept()?;
        sender.send(stream).map_err(io::Error::other)?;
        doorbell.write_all(&[0])?;
    }
    Ok(())
}

/// Starts an answering thread. It gets clients through the channel, and a byte in the pipe for each
/// of them.
fn start_worker(
    number: usize,
    lock: &Arc<Mutex<()>>,
    index: Index,
) -> io::Result<(io::PipeWriter, Sender<TcpStream>)> {
    let (arrivals, doorbell) = io::pipe()?;
    let (sender, receiver) = channel();
    let lock = Arc::clone(lock);
    let worker = std::thread::Builder::new().name(format!("elfen-worker-{number}"));
    worker.spawn(move || {
        let ended = serve_clients(&arrivals, &receiver, &lock, index);
        std::process::exit(i32::from(ended.is_err()));
    })?;
    Ok((doorbell, sender))
}

fn hold_on_request(lock: &Mutex<()>, output: &mut File) -> io::Result<()> {
    for line in io::stdin().lines() {
        let us = line?.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let from_ns = monotonic_ns();
        std::thread::sleep(Duration::from_micros(us));
        let to_ns = monotonic_ns();
        drop(guard);
        let held = Injection::all(from_ns, to_ns);
        writeln!(output, "{}", serde_json::to_string(&held)?)?;
    }
    Ok(())
}

struct Client {
    stream: TcpStream,
    line: Vec<u8>,
}

fn serve_clients(
    mut arrivals: &io::PipeReader,
    new: &Receiver<TcpStream>,
    lock: &Mutex<()>,
    index: Index,
) -> io::Result<()> {
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let mut wanted = vec![PollFd::new(arrivals.as_fd(), PollFlags::POLLIN)];
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
            arrivals.read_exact(&mut [0])?;
            let stream = new.recv().map_err(io::Error::other)?;
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
                READ => self.answer_number(index.read())?,
                PIECES => {
                    self.stream.set_nodelay(false)?;
                    self.stream.write_all(b"do")?;
                    self.stream.write_all(b"ne\n")?;
                }
                line => {
                    let text = std::str::from_utf8(line).map_err(io::Error::other)?;
                    let us = |text: &str| text.trim().parse::<u64>().map_err(io::Error::other);
                    if let Some(text) = text.strip_prefix(SPIN) {
                        self.answer_number(spin(us(text)?))?;
                        continue;
                    }
                    let (started_ns, us) = match text.strip_prefix(START) {
                        Some(text) => (Some(monotonic_ns()), us(text)?),
                        None => (None, us(text)?),
                    };
                    let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
                    work(us);
                    drop(guard);
                    match started_ns {
                        Some(ns) => self.answer_number(ns)?,
                        None => self.stream.write_all(b"done\n")?,
                    }
                }
            }
        }
        Ok(())
    }

    fn answer_number(&mut self, ns: u64) -> io::Result<()> {
        self.stream.write_all(format!("{ns:020}\n").as_bytes())
    }
}

/// Asks to read the index. The answer is the time of the read without its CPU time.
pub(super) const READ: &[u8] = b"read\n";
/// Asks to spin for this many microseconds. The answer is the time during which the thread did not
/// run.
pub(super) const SPIN: &str = "spin ";
/// Asks for this many microseconds of work. The answer is the time at which the work began.
pub(super) const START: &str = "start ";
/// The length of an answer with a number.
pub(super) const NUMBER_BYTES: usize = 21;
/// Asks for an answer in two pieces. Nagle's algorithm delays the second.
pub(super) const PIECES: &[u8] = b"pieces\n";

/// The data of a file that the service has mapped.
#[derive(Clone, Copy)]
struct Index(&'static [u8]);

/// A directory on a disk. /tmp may be in memory.
const INDEX: &str = "/var/tmp";
const INDEX_BYTES: usize = 2 << 20;

impl Index {
    fn new() -> io::Result<Self> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).custom_flags(libc::O_TMPFILE).open(INDEX)?;
        file.write_all(&vec![1; INDEX_BYTES])?;
        // Dirty pages cannot be evicted.
        file.sync_all()?;
        let read = libc::PROT_READ;
        let shared = libc::MAP_SHARED;
        let fd = file.as_raw_fd();
        // SAFETY: the kernel picks a free address for the new mapping, and `file` is open during
        // the call.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), INDEX_BYTES, read, shared, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `mmap` mapped `INDEX_BYTES` at `at`, and no code unmaps them. The file has no
        // name, so no other process writes or truncates it.
        Ok(Self(unsafe { std::slice::from_raw_parts(at.cast(), INDEX_BYTES) }))
    }

    /// Touches every page. Returns how long this took, without its CPU time.
    fn read(self) -> u64 {
        let from_ns = monotonic_ns();
        let cpu_ns = own_cpu_ns();
        let sum: u64 = self.0.iter().step_by(4096).map(|byte| u64::from(*byte)).sum();
        assert_eq!(sum, (INDEX_BYTES / 4096) as u64, "as it was written");
        (monotonic_ns() - from_ns).saturating_sub(own_cpu_ns() - cpu_ns)
    }
}

/// A longer iteration of the loop that reads the clock means that the thread did not run.
const GAP_NS: u64 = 2_000;

/// Spins for this many microseconds. Returns the time during which the thread did not run. The
/// thread measures this with its own clock, so the result does not depend on the injector.
fn spin(us: u64) -> u64 {
    let mut last_ns = monotonic_ns();
    let until_ns = last_ns + us * 1_000;
    let mut kept_ns = 0;
    while last_ns < until_ns {
        let now_ns = monotonic_ns();
        if now_ns - last_ns >= GAP_NS {
            kept_ns += now_ns - last_ns;
        }
        last_ns = now_ns;
    }
    kept_ns
}

/// Uses this much CPU time, however long this takes.
fn work(us: u64) {
    let until_ns = own_cpu_ns() + us * 1_000;
    while own_cpu_ns() < until_ns {
        std::hint::spin_loop();
    }
}
