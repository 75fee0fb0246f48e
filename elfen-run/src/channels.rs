//! The channels of one run: shared pages and the task map, from which guards and checks read
//! signals and settings, and to which they write what they did.
//!
//! The pages of a run have no name, so they disappear with the last process that maps them, however
//! the processes end. Children find them by the ids in `ELFEN_RUN`, and `elfen status` searches the
//! machine's segments. `elfend` passes its own pages over a socket, as descriptors.

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
use elfen_rt::inherit::{Inherited, TaskMapSource};
use elfen_rt::lane::{Lane, ServiceCache};
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
use super::hotplug::Online;
use super::ipc::{Counts, NoCounts};
use super::live::page::{LivePage, LiveWords};
use super::pages::{
    GuardSlot, PagesError, keep_open, lane_slots, page, page_name, private_page, sealed_page,
    segment,
};
use crate::services::services;
use elfen_machine::fence::status::{Answer, Request, ask};
use elfen_machine::segment::text_of;

/// Which source of signals the user allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum SourceChoice {
    /// The task map if possible, with the service's page if there is one; else only the page
    Auto,
    /// The task map by eBPF, or fail
    Tasks,
    /// The task map by the nanonap module, or fail
    Module,
    /// Only the service's page, which needs no privileges
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
    /// Opens the page of `name`, which this user, root or the user `trusted` must own.
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

    /// The only service that publishes on this machine. The names of all such services if there is
    /// not exactly one.
    pub fn only(trusted: Option<u32>) -> Result<Self, Vec<String>> {
        let found = services().unwrap_or_default();
        let living_slots = found.into_iter().filter(|page| page.slots().any(|(_, _, alive)| alive));
        let names: Vec<String> = living_slots.map(|page| page.name).collect();
        let [name] = names.as_slice() else { return Err(names) };
        Self::open(name, trusted).map_err(|_| names.clone())
    }

    /// The service behind a run's page, by its segment.
    pub fn of_segment(id: i32) -> Option<Self> {
        let reader = ServiceReader::open_segment(id).ok()?;
        Some(Self { name: text_of(&reader.name()), reader })
    }

    /// The latency that `per_million` of a million requests did not exceed, of all requests that
    /// finished so far.
    pub fn latency_ns(&self, per_million: u32) -> Option<u64> {
        let mut all = [0; BUCKETS];
        for slot in (0..self.reader.lanes()).filter_map(|lane| self.reader.slot(lane)) {
            all.iter_mut().zip(slot.latency.counts()).for_each(|(sum, count)| *sum += count);
        }
        quantile_ns(all.into_iter(), per_million)
    }

    /// The slots of these request lanes whose writers live.
    pub fn living_slots(&self, requests: &[u32]) -> impl Iterator<Item = &ServiceSlot> {
        let lives = |lane| match self.reader.writer(lane) {
            PageWriter::Process(_, state) => state != Liveness::Dead,
            PageWriter::None => false,
        };
        let stands = move |&lane: &u32| {
            requests.iter().any(|&cpu| self.reader.stands_for(lane, cpu)) && lives(lane)
        };
        (0..self.reader.lanes()).filter(stands).filter_map(|lane| self.reader.slot(lane))
    }
}

/// The sources of a run's request signals: the task map, a service's page, or both.
#[derive(Debug)]
pub struct Signals {
    pub tasks: Option<(TaskMap, Writer)>,
    pub service: Option<Service>,
}

