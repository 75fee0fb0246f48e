//! What brings a server to a halt, told as it happens by `kernel/bpf/hazard.bpf.c`: signals that
//! stop it, and its JVM's own halts.

use std::fmt;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use aya::maps::{MapData, RingBuf};
use elfen_rt::signal::event::Runtime;

use crate::bpf_call;
pub use crate::error::Error;
use crate::events::Place;
use crate::object::Object;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/hazard.bpf.o");

const CONFIG: &str = "elfen_hz_config";
const RING: &str = "elfen_hz_ring";
const SERVERS: usize = 2;
/// A server has no more processes whose halts are told.
const PROCESSES: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Stopped,
    Continued,
    /// A JVM's threads come to a halt.
    Halted,
    Released,
}

/// What is told, as long as this lives.
pub struct Hazards {
    ring: RingBuf<MapData>,
    _link: OwnedFd,
}

/// Of whom it is told. Probes of a JVM are gone with this; attaching them takes the kernel some
/// tens of milliseconds, so this may be another thread's.
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

    /// What has happened since the last call, in its order: to which server, and what.
    pub fn take(&mut self) -> Vec<(usize, Step)> {
        let mut told = Vec::new();
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
                told.push((server, step));
            }
        }
        told
    }
}

impl Subjects {
    /// Says anew which processes each server has.
    pub fn watch(&self, servers: [&[u32]; SERVERS]) -> Result<(), Error> {
        let mut words = [0; SERVERS * PROCESSES];
        for (of, processes) in words.chunks_exact_mut(PROCESSES).zip(servers) {
            of.iter_mut().zip(processes).for_each(|(word, process)| *word = u64::from(*process));
        }
        let told = bpf_call::update_element(self.config.as_fd(), 0, &words);
        told.map_err(Error::call("saying whom to watch"))
    }

    /// Has a JVM tell of its halts, by these places of its library.
    pub fn probe(&mut self, process: u32, file: &Path, places: &[Place]) -> Result<(), Error> {
        let process = NonZeroU32::new(process)
            .ok_or_else(|| Error::Refused("process 0 is none".to_owned()))?;
        for place in places {
            let cookie = match place.step {
                Runtime::SafepointBegin => 1,
                Runtime::SafepointEnd => 2,
                _ => continue,
            };
            self.object.probe("elfen_hz_runtime", (file, place.offset, cookie), process)?;
        }
        Ok(())
    }
}

/// It becomes readable as soon as something has happened.
impl AsFd for Hazards {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}
