//! The kernel's accounts in the task map: reading them, and a claim for a batch program that no
//! `elfen run` has started and so has had counted.

use super::account::Accounts;
use super::lanes::Lanes;
use super::runs::LanePages;
use crate::units::Nanos;
use elfen_kernel::task_map;
use elfen_rt::inherit::Run;
use elfen_rt::signal::account::Claim;
use elfen_rt::signal::lane::LaneSlot;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::{TaskMap, TaskSlot};
use nix::errno::Errno;
use nix::sched::sched_getcpu;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::process;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The task map, and what runs say of their lanes.
#[derive(Debug)]
pub struct Kernel {
    map: TaskMap,
    /// Of all runs.
    pages: LanePages,
    /// Of the run that this process belongs to.
    own: Option<Page<LaneSlot>>,
}

impl Kernel {
    fn new(map: TaskMap, own: Option<Page<LaneSlot>>) -> Self {
        Self { map, pages: LanePages::default(), own }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(cpus: u32) -> Self {
        Self::new(TaskMap::for_tests(cpus), None)
    }

    #[cfg(test)]
    pub(crate) fn map(&self) -> &TaskMap {
        &self.map
    }
}

impl Accounts for Kernel {
    fn ran_ns(&self, batch: u32, now_ns: Nanos) -> Nanos {
        self.map.accounts(batch).map(|account| account.ran_until_ns(now_ns)).sum()
    }

    fn napping_since_ns(&self, batch: u32) -> Option<Nanos> {
        self.pages.napping_since_ns(batch, |index, claim| {
            let account = self.map.account(batch, index, claim);
            account.is_some_and(|account| account.is_running())
        })
    }

    /// A run goes by the same accounts, and leaves naps out.
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

    fn refresh(&self) {
        self.pages.refresh();
    }
}

/// Why a core cannot be emulated here.
#[derive(Debug, Error)]
pub enum Lacking {
    #[error(
        "emulating a core: opening the task map: {0}; run this as root, or as a member of \
         group elfen where elfend runs"
    )]
    Map(#[from] task_map::Error),
    #[error("emulating a core: this kernel has no CPU {cpu}; correct --beside")]
    NoCpu { cpu: u32 },
}

/// The task map with the accounts of these lanes: of the run that this process belongs to, or else
/// the machine's.
pub fn open(lanes: &Lanes) -> Result<Kernel, Lacking> {
    let (map, own) = match Run::inherited() {
        Some(Run { tasks: Some(map), pages: [Some(pages), ..] }) => (map, Some(pages.lanes)),
        _ => (task_map::open()?.0, None),
    };
    let all = lanes.pairs().flat_map(|(request, batch)| [request, batch]);
    match all.into_iter().find(|cpu| *cpu >= map.cpus()) {
        Some(cpu) => Err(Lacking::NoCpu { cpu }),
        None => Ok(Kernel::new(map, own)),
    }
}

/// Leases run out after four seconds.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Looks that must find this process uncounted before it claims: one may meet the kernel writing.
const LOOKS: u32 = 3;

/// Has the kernel count this process on its batch lanes if no run does.
#[derive(Debug)]
pub struct OwnClaim {
    kernel: Rc<Kernel>,
    lanes: Lanes,
    uncounted: u32,
    renewed: Option<Instant>,
}

impl OwnClaim {
    pub fn new(kernel: Rc<Kernel>, lanes: Lanes) -> Self {
        Self { kernel, lanes, uncounted: 0, renewed: None }
    }

    /// To be called again and again by the thread that is to be counted.
    pub fn tend(&mut self) {
        match self.renewed {
            Some(at) if at.elapsed() >= RENEW_EVERY => self.renew(),
            Some(_) => {}
            None if self.is_counted() => self.uncounted = 0,
            None => {
                self.uncounted += 1;
                if self.uncounted >= LOOKS {
                    for (request, batch) in self.lanes.pairs() {
                        // A lane whose accounts are all taken goes on without this process.
                        let _room = self.kernel.map.claim(batch, request, own(), is_dead);
                    }
                    self.renew();
                }
            }
        }
    }

    /// Whether an account runs on the CPU that this thread runs on: then it is this thread's. Off
    /// the batch lanes there is nothing to count.
    fn is_counted(&self) -> bool {
        let cpu = sched_getcpu().ok().and_then(|cpu| u32::try_from(cpu).ok());
        let lane = cpu.filter(|cpu| self.lanes.request_of(*cpu).is_some());
        lane.is_none_or(|lane| self.kernel.map.accounts(lane).any(|account| account.is_running()))
    }

    /// The kernel counts on CPUs whose switches are timed, which a lease asks for.
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
