//! How servers are observed, if the policy needs that: by their CPU clocks, or by events from the
//! kernel. A separate thread finds their processes, and attaches probes to their JVMs.

use elfen_kernel::hazard::{self, Hazards, Step, Subjects};
use elfen_machine::process::stat;
use elfen_tailor::jvm::probes_of;
use elfen_tailor::service::NotFound;

use crate::policy::{Halt, Server};
use crate::processes::{ProcessWatcher, ServerProcesses};
use crate::watch::WatchedServer;

#[derive(Debug)]
pub(crate) struct Observation {
    pub(crate) process_watcher: ProcessWatcher,
    pub(crate) source: Source,
}

#[derive(Debug)]
pub(crate) enum Source {
    /// The servers' CPU clocks, which are polled.
    Clocks([WatchedServer; 2]),
    /// The kernel's events about halts of the servers.
    Events(Hazards),
}

#[derive(Debug)]
pub(crate) enum ObservationError {
    Server(NotFound),
    Events(hazard::Error),
}

impl From<NotFound> for ObservationError {
    fn from(error: NotFound) -> Self {
        Self::Server(error)
    }
}

impl From<hazard::Error> for ObservationError {
    fn from(error: hazard::Error) -> Self {
        Self::Events(error)
    }
}

impl Observation {
    /// Polls the servers' CPU clocks. The servers may start later.
    pub(crate) fn by_clocks(ports: [u16; 2]) -> Result<Self, ObservationError> {
        let servers = find(ports)?;
        let watched = servers.each_ref().map(|server| WatchedServer::of(server.processes()));
        let process_watcher = ProcessWatcher::start(servers, |_| {});
        Ok(Self { process_watcher, source: Source::Clocks(watched) })
    }

    /// Receives events about the servers. The servers may start later.
    pub(crate) fn by_events(ports: [u16; 2]) -> Result<Self, ObservationError> {
        let servers = find(ports)?;
        let (hazards, subjects) = Hazards::attach()?;
        let mut probes = Probes { subjects, probed: Vec::new() };
        probes.attach(servers.each_ref().map(ServerProcesses::processes))?;
        let process_watcher = ProcessWatcher::start(servers, move |processes| {
            // A server without events still gets requests.
            let _without = probes.attach(processes);
        });
        Ok(Self { process_watcher, source: Source::Events(hazards) })
    }

    /// The events since the last call: the server, the reason, and whether it halts or continues.
    pub(crate) fn take_halts(&mut self) -> Vec<(Server, Halt, bool)> {
        let Source::Events(hazards) = &mut self.source else { return Vec::new() };
        let halt = |(server, step): (usize, Step)| {
            let (why, is_halted) = match step {
                Step::Stopped => (Halt::Stop, true),
                Step::Continued => (Halt::Stop, false),
                Step::Halted => (Halt::Pause, true),
                Step::Released => (Halt::Pause, false),
            };
            (Server::BOTH[server], why, is_halted)
        };
        hazards.take().into_iter().map(halt).collect()
    }
}

fn find([first, second]: [u16; 2]) -> Result<[ServerProcesses; 2], NotFound> {
    Ok([ServerProcesses::find(first)?, ServerProcesses::find(second)?])
}

/// Probes in the servers' processes.
#[derive(Debug)]
struct Probes {
    subjects: Subjects,
    /// Processes that have probes in their JVM.
    probed: Vec<u32>,
}

impl Probes {
    fn attach(&mut self, [first, second]: [&[u32]; 2]) -> Result<(), hazard::Error> {
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
