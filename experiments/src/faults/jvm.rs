//! A service in Java that collects its heap, or loads classes, on request. `java` compiles it as it
//! starts. The times of collections come from its log, whose clock is the machine's.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use elfen_machine::affinity;
use elfen_rt::clock::nanos;

use super::inject::Injection;

const SOURCE: &str = include_str!("JavaService.java");

/// It ends when this drops.
#[derive(Debug)]
pub(super) struct Java {
    process: Child,
    pub(super) port: u16,
    collected: Receiver<Injection>,
}

impl Java {
    /// Starts it on one CPU, at the highest ordinary priority. At a real-time priority it could not
    /// collect: a spinning thread would keep the other threads of its own process from that CPU.
    ///
    /// With `fresh`, it looks up classes before it serves, which it can then load.
    pub(super) fn start(cpu: u32, fresh: bool) -> io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE);
        let mut source = options.open(std::env::temp_dir())?;
        source.write_all(SOURCE.as_bytes())?;
        let file = format!("/proc/{}/fd/{}", std::process::id(), source.as_raw_fd());
        let mut command = Command::new("java");
        // One collector that stops all threads, and a heap that is full after two collections.
        command.args(["-XX:+UseSerialGC", "-Xmx128m"]);
        command.arg("-Xlog:gc:stderr:timenanos");
        // The trace distinguishes clients by IPv4 addresses.
        command.args(["-Djava.net.preferIPv4Stack=true", "--source", "11", &file]);
        command.args(fresh.then_some("fresh"));
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
        let process = start.join().map_err(|_| io::ErrorKind::Other)??;
        let (sender, collected) = channel();
        let mut java = Self { process, port: 0, collected };
        let log = java.process.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?;
        std::thread::spawn(move || {
            let lines = BufReader::new(log).lines().map_while(Result::ok);
            // The receiver is gone when the check has ended.
            let _gone = lines.filter_map(|line| collection(&line)).try_for_each(|c| sender.send(c));
        });
        let mut line = String::new();
        let output = java.process.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        BufReader::new(output).read_line(&mut line)?;
        let ended = || io::Error::other("it did not start: it takes a JDK of version 11 or newer");
        java.port = line.trim().parse().map_err(|_| ended())?;
        Ok(java)
    }

    /// From when to when it collected, since this was asked last.
    pub(super) fn collections(&mut self) -> Vec<Injection> {
        self.collected.try_iter().collect()
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

impl Drop for Java {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill, and `wait` reaps it.
        let _gone = self.process.kill();
        let _ended = self.process.wait();
    }
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
