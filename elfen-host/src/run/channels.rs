//! The channels of one run: what it samples, what steers it, and where it says what it did.
//!
//! The pages of a run have no name: they go with the last process that maps them, whatever
//! kills the others. Children find them by the ids in `ELFEN_RUN`, `elfen status` by looking
//! through the machine's segments. Those of a daemon are handed on as descriptors.

use std::io;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::output::warn;
use elfen_instrument::live::{LaneAt, Pages};
use elfen_kernel::counters::Counted;
use elfen_kernel::device::{self, Missing};
use elfen_kernel::task_map::{self, Source};
use elfen_rt::bpf::Descriptor;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::{Inherited, Tasks};
use elfen_rt::lane::{Lane, Memory as LaneMemory};
use elfen_rt::process::{Liveness, pid_namespace};
use elfen_rt::sealed::Writers;
use elfen_rt::signal::account::{ACCOUNTS, Claim};
use elfen_rt::signal::control::{ControlSlot, PolicyKind, Settings};
use elfen_rt::signal::histogram::{BUCKETS, quantile_ns};
use elfen_rt::signal::lane::{BATCH_OFFLINE, LaneSlot};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::{OpenError, ServiceReader, ServiceSlot, Writer as PageWriter};
use elfen_rt::signal::task::{TaskMap, TaskSlot};

use super::Order;
use super::accounts::claimed_by_elfend;
use super::hotplug::Online;
use super::ipc::{Counts, NoCounts};
use super::live::page::LivePage;
use super::live::words::LiveWords;
use super::pages::{
    GuardSlot, PagesError, keep_open, lane_slots, page, page_name, private_page, sealed_page,
    segment,
};
use crate::segment::text_of;
use crate::services::services;

