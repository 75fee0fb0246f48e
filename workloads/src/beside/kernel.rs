//! Neighbours according to the kernel's accounts. The task map says how long batches ran on a batch
//! lane, and for how much of that time the request lane was busy.
//!
//! The accounts contain neither other programs on the lane nor a guard that occupies it. They do
//! contain a batch thread that naps at a check in its program without blocking, because the kernel
//! sees it run. So this module reads from the run's lane page when such a thread naps. `elfen run`
//! has the kernel count its batch. A batch program that was started without `elfen run` claims an
//! account for itself.

use super::{Lanes, Neighbour, Reading};
use crate::units::Nanos;
use elfen_console::failure::{Failure, Status};
use elfen_kernel::task_map;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::Run;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::signal::account::Claim;
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::{TaskMap, TaskSlot};
use nix::errno::Errno;
use nix::sched::sched_getcpu;
use nix::sys::signal::kill;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::{fs, process};

/// The task map, and the lane pages of all runs. Only `refresh` makes system calls.
#[derive(Debug)]
pub struct Kernel {
    map: TaskMap,
    /// The lane pages of all runs, by segment.
    pages: RwLock<Vec<(i32, Page<LaneSlot>)>>,
    /// The lane page of the run that this process belongs to.
    own: Option<Page<LaneSlot>>,
}

/// Opens the task map with the accounts of these lanes. A process of a run uses the map of its run.
/// Other processes use the map of the machine.
pub fn open(lanes: &Lanes) -> Result<Kernel, Failure> {
    let lacks =
        |why: String, fix: &str| Failure::new(Status::Unsupported, "emulating a core", why, fix);
    let (map, own) = match Run::inherited() {
        Some(Run { tasks: Some(map), pages: [Some(pages), ..] }) => (map, Some(pages.lanes)),
        _ => {
            let fix = "run this as root, or as a member of group elfen where elfend runs";
            let opened = task_map::open();
            (opened.map_err(|error| lacks(format!("opening the task map: {error}"), fix))?.0, None)
        }
    };
    let all = lanes.pairs().flat_map(|(request, batch)| [request, batch]);
    match all.into_iter().find(|cpu| *cpu >= map.cpus()) {
        Some(cpu) => Err(lacks(format!("this kernel has no CPU {cpu}"), "correct --beside")),
        None => Ok(Kernel { map, pages: RwLock::default(), own }),
    }
}

impl Kernel {
    #[cfg(test)]
    pub(crate) fn for_tests(cpus: u32) -> Self {
        Self { map: TaskMap::for_tests(cpus), pages: RwLock::default(), own: None }
    }

    #[cfg(test)]
    pub(crate) fn map(&self) -> &TaskMap {
        &self.map
    }

    /// How long batches have run on this batch lane until now.
    fn ran_ns(&self, batch: u32, now_ns: Nanos) -> Nanos {
        self.map.accounts(batch).map(|account| account.ran_until_ns(now_ns)).sum()
    }

    /// When the batch thread on this lane began to nap at a check, if it naps now.
    fn napping_since_ns(&self, batch: u32) -> Option<Nanos> {
        self.pages.read().iter().flat_map(|(_, page)| page.slots()).find_map(|slot| {
            let is_lane = slot.batch_cpu.load(Relaxed) == u64::from(batch);
            let (state, since_ns) = slot.state().filter(|_| is_lane)?;
            if state != LaneState::Napping {
                return None;
            }
            let index = usize::try_from(slot.account_index.load(Relaxed)).ok()?;
            let account = self.map.account(batch, index, slot.account_claim.load(Relaxed))?;
            account.is_running().then_some(since_ns)
        })
    }

