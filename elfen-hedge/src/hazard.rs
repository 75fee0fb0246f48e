//! Reports what halts one of two servers, as it happens: signals, and halts of its JVM.

use std::os::fd::{AsFd, BorrowedFd};

use crate::policy::{Halt, Server};
use elfen_kernel::hazard::{self, Error, Step, Subjects};
use elfen_machine::process::stat;
use elfen_tailor::jvm::probes_of;
use elfen_tailor::service::NotFound;

use crate::processes::ProcessWatcher;
use crate::processes::ServerProcesses;

#[derive(Debug)]
pub(crate) struct Hazards {
    hazards: hazard::Hazards,
    pub(crate) process_watcher: ProcessWatcher,
}

#[derive(Debug)]
pub(crate) enum AttachError {
    Server(NotFound),
    Events(Error),
}

/// The source of events about the servers' processes.
#[derive(Debug)]
struct EventSource {
    subjects: Subjects,
    /// Processes with probes in their JVM.
    probed: Vec<u32>,
}

impl EventSource {
    fn attach(&mut self, [first, second]: [&[u32]; 2]) -> Result<(), Error> {
        self.subjects.watch([first, second])?;
        self.probed.retain(|process| stat(*process).is_some());
        for &process in first.iter().chain(second) {
            if self.probed.contains(&process) {
                continue;
            }
            if let Some((library, sites)) = probes_of(process) {
                self.subjects.probe(process, &library, &sites)?;
                self.probed.push(process);
            }
        }
        Ok(())
    }
}

impl Hazards {
    /// Finds the servers, which may also start later.
    pub(crate) fn find(ports: [u16; 2]) -> Result<Self, AttachError> {
        let [first, second] = ports.map(ServerProcesses::find);
        let serving = [first.map_err(AttachError::Server)?, second.map_err(AttachError::Server)?];
        let (hazards, subjects) = hazard::Hazards::attach().map_err(AttachError::Events)?;
        let mut source = EventSource { subjects, probed: Vec::new() };
        source
            .attach(serving.each_ref().map(ServerProcesses::processes))
            .map_err(AttachError::Events)?;
        let process_watcher = ProcessWatcher::start(serving, move |processes| {
            // A server whose events are not available gets requests like any other.
            let _without = source.attach(processes);
        });
        Ok(Self { hazards, process_watcher })
    }

    /// The events since the last call: server, reason, and whether it halts or continues.
    pub(crate) fn take(&mut self) -> Vec<(Server, Halt, bool)> {
        let halt = |(server, step): (usize, Step)| {
            let (why, is_halted) = match step {
                Step::Stopped => (Halt::Stop, true),
                Step::Continued => (Halt::Stop, false),
                Step::Halted => (Halt::Pause, true),
                Step::Released => (Halt::Pause, false),
            };
            (Server::BOTH[server], why, is_halted)
        };
        self.hazards.take().into_iter().map(halt).collect()
    }
}

/// Readable as soon as there are events.
impl AsFd for Hazards {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hazards.as_fd()
    }
}
