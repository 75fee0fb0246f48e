//! The daemon `elfend`: it enforces fences, and has their lanes guarded.
//!
//! - The *daemon* process checks the fences, once a second and when a cgroup file of a fence is
//!   written. It compares their guarantees with the state of the kernel, repairs what it can, and
//!   freezes fences that it cannot repair.
//! - The *guard process*, its child, runs the guards of all lanes.
//!
//! Fences without running guards, or without a daemon that checks them, are frozen. So the daemon
//! first freezes every fence when the guard process ends or hangs, and the guard process does so
//! when the daemon ends. A stopped daemon leaves its fences frozen; `--release` ends them.

mod confined;
mod fence_accounts;
mod file_watch;
mod guard_monitor;
mod guard_process;
mod lent_lanes;
mod log;
mod managed_fence;
pub mod metrics;
mod metrics_process;
pub mod release;
mod reload;
mod requests;
mod requirements;
mod respawned;
pub mod settings;
mod socket;
mod uevents;
mod units;
mod watchdog;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status as Exit};
use elfen_rt::nap::Nap;
use elfen_rt::signal::account::Claim;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use self::confined::Confinement;
use self::file_watch::FileWatch;
use self::guard_monitor::GuardMonitor;
use self::guard_process::GuardInputs;
use self::lent_lanes::LentLanes;
use self::log::{Level, PendingList, notify_systemd, pet_watchdog, report};
use self::managed_fence::ManagedFence;
use self::metrics_process::MetricsProcess;
use self::requirements::fit;
pub use self::requirements::{enter_cgroup, offline, require};
use self::settings::{CgroupSelector, Settings};
use self::socket::Listener;
use self::uevents::Uevents;
use self::units::{FoundCgroup, Units};
use self::watchdog::Watchdog;
use elfen_machine::affinity;
use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::state::Folder;
use elfen_machine::fence::status::Frozen;
use elfen_machine::placement;
use elfen_run::hotplug::online;

const TICK_MS: u16 = 100;
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the daemon until a signal ends it. `file` is the file of the settings.
pub fn run(settings: Settings, file: &Path, folder: &Folder) -> Result<(), Failure> {
    let mut daemon = Daemon::start(settings, file, folder)?;
    let failed = |error: io::Error| Failure::new(Exit::Failed, "elfend", error, "start it again");
    let ended = daemon.run_until_signal();
    daemon.stop();
    ended.map_err(failed)
}

struct Daemon {
    settings: Settings,
    file: PathBuf,
    /// The CPUs that the daemon could run on when it started, request lanes included.
    initial_cpus: CpuSet,
    folder: Folder,
    _lock: File,
    hierarchies: Hierarchies,
    home: CgroupPath,
    nap: Arc<Nap>,
    lent_lanes: LentLanes,
    fences: Vec<ManagedFence>,
    units: Units,
    confinement: Confinement,
    guards: GuardMonitor,
    watchdog: Watchdog,
    metrics: MetricsProcess,
    online: Option<CpuSet>,
    listener: Listener,
    uevents: Option<Uevents>,
    signals: SignalFd,
    checked_at: Option<Instant>,
    pending: PendingList,
    file_watch: FileWatch,
}

