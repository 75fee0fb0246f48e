//! The channels of one run: what it samples, what steers it, and where it says what it did.
//!
//! The pages of a run have no name: they go with the last process that maps them, whatever kills the others. Children
//! find them by the ids in `ELFEN_RUN`, `elfen status` by looking through the machine's segments.

use std::io;
use std::sync::atomic::Ordering::Relaxed;

use elfen_kernel::counters::Counted;
use elfen_kernel::device::{self, Missing};
use elfen_kernel::task_map::{self, Source};
use elfen_rt::borrow::Sources;
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::process::pid_namespace;
use elfen_rt::signal::control::{ControlSlot, PolicyKind, Settings};
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::{NAME_BYTES, Page, PageError, Slot};
use elfen_rt::signal::service::{OpenError, ServiceReader, ServiceSlot};
use elfen_rt::signal::task::TaskMap;

use super::Order;
use super::ipc::{Counts, NoCounts};

/// The variable that tells batch processes where their pages are.
pub(crate) const VARIABLE: &str = "ELFEN_RUN";
const PROTOCOL: u32 = 1;

/// What the user allows as a source of signals.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Wanted {
    /// The task map if it can be had, with the service's page if there is one; else the page alone
    Auto,
    /// The task map by eBPF, or fail
    Tasks,
    /// The task map by the nanonap module, or fail
    Module,
    /// The service's page alone, which needs no privileges
    Service,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Tasks(#[from] task_map::Error),
    #[error(transparent)]
    Module(#[from] Missing),
    #[error("service {name:?}: {error}")]
    Service { name: String, error: OpenError },
    #[error("neither the task map ({0}) nor a service's page")]
    Nothing(task_map::Error),
    #[error("no service was named")]
    NoService,
    #[error("shared memory: {0}")]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Page(#[from] PageError),
    #[error(transparent)]
    Counts(#[from] NoCounts),
    #[error("keeping a descriptor open for the batch: {0}")]
    Descriptor(io::Error),
}

/// A service's page, by its name.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) reader: ServiceReader,
}

impl Service {
    pub(crate) fn open(name: &str) -> Result<Self, Error> {
        let name = name.to_owned();
        match ServiceReader::open(&name) {
            Ok(reader) => Ok(Self { name, reader }),
            Err(error) => Err(Error::Service { name, error }),
        }
    }

    pub(crate) fn slot(&self, request: u32) -> Option<&ServiceSlot> {
        self.reader.lane_of(request).and_then(|slot| self.reader.slot(slot))
    }
}

#[derive(Debug)]
pub(crate) struct Channels {
    pub(crate) tasks: Option<(TaskMap, Writer)>,
    pub(crate) service: Option<Service>,
    /// For `dynamic-budget`.
    pub(crate) counts: Option<Counts>,
    control: Page<ControlSlot>,
    lanes: Page<LaneSlot>,
    /// The pairs of the lane page's slots, as (batch, request).
    assigned: Vec<(u32, u32)>,
}

impl Channels {
    pub(crate) fn open(
        order: &Order,
        wanted: Wanted,
        service: Option<&str>,
    ) -> Result<Self, Error> {
        let service = service.map(Service::open).transpose()?;
        let tasks = match wanted {
            Wanted::Auto => open_any(service.is_some())?,
            Wanted::Tasks => Some(open_program()?),
            Wanted::Module => Some((device::open_map()?, Writer::Module)),
            Wanted::Service if service.is_none() => return Err(Error::NoService),
            Wanted::Service => None,
        };
        let assigned: Vec<(u32, u32)> = order.lanes().collect();
        let name = page_name(order);
        let lanes = page::<LaneSlot>(u32::try_from(assigned.len()).unwrap_or(u32::MAX), &name)?;
        for (slot, &(batch, request)) in lanes.slots().zip(&assigned) {
            slot.assign(batch, request);
        }
        let control = page::<ControlSlot>(CONTROL_SLOTS, &name)?;
        let mut channels = Self { tasks, service, counts: None, control, lanes, assigned };
        if order.settings.policy == PolicyKind::DynamicBudget {
            let requests = channels.requests();
            let slots = channels
                .service
                .as_ref()
                .map(|service| requests.iter().filter_map(|&request| service.slot(request)));
            channels.counts = Some(Counts::open(&requests, slots)?);
        }
        channels.control().nap.store(order.nap.kind() as u64, Relaxed);
        channels.control().publish(&order.settings);
        channels.control().lanes_segment.store(segment(&channels.lanes), Relaxed);
        Ok(channels)
    }

    /// What holds.
    pub(crate) fn control(&self) -> &ControlSlot {
        self.control.slot(0).unwrap_or_else(|| unreachable!("made with two slots"))
    }

    /// What `elfen set` wants.
    pub(crate) fn wanted(&self) -> &ControlSlot {
        self.control.slot(1).unwrap_or_else(|| unreachable!("made with two slots"))
    }

    pub(crate) fn settings(&self) -> Option<Settings> {
        self.control().settings().map(|(_, settings)| settings)
    }

    pub(crate) fn lanes(&self) -> &Page<LaneSlot> {
        &self.lanes
    }

    /// Batch and request lane of every slot of the lane page.
    pub(crate) fn assigned(&self) -> &[(u32, u32)] {
        &self.assigned
    }

    /// Every request lane once.
    pub(crate) fn requests(&self) -> Vec<u32> {
        let mut requests: Vec<u32> = self.assigned.iter().map(|&(_, request)| request).collect();
        requests.dedup();
        requests
    }

    pub(crate) fn sources(&self, request: u32) -> Sources<'_> {
        let tasks = self.tasks.as_ref().and_then(|(map, _)| map.slot(request));
        let service = self.service.as_ref();
        let slot = service.and_then(|s| s.reader.lane_of(request).map(|slot| (&s.reader, slot)));
        Sources { tasks, service: slot }
    }

    /// What a request lane has executed; `None` if nobody counts, or not yet.
    pub(crate) fn counted(&self, request: u32) -> Option<Counted> {
        let service = self.service.as_ref();
        self.counts.as_ref()?.read(request, service.and_then(|service| service.slot(request)))
    }

    /// How long a lane has been busy so far; `None` without a task map.
    pub(crate) fn busy_ns(&self, cpu: u32, now_ns: u64) -> Option<u64> {
        let (map, _) = self.tasks.as_ref()?;
        Some(map.slot(cpu)?.snapshot()?.busy_until_ns(now_ns))
    }

    /// When a lane turned busy, by the kernel's note; `None` while it idles, or without a task map.
    pub(crate) fn busy_since_ns(&self, cpu: u32) -> Option<u64> {
        let (map, _) = self.tasks.as_ref()?;
        map.slot(cpu)?.snapshot()?.busy_since_ns
    }

    /// Asks for another lease on the clocks of all lanes.
    pub(crate) fn renew_leases(&self) {
        let Some((map, _)) = &self.tasks else { return };
        let cpus = self.assigned.iter().flat_map(|&(batch, request)| [batch, request]);
        cpus.for_each(|cpu| {
            map.renew(cpu);
        });
    }

    /// The value of [`VARIABLE`], with descriptors that stay open in the batch.
    pub(crate) fn inheritance(&self) -> Result<String, Error> {
        let [lanes, control] = [segment(&self.lanes), segment(&self.control)];
        let descriptors = match &self.tasks {
            Some((map, _)) => match map.descriptors() {
                Some(ours) => {
                    let kept = [&ours.tasks, &ours.watch, &ours.link].map(|fd| keep_open(fd.raw()));
                    let [tasks, watch, link] = kept;
                    format!("{} {} {}", tasks?, watch?, link?)
                }
                None => "module - -".to_owned(),
            },
            None => "- - -".to_owned(),
        };
        let service = self.service.as_ref().map_or("-", |service| &service.name);
        Ok(format!("{PROTOCOL} {lanes} {control} {descriptors} {service}"))
    }
}