impl Signals {
    pub fn open(wanted: SourceChoice, service: Option<Service>) -> Result<Self, Error> {
        let tasks = match wanted {
            SourceChoice::Auto => open_any(service.is_some())?,
            SourceChoice::Tasks => Some(open_program()?),
            SourceChoice::Module => Some((device::open_map()?, Writer::Module)),
            SourceChoice::Service if service.is_none() => return Err(Error::NoService),
            SourceChoice::Service => None,
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
    /// The inputs of guards.
    guards: Page<GuardSlot>,
    /// Only with live checks.
    live: Option<LivePage>,
    /// The pairs of the lane page's slots, as (batch, request).
    assigned: Vec<(u32, u32)>,
    /// The lane page and the control page as files, where other processes may map them.
    shared_files: Option<[Descriptor; 2]>,
}

/// The warning for a lane on which other batches have taken all accounts.
pub fn uncounted_warning(batch: u32) -> String {
    format!(
        "CPU {batch}: the time of this batch is not counted there, as other batches use all \
         {ACCOUNTS} accounts"
    )
}

impl Channels {
    pub fn open(order: &Order, signals: Signals) -> Result<Self, Error> {
        let name = page_name(order);
        let lanes = page::<LaneSlot>(lane_slots(order), &name)?;
        Self::of_pages(order, signals, lanes, page::<ControlSlot>(CONTROL_SLOTS, &name)?, None)
    }

    /// With pages that can be passed over a socket. Receivers cannot write the control page.
    pub fn open_shared(order: &Order, signals: Signals) -> Result<Self, Error> {
        let name = page_name(order);
        let (lanes, lanes_file) =
            sealed_page::<LaneSlot>(lane_slots(order), &name, Writers::AnyProcess)?;
        let (control, control_file) =
            sealed_page::<ControlSlot>(CONTROL_SLOTS, &name, Writers::MakerOnly)?;
        Self::of_pages(order, signals, lanes, control, Some([lanes_file, control_file]))
    }

    /// The descriptors of the lane page and the control page, if they can be passed on.
    pub fn shared_files(&self) -> Option<[RawFd; 2]> {
        self.shared_files.as_ref().map(|files| files.each_ref().map(Descriptor::raw))
    }

    fn of_pages(
        order: &Order,
        signals: Signals,
        lanes: Page<LaneSlot>,
        control: Page<ControlSlot>,
        shared_files: Option<[Descriptor; 2]>,
    ) -> Result<Self, Error> {
        let Signals { tasks, service } = signals;
        let assigned: Vec<(u32, u32)> = order.lanes().collect();
        for (slot, &(batch, request)) in lanes.slots().zip(&assigned) {
            slot.assign(batch, request);
        }
        let live = order.notes.as_ref().map(|notes| LivePage::make(notes, &page_name(order)));
        let live = live.transpose()?;
        let guards = private_page(lanes.slot_count())?;
        let counts = None;
        let mut channels =
            Self { tasks, service, counts, control, lanes, guards, live, assigned, shared_files };
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

    /// The settings that are in force.
    pub fn control(&self) -> &ControlSlot {
        self.control.slot(0).unwrap_or_else(|| unreachable!("made with two slots"))
    }

    /// The settings that `elfen set` requests.
    pub fn requested(&self) -> &ControlSlot {
        self.control.slot(1).unwrap_or_else(|| unreachable!("made with two slots"))
    }

    pub fn settings(&self) -> Option<Settings> {
        self.control().settings().map(|(_, settings)| settings)
    }

    /// The name of these lanes for users. Read from the control page, whose header a batch in a
    /// fence cannot write.
    pub fn name(&self) -> String {
        text_of(&self.control.name())
    }

    pub fn lanes(&self) -> &Page<LaneSlot> {
        &self.lanes
    }

    pub fn live(&self) -> Option<&LiveWords> {
        self.live.as_ref()?.words()
    }

    /// Where checks that are patched into a batch find their words, and the batch's descriptor of
    /// the task map. `None` without an eBPF task map.
    pub(super) fn pages(&self, inheritance: &Inherited) -> Option<Pages> {
        let (map, _) = self.tasks.as_ref()?;
        let Some(TaskMapSource::Descriptors([tasks, ..])) = inheritance.tasks else { return None };
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
            doorbell_at: word(offset_of!(LaneSlot, doorbell)),
            probe_at: word(offset_of!(LaneSlot, probe)),
            answer_tsc_at: word(offset_of!(LaneSlot, answer_tsc)),
            answer_place_at: word(offset_of!(LaneSlot, answer_address)),
        })
    }

    /// Whether any request lane is busy.
    pub(super) fn is_busy(&self) -> bool {
        let Some((map, _)) = &self.tasks else { return false };
        self.requests().iter().any(|&cpu| map.slot(cpu).is_some_and(TaskSlot::is_busy))
    }

    /// How long the batch has run so far, on all lanes.
    pub(super) fn ran_ns(&self) -> u64 {
        let words = self.lanes.slots().flat_map(|slot| [&slot.borrowed_ns, &slot.overlapped_ns]);
        words.map(|word| word.load(Relaxed)).sum()
    }

    /// (batch, request) of every slot of the lane page.
    pub fn assigned(&self) -> &[(u32, u32)] {
        &self.assigned
    }

    /// All request lanes, without duplicates.
    pub fn requests(&self) -> Vec<u32> {
        let mut requests: Vec<u32> = self.assigned.iter().map(|&(_, request)| request).collect();
        requests.dedup();
        requests
    }

    /// The batch lane of a slot, as its guard evaluates it.
    pub fn lane<'a>(&'a self, index: usize, service_cache: &'a ServiceCache) -> Option<Lane<'a>> {
        let &(batch_cpu, request_cpu) = self.assigned.get(index)?;
        Some(Lane {
            batch_cpu,
            request_cpu,
            tasks: self.tasks.as_ref().map(|(map, _)| map),
            service: self.service.as_ref().map(|service| &service.reader),
            control: self.control(),
            slot: self.lanes.slot(u32::try_from(index).ok()?)?,
            inputs: &self.guards.slot(u32::try_from(index).ok()?)?.inputs,
            service_cache,
        })
    }

    /// Publishes which CPUs are online, to guards and to threads with checks.
    pub fn follow_hotplug(&self, online: &Online) {
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

    /// The instructions and cycles of a request lane so far. `None` if the run has no counters, or
    /// they have counted nothing yet.
    pub(crate) fn counted(&self, lane: &Lane<'_>) -> Option<Counted> {
        let counts = self.counts.as_ref()?;
        counts.read(lane.request_cpu, lane.service(monotonic_ns()))
    }

    /// Has the kernel count how long the batch runs on its lanes. The batch are all tasks that
    /// descend from the processes in `claim`.
    ///
    /// Nothing is counted without the eBPF program, or in a pid namespace, where a run does not
    /// know the kernel's process ids.
    pub(crate) fn claim(&self, claim: Claim) {
        let Some((map, writer)) =
            self.tasks.as_ref().filter(|_| pid_namespace() == INITIAL_NAMESPACE)
        else {
            return;
        };
        let claimed = match writer {
            Writer::Program(Source::Handed) => claim_by_elfend(&self.assigned, claim),
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
                    warn(&uncounted_warning(batch));
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

    /// When a lane became busy, by the task map. `None` while it idles, or without a task map.
    pub fn busy_since_ns(&self, cpu: u32) -> Option<u64> {
        let (map, _) = self.tasks.as_ref()?;
        map.slot(cpu)?.snapshot()?.busy_since_ns
    }

    /// Renews the leases on the clocks of all lanes.
    pub fn renew_leases(&self) {
        let Some((map, _)) = &self.tasks else { return };
        let cpus = self.assigned.iter().flat_map(|&(batch, request)| [batch, request]);
        cpus.for_each(|cpu| {
            map.renew(cpu);
        });
    }

    /// The channels for a batch to inherit, with descriptors that stay open in it.
    pub fn inheritance(&self) -> Result<Inherited, Error> {
        let id = |page: Option<i32>| page.unwrap_or(0);
        let tasks = match &self.tasks {
            Some((map, _)) => Some(match map.descriptors() {
                Some(ours) => {
                    let [tasks, link] = [&ours.tasks, &ours.link].map(|fd| keep_open(fd.raw()));
                    TaskMapSource::Descriptors([tasks?, link?])
                }
                None => TaskMapSource::Module,
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

impl Channels {
    /// Gives the pages of the run to the user that the batch runs as.
    pub fn give_to(&self, user: u32, group: u32) -> Result<(), Error> {
        let pages = [self.lanes.memory(), self.control.memory()];
        pages
            .into_iter()
            .try_for_each(|page| Ok(page.give_to(user, group).map_err(PagesError::Memory)?))
    }
}

/// The inode of the first pid namespace; every kernel uses this number (PROC_PID_INIT_INO).
const INITIAL_NAMESPACE: u32 = 0xeffffffc;

pub fn is_dead(claim: Claim) -> bool {
    let gone = |process: u32| {
        // SAFETY: kill takes numbers, and signal 0 only looks the id up.
        process == 0
            || unsafe { libc::kill(process.cast_signed(), 0) } != 0
                && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
    };
    match claim {
        Claim::Processes { launcher, supervisor, .. } => gone(launcher) && gone(supervisor),
        // The claim of a fence. The daemon takes back the claims of an earlier daemon.
        Claim::Cgroup(_) => false,
    }
}

/// Has elfend claim accounts for a run without privileges. Returns the claim, and which account of
/// each pair's batch lane it has.
///
/// A process that can write claims can falsify every account of the machine. So members of group
/// elfen receive the task map without claims. elfend claims for the process that asks, and takes
/// its id from the kernel.
fn claim_by_elfend(pairs: &[(u32, u32)], claim: Claim) -> Option<(Claim, Vec<Option<usize>>)> {
    let Claim::Processes { launcher, .. } = claim else { return None };
    let request = Request::Count { pairs: pairs.to_vec(), front: launcher };
    let Ok(Answer::Counted { claim, accounts }) = ask(&task_map::elfend_socket(), &request) else {
        return None;
    };
    let accounts = accounts.into_iter().map(|one| one.and_then(|one| usize::try_from(one).ok()));
    Some((Claim::from_word(claim)?, accounts.collect()))
}

/// The settings in force, and the settings that `elfen set` requests.
pub(super) const CONTROL_SLOTS: u32 = 2;

/// What writes the task map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writer {
    /// The eBPF program, and where its map came from.
    Program(Source),
    Module,
}

fn open_program() -> Result<(TaskMap, Writer), task_map::Error> {
    task_map::open().map(|(map, source)| (map, Writer::Program(source)))
}

/// The eBPF program's map, or the module's. Neither is needed if there is a service's
/// page instead.
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
