//! What brings one of two servers to a halt, told as it happens: signals, and the halts of its JVM;
//! and that another process serves there now.

use std::os::fd::{AsFd, BorrowedFd};

use elfen_hedge_policy::{Halt, Server};
use elfen_host::process::stat;
use elfen_kernel::hazard::{self, Error, Step, Subjects};
use elfen_rt::clock::monotonic_ns;

use super::lookout::Lookout;
use super::serving::{Change, LOOK_NS, Serving};
use crate::jvm::probes_of;
use crate::service::NotFound;

#[derive(Debug)]
pub struct Hazards {
    hazards: hazard::Hazards,
    lookout: Lookout,
    asked_ns: u64,
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

/// Whose halts are told.
#[derive(Debug)]
struct Listening {
    subjects: Subjects,
    /// Processes whose JVM tells of its halts.
    probed: Vec<u32>,
}

impl Listening {
    fn to(&mut self, [first, second]: [&[u32]; 2]) -> Result<(), Error> {
        self.subjects.watch([first, second])?;
        self.probed.retain(|process| stat(*process).is_some());
        for &process in first.iter().chain(second) {
            if self.probed.contains(&process) {
                continue;
            }
            if let Some((library, places)) = probes_of(process) {
                self.subjects.probe(process, &library, &places)?;
                self.probed.push(process);
            }
        }
        Ok(())
    }
}

impl Hazards {
    pub fn find(ports: [u16; 2]) -> Result<Self, Missing> {
        let [first, second] = ports.map(Serving::find);
        let serving = [first.map_err(Missing::Server)?, second.map_err(Missing::Server)?];
        let (hazards, subjects) = hazard::Hazards::attach().map_err(Missing::Events)?;
        let mut listening = Listening { subjects, probed: Vec::new() };
        listening.to(serving.each_ref().map(Serving::processes)).map_err(Missing::Events)?;
        let lookout = Lookout::begin(serving, move |processes| {
            // One that can't be listened to is served as any other.
            let _without = listening.to(processes);
        });
        Ok(Self { hazards, lookout, asked_ns: 0 })
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
        self.asked_ns = monotonic_ns();
        let halts = self.hazards.take().into_iter().map(halt);
        let anew = self.lookout.take().filter(|changed| changed.change == Change::All);
        halts.chain(anew.map(|changed| (changed.server, Told::Restarts))).collect()
    }

    /// When it is time to ask again who serves.
    pub(super) fn due_ns(&self) -> u64 {
        self.asked_ns.saturating_add(LOOK_NS)
    }
}

/// It becomes readable as soon as something has happened.
impl AsFd for Hazards {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hazards.as_fd()
    }
}
