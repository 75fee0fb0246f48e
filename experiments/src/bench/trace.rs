//! The scheduler's record of which task ran where and when, parsed from the text of its trace.
//!
//! Task names may contain any text, so a line is parsed around them. The CPU and the id of the
//! event's own task are found from the right, starting at the event's name. The last field of an
//! event is found from the end of the line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use elfen_console::failure::{Failure, Status};

use super::BenchError;

/// A scheduler event of a task. Events are in the order in which they happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Event {
    /// `CLOCK_MONOTONIC`. The trace has only microseconds.
    pub(super) at_ns: u64,
    pub(super) cpu: u32,
    /// The thread id, like all other ids here. 0 is the idle task.
    pub(super) task: i32,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The CPU runs `next` from now on. `preempted`: the old task could have run on.
    Switch {
        next: i32,
        preempted: bool,
    },
    /// The task has started a thread or a process.
    Fork {
        child: i32,
    },
    /// The task starts another program. If the task is not the first thread of its process, it
    /// takes over the id of the first thread.
    Exec,
    Exit,
}

/// Why the trace is missing or incomplete.
#[derive(Debug, thiserror::Error)]
pub(super) enum TraceError {
    #[error("tracefs is not mounted at {FOLDER}")]
    NotMounted,
    #[error("{FOLDER}: {0}")]
    Io(#[from] io::Error),
    #[error("its process ids are not those of this process's pid namespace")]
    Strangers,
    #[error("it has gaps: only {kept} events of {written} fit into the buffer")]
    Gaps { kept: String, written: String },
    #[error("it has an invalid line: {0:?}")]
    Line(String),
}

impl From<TraceError> for BenchError {
    fn from(error: TraceError) -> Self {
        use Status::{Failed, Unsupported};
        let (status, fix) = match &error {
            TraceError::NotMounted => (
                Unsupported,
                "run this as root, after `mount -t tracefs nodev /sys/kernel/tracing`",
            ),
            TraceError::Io(_) => (Unsupported, "run this as root, and check that memory is free"),
            TraceError::Strangers => (Unsupported, "run this outside of containers"),
            TraceError::Gaps { .. } | TraceError::Line(_) => {
                (Failed, "choose a shorter --duration")
            }
        };
        Failure::new(status, "the scheduler's trace", error, fix).into()
    }
}

const COUNTS: &str = "# entries-in-buffer/entries-written: ";

/// Parses all events of a trace, as the file `trace` prints them.
pub(super) fn events(text: &str) -> Result<Vec<Event>, TraceError> {
    let mut events = Vec::new();
    for line in text.lines() {
        if let Some(counts) = line.strip_prefix(COUNTS) {
            refuse_gaps(counts)?;
        } else if !line.starts_with('#') && !line.is_empty() {
            events.push(event(line).ok_or_else(|| TraceError::Line(line.to_owned()))?);
        }
    }
    Ok(events)
}

fn refuse_gaps(counts: &str) -> Result<(), TraceError> {
    let counts = counts.split_whitespace().next().unwrap_or(counts);
    let (kept, written) = counts.split_once('/').unwrap_or((counts, ""));
    if kept == written {
        return Ok(());
    }
    Err(TraceError::Gaps { kept: kept.to_owned(), written: written.to_owned() })
}

/// Parses a line like `NAME-PID [001] d..2. 12.345678: sched_switch: ...`.
fn event(line: &str) -> Option<Event> {
    const MARKS: [&str; 4] =
        [": sched_switch: ", ": sched_process_fork: ", ": sched_process_exec: ", EXIT];
    const EXIT: &str = ": sched_process_exit: ";
    // Task names are too short to contain a mark, so the first mark that is found belongs to the
    // event.
    let (mark, begin) =
        MARKS.iter().find_map(|mark| line.find(mark).map(|begin| (*mark, begin)))?;
    let (head, fields) = (&line[..begin], &line[begin + mark.len()..]);
    let (seconds, micros) = head.split_whitespace().next_back()?.split_once('.')?;
    let at_us = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?;
    let at_us = at_us.checked_add(micros.parse().ok()?)?;
    let (named, flags) = head.rsplit_once(" [")?;
    let cpu = flags.split_once(']')?.0.parse().ok()?;
    let task = named.trim_end().rsplit_once('-')?.1.parse().ok()?;
    let kind = match mark {
        EXIT => Kind::Exit,
        _ if mark == MARKS[0] => Kind::Switch {
            next: after(fields, "next_pid=")?,
            // The state is `R`, or `R+` if the task was preempted.
            preempted: fields.split_once(" ==> ")?.0.rsplit_once("prev_state=")?.1.starts_with('R'),
        },
        _ if mark == MARKS[1] => Kind::Fork { child: after(fields, "child_pid=")? },
        _ => Kind::Exec,
    };
    Some(Event { at_ns: at_us.checked_mul(1000)?, cpu, task, kind })
}

fn after(fields: &str, key: &str) -> Option<i32> {
    fields.rsplit_once(key)?.1.split_whitespace().next()?.parse().ok()
}

const FOLDER: &str = "/sys/kernel/tracing";
const BUFFERS: &str = "/sys/kernel/tracing/instances";
/// The process id follows this prefix.
const NAME: &str = "elfen-bench-";
/// The buffer size of CPUs where only the start and end of tasks is recorded.
const SMALL_KB: u64 = 1024;

/// A trace of the context switches of some CPUs, and of all tasks that start or end. Removed on
/// drop.
#[derive(Debug)]
pub(super) struct Buffer {
    folder: PathBuf,
}

impl Buffer {
    /// Starts to trace, with a buffer of `room_kb` for each of these CPUs.
    pub(super) fn start(cpus: &[u32], room_kb: u64) -> Result<Self, TraceError> {
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

    /// Stops the trace, and returns its events.
    pub(super) fn read(self) -> Result<Vec<Event>, TraceError> {
        self.set("tracing_on", "0")?;
        let text = fs::read(self.folder.join("trace"))?;
        events(&String::from_utf8_lossy(&text))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A buffer that stays costs memory until the next benchmark removes it. This is not worth a
        // message.
        let _removed = fs::remove_dir(&self.folder);
    }
}

/// A user without access to tracefs does not see that it is mounted.
fn not_there() -> TraceError {
    match fs::read_dir(FOLDER) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => TraceError::Io(error),
        _ => TraceError::NotMounted,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A recorded trace with invented task names.
    const TRACE: &str = include_str!("trace/recorded.txt");

    /// Goal: every kind of event is parsed, whatever the names of the tasks are. Method: a recorded
    /// trace with task names that look like parts of the trace's own format.
    #[test]
    fn what_happened_is_read() {
        let found = events(TRACE).unwrap();
        let at = |at_ns, cpu, task, kind| Event { at_ns, cpu, task, kind };
        let switch = |next, preempted| Kind::Switch { next, preempted };
        let expected = [
            at(1_449_892_232_000, 0, 711, Kind::Fork { child: 712 }),
            at(1_449_892_241_000, 0, 711, switch(0, false)),
            at(1_449_896_193_000, 1, 712, Kind::Exec),
            at(1_449_896_623_000, 1, 712, switch(713, true)),
            at(1_449_897_000_000, 1, 713, switch(712, false)),
            at(1_449_900_708_000, 1, 712, Kind::Exit),
            at(1_449_900_712_000, 1, 712, switch(0, false)),
        ];
        assert_eq!(found, expected);
    }

    /// Goal: an incomplete trace is refused. Method: the header says that events were lost.
    #[test]
    fn gaps_are_told() {
        let error = events(&TRACE.replace("7/7", "7/9")).unwrap_err().to_string();
        assert_eq!(error, "it has gaps: only 7 events of 9 fit into the buffer");
    }

    /// Goal: a line that cannot be parsed is an error and is not skipped. Method: a line that lacks
    /// one of its parts.
    #[test]
    fn lines_that_are_not_understood_are_told() {
        let line = TRACE.lines().find(|line| line.contains("sched_switch")).unwrap();
        for part in ["-711", "[000]", "1449.892241", "sched_switch", " ==> ", "next_pid="] {
            let lacking = line.replace(part, "");
            let refused = events(&lacking);
            assert!(matches!(refused, Err(TraceError::Line(of)) if of == lacking), "{part}");
        }
    }
}
