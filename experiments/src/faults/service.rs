//! The services that faults are injected into: a process of this program, or one in Java.

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
/// Time for `java` to compile its source, and for any service to listen.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time for the holder to have the lock, in addition to the time that it holds it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

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
    process: Process,
    /// Injections in its output that were returned.
    returned: usize,
    pub(super) port: u16,
    pub(super) cpu: u32,
    _scratch: Scratch,
}

impl TestService {
    /// Starts it on one CPU. Only a service that is not in Java can have several answering threads.
    pub(super) fn start(kind: ServiceKind, cpu: u32, workers: usize) -> io::Result<Self> {
        let scratch = Scratch::new(1)?;
        let (command, rank) = if kind.is_java() {
            let source = scratch.path("JavaService.java");
            fs::write(&source, JAVA_SOURCE)?;
            let mut command = Command::new("java");
            // One collector that stops all threads, and a heap that is full after two collections.
            command.args(["-XX:+UseSerialGC", "-Xmx128m"]);
            // Times of collections come from its log, whose clock is the machine's.
            command.arg("-Xlog:gc:stderr:timenanos");
            // The trace distinguishes clients by IPv4 addresses.
            command.args(["-Djava.net.preferIPv4Stack=true", "--source", "11"]).arg(source);
            // It looks up classes before it serves, which it can then load.
            command.args((kind == ServiceKind::FreshJava).then_some("fresh"));
            // At a real-time priority it could not collect: a spinning thread would keep the other
            // threads of its own process from that CPU.
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

    /// Has its lock held.
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

    /// From when to when it collected its heap, since this was asked last.
    pub(super) fn collections(&mut self) -> Vec<Injection> {
        let log = self.process.stderr_text();
        let all = log.lines().filter_map(collection).skip(self.returned);
        let new: Vec<Injection> = all.collect();
        self.returned += new.len();
        new
    }
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