/// What holds, and what `elfen set` wants.
pub(super) const CONTROL_SLOTS: u32 = 2;

/// Who writes the task map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Writer {
    /// The eBPF program, and how it was come by.
    Program(Source),
    Module,
}

fn open_program() -> Result<(TaskMap, Writer), task_map::Error> {
    task_map::open().map(|(map, source)| (map, Writer::Program(source)))
}

/// The program's map, or the module's; neither is an error unless a service's page can stand in for them.
fn open_any(has_service: bool) -> Result<Option<(TaskMap, Writer)>, Error> {
    let error = match open_program() {
        Ok(opened) => return Ok(Some(opened)),
        Err(error) => error,
    };
    match device::open_map() {
        Ok(map) => Ok(Some((map, Writer::Module))),
        Err(_) if has_service => Ok(None),
        Err(_) => Err(Error::Nothing(error)),
    }
}

/// The program's name, as far as it fits, so that `elfen status` can tell runs apart.
fn page_name(order: &Order) -> [u8; NAME_BYTES] {
    let path = std::path::Path::new(&order.program);
    let name = path.file_name().unwrap_or(order.program.as_os_str()).to_string_lossy();
    let mut padded = [0; NAME_BYTES];
    for (to, from) in padded.iter_mut().zip(name.bytes()).take(NAME_BYTES - 1) {
        *to = from;
    }
    padded
}

fn page<S: Slot>(slots: u32, name: &[u8; NAME_BYTES]) -> Result<Page<S>, Error> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(slots), 0o600)?;
    // From now on it goes with the last process that maps it.
    memory.remove_name()?;
    Ok(Page::format(memory, slots, pid_namespace(), name)?)
}

fn segment<S: Slot>(page: &Page<S>) -> u64 {
    page.memory().segment_id().map_or(0, |id| u64::from(id.unsigned_abs()))
}

/// A copy of a descriptor that survives exec, out of the way of a program that counts on low numbers.
fn keep_open(fd: i32) -> Result<i32, Error> {
    const FROM: [i32; 3] = [900, 200, 20];
    for from in FROM {
        // SAFETY: F_DUPFD takes numbers and gives a new descriptor, which the batch inherits.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD, from) };
        if copy >= 0 {
            return Ok(copy);
        }
    }
    Err(Error::Descriptor(io::Error::last_os_error()))
}
