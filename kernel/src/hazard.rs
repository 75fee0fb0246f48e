//! Events that halt a server, reported by `kernel/bpf/hazard.bpf.c` as they happen: signals that
//! stop it, and safepoints of its JVM.

use std::fmt;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use aya::maps::{MapData, RingBuf};
use elfen_rt::signal::event::Runtime;

use crate::bpf_call;
pub use crate::error::Error;
use crate::events::ProbePoint;
use crate::object::Object;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/hazard.bpf.o");

const CONFIG: &str = "elfen_hz_config";
const RING: &str = "elfen_hz_ring";
const SERVERS: usize = 2;
/// How many processes of a server are watched.
const PROCESSES: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Stopped,
    Continued,
    /// A JVM stops its threads.
    Halted,
    Released,
}

/// The reported events. The program is attached as long as this value exists.
pub struct Hazards {
    ring: RingBuf<MapData>,
    _link: OwnedFd,
}

/// The watched servers. Probes of a JVM stay attached as long as this value exists. Attaching them
/// takes some tens of milliseconds, so another thread may own this value.
pub struct Subjects {
    object: Object,
    config: OwnedFd,
}

impl fmt::Debug for Hazards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hazards").finish_non_exhaustive()
    }
}

impl fmt::Debug for Subjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subjects").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Hazards {
    pub fn attach() -> Result<(Self, Subjects), Error> {
        let mut object = Object::load(OBJECT, &[])?;
        let program = object.program("elfen_hz_signal", "signal_generate")?;
        let link = bpf_call::attach(program.as_fd()).map_err(Error::call("attaching"))?;
        let (config, ring) = (object.map(CONFIG)?, object.ring(RING)?);
        Ok((Self { ring, _link: link }, Subjects { object, config }))
    }

    /// The events since the last call, in their order, each with the index of its server.
    pub fn take(&mut self) -> Vec<(usize, Step)> {
        let mut steps = Vec::new();
        while let Some(item) = self.ring.next() {
            let (words, _) = item.as_chunks::<8>();
            let [server, step] = words else { continue };
            let step = match u64::from_le_bytes(*step) {
                1 => Step::Stopped,
                2 => Step::Continued,
                3 => Step::Halted,
                _ => Step::Released,
            };
            let server = usize::try_from(u64::from_le_bytes(*server)).unwrap_or(SERVERS);
            if server < SERVERS {
                steps.push((server, step));
            }
        }
        steps
    }
}

impl Subjects {
    /// Replaces the processes of each server.
    pub fn watch(&self, servers: [&[u32]; SERVERS]) -> Result<(), Error> {
        let mut words = [0; SERVERS * PROCESSES];
        for (of, processes) in words.chunks_exact_mut(PROCESSES).zip(servers) {
            for (word, process) in of.iter_mut().zip(processes) {
                *word = u64::from(*process);
            }
        }
        let updated = bpf_call::update_element(self.config.as_fd(), 0, &words);
        updated.map_err(Error::call("setting what to watch"))
    }

    /// Reports the safepoints of a JVM, at these points of its library.
    pub fn probe(&mut self, process: u32, file: &Path, points: &[ProbePoint]) -> Result<(), Error> {
        let process = NonZeroU32::new(process)
            .ok_or_else(|| Error::Refused("0 is no process id".to_owned()))?;
        for point in points {
            let cookie = match point.step {
                Runtime::SafepointBegin => 1,
                Runtime::SafepointEnd => 2,
                _ => continue,
            };
            self.object.probe("elfen_hz_runtime", (file, point.offset, cookie), process)?;
        }
        Ok(())
    }
}

/// The descriptor becomes readable as soon as an event is available.
impl AsFd for Hazards {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}
