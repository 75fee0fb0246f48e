//! A buffer of the scheduler's trace of our own, in the kernel's tracefs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Event, Unreadable, events};

const FOLDER: &str = "/sys/kernel/tracing";
const BUFFERS: &str = "/sys/kernel/tracing/instances";
/// The process id follows.
const NAME: &str = "elfen-bench-";
/// Of CPUs that only start and end tasks.
const SMALL_KB: u64 = 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no tracefs at {FOLDER}")]
    NotMounted,
    #[error("{FOLDER}: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Unreadable(Unreadable),
    #[error("it names tasks by other ids than this process's pid namespace does")]
    Strangers,
}

/// The switches of some CPUs, and the tasks that begin and end anywhere. Goes with this.
#[derive(Debug)]
pub(in crate::bench) struct Buffer {
    folder: PathBuf,
}

impl Buffer {
    /// Begins to trace, with so much room for each of these CPUs.
    pub(in crate::bench) fn start(cpus: &[u32], room_kb: u64) -> Result<Self, Error> {
        if !Path::new(BUFFERS).exists() {
            return Err(not_there());
        }
        remove_abandoned()?;
        let folder = Path::new(BUFFERS).join(format!("{NAME}{}", std::process::id()));
        fs::create_dir(&folder)?;
        let buffer = Self { folder };
        buffer.set("trace_clock", "mono")?;
        buffer.set("buffer_size_kb", &SMALL_KB.to_string())?;
        for cpu in cpus {
            buffer.set(&format!("per_cpu/cpu{cpu}/buffer_size_kb"), &room_kb.to_string())?;
        }
        let on = cpus.iter().map(|cpu| format!("CPU == {cpu}")).collect::<Vec<_>>();
        buffer.set("events/sched/sched_switch/filter", &on.join(" || "))?;
        for event in ["switch", "process_fork", "process_exec", "process_exit"] {
            buffer.set(&format!("events/sched/sched_{event}/enable"), "1")?;
        }
        Ok(buffer)
    }

    fn set(&self, file: &str, value: &str) -> io::Result<()> {
        fs::write(self.folder.join(file), value)
    }

    /// Ends it, and gives what was traced.
    pub(in crate::bench) fn read(self) -> Result<Vec<Event>, Error> {
        self.set("tracing_on", "0")?;
        let text = fs::read(self.folder.join("trace"))?;
        events(&String::from_utf8_lossy(&text)).map_err(Error::Unreadable)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A buffer that stays costs memory until the next benchmark removes it; there is nobody to
        // tell.
        let _removed = fs::remove_dir(&self.folder);
    }
}

/// Users who may not look into tracefs see nothing of it either.
fn not_there() -> Error {
    match fs::read_dir(FOLDER) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Error::Io(error),
        _ => Error::NotMounted,
    }
}

/// Removes the buffers of benchmarks that were killed.
fn remove_abandoned() -> io::Result<()> {
    for entry in fs::read_dir(BUFFERS)?.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(NAME));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            fs::remove_dir(entry.path())?;
        }
    }
    Ok(())
}
