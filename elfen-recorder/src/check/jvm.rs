//! A service in Java that collects its heap when it is asked to, or loads classes, compiled as it
//! starts. When it collected, is what its log says: by its own clock, which is the machine's.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use elfen_host::affinity;
use elfen_rt::clock::nanos;

use super::inject::Injured;

const SOURCE: &str = include_str!("JavaService.java");

/// It ends with this.
#[derive(Debug)]
pub(super) struct Java {
    process: Child,
    pub(super) port: u16,
    collected: Receiver<Injured>,
}

impl Java {
    /// On one CPU, before ordinary threads there. Above them, it would keep itself from collecting:
    /// who spins at a real-time priority leaves that CPU to no thread of its own process.
    ///
    /// One that is `fresh` is to load classes, which it looks up before it serves.
    pub(super) fn start(cpu: u32, fresh: bool) -> io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE);
        let mut source = options.open(std::env::temp_dir())?;
        source.write_all(SOURCE.as_bytes())?;
        let file = format!("/proc/{}/fd/{}", std::process::id(), source.as_raw_fd());
        let mut command = Command::new("java");
        // One collector that stops all threads, and as much heap as it fills twice.
        command.args(["-XX:+UseSerialGC", "-Xmx128m"]);
        command.arg("-Xlog:gc:stderr:timenanos");
        // Its clients are told from each other by addresses of the fourth version.
        command.args(["-Djava.net.preferIPv4Stack=true", "--source", "11", &file]);
        command.args(fresh.then_some("fresh"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // What a process begins with is that of the thread that starts it.
        let start = std::thread::spawn(move || {
            affinity::pin(cpu)?;
            // SAFETY: takes numbers; 0 is the calling thread.
            match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) } {
                0 => command.spawn(),
                _ => Err(io::Error::last_os_error()),
            }
        });
        let process = start.join().map_err(|_| io::ErrorKind::Other)??;
        let (tells, collected) = channel();
        let mut java = Self { process, port: 0, collected };
        let log = java.process.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?;
        std::thread::spawn(move || {
            let lines = BufReader::new(log).lines().map_while(Result::ok);
            // Whoever asked is gone when nobody takes one.
            let _gone = lines.filter_map(|line| collection(&line)).try_for_each(|c| tells.send(c));
        });
        let mut line = String::new();
        let told = java.process.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        BufReader::new(told).read_line(&mut line)?;
        let ended = || io::Error::other("it did not start: it takes a JDK of version 11 or newer");
        java.port = line.trim().parse().map_err(|_| ended())?;
        Ok(java)
    }

    /// From when to when it collected, since this was asked last.
    pub(super) fn collections(&mut self) -> Vec<Injured> {
        self.collected.try_iter().collect()
    }
}

/// A line of its log, if it had collected by then:
/// `[123456789ns] GC(0) Pause Full (System.gc()) 9M->8M(9M) 4.512ms`. It is written before threads
/// go on, which would take the CPU from whoever writes it.
fn collection(line: &str) -> Option<Injured> {
    let (at, rest) = line.strip_prefix('[')?.split_once("ns]")?;
    let took_ms: f64 = rest.rsplit(' ').next()?.strip_suffix("ms")?.parse().ok()?;
    let took = Duration::try_from_secs_f64(took_ms / 1e3).ok()?;
    let to_ns: u64 = at.parse().ok()?;
    rest.contains("Pause").then_some(())?;
    Some(Injured::all(to_ns.checked_sub(nanos(took))?, to_ns))
}

impl Drop for Java {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill, and waiting takes it away.
        let _gone = self.process.kill();
        let _ended = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_tells_of_collections() {
        let line = "[683534180ns] GC(3) Pause Full (System.gc()) 12M->8M(123M) 9.250ms";
        assert_eq!(collection(line), Some(Injured::all(683_534_180 - 9_250_000, 683_534_180)));
        let begins = "[683534180ns] GC(3) Pause Full (System.gc())";
        for other in [begins, "[683534180ns] Using Serial", "[1ns] GC(3) Pause 2ms", "", "[1ns]"] {
            assert_eq!(collection(other), None, "{other}");
        }
    }
}