impl Daemon {
    fn start(settings: Settings, file: &Path, folder: &Folder) -> Result<Self, Failure> {
        let (hierarchies, home) = require(&settings)?;
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Failure::new(Exit::Failed, what, error, "name another folder with --run-dir")
        };
        let what = format!("folder {:?}", folder.path().display().to_string());
        folder.make().map_err(|error| failed(&what, &error))?;
        let lock = folder.lock().map_err(|error| failed(&what, &error))?;
        let lock = lock.ok_or_else(|| {
            Failure::new(
                Exit::Failed,
                &what,
                "another elfend uses it",
                "stop the other elfend first",
            )
        })?;
        let mut ours = SigSet::empty();
        let handled = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD];
        handled.into_iter().for_each(|signal| ours.add(signal));
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours), None)
            .and_then(|()| SignalFd::with_flags(&ours, flags));
        let signals = signals
            .map_err(|error| Failure::new(Exit::Failed, "signals", error, "start it again"))?;
        let initial_cpus = affinity::allowed().unwrap_or_default();
        // If a cpuset forbids this, the daemon stays where it is.
        let _left = placement::avoid_lanes_within(&initial_cpus, &settings.requests());
        let nap = Arc::new(settings.open_nap()?);
        let socket = folder.socket();
        let listener = Listener::bind(&socket);
        let what = format!("socket {:?}", socket.display().to_string());
        let listener = listener.map_err(|error| failed(&what, &error))?;
        let metrics = MetricsProcess::bind(settings.metrics)?;
        let uevents = Uevents::open().inspect_err(|error| {
            report(
                Level::Warning,
                format_args!("CPUs that go offline are noticed only once a second: {error}"),
            );
        });
        let watchdog = Watchdog::start(folder, &hierarchies, &home);
        let mut daemon = Self {
            folder: folder.clone(),
            _lock: lock,
            hierarchies,
            home,
            lent_lanes: lent_lanes::open_all(&settings, &nap)?,
            nap,
            fences: Vec::new(),
            units: Units::default(),
            confinement: Confinement::default(),
            guards: GuardMonitor::new(),
            watchdog,
            metrics,
            online: online().map(|online| online.0),
            listener,
            uevents: uevents.ok(),
            signals,
            checked_at: None,
            pending: PendingList::default(),
            file_watch: FileWatch::default(),
            file: file.to_owned(),
            initial_cpus,
            settings,
        };
        daemon.warn_of_offline_lanes();
        daemon.adopt_fences();
        daemon.require_fences()?;
        daemon.check_guards();
        Ok(daemon)
    }

    /// Requires that each cgroup named by path has become a fence. Units and patterns may come
    /// later.
    fn require_fences(&mut self) -> Result<(), Failure> {
        let is_held = |fence: &&settings::Fence| match &fence.which {
            CgroupSelector::Cgroup(path) => {
                self.fences.iter().any(|known| known.group.path == *path)
            }
            CgroupSelector::Cgroups(_) | CgroupSelector::Unit(_) => true,
        };
        if self.settings.fences.iter().all(|fence| is_held(&fence)) {
            return Ok(());
        }
        let why = self.pending.lines().join("; ");
        Err(Failure::new(Exit::Failed, "elfend", why, "run it as root, or name another cgroup"))
    }

    fn warn_of_offline_lanes(&self) {
        if let Some(gone) = offline(&self.settings) {
            report(Level::Warning, format_args!("{gone}"));
        }
    }

    /// Whether every lane that a fence may use is open, so that it can be guarded.
    fn has_all_lanes(&self) -> bool {
        self.lent_lanes.lanes.len() == self.settings.lent.len()
    }

    fn run_until_signal(&mut self) -> io::Result<()> {
        notify_systemd("READY=1");
        report(Level::Info, format_args!("guards run in cgroup {}", self.home));
        loop {
            self.wait()?;
            while let Some(signal) = self.signals.read_signal()? {
                match i32::try_from(signal.ssi_signo) {
                    Ok(libc::SIGTERM | libc::SIGINT) => return Ok(()),
                    Ok(libc::SIGHUP) => self.reload(),
                    _ => {}
                }
            }
            self.check_guards();
            self.watchdog.ensure_running();
            self.metrics.ensure_running(&self.folder.socket());
            if self.uevents.as_mut().is_some_and(Uevents::cpu_changed) || self.checked_at.is_none()
            {
                self.online = online().map(|online| online.0);
            }
            self.answer_requests();
            if self.checked_at.is_none_or(|at| at.elapsed() >= CHECK_INTERVAL) {
                self.check_all();
                // The check may have taken long: a guard process that ended meanwhile must freeze
                // the fences before any is thawed.
                self.check_guards();
            } else if self.file_watch.was_written() {
                self.check_fences();
            }
            self.freeze_or_thaw();
        }
    }

    fn wait(&self) -> io::Result<()> {
        let borrow = |fd: i32| {
            // SAFETY: the daemon owns these descriptors and keeps them open during this call.
            unsafe { BorrowedFd::borrow_raw(fd) }
        };
        let mut all = vec![self.signals.as_fd().as_raw_fd()];
        all.extend(self.listener.descriptors());
        all.extend(self.uevents.as_ref().map(Uevents::descriptor));
        all.extend(self.guards.ready_fd());
        let mut waits: Vec<PollFd<'_>> =
            all.into_iter().map(|fd| PollFd::new(borrow(fd), PollFlags::POLLIN)).collect();
        match poll(&mut waits, PollTimeout::from(TICK_MS)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The slow checks, once a second.
    fn check_all(&mut self) {
        self.checked_at = Some(Instant::now());
        pet_watchdog();
        self.online = online().map(|online| online.0);
        if self.lent_lanes.some_await_service && self.awaited_service_publishes() {
            self.freeze_all(&Frozen::Unguarded);
            self.guards.stop();
            // A service publishes by now: opens its lanes with its page.
            match lent_lanes::open_all(&self.settings, &self.nap) {
                Ok(opened) => self.lent_lanes = opened,
                Err(failure) => report(Level::Error, failure),
            }
        }
        self.pending.begin_round();
        self.adopt_fences();
        self.confine();
        self.file_watch.watch(self.fences.iter().map(|fence| &fence.group));
        self.check_fences();
        self.update_accounts();
    }

    fn check_fences(&mut self) {
        let hierarchies = &self.hierarchies;
        let home = &self.home;
        let online = self.online.as_ref();
        for fence in &mut self.fences {
            pet_watchdog();
            fence.check(hierarchies, home, online);
        }
    }

    /// Adds what the kernel has counted to the accounts of all fences.
    fn update_accounts(&mut self) {
        let known: Vec<Claim> = self.fences.iter().map(|fence| fence.accounts.claim()).collect();
        let lanes = &self.lent_lanes.lanes;
        self.fences.iter_mut().for_each(|fence| fence.update_accounts(lanes, &known));
    }

    /// Whether a service without a page so far publishes one now.
    fn awaited_service_publishes(&self) -> bool {
        let has_page = |lent: &settings::Lent| {
            let mut lanes = self.lent_lanes.lanes.iter();
            lanes.any(|lanes| lanes.order.pairs == lent.pairs && !lanes.awaits_service)
        };
        let mut waiting = self.settings.lent.iter().filter(|lent| !has_page(lent));
        waiting.any(|lent| matches!(lent_lanes::service_page(lent), Ok(Some(Ok(_)))))
    }

    fn confine(&mut self) {
        let folder = &self.folder;
        let online = self.online.as_ref();
        let terms = confined::Terms { hierarchies: &self.hierarchies, folder, online };
        self.confinement.enforce(&self.settings.lent, &terms, &mut self.units, &mut self.pending);
    }

    fn freeze_or_thaw(&mut self) {
        let lacks_lanes = (!self.has_all_lanes()).then_some(Frozen::Unguarded);
        let unguarded = self.guards.reason_to_freeze().or(lacks_lanes);
        let folder = &self.folder;
        let online = self.online.as_ref();
        self.fences
            .iter_mut()
            .for_each(|fence| fence.freeze_or_thaw(folder, unguarded.as_ref(), online));
    }

    fn freeze_all(&mut self, why: &Frozen) {
        self.fences.iter_mut().for_each(|fence| fence.freeze(why.clone()));
    }

    /// Takes over the cgroups of the fences in the settings, and drops fences whose cgroup is gone.
    fn adopt_fences(&mut self) {
        let folder = &self.folder;
        self.fences.retain(|fence| {
            let is_listed = |listed: &settings::Fence| match &listed.which {
                CgroupSelector::Cgroup(path) => *path == fence.group.path,
                CgroupSelector::Cgroups(_) | CgroupSelector::Unit(_) => false,
            };
            let stays = fence.group.exists() || self.settings.fences.iter().any(is_listed);
            if !stays {
                fence.accounts.disclaim(&self.lent_lanes.lanes);
                report(
                    Level::Info,
                    format_args!("fence {:?}: its cgroup no longer exists", fence.name),
                );
                // If this fails, the next daemon finds a record of a cgroup that does not exist.
                folder.forget(&fence.name).ok();
            }
            stays
        });
        for listed in self.settings.fences.clone() {
            pet_watchdog();
            match self.units.find(&listed.which, &self.hierarchies) {
                Ok(found) => {
                    if found.is_empty() {
                        let none = match &listed.which {
                            CgroupSelector::Unit(unit) => format!("unit {unit} does not run"),
                            which => format!("there is no {which}"),
                        };
                        self.add_pending(&listed.name, &none);
                    }
                    found.into_iter().for_each(|found| self.adopt_fence(&listed, found));
                }
                Err(error) => self.add_pending(&listed.name, &error.to_string()),
            }
        }
    }

    fn add_pending(&mut self, name: &str, why: &str) {
        self.pending.add(&format!("fence {name:?}"), why);
    }

    /// Takes over one cgroup of a fence in the settings, unless it is taken over already.
    fn adopt_fence(&mut self, listed: &settings::Fence, found: FoundCgroup) {
        let group = Group::new(&self.hierarchies, found.path.clone());
        let shares = |fence: &&ManagedFence| {
            fence.group.path.is_within(&group.path) || group.path.is_within(&fence.group.path)
        };
        if let Some(known) = self.fences.iter().find(shares) {
            let path = &group.path;
            let other = &known.name;
            let why = if *path != known.group.path {
                let its = &known.group.path;
                format!("{path} and {its}, fence {other:?}: one is inside of the other")
            } else if known.which == listed.which {
                return;
            } else {
                format!("{path} is fence {other:?} already")
            };
            return self.add_pending(&listed.name, &why);
        }
        let made = match &listed.which {
            CgroupSelector::Cgroup(_) => group.make().map_err(|error| error.to_string()),
            CgroupSelector::Cgroups(_) => group.enable_cpuset().map_err(|error| error.to_string()),
            CgroupSelector::Unit(_) => Ok(()),
        };
        let adopted = made.and_then(|()| fit(&group, &self.settings.lent)).and_then(|()| {
            let fence = ManagedFence::adopt(listed, found, group, &self.folder);
            fence.map_err(|error| error.to_string())
        });
        match adopted {
            Ok(fence) => self.fences.push(fence),
            Err(why) => self.add_pending(&listed.name, &why),
        }
    }

    /// Checks the guard process, and starts another one if it is time to.
    fn check_guards(&mut self) {
        let fences = &mut self.fences;
        self.guards.check(|why| fences.iter_mut().for_each(|fence| fence.freeze(why.clone())));
        if !self.guards.may_start() || !self.has_all_lanes() {
            return;
        }
        self.guards.start(&GuardInputs {
            lanes: &self.lent_lanes.lanes,
            nap: &self.nap,
            poll_timing: self.settings.poll_timing,
            folder: &self.folder,
            hierarchies: &self.hierarchies,
        });
    }

    fn stop(&mut self) {
        notify_systemd("STOPPING=1");
        self.freeze_all(&Frozen::Unguarded);
        self.guards.stop();
        self.fences.iter().for_each(|fence| fence.accounts.disclaim(&self.lent_lanes.lanes));
        let frozen = self.fences.iter().map(|fence| fence.name.as_str()).collect::<Vec<_>>();
        if !frozen.is_empty() {
            let names = frozen.join(", ");
            let until = "frozen until it is back, or until `elfend --release`";
            report(Level::Notice, format_args!("stopped; {until}: {names}"));
        }
    }
}