/// What the user allows as a source of signals.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Wanted {
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
pub enum Error {
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
    #[error(transparent)]
    Pages(#[from] PagesError),
    #[error(transparent)]
    Counts(#[from] NoCounts),
}

/// A service's page, by its name.
#[derive(Debug)]
pub struct Service {
    pub name: String,
    pub reader: ServiceReader,
}

impl Service {
    /// The page of `name`: ours, root's, or that of a user who is trusted to write it.
    pub fn open(name: &str, trusted: Option<u32>) -> Result<Self, Error> {
        let name = name.to_owned();
        match ServiceReader::open_of(&name, trusted) {
            Ok(reader) => Ok(Self { name, reader }),
            Err(error) => Err(Error::Service { name, error }),
        }
    }

    pub fn slot(&self, request: u32) -> Option<&ServiceSlot> {
        self.reader.lane_of(request).and_then(|slot| self.reader.slot(slot))
    }

    /// The one service that publishes on this machine; the names of all of them if
    /// there is not exactly one.
    pub fn only(trusted: Option<u32>) -> Result<Self, Vec<String>> {
        let found = services().unwrap_or_default();
        let living = found.into_iter().filter(|page| page.slots().any(|(_, _, alive)| alive));
        let names: Vec<String> = living.map(|page| page.name).collect();
        let [name] = names.as_slice() else { return Err(names) };
        Self::open(name, trusted).map_err(|_| names.clone())
    }

    /// The service behind a run's page, by its segment.
    pub fn of_segment(id: i32) -> Option<Self> {
        let reader = ServiceReader::open_segment(id).ok()?;
        Some(Self { name: text_of(&reader.name()), reader })
    }

    /// The latency that `per_million` of a million requests did not exceed, of all
    /// that were finished so far.
    pub fn latency_ns(&self, per_million: u32) -> Option<u64> {
        let mut all = [0; BUCKETS];
        for slot in (0..self.reader.lanes()).filter_map(|lane| self.reader.slot(lane)) {
            all.iter_mut().zip(slot.latency.counts()).for_each(|(sum, count)| *sum += count);
        }
        quantile_ns(all.into_iter(), per_million)
    }

    /// The slots of living writers on these request lanes.
    pub fn living(&self, requests: &[u32]) -> impl Iterator<Item = &ServiceSlot> {
        let lives = |lane| match self.reader.writer(lane) {
            PageWriter::Process(_, state) => state != Liveness::Dead,
            PageWriter::Nobody => false,
        };
        let stands = move |&lane: &u32| {
            requests.iter().any(|&cpu| self.reader.stands_for(lane, cpu)) && lives(lane)
        };
        (0..self.reader.lanes()).filter(stands).filter_map(|lane| self.reader.slot(lane))
    }
}

/// Where a run learns of its request lanes: the task map, a service's page, or both.
#[derive(Debug)]
pub struct Signals {
    pub tasks: Option<(TaskMap, Writer)>,
    pub service: Option<Service>,
}

impl Signals {
    pub fn open(wanted: Wanted, service: Option<Service>) -> Result<Self, Error> {
        let tasks = match wanted {
            Wanted::Auto => open_any(service.is_some())?,
            Wanted::Tasks => Some(open_program()?),
            Wanted::Module => Some((device::open_map()?, Writer::Module)),
            Wanted::Service if service.is_none() => return Err(Error::NoService),
            Wanted::Service => None,
        };
        Ok(Self { tasks, service })
    }
}

#[derive(Debug)]
pub struct Channels {
    pub tasks: Option<(TaskMap, Writer)>,
    pub service: Option<Service>,
    /// For `dynamic-budget`.
    pub counts: Option<Counts>,
    control: Page<ControlSlot>,
    lanes: Page<LaneSlot>,
    /// What guards decide by.
    guards: Page<GuardSlot>,
    /// Where there are live checks.
    live: Option<LivePage>,
    /// The pairs of the lane page's slots, as (batch, request).
    assigned: Vec<(u32, u32)>,
    /// The lane page and the control page, for others to map.
    handed: Option<[Descriptor; 2]>,
}

/// Of a batch that came when all accounts of a lane were others'.
pub(crate) fn uncounted(batch: u32) -> String {
    format!(
        "CPU {batch}: what this batch runs there is not counted, as {ACCOUNTS} others' there is"
    )
}

impl Channels {
    pub fn open(order: &Order, signals: Signals) -> Result<Self, Error> {
        let name = page_name(order);
        let lanes = page::<LaneSlot>(lane_slots(order), &name)?;
        Self::of_pages(order, signals, lanes, page::<ControlSlot>(CONTROL_SLOTS, &name)?, None)
    }

    /// With pages that go over a socket. Who gets them cannot write the control page.
    pub(crate) fn open_to_hand_on(order: &Order, signals: Signals) -> Result<Self, Error> {
        let name = page_name(order);
        let (lanes, lanes_file) =
            sealed_page::<LaneSlot>(lane_slots(order), &name, Writers::Everybody)?;
        let (control, control_file) =
            sealed_page::<ControlSlot>(CONTROL_SLOTS, &name, Writers::Nobody)?;
        Self::of_pages(order, signals, lanes, control, Some([lanes_file, control_file]))
    }

    /// The descriptors of the lane page and the control page, where they are to be handed on.
    pub(crate) fn handed(&self) -> Option<[RawFd; 2]> {
        self.handed.as_ref().map(|files| files.each_ref().map(Descriptor::raw))
    }

    fn of_pages(
        order: &Order,
        signals: Signals,
        lanes: Page<LaneSlot>,
        control: Page<ControlSlot>,
        handed: Option<[Descriptor; 2]>,
    ) -> Result<Self, Error> {
        let Signals { tasks, service } = signals;
        let assigned: Vec<(u32, u32)> = order.lanes().collect();
        for (slot, &(batch, request)) in lanes.slots().zip(&assigned) {
            slot.assign(batch, request);
        }
        let live = order.notes.as_ref().map(|notes| LivePage::make(notes, &page_name(order)));
        let live = live.transpose()?;
        let (guards, counts) = (private_page(lanes.slot_count())?, None);
        let mut channels =
            Self { tasks, service, counts, control, lanes, guards, live, assigned, handed };
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
        let service = channels.service.as_ref().and_then(|service| service.reader.segment_id());
        let service = service.map_or(0, |id| u64::from(id.unsigned_abs()) + 1);
        channels.control().service_segment.store(service, Relaxed);
        Ok(channels)
    }

    /// The slot of the settings that hold.
    pub fn control(&self) -> &ControlSlot {
        self.control.slot(0).unwrap_or_else(|| unreachable!("made with two slots"))
    }

    /// The slot of the settings that `elfen set` wants.
    pub fn wanted(&self) -> &ControlSlot {
        self.control.slot(1).unwrap_or_else(|| unreachable!("made with two slots"))
    }

    pub fn settings(&self) -> Option<Settings> {
        self.control().settings().map(|(_, settings)| settings)
    }

    /// What others call these lanes. Of the control page, whose header no batch in a fence writes.
    pub(crate) fn name(&self) -> String {
        text_of(&self.control.name())
    }

    pub fn lanes(&self) -> &Page<LaneSlot> {
        &self.lanes
    }

    pub fn live(&self) -> Option<&LiveWords> {
        self.live.as_ref()?.words()
    }

    /// What checks look at that are written into a batch, and that batch's descriptor of the task
    /// map; `None` without an eBPF task map.
    pub(super) fn pages(&self, inheritance: &Inherited) -> Option<Pages> {
        let (map, _) = self.tasks.as_ref()?;
        let Some(Tasks::Descriptors([tasks, ..])) = inheritance.tasks else { return None };
        let word = |offset: usize| offset as u64;
        let lane = |(index, &(cpu, request)): (u32, &(u32, u32))| LaneAt {
            cpu,
            lane_at: word(Page::<LaneSlot>::offset(index)),
            task_at: word(Page::<TaskSlot>::offset(request) + offset_of!(TaskSlot, task)),
        };
        Some(Pages {
            lanes_segment: self.lanes.memory().segment_id()?,
            lanes_bytes: word(self.lanes.memory().len()),
            tasks_fd: tasks,
            tasks_bytes: word(map.bytes()),
            filters: self.live.as_ref()?.filters,
            lanes: (0..).zip(&self.assigned).map(lane).collect(),
            cpus: u64::from(map.cpus()),
            doorbell_at: word(offset_of!(LaneSlot, bell)),
            probe_at: word(offset_of!(LaneSlot, drill)),
            answer_tsc_at: word(offset_of!(LaneSlot, answer_tsc)),
            answer_place_at: word(offset_of!(LaneSlot, answer_place)),
        })
    }

    /// Whether any request lane is busy.
    pub(super) fn is_busy(&self) -> bool {
        let Some((map, _)) = &self.tasks else { return false };
        self.requests().iter().any(|&cpu| map.slot(cpu).is_some_and(TaskSlot::is_busy))
    }

    /// How long the batch ran so far, on all lanes.
    pub(super) fn ran_ns(&self) -> u64 {
        let words = self.lanes.slots().flat_map(|slot| [&slot.borrowed_ns, &slot.overlapped_ns]);
        words.map(|word| word.load(Relaxed)).sum()
    }

    /// Batch and request lane of every slot of the lane page.
    pub fn assigned(&self) -> &[(u32, u32)] {
        &self.assigned
    }

    /// Every request lane once.
    pub fn requests(&self) -> Vec<u32> {
        let mut requests: Vec<u32> = self.assigned.iter().map(|&(_, request)| request).collect();
        requests.dedup();
        requests
    }

    /// A batch lane by its slot, for the guard that steps on it.
    pub fn lane<'a>(&'a self, index: usize, memory: &'a LaneMemory) -> Option<Lane<'a>> {
        let &(batch_cpu, request_cpu) = self.assigned.get(index)?;
        Some(Lane {
            batch_cpu,
            request_cpu,
            tasks: self.tasks.as_ref().map(|(map, _)| map),
            service: self.service.as_ref().map(|service| &service.reader),
            control: self.control(),
            slot: self.lanes.slot(u32::try_from(index).ok()?)?,
            inputs: &self.guards.slot(u32::try_from(index).ok()?)?.inputs,
            memory,
        })
    }

    /// Notes which CPUs are online, for guards and for threads with checks.
    pub(crate) fn follow_hotplug(&self, online: &Online) {
        let slots = self.guards.slots().zip(self.lanes.slots()).zip(&self.assigned);
        for ((guard, lane), &pair) in slots {
            let bits = online.bits_of(pair);
            guard.inputs.hotplug.store(bits, Relaxed);
            lane.inputs.hotplug.store(bits, Relaxed);
        }
    }

    /// How many batch lanes are offline.
    pub(super) fn batch_lanes_offline(&self) -> usize {
        let is_offline =
            |guard: &&GuardSlot| guard.inputs.hotplug.load(Relaxed) & BATCH_OFFLINE != 0;
        self.guards.slots().filter(is_offline).count()
    }

    /// The instructions and cycles of a request lane so far; `None` if the run has no counters, or
    /// they have no count yet.
    pub(crate) fn counted(&self, lane: &Lane<'_>) -> Option<Counted> {
        let counts = self.counts.as_ref()?;
        counts.read(lane.request_cpu, lane.service(monotonic_ns()))
    }

    /// Has the kernel count how long the batch, all tasks that descend from these two processes,
    /// runs on its lanes. Where it can't (without the eBPF program, or in a pid namespace, where a
    /// run does not know the ids that the kernel does), nothing is counted.
    pub(crate) fn claim(&self, claim: Claim) {
        let Some((map, writer)) =
            self.tasks.as_ref().filter(|_| pid_namespace() == INITIAL_NAMESPACE)
        else {
            return;
        };
        let claimed = match writer {
            Writer::Program(Source::Handed) => claimed_by_elfend(&self.assigned, claim),
            _ => {
                let claim_lane = |&(batch, request)| map.claim(batch, request, claim, is_dead);
                Some((claim, self.assigned.iter().map(claim_lane).collect()))
            }
        };
        let (claim, accounts) = claimed.unwrap_or_else(|| (claim, Vec::new()));
        let accounts = accounts.into_iter().chain(std::iter::repeat(None));
        for ((slot, &(batch, _)), index) in self.lanes.slots().zip(&self.assigned).zip(accounts) {
            let Some(index) = index else {
                if *writer != Writer::Module {
                    warn(&uncounted(batch));
                }
                continue;
            };
            if slot.account_claim.load(Relaxed) != claim.word() {
                slot.counted_ran_ns.store(0, Relaxed);
                slot.counted_shared_ns.store(0, Relaxed);
                slot.account_index.store(index as u64, Relaxed);
                slot.account_claim.store(claim.word(), Relaxed);
            }
        }
    }

    pub(crate) fn disclaim(&self, claim: Claim) {
        let Some((map, _)) = &self.tasks else { return };
        self.assigned.iter().for_each(|&(batch, _)| map.disclaim(batch, claim));
    }

    /// How long a lane has been busy so far; `None` without a task map.
    pub fn busy_ns(&self, cpu: u32, now_ns: u64) -> Option<u64> {
        let (map, _) = self.tasks.as_ref()?;
        Some(map.slot(cpu)?.snapshot()?.busy_until_ns(now_ns))
    }

    /// When a lane turned busy, by the kernel's note; `None` while it idles, or without a task map.
    pub fn busy_since_ns(&self, cpu: u32) -> Option<u64> {
        let (map, _) = self.tasks.as_ref()?;
        map.slot(cpu)?.snapshot()?.busy_since_ns
    }

    /// Asks for another lease on the clocks of all lanes.
    pub fn renew_leases(&self) {
        let Some((map, _)) = &self.tasks else { return };
        let cpus = self.assigned.iter().flat_map(|&(batch, request)| [batch, request]);
        cpus.for_each(|cpu| {
            map.renew(cpu);
        });
    }

    /// The channels that the batch inherits, with descriptors that stay open in it.
    pub fn inheritance(&self) -> Result<Inherited, Error> {
        let id = |page: Option<i32>| page.unwrap_or(0);
        let tasks = match &self.tasks {
            Some((map, _)) => Some(match map.descriptors() {
                Some(ours) => {
                    let [tasks, link] = [&ours.tasks, &ours.link].map(|fd| keep_open(fd.raw()));
                    Tasks::Descriptors([tasks?, link?])
                }
                None => Tasks::Module,
            }),
            None => None,
        };
        Ok(Inherited {
            lanes: id(self.lanes.memory().segment_id()),
            control: id(self.control.memory().segment_id()),
            tasks,
            service: self.service.as_ref().and_then(|service| service.reader.segment_id()),
        })
    }
}

/// Gives the pages of the run to the user that the batch runs as.
impl Channels {
    pub fn give_to(&self, user: u32, group: u32) -> Result<(), Error> {
        let pages = [self.lanes.memory(), self.control.memory()];
        pages
            .into_iter()
            .try_for_each(|page| Ok(page.give_to(user, group).map_err(PagesError::Memory)?))
    }
}

/// The inode of the first pid namespace, the same on every kernel (PROC_PID_INIT_INO).
const INITIAL_NAMESPACE: u32 = 0xeffffffc;

pub(crate) fn is_dead(claim: Claim) -> bool {
    let gone = |process: u32| {
        // SAFETY: signal 0 sends nothing; kill only looks the id up.
        process == 0
            || unsafe { libc::kill(process.cast_signed(), 0) } != 0
                && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
    };
    match claim {
        Claim::Processes { front, keeper, .. } => gone(front) && gone(keeper),
        // A fence's, whose daemon takes back what it left behind.
        Claim::Cgroup(_) => false,
    }
}

/// The settings that hold, and those that `elfen set` wants.
pub(super) const CONTROL_SLOTS: u32 = 2;

/// The writer of the task map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writer {
    /// The eBPF program, and how it was come by.
    Program(Source),
    Module,
}

fn open_program() -> Result<(TaskMap, Writer), task_map::Error> {
    task_map::open().map(|(map, source)| (map, Writer::Program(source)))
}

/// The program's map, or the module's; neither is an error unless a service's
/// page can stand in for them.
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
