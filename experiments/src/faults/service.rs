//! The services that faults are injected into: a process of `elfen-lab serve`, or one in Java.

use std::fs;
use std::io;
use std::process::Command;
use std::time::Duration;

use elfen_kernel::events::Detail;
use elfen_rt::clock::nanos;

use super::injectors::Injection;
use crate::live::LiveError;
use crate::live::os::{ChildSetup, Rank};
use crate::live::process::Process;
use crate::live::scratch::Scratch;

const JAVA_SOURCE: &str = include_str!("JavaService.java");
/// The time limit for `java` to compile its source, and for any service to listen.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The time limit for the holder to get the lock. It comes on top of the time for which it holds
/// the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// The kind of service that a fault needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ServiceKind {
    /// It runs above all ordinary threads, so that only faults delay it.
    Realtime,
    /// It runs at an ordinary priority. At a real-time priority, a service would not share its CPU
    /// with a rival.
    Ordinary,
    /// It is recorded in full detail, which includes packets. Each request has packets.
    WithPackets,
    /// It is written in Java and collects its heap on request.
    Java,
    /// It is written in Java and has not loaded the classes yet. It serves only one request of this
    /// kind.
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

/// A service in a process of its own. The process ends when this value is dropped.
#[derive(Debug)]
pub(super) struct TestService {
    process: Process,
    /// The number of collections in the log that `collections` has returned.
    returned: usize,
    pub(super) port: u16,
    pub(super) cpu: u32,
    _scratch: Scratch,
}

impl TestService {
    /// Starts a service on one CPU. A service in Java ignores `workers`.
    pub(super) fn start(kind: ServiceKind, cpu: u32, workers: usize) -> io::Result<Self> {
        let scratch = Scratch::new(1)?;
        let (command, rank) = if kind.is_java() {
            let source = scratch.path("JavaService.java");
            fs::write(&source, JAVA_SOURCE)?;
            let mut command = Command::new("java");
            // This collector stops all threads, and this heap is full after two collections.
            command.args(["-XX:+UseSerialGC", "-Xmx128m"]);
            // The times of collections are read from this log. Its clock is the machine's.
            command.arg("-Xlog:gc:stderr:timenanos");
            // The trace distinguishes clients by IPv4 addresses.
            command.args(["-Djava.net.preferIPv4Stack=true", "--source", "11"]).arg(source);
            // With this argument, the service lists the classes that it can load before it serves.
            command.args((kind == ServiceKind::FreshJava).then_some("fresh"));
            // At a real-time priority, the service could not collect. Its spinning thread would
            // keep the other threads of its process from the CPU.
            (command, Rank::Nice(-20))
        } else {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["serve", &cpu.to_string(), "--workers", &workers.to_string()]);
            command.args((kind == ServiceKind::Ordinary).then_some("--ordinary"));
            (command, Rank::Normal)
        };
        let setup = ChildSetup { takes_input: true, ..ChildSetup::on(cpu, rank) };
        let mut process =
            Process::start("service", command, &setup, &scratch).map_err(io::Error::other)?;
        let port = |process: &Process| process.stdout_text().split_once('\n')?.0.parse().ok();
        let port = process.wait_for(START_TIMEOUT, port).map_err(|error| match error {
            LiveError::Failed { .. } if kind.is_java() => {
                io::Error::other("it did not start: Java takes a JDK of version 11 or newer")
            }
            other => io::Error::other(other),
        })?;
        Ok(Self { process, returned: 0, port, cpu, _scratch: scratch })
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Makes the service hold its lock.
    pub(super) fn hold_lock(&mut self, length: Duration) -> io::Result<Injection> {
        let before = self.process.stdout_text().lines().count();
        self.process.write_line(&length.as_micros().to_string()).map_err(io::Error::other)?;
        let held = self.process.wait_for(length + LOCK_TIMEOUT, |process| {
            let text = process.stdout_text();
            let line = text.split_inclusive('\n').nth(before)?;
            line.strip_suffix('\n').map(str::to_owned)
        });
        Ok(serde_json::from_str(&held.map_err(io::Error::other)?)?)
    }

    /// Returns when the service collected its heap, since the last call.
    pub(super) fn collections(&mut self) -> Vec<Injection> {
        let log = self.process.stderr_text();
        let all = log.lines().filter_map(collection).skip(self.returned);
        let new: Vec<Injection> = all.collect();
        self.returned += new.len();
        new
    }
}

/// Parses a line of the log. Returns `None` unless the line is the end of a collection, like
/// `[123456789ns] GC(0) Pause Full (System.gc()) 9M->8M(9M) 4.512ms`.
///
/// The JVM writes the line before it resumes the threads, which would take the CPU from the writing
/// thread.
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