    /// How long the calling thread's batch has run on this lane while its request lane was busy.
    /// The lane page of a run has this figure from the same accounts, without naps.
    fn shared_ns(&self, batch: u32, request: u32, now_ns: Nanos) -> Nanos {
        let is_own = |slot: &&LaneSlot| {
            slot.is_counted() && slot.batch_cpu.load(Relaxed) == u64::from(batch)
        };
        if let Some(slot) = self.own.as_ref().and_then(|own| own.slots().find(is_own)) {
            return slot.overlapped_ns.load(Relaxed);
        }
        let Some(switch) = self.map.slot(request).and_then(TaskSlot::snapshot) else { return 0 };
        let busy_ns = switch.busy_until_ns(now_ns);
        self.map.accounts(batch).map(|account| account.shared_until_ns(now_ns, busy_ns)).sum()
    }

    /// Updates the list of runs, with system calls. Runs have no registry. The kernel lists
    /// its shared memory segments, and a run owns each segment that contains a readable lane page.
    fn refresh(&self) {
        // If the list cannot be read, no runs are found, and naps count as running.
        let list = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        let segments: Vec<Segment> = list.lines().filter_map(Segment::parse).collect();
        let mut pages = self.pages.write();
        // If only this process has mapped a page, the page's run has ended.
        pages.retain(|(id, _)| segments.iter().any(|s| s.id == *id && s.attached > 1));
        for segment in segments.iter().filter(|segment| segment.may_hold_lanes()) {
            let known = pages.iter().any(|(id, _)| *id == segment.id);
            if !known && let Some(page) = open_page(segment.id) {
                pages.push((segment.id, page));
            }
        }
    }
}

/// `None` if the segment is not a lane page, or if its owner is not trusted.
fn open_page(id: i32) -> Option<Page<LaneSlot>> {
    let memory = Memory::attach_id(id, Access::Read).ok()?;
    let trusted = memory.owner().is_some_and(|owner| owner.is_ours_or_roots());
    if trusted { Page::open(memory).ok() } else { None }
}

/// A line of the kernel's list: key, id, permissions, size, creator, last user, number of mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    id: i32,
    bytes: usize,
    attached: u64,
}

impl Segment {
    /// `None` for the heading.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace().skip(1);
        let id = fields.next()?.parse().ok()?;
        let bytes = fields.nth(1)?.parse().ok()?;
        Some(Self { id, bytes, attached: fields.nth(2)?.parse().ok()? })
    }

    /// Whether the segment has the size of a lane page. Other segments are not mapped.
    fn may_hold_lanes(self) -> bool {
        let slots = self.bytes.checked_sub(Page::<LaneSlot>::bytes(0));
        let whole = slots.is_some_and(|slots| slots.is_multiple_of(size_of::<LaneSlot>()));
        whole && self.attached > 0
    }
}

/// The sum of several accounts, of which only the growth is used.
///
/// An account restarts at 0 when another run claims it. An account that the kernel is writing
/// cannot be read, and is missing from the sum.
#[derive(Clone, Copy, Debug, Default)]
struct Grown {
    last_ns: Nanos,
}

/// The kernel writes an account in nanoseconds. A hypervisor may stop it for longer.
const TRIES: u32 = 100;

impl Grown {
    /// By how much the sum has grown since the last call.
    fn by(&mut self, mut sum: impl FnMut() -> Nanos) -> Nanos {
        let mut sum_ns = sum();
        for _ in 0..TRIES {
            if sum_ns >= self.last_ns {
                break;
            }
            sum_ns = sum();
        }
        sum_ns.saturating_sub(std::mem::replace(&mut self.last_ns, sum_ns))
    }
}

/// The neighbour of a worker: the batches on the batch lanes of its request lane. A look makes no
/// system call.
#[derive(Debug)]
pub struct Batches {
    lanes: Vec<(u32, Grown)>,
    last: Reading,
    refreshed_ns: Nanos,
    kernel: Arc<Kernel>,
}

/// The maximum time until the begin or end of a run is noticed.
const REFRESH_EVERY_NS: Nanos = 100_000_000;

impl Batches {
    pub fn new(kernel: Arc<Kernel>, lanes: &[u32]) -> Self {
        kernel.refresh();
        let lanes = lanes.iter().map(|lane| (*lane, Grown::default())).collect();
        Self { lanes, last: Reading::default(), refreshed_ns: monotonic_ns(), kernel }
    }
}

