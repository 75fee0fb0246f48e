//! The services that faults are injected into: a process of this program, or one in Java.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use elfen_kernel::events::Detail;
use elfen_machine::affinity;
use elfen_rt::clock::nanos;

use super::injectors::Injection;

const JAVA_SOURCE: &str = include_str!("JavaService.java");

/// A service that a fault needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ServiceKind {
    /// Above all ordinary threads, so that only faults are in its way.
    Realtime,
    /// At an ordinary priority: at a real-time priority a service shares its CPU with no rival.
    Ordinary,
    /// Recorded in full detail, in which packets show. Each request has some.
    WithPackets,
    /// In Java, and collects its heap on request.
    Java,
    /// In Java, and has loaded no classes yet. It is new only for a single request.
    FreshJava,
}

impl ServiceKind {
    pub(super) const ALL: [Self; 5] =
        [Self::Realtime, Self::Ordinary, Self::WithPackets, Self::Java, Self::FreshJava];

    pub(super) fn is_java(self) -> bool {
        matches!(self, Self::Java | Self::FreshJava)
    }

    pub(super) fn detail(self) -> Detail {
        if self == Self::WithPackets { Detail::Full } else { Detail::Sched }
    }
}

/// A service in a process of its own, which ends when this drops.
#[derive(Debug)]
pub(super) struct TestService {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Collections of its heap, if it is in Java.
    collected: Receiver<Injection>,
    pub(super) port: u16,
    pub(super) cpu: u32,
}

impl TestService {
    /// Starts it on one CPU. Only a service that is not in Java can have several answering threads.
    pub(super) fn start(kind: ServiceKind, cpu: u32, workers: usize) -> io::Result<Self> {
        let mut source = None;
        let mut process = match kind {
            ServiceKind::Java | ServiceKind::FreshJava => {
                start_java(cpu, kind, source.insert(java_source()?))?
            }
            _ => Command::new(std::env::current_exe()?)
                .args(["serve", &cpu.to_string(), "--workers", &workers.to_string()])
                .args((kind == ServiceKind::Ordinary).then_some("--ordinary"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?,
        };
        let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
        let input = process.stdin.take().ok_or_else(missing)?;
        let output = BufReader::new(process.stdout.take().ok_or_else(missing)?);
        let (sender, collected) = channel();
        if let Some(log) = process.stderr.take() {
            std::thread::spawn(move || {
                let lines = BufReader::new(log).lines().map_while(Result::ok);
                // The receiver is gone when the check has ended.
                let _gone =
                    lines.filter_map(|line| collection(&line)).try_for_each(|c| sender.send(c));
            });
        }
        let mut service = Self { process, input, output, collected, port: 0, cpu };
        let ended =
            |_| io::Error::other("it did not start: Java takes a JDK of version 11 or newer");
        service.port = service.line()?.trim().parse().map_err(ended)?;
        // By now `java` has read its source.
        drop(source);
        Ok(service)
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Has its lock held.
    pub(super) fn hold_lock(&mut self, length: Duration) -> io::Result<Injection> {
        writeln!(self.input, "{}", length.as_micros())?;
        Ok(serde_json::from_str(&self.line()?)?)
    }

    /// From when to when it collected its heap, since this was asked last.
    pub(super) fn collections(&self) -> Vec<Injection> {
        self.collected.try_iter().collect()
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line)
    }
}

impl Drop for TestService {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill, and `wait` reaps it.
        let _gone = self.process.kill();
        let _ended = self.process.wait();
    }
}

fn java_source() -> io::Result<File> {
    let mut options = File::options();
    let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE);
    let mut source = options.open(std::env::temp_dir())?;
    source.write_all(JAVA_SOURCE.as_bytes())?;
    Ok(source)
}

/// Starts a service in Java on one CPU, at the highest ordinary priority. At a real-time priority
/// it could not collect: a spinning thread would keep the other threads of its own process from
/// that CPU. `java` compiles the source as it starts.
fn start_java(cpu: u32, kind: ServiceKind, source: &File) -> io::Result<Child> {
    let file = format!("/proc/{}/fd/{}", std::process::id(), source.as_raw_fd());
    let mut command = Command::new("java");
    // One collector that stops all threads, and a heap that is full after two collections.
    command.args(["-XX:+UseSerialGC", "-Xmx128m"]);
    // Times of collections come from its log, whose clock is the machine's.
    command.arg("-Xlog:gc:stderr:timenanos");
    // The trace distinguishes clients by IPv4 addresses.
    command.args(["-Djava.net.preferIPv4Stack=true", "--source", "11", &file]);
    // It looks up classes before it serves, which it can then load.
    command.args((kind == ServiceKind::FreshJava).then_some("fresh"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A process inherits affinity and priority from the thread that starts it.
    let start = std::thread::spawn(move || {
        affinity::pin(cpu)?;
        // SAFETY: takes numbers; 0 is the calling thread.
        match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) } {
            0 => command.spawn(),
            _ => Err(io::Error::last_os_error()),
        }
    });
    start.join().map_err(|_| io::ErrorKind::Other)?
}

/// Parses a line of the log, if it is the end of a collection: `[123456789ns] GC(0) Pause Full
/// (System.gc()) 9M->8M(9M) 4.512ms`. The JVM writes it before the threads resume, which would take
/// the CPU from the writing thread.
fn collection(line: &str) -> Option<Injection> {
    let (at, rest) = line.strip_prefix('[')?.split_once("ns]")?;
    let took_ms: f64 = rest.rsplit(' ').next()?.strip_suffix("ms")?.parse().ok()?;
    let took = Duration::try_from_secs_f64(took_ms / 1e3).ok()?;
    let to_ns: u64 = at.parse().ok()?;
    rest.contains("Pause").then_some(())?;
    Some(Injection::all(to_ns.checked_sub(nanos(took))?, to_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collections_are_read_from_the_log() {
        let line = "[683534180ns] GC(3) Pause Full (System.gc()) 12M->8M(123M) 9.250ms";
        assert_eq!(collection(line), Some(Injection::all(683_534_180 - 9_250_000, 683_534_180)));
        let begins = "[683534180ns] GC(3) Pause Full (System.gc())";
        for other in [begins, "[683534180ns] Using Serial", "[1ns] GC(3) Pause 2ms", "", "[1ns]"] {
            assert_eq!(collection(other), None, "{other}");
        }
    }
}
