//! What all recordings of a program have in common: how they begin and end, and what they note.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::process::{Child, Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_instrument::process::{ProgramId, name_of, stat, threads_of};
use elfen_instrument::remote::ended;
use elfen_machine::pidfd::PidFd;

use crate::control::Recording;
use crate::profile::{Profile, Source};
use crate::program::{own_ns, tick_ns};
use crate::signals;

/// How often a recording that is over looks whether the program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// The program or process to record.
#[derive(Clone, Default, Debug)]
pub struct Subject {
    /// The program, unless a process is named.
    pub program: Vec<OsString>,
    pub process: Option<u32>,
    /// For how long; until the program ends without it.
    pub duration: Option<Duration>,
}

#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The program was not found, or cannot be executed.
    #[error("{0}")]
    Program(io::Error),
    #[error("no process has this id")]
    Gone,
    #[error("waiting for the program: {0}")]
    Wait(io::Error),
}

/// A profile, and what it cost.
#[derive(Debug)]
pub struct Recorded {
    pub profile: Profile,
    /// How a program that was started has ended.
    pub ended: Option<ExitStatus>,
    /// How long it took, and the CPU time of the recording itself.
    pub elapsed: Duration,
    pub own: Duration,
    /// Whether it has ended because everything is known well enough.
    pub is_known: bool,
}

/// A process of the program.
#[derive(Debug)]
pub(crate) enum Process<Prepared> {
    /// It has not run for long.
    Waits,
    Prepared(Box<Prepared>),
    /// Nothing can be recorded while it runs this program.
    Refused(Option<ProgramId>),
}

/// The processes that are prepared.
pub(crate) fn prepared<Prepared>(
    processes: &HashMap<u32, Process<Prepared>>,
) -> impl Iterator<Item = &Prepared> {
    processes.values().filter_map(|process| match process {
        Process::Prepared(prepared) => Some(&**prepared),
        _ => None,
    })
}

/// A recording of a program or process, from its beginning to its end.
pub(crate) struct ProgramRecording<'a> {
    pub(crate) root: u32,
    pub(crate) profile: Profile,
    pub(crate) began: Instant,
    /// When the recording ends, unless the program ends before.
    pub(crate) deadline: Option<Instant>,
    /// Everything is known well enough.
    pub(crate) is_known: bool,
    root_fd: Option<PidFd>,
    child: Option<Child>,
    ended: Option<ExitStatus>,
    running: &'a dyn Fn(i32),
    /// User time of a program that was started, and of its children that have ended.
    user_ticks: u64,
    /// CPU time of this process at the beginning.
    own_ns: u64,
    notes: HashSet<String>,
}

impl<'a> ProgramRecording<'a> {
    /// Starts the program, or takes the process. Calls `running` with the id of a program that was
    /// started, and with 0 when this program has ended.
    pub(crate) fn begin(
        subject: &Subject,
        by: Source,
        running: &'a dyn Fn(i32),
    ) -> Result<Self, RecordingError> {
        let own_ns = own_ns();
        let (root, child) = match subject.process {
            Some(process) if threads_of(process).is_empty() => return Err(RecordingError::Gone),
            Some(process) => (process, None),
            None => {
                let child = start(&subject.program).map_err(RecordingError::Program)?;
                running(child.id().cast_signed());
                (child.id(), Some(child))
            }
        };
        let began = Instant::now();
        Ok(Self {
            root,
            profile: Profile { by, ..Profile::default() },
            began,
            deadline: subject.duration.and_then(|most| began.checked_add(most)),
            is_known: false,
            root_fd: PidFd::open(root, || true),
            child,
            ended: None,
            running,
            user_ticks: 0,
            own_ns,
            notes: HashSet::new(),
        })
    }

    /// Forgets what was recorded.
    pub(crate) fn start_again(&mut self, by: Source) {
        self.profile = Profile { by, ..Profile::default() };
        self.notes.clear();
    }

    /// Whether the program still runs, as far as it was started here, and there is more to record.
    pub(crate) fn goes_on(&mut self) -> Result<bool, RecordingError> {
        if self.child.is_some()
            && let Some(stat) = stat(self.root)
        {
            self.user_ticks = stat.user_ticks.saturating_add(stat.waited_for_user_ticks);
        }
        let has_ended = self.child_has_ended()?;
        let is_over = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        Ok(!(has_ended || is_over || self.is_known || signals::is_stopped()))
    }

    fn child_has_ended(&mut self) -> Result<bool, RecordingError> {
        let Some(child) = &mut self.child else { return Ok(false) };
        if self.ended.is_none() {
            self.ended = ended(child).map_err(RecordingError::Wait)?;
            if self.ended.is_some() {
                (self.running)(0);
            }
        }
        Ok(self.ended.is_some())
    }

    /// Waits until a program that was started has ended.
    pub(crate) fn end(mut self) -> Result<Recorded, RecordingError> {
        while self.child.is_some() && !self.child_has_ended()? {
            self.wait(LOOK);
        }
        // Processes that ran for a short time are known to their parents only.
        let user_ns = self.user_ticks.saturating_mul(tick_ns());
        self.profile.ran_ns = self.profile.ran_ns.max(user_ns);
        Ok(Recorded {
            elapsed: self.began.elapsed(),
            own: self.own(),
            profile: self.profile,
            ended: self.ended,
            is_known: self.is_known,
        })
    }

    pub(crate) fn root_fd(&self) -> Option<&PidFd> {
        self.root_fd.as_ref()
    }

    /// Whether the program was started here. Otherwise, a process was named.
    pub(crate) fn has_child(&self) -> bool {
        self.child.is_some()
    }

    /// Whether a process was named that has ended.
    pub(crate) fn named_process_has_ended(&self) -> bool {
        let has_ended = || match &self.root_fd {
            Some(root) => root.has_ended(),
            None => threads_of(self.root).is_empty(),
        };
        self.child.is_none() && has_ended()
    }

    /// Waits for a time, or until the program ends.
    pub(crate) fn wait(&self, time: Duration) {
        match &self.root_fd {
            Some(root) if !root.has_ended() => root.await_end_for(time),
            _ => sleep(time),
        }
    }

    /// Notes why a process of the program is not recorded, once for each name and reason.
    pub(crate) fn note(&mut self, process: u32, why: &impl Display) {
        // One that ends has threads for a moment, and no program.
        if ProgramId::of(process).is_none() {
            return;
        }
        let name = name_of(process).unwrap_or_default();
        if self.is_new(format!("{name}: {why}")) {
            self.profile.left.push(format!("process {process} ({name}): {why}"));
        }
    }

    /// Whether a note is the first of its kind.
    pub(crate) fn is_new(&mut self, note: String) -> bool {
        self.notes.insert(note)
    }

    /// The CPU time of the recording itself.
    pub(crate) fn own(&self) -> Duration {
        Duration::from_nanos(own_ns().saturating_sub(self.own_ns))
    }

    /// What this recording says of itself, without its bursts and their cost.
    pub(crate) fn state(&self, own: Duration, may_cost: f64) -> Recording {
        Recording {
            process: self.root,
            recorder: std::process::id(),
            by: self.profile.by,
            bursts: 0,
            cost_percent: 0.0,
            own_percent: percent(own, self.began.elapsed()),
            may_cost_percent: may_cost * 100.0,
        }
    }
}

fn start(words: &[OsString]) -> io::Result<Child> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    signals::pass_to(command.args(arguments));
    command.spawn()
}

pub(crate) fn percent(part: Duration, whole: Duration) -> f64 {
    part.as_secs_f64() / whole.as_secs_f64().max(1e-9) * 100.0
}