impl Neighbour for Batches {
    fn look(&mut self) -> Reading {
        let at_ns = monotonic_ns();
        let Self { kernel, lanes, last, .. } = self;
        let beside_ns = lanes.iter_mut().map(|(lane, grown)| {
            let ran_ns = grown.by(|| kernel.ran_ns(*lane, at_ns));
            let napped_ns = kernel
                .napping_since_ns(*lane)
                .map_or(0, |since_ns| at_ns.saturating_sub(since_ns.max(last.at_ns)));
            ran_ns.saturating_sub(napped_ns)
        });
        *last = Reading { at_ns, beside_ns: last.beside_ns + beside_ns.sum::<Nanos>() };
        *last
    }

    fn refresh(&mut self) {
        if monotonic_ns().saturating_sub(self.refreshed_ns) >= REFRESH_EVERY_NS {
            self.kernel.refresh();
            self.refreshed_ns = monotonic_ns();
        }
    }
}

/// The neighbour of a batch program: the requests on the request lane next to the program's batch
/// lane. Its clock is the thread's CPU time, so time off the lane pays for nothing.
#[derive(Debug)]
pub struct Requests {
    kernel: Arc<Kernel>,
    lanes: Lanes,
    cpu: Option<u32>,
    shared: Grown,
    beside_ns: Nanos,
}

impl Requests {
    pub fn new(kernel: Arc<Kernel>, lanes: Lanes) -> Self {
        Self { kernel, lanes, cpu: None, shared: Grown::default(), beside_ns: 0 }
    }
}

impl Neighbour for Requests {
    fn look(&mut self) -> Reading {
        let cpu = own_cpu();
        let at_ns = cpu_time_ns();
        let now_ns = monotonic_ns();
        let lane = cpu.and_then(|cpu| Some((cpu, self.lanes.request_of(cpu)?)));
        let sum = || lane.map_or(0, |(cpu, request)| self.kernel.shared_ns(cpu, request, now_ns));
        if self.cpu != cpu {
            // The thread moved to another lane. The growth of that lane's accounts until now is not
            // this thread's.
            (self.cpu, self.shared.last_ns) = (cpu, sum());
        }
        self.beside_ns += self.shared.by(sum);
        Reading { at_ns, beside_ns: self.beside_ns }
    }
}

/// The CPU time of this thread.
fn cpu_time_ns() -> Nanos {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has this clock");
    Nanos::try_from(Duration::from(time).as_nanos()).unwrap_or(Nanos::MAX)
}

fn own_cpu() -> Option<u32> {
    u32::try_from(sched_getcpu().ok()?).ok()
}

/// Leases run out after four seconds.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// A claim requires that this many looks find the process uncounted. A single look may fail because
/// the kernel is writing.
const LOOKS: u32 = 3;

/// Makes the kernel count this process on its batch lanes, if no run has claimed it.
#[derive(Debug)]
pub struct OwnClaim {
    kernel: Arc<Kernel>,
    lanes: Lanes,
    uncounted: u32,
    renewed: Option<Instant>,
}

impl OwnClaim {
    pub fn new(kernel: Arc<Kernel>, lanes: Lanes) -> Self {
        Self { kernel, lanes, uncounted: 0, renewed: None }
    }

    /// Call this repeatedly, from the thread that is to be counted.
    pub fn tend(&mut self) {
        match self.renewed {
            Some(at) if at.elapsed() >= RENEW_EVERY => self.renew(),
            Some(_) => {}
            None if self.is_counted() => self.uncounted = 0,
            None => {
                self.uncounted += 1;
                if self.uncounted >= LOOKS {
                    for (request, batch) in self.lanes.pairs() {
                        // If all accounts of a lane are taken, this process is not counted on that
                        // lane.
                        let _room = self.kernel.map.claim(batch, request, own(), is_dead);
                    }
                    self.renew();
                }
            }
        }
    }

