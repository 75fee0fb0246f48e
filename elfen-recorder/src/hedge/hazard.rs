//! What brings one of two servers to a halt, told as it happens: signals, and the halts of its JVM;
//! and that another process serves there now.

use std::os::fd::{AsFd, BorrowedFd};

use elfen_host::process::stat;
use elfen_kernel::hazard::{self, Error, Step};
use elfen_rt::clock::monotonic_ns;
use elfen_tailor::hedge::{Halt, Server};

use crate::jvm::probes_of;
use crate::service::{NotFound, Service, Which};

/// Between two looks at whether the processes are still there.
const REFRESH_NS: u64 = 200_000_000;

#[derive(Debug)]
pub struct Hazards {
    hazards: hazard::Hazards,
    services: [Service; 2],
    /// Processes whose JVM tells of its halts.
    probed: Vec<u32>,
    refreshed_ns: u64,
}

/// Something that the policy is to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    Halts { why: Halt, is_so: bool },
    Restarts,
}

#[derive(Debug)]
pub enum Missing {
    Server(NotFound),
    Events(Error),
}

impl Hazards {
    pub fn find(ports: [u16; 2]) -> Result<Self, Missing> {
        let [first, second] = ports.map(|port| Service::find(Which::Port(port)));
        let services = [first.map_err(Missing::Server)?, second.map_err(Missing::Server)?];
        let hazards = hazard::Hazards::attach().map_err(Missing::Events)?;
        let mut all = Self { hazards, services, probed: Vec::new(), refreshed_ns: 0 };
        all.watch().map_err(Missing::Events)?;
        Ok(all)
    }

    fn watch(&mut self) -> Result<(), Error> {
        let [first, second] = &self.services;
        self.hazards.watch([&first.processes, &second.processes])?;
        self.probed.retain(|process| stat(*process).is_some());
        for &process in first.processes.iter().chain(&second.processes) {
            if self.probed.contains(&process) {
                continue;
            }
            if let Some((library, places)) = probes_of(process) {
                self.hazards.probe(process, &library, &places)?;
                self.probed.push(process);
            }
        }
        Ok(())
    }

    /// What has happened since the last call.
    pub fn take(&mut self) -> Vec<(Server, Told)> {
        let halt = |(server, step): (usize, Step)| {
            let (why, is_so) = match step {
                Step::Stopped => (Halt::Stop, true),
                Step::Continued => (Halt::Stop, false),
                Step::Halted => (Halt::Pause, true),
                Step::Released => (Halt::Pause, false),
            };
            (Server::BOTH[server], Told::Halts { why, is_so })
        };
        let mut told: Vec<(Server, Told)> = self.hazards.take().into_iter().map(halt).collect();
        if monotonic_ns().saturating_sub(self.refreshed_ns) >= REFRESH_NS {
            self.refreshed_ns = monotonic_ns();
            told.extend(self.restarted());
        }
        told
    }

    /// Servers whose processes are gone and others in their place. Looking for those takes long,
    /// so it is done only while one is missing.
    fn restarted(&mut self) -> Vec<(Server, Told)> {
        let mut anew = Vec::new();
        for (server, service) in Server::BOTH.into_iter().zip(&mut self.services) {
            let is_there = |process: &u32| stat(*process).is_some_and(|stat| stat.state != 'Z');
            if service.processes.iter().any(is_there) {
                continue;
            }
            let before = service.processes.clone();
            service.refresh();
            if service.processes != before {
                anew.push((server, Told::Restarts));
            }
        }
        if !anew.is_empty() {
            // One that can't be listened to is served as any other.
            let _without = self.watch();
        }
        anew
    }

    /// When it is time to look at the processes again.
    pub fn due_ns(&self) -> u64 {
        self.refreshed_ns.saturating_add(REFRESH_NS)
    }
}

/// It becomes readable as soon as something has happened.
impl AsFd for Hazards {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hazards.as_fd()
    }
}
