//! A service in Java that collects its heap when it is asked to, compiled as it starts.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};

use elfen_host::affinity;

const SOURCE: &str = include_str!("Held.java");

/// It ends with this.
#[derive(Debug)]
pub(super) struct Java {
    process: Child,
    pub(super) port: u16,
}

impl Java {
    /// On one CPU, before ordinary threads there. Above them, it would keep itself from collecting:
    /// who spins at a real-time priority leaves that CPU to no thread of its own process.
    pub(super) fn start(cpu: u32) -> io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE);
        let mut source = options.open(std::env::temp_dir())?;
        source.write_all(SOURCE.as_bytes())?;
        let file = format!("/proc/{}/fd/{}", std::process::id(), source.as_raw_fd());
        let mut command = Command::new("java");
        // One collector that stops all threads, and as much heap as it fills twice.
        command.args(["-XX:+UseSerialGC", "-Xmx128m"]);
        // Its clients are told from each other by addresses of the fourth version.
        command.args(["-Djava.net.preferIPv4Stack=true", "--source", "11", &file]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
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
        let mut java = Self { process, port: 0 };
        let mut line = String::new();
        let told = java.process.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        BufReader::new(told).read_line(&mut line)?;
        let ended = || io::Error::other("it did not start: it takes a JDK of version 11 or newer");
        java.port = line.trim().parse().map_err(|_| ended())?;
        Ok(java)
    }
}

impl Drop for Java {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill, and waiting takes it away.
        let _gone = self.process.kill();
        let _ended = self.process.wait();
    }
}