    /// Whether the kernel counts this thread. It does if an account of the thread's CPU is running.
    /// Outside the batch lanes there is nothing to count, which also returns true.
    fn is_counted(&self) -> bool {
        let lane = own_cpu().filter(|cpu| self.lanes.request_of(*cpu).is_some());
        lane.is_none_or(|lane| self.kernel.map.accounts(lane).any(|account| account.is_running()))
    }

    /// Renews the leases of all lanes. The kernel keeps accounts only on CPUs with a lease.
    fn renew(&mut self) {
        for (request, batch) in self.lanes.pairs() {
            let _timed = [request, batch].map(|cpu| self.kernel.map.renew(cpu));
        }
        self.renewed = Some(Instant::now());
    }
}

impl Drop for OwnClaim {
    fn drop(&mut self) {
        if self.renewed.is_some() {
            self.lanes.pairs().for_each(|(_, batch)| self.kernel.map.disclaim(batch, own()));
        }
    }
}

fn own() -> Claim {
    Claim::of_program(process::id())
}

fn is_dead(claim: Claim) -> bool {
    let gone = |process: u32| match i32::try_from(process) {
        Ok(0) | Err(_) => true,
        Ok(process) => kill(Pid::from_raw(process), None) == Err(Errno::ESRCH),
    };
    match claim {
        Claim::Processes { launcher, supervisor, .. } => gone(launcher) && gone(supervisor),
        Claim::Cgroup(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::libc::IPC_PRIVATE;

    /// Writes an account as the kernel leaves it after a switch on its lane.
    fn counted(kernel: &Kernel, batch: u32, index: usize, words: [u64; 5]) {
        let account = kernel.map().account_for_tests(batch, index);
        let places = [
            &account.claim,
            &account.ran_ns,
            &account.shared_ns,
            &account.since_ns,
            &account.busy_at_ns,
        ];
        places.into_iter().zip(words).for_each(|(place, word)| place.store(word, Relaxed));
    }

    fn claim(keeper: u32) -> u64 {
        Claim::of_program(keeper).word()
    }

    /// Goal: the time that batches ran on a lane is the sum over its accounts, and includes a run
    /// that goes on. The shared time is bounded by the request lane's busy time. Method: two runs
    /// on lane 1, one of which is running, and a request lane that became busy meanwhile.
    #[test]
    fn accounts_of_a_lane_add_up() {
        let kernel = Kernel::for_tests(4);
        counted(&kernel, 1, 0, [claim(7), 500, 100, 10_000, 2_000]);
        counted(&kernel, 1, 2, [claim(8), 40, 30, 0, 0]);
        counted(&kernel, 2, 0, [claim(7), 9_000, 9_000, 0, 0]);
        let request = kernel.map().slot(0).expect("it has four");
        request.busy_ns.store(2_000, Relaxed);
        request.busy_since_ns.store(10_400, Relaxed);
        assert_eq!(kernel.ran_ns(1, 11_000), 500 + 1_000 + 40);
        assert_eq!(kernel.shared_ns(1, 0, 11_000), 100 + 600 + 30);
        assert_eq!((kernel.ran_ns(3, 11_000), kernel.shared_ns(3, 0, 11_000)), (0, 0));
    }

    /// Goal: a worker sees all batch lanes of its core. The count never decreases or jumps, even if
    /// another run takes over an account or an account cannot be read. Method: each case, between
    /// looks.
    #[test]
    fn a_worker_sees_all_its_lanes() {
        let kernel = Arc::new(Kernel::for_tests(4));
        counted(&kernel, 1, 0, [claim(7), 500, 0, 0, 0]);
        let mut batches = Batches::new(kernel.clone(), &[1, 2]);
        let first_ns = batches.look().beside_ns;
        counted(&kernel, 1, 0, [claim(7), 600, 0, 0, 0]);
        counted(&kernel, 2, 1, [claim(8), 50, 0, 0, 0]);
        assert_eq!(batches.look().beside_ns - first_ns, 150);
        counted(&kernel, 1, 0, [claim(9), 5, 0, 0, 0]);
        assert_eq!(batches.look().beside_ns - first_ns, 150, "another run's, from the beginning");
        counted(&kernel, 1, 0, [claim(9), 25, 0, 0, 0]);
        assert_eq!(batches.look().beside_ns - first_ns, 170);
    }

    /// Goal: a batch thread that naps at a check does not count as running next to the request.
    /// This requires that the nap is of the run that owns the account, and that the run still
    /// exists. Method: an account that always runs, and a run's page that says when the thread
    /// naps.
    #[test]
    fn own_naps_do_not_count() {
        let kernel = Arc::new(Kernel::for_tests(2));
        counted(&kernel, 1, 0, [claim(7), 0, 0, 1, 0]);
        let bytes = Page::<LaneSlot>::bytes(1);
        let memory = Memory::create_segment(IPC_PRIVATE, bytes, 0o600).expect("a segment");
        memory.remove_name().expect("it is ours");
        let run: Page<LaneSlot> = Page::format(memory, 1, 0, &[0; 32]).expect("a page");
        let slot = run.slot(0).expect("it has one");
        slot.assign(1, 0);
        slot.account_claim.store(claim(7), Relaxed);
        let mut batches = Batches::new(kernel.clone(), &[1]);
        let mut grew = || {
            let (before, after) = (batches.look(), batches.look());
            (after.at_ns - before.at_ns, after.beside_ns - before.beside_ns)
        };
        for _ in 0..2 {
            slot.enter(LaneState::Running, monotonic_ns());
            let (long_ns, beside_ns) = grew();
            assert_eq!(beside_ns, long_ns);
            slot.enter(LaneState::Napping, monotonic_ns());
            assert_eq!(grew().1, 0);
        }
        slot.enter(LaneState::Held, 6_000);
        assert_eq!(kernel.napping_since_ns(1), None, "the guard's nap is no running to the kernel");
        slot.enter(LaneState::Napping, 7_000);
        assert_eq!(kernel.napping_since_ns(1), Some(7_000));
        slot.account_claim.store(claim(8), Relaxed);
        assert_eq!(kernel.napping_since_ns(1), None, "another run's task runs");
        slot.account_claim.store(claim(7), Relaxed);
        drop(run);
        kernel.refresh();
        assert_eq!(kernel.napping_since_ns(1), None, "the run is gone");
    }

    /// Goal: a batch thread counts the time that its own lane shared with its request lane, and
    /// nothing outside batch lanes. Method: the test's CPU, once as a batch lane and once as an
    /// ordinary CPU.
    #[test]
    fn a_batch_sees_its_own_lane() {
        let cpus = u32::try_from(nix::sched::CpuSet::count()).expect("a few");
        let kernel = Arc::new(Kernel::for_tests(cpus));
        let pinned = crate::process::allowed_cpus().expect("Linux says")[0];
        crate::process::pin(pinned).expect("it is allowed");
        let own = u32::try_from(pinned).expect("a CPU");
        let lanes: Lanes = format!("{}:{own}", own + 1).parse().expect("a pair");
        let strangers: Lanes = format!("{}:{}", own + 1, own + 2).parse().expect("a pair");
        let mut inside = Requests::new(kernel.clone(), lanes);
        let mut outside = Requests::new(kernel.clone(), strangers);
        let before = [inside.look(), outside.look()];
        for lane in [own, own + 2] {
            counted(&kernel, lane, 0, [claim(7), 900, 400, 0, 0]);
        }
        let after = [inside.look(), outside.look()];
        assert_eq!(after[0].beside_ns - before[0].beside_ns, 400);
        assert_eq!(after[1].beside_ns - before[1].beside_ns, 0);
        assert!(after[0].at_ns > before[0].at_ns, "its own CPU time goes on");
    }

    /// Goal: lines of the kernel's list are parsed. Method: its heading and one line.
    #[test]
    fn the_list_is_read() {
        let heading = "       key      shmid perms                  size  cpid  lpid nattch   uid";
        assert_eq!(Segment::parse(heading), None);
        let line = "         0          3  1600                 20352  4242  4243      2     0";
        let segment = Segment::parse(line).expect("a line");
        assert_eq!(segment, Segment { id: 3, bytes: 20_352, attached: 2 });
    }
}
