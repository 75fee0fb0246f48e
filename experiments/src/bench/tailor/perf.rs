//! The same hand-overs beside `perf sched record`, which is what else tells who ran when.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// It writes what it has once some has come together.
const TO_RECORD: Duration = Duration::from_secs(10);
/// More than what the file begins with.
const HAS_EVENTS: u64 = 256 << 10;

/// One that records all CPUs; it ends with this, and its file goes.
#[derive(Debug)]
pub(super) struct PerfSched {
    process: Child,
    file: PathBuf,
}

/// Why there is none, in a few words.
pub(super) type Lacking = String;

impl PerfSched {
    /// Writes to `file`, on whichever of these CPUs.
    pub(super) fn start(file: &Path, cpus: &CpuSet) -> Result<Self, Lacking> {
        let mut command = Command::new("perf");
        command.args(["sched", "record", "--no-buildid", "-o"]).arg(file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "there is no perf here".to_owned(),
            _ => error.to_string(),
        })?;
        affinity::set(process.id(), cpus).map_err(|error| error.to_string())?;
        Ok(Self { process, file: file.to_owned() })
    }

    /// Has `turn` go on until events are in the file.
    pub(super) fn begins(
        &mut self,
        mut turn: impl FnMut() -> io::Result<()>,
    ) -> Result<(), Lacking> {
        let began = Instant::now();
        while self.file.metadata().map_or(0, |file| file.len()) < HAS_EVENTS {
            if let Ok(Some(status)) = self.process.try_wait() {
                return Err(format!("perf sched record ended with {status}"));
            }
            if began.elapsed() > TO_RECORD {
                return Err("perf sched record wrote nothing in 10 s".to_owned());
            }
            turn().map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl Drop for PerfSched {
    fn drop(&mut self) {
        let id = i32::try_from(self.process.id()).map(Pid::from_raw);
        // It has its children end as well; one that is gone needs no end.
        let _gone = id.map(|id| kill(id, Signal::SIGINT));
        let _ended = self.process.wait();
        // It may not have come to make it.
        let _none = std::fs::remove_file(&self.file);
    }
}
