//! What brings one of two servers to a halt, as it happens: signals, and the halts of its JVM.

use std::os::fd::{AsFd, BorrowedFd};

use elfen_hedge_policy::{Halt, Server};
use elfen_host::process::stat;
use elfen_kernel::hazard::{self, Error, Step, Subjects};
use elfen_recorder::jvm::probes_of;
use elfen_recorder::service::NotFound;

use crate::lookout::Lookout;
use crate::processes::Serving;

#[derive(Debug)]
pub(crate) struct Hazards {
    hazards: hazard::Hazards,
    pub(crate) lookout: Lookout,
}

#[derive(Debug)]
pub(crate) enum Missing {
    Server(NotFound),
    Events(Error),
}

/// The processes whose halts are told.
#[derive(Debug)]
struct Listening {
    subjects: Subjects,
    /// Processes with probes in their JVM.
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
    /// A server that is not up yet may come later.
    pub(crate) fn find(ports: [u16; 2]) -> Result<Self, Missing> {
        let [first, second] = ports.map(Serving::find);
        let serving = [first.map_err(Missing::Server)?, second.map_err(Missing::Server)?];
        let (hazards, subjects) = hazard::Hazards::attach().map_err(Missing::Events)?;
        let mut listening = Listening { subjects, probed: Vec::new() };
        listening.to(serving.each_ref().map(Serving::processes)).map_err(Missing::Events)?;
        let lookout = Lookout::begin(serving, move |processes| {
            // A server that can't be listened to gets requests as any other does.
            let _without = listening.to(processes);
        });
        Ok(Self { hazards, lookout })
    }

    /// What has happened since the last call: which server, why, and whether it halts or goes on.
    pub(crate) fn take(&mut self) -> Vec<(Server, Halt, bool)> {
        let halt = |(server, step): (usize, Step)| {
            let (why, is_so) = match step {
                Step::Stopped => (Halt::Stop, true),
                Step::Continued => (Halt::Stop, false),
                Step::Halted => (Halt::Pause, true),
                Step::Released => (Halt::Pause, false),
            };
            (Server::BOTH[server], why, is_so)
        };
        self.hazards.take().into_iter().map(halt).collect()
    }
}

/// It becomes readable as soon as something has happened.
impl AsFd for Hazards {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hazards.as_fd()
    }
}
