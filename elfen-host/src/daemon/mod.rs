//! `elfend`: fences, and the guards of their lanes.
//!
//! Two processes. The *daemon* sees to the fences: once a second, and when somebody writes into
//! one, it holds their promises against what the kernel says, and what cannot be held is frozen.
//! The *keeper*, its child, holds the lanes' guards. Each survives the other's death by one rule: a
//! fence that nobody guards, or whose promises nobody sees to, stands still. So the daemon freezes
//! every fence before anything else when its keeper ends or hangs, and the keeper does when the
//! daemon ends. On a stop fences stay frozen; `--release` lets them go for good.

mod confined;
mod fence_accounts;
mod file_watch;
mod freeze_on_exit;
mod guard_monitor;
mod guard_process;
mod heartbeat;
mod lent_lanes;
mod log;
mod managed_fence;
mod metrics_process;
mod pending;
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

use self::confined::Confining;
use self::file_watch::Written;
use self::guard_monitor::Guarding;
use self::guard_process::Duties;
use self::lent_lanes::Opened;
use self::log::{Level, gets_on, notify, say};
use self::managed_fence::Held;
use self::metrics_process::Serving;
use self::pending::Waiting;
use self::requirements::fit;
pub use self::requirements::{offline, require};
use self::settings::{Settings, Which};
use self::socket::Listener;
use self::uevents::Uevents;
use self::units::{Found, Units};
use self::watchdog::Watchdog;
use crate::affinity;
use crate::cgroup::{CgroupPath, Group, Hierarchies};
use crate::cpulist::CpuSet;
use crate::fence::state::Folder;
use crate::fence::status::Frozen;
use crate::run::hotplug::online;
use crate::run::placement;

const TICK_MS: u16 = 100;
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Runs until a signal ends it. `file` is where the settings are from.
pub fn run(settings: Settings, file: &Path, folder: &Folder) -> Result<(), Failure> {
    let mut daemon = Daemon::start(settings, file, folder)?;
    let failed = |error: io::Error| Failure::new(Exit::Failed, "elfend", error, "start it again");
    let ended = daemon.until_the_end();
    daemon.stop();
    ended.map_err(failed)
}

struct Daemon {
    settings: Settings,
    file: PathBuf,
    /// The CPUs that it may run on, beside request lanes.
    began_on: CpuSet,
    folder: Folder,
    _lock: File,
    hierarchies: Hierarchies,
    home: CgroupPath,
    nap: Arc<Nap>,
    opened: Opened,
    held: Vec<Held>,
    units: Units,
    confining: Confining,
    guarding: Guarding,
    watchdog: Watchdog,
    serving: Serving,
    online: Option<CpuSet>,
    listener: Listener,
    uevents: Option<Uevents>,
    signals: SignalFd,
    looked: Option<Instant>,
    waiting: Waiting,
    written: Written,
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
            Failure::new(Exit::Failed, &what, "another elfend has it", "stop that one first")
        })?;
        let mut ours = SigSet::empty();
        let heeded = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD];
        heeded.into_iter().for_each(|signal| ours.add(signal));
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours), None)
            .and_then(|()| SignalFd::with_flags(&ours, flags));
        let signals = signals
            .map_err(|error| Failure::new(Exit::Failed, "signals", error, "start it again"))?;
        let began_on = affinity::allowed().unwrap_or_default();
        // Where a cpuset of ours says otherwise, the daemon stays where it is.
        let _left = placement::avoid_lanes_within(&began_on, &settings.requests());
        let nap = Arc::new(settings.open_nap()?);
        let socket = folder.socket();
        let listener = Listener::bind(&socket);
        let what = format!("socket {:?}", socket.display().to_string());
        let listener = listener.map_err(|error| failed(&what, &error))?;
        let serving = Serving::bind(settings.metrics)?;
        let uevents = Uevents::open().inspect_err(|error| {
            say(Level::Warning, format_args!("CPUs that go are seen at the next look: {error}"));
        });
        let watchdog = Watchdog::start(folder, &hierarchies, &home);
        let mut daemon = Self {
            folder: folder.clone(),
            _lock: lock,
            hierarchies,
            home,
            opened: lent_lanes::open_all(&settings, &nap)?,
            nap,
            held: Vec::new(),
            units: Units::default(),
            confining: Confining::default(),
            guarding: Guarding::nobody(),
            watchdog,
            serving,
            online: online().map(|online| online.0),
            listener,
            uevents: uevents.ok(),
            signals,
            looked: None,
            waiting: Waiting::default(),
            written: Written::default(),
            file: file.to_owned(),
            began_on,
            settings,
        };
        daemon.warn_of_lanes();
        daemon.take_fences();
        daemon.require_fences()?;
        daemon.mind_keeper();
        Ok(daemon)
    }

    /// A cgroup of ours that cannot be made at the start is a mistake; a unit may come.
    fn require_fences(&mut self) -> Result<(), Failure> {
        let is_held = |fence: &&settings::Fence| match &fence.which {
            Which::Cgroup(path) => self.held.iter().any(|held| held.group.path == *path),
            Which::Cgroups(_) | Which::Unit(_) => true,
        };
        if self.settings.fences.iter().all(|fence| is_held(&fence)) {
            return Ok(());
        }
        let why = self.waiting.lines().join("; ");
        Err(Failure::new(Exit::Failed, "elfend", why, "run it as root, or name another cgroup"))
    }

    fn warn_of_lanes(&self) {
        if let Some(gone) = offline(&self.settings) {
            say(Level::Warning, format_args!("{gone}"));
        }
    }

    /// Whether every lane that a fence may use has channels to guard it by.
    fn has_all_lanes(&self) -> bool {
        self.opened.lanes.len() == self.settings.lent.len()
    }

    fn until_the_end(&mut self) -> io::Result<()> {
        notify("READY=1");
        say(Level::Info, format_args!("guards at home in {}", self.home));
        loop {
            self.wait()?;
            while let Some(signal) = self.signals.read_signal()? {
                match i32::try_from(signal.ssi_signo) {
                    Ok(libc::SIGTERM | libc::SIGINT) => return Ok(()),
                    Ok(libc::SIGHUP) => self.reload(),
                    _ => {}
                }
            }
            self.mind_keeper();
            self.watchdog.mind();
            self.serving.mind(&self.folder.socket());
            if self.uevents.as_mut().is_some_and(Uevents::heard) || self.looked.is_none() {
                self.online = online().map(|online| online.0);
            }
            self.serve();
            if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY) {
                self.look();
                // What ended meanwhile speaks against running.
                self.mind_keeper();
            } else if self.written.heard() {
                self.look_at_fences();
            }
            self.settle();
        }
    }

    fn wait(&self) -> io::Result<()> {
        let borrow = |fd: i32| {
            // SAFETY: the descriptors are the daemon's own, which keeps them during this call.
            unsafe { BorrowedFd::borrow_raw(fd) }
        };
        let mut all = vec![self.signals.as_fd().as_raw_fd()];
        all.extend(self.listener.descriptors());
        all.extend(self.uevents.as_ref().map(Uevents::descriptor));
        all.extend(self.guarding.awaited());
        let mut waits: Vec<PollFd<'_>> =
            all.into_iter().map(|fd| PollFd::new(borrow(fd), PollFlags::POLLIN)).collect();
        match poll(&mut waits, PollTimeout::from(TICK_MS)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What is slow, once a second.
    fn look(&mut self) {
        self.looked = Some(Instant::now());
        gets_on();
        self.online = online().map(|online| online.0);
        if self.opened.awaited && self.someone_publishes() {
            self.freeze_all(&Frozen::Unguarded);
            self.guarding.end();
            // The channels of a service that publishes by now replace those without its page.
            match lent_lanes::open_all(&self.settings, &self.nap) {
                Ok(opened) => self.opened = opened,
                Err(failure) => say(Level::Error, failure),
            }
        }
        self.waiting.begin();
        self.take_fences();
        self.confine();
        self.written.follow(self.held.iter().map(|held| &held.group));
        self.look_at_fences();
        self.add_up();
    }

    fn look_at_fences(&mut self) {
        let (hierarchies, home, online) = (&self.hierarchies, &self.home, self.online.as_ref());
        for held in &mut self.held {
            gets_on();
            held.look(hierarchies, home, online);
        }
    }

    /// Takes over what the kernel has counted of all fences.
    fn add_up(&mut self) {
        let known: Vec<Claim> = self.held.iter().map(|held| held.tally.claim()).collect();
        let lanes = &self.opened.lanes;
        self.held.iter_mut().for_each(|held| held.add_up(lanes, &known));
    }

    /// Whether a service that was waited for has a page now.
    fn someone_publishes(&self) -> bool {
        let has_page = |lent: &settings::Lent| {
            let mut lanes = self.opened.lanes.iter();
            lanes.any(|lanes| lanes.order.pairs == lent.pairs && !lanes.awaits_service)
        };
        let mut waiting = self.settings.lent.iter().filter(|lent| !has_page(lent));
        waiting.any(|lent| matches!(lent_lanes::published(lent), Ok(Some(Ok(_)))))
    }

    fn confine(&mut self) {
        let (folder, online) = (&self.folder, self.online.as_ref());
        let terms = confined::Terms { hierarchies: &self.hierarchies, folder, online };
        self.confining.look(&self.settings.lent, &terms, &mut self.units, &mut self.waiting);
    }

    fn settle(&mut self) {
        let lacks_lanes = (!self.has_all_lanes()).then_some(Frozen::Unguarded);
        let unguarded = self.guarding.against().or(lacks_lanes);
        let (folder, online) = (&self.folder, self.online.as_ref());
        self.held.iter_mut().for_each(|held| held.settle(folder, unguarded.as_ref(), online));
    }

    fn freeze_all(&mut self, why: &Frozen) {
        self.held.iter_mut().for_each(|held| held.freeze(why.clone()));
    }

    /// Takes over what is there of the fences that are asked for, and lets go of those whose cgroup
    /// is gone.
    fn take_fences(&mut self) {
        let (folder, units) = (&self.folder, |held: &Held| held.group.exists());
        self.held.retain(|held| {
            let stays = units(held)
                || self.settings.fences.iter().any(
                    |fence| matches!(&fence.which, Which::Cgroup(path) if *path == held.group.path),
                );
            if !stays {
                held.tally.end(&self.opened.lanes);
                say(Level::Info, format_args!("fence {:?}: its cgroup is gone", held.name));
                // The next start of a daemon finds a note of a cgroup that is not there.
                folder.forget(&held.name).ok();
            }
            stays
        });
        for fence in self.settings.fences.clone() {
            gets_on();
            match self.units.find(&fence.which, &self.hierarchies) {
                Ok(found) => {
                    if found.is_empty() {
                        let none = match &fence.which {
                            Which::Unit(unit) => format!("unit {unit} does not run"),
                            which => format!("there is no {which}"),
                        };
                        self.wait_for(&fence.name, &none);
                    }
                    found.into_iter().for_each(|found| self.take(&fence, found));
                }
                Err(error) => self.wait_for(&fence.name, &error.to_string()),
            }
        }
    }

    fn wait_for(&mut self, name: &str, why: &str) {
        self.waiting.add(&format!("fence {name:?}"), why);
    }

    fn take(&mut self, fence: &settings::Fence, found: Found) {
        let group = Group::new(&self.hierarchies, found.path.clone());
        let shares = |held: &&Held| {
            held.group.path.is_within(&group.path) || group.path.is_within(&held.group.path)
        };
        if let Some(held) = self.held.iter().find(shares) {
            let (path, other) = (&group.path, &held.name);
            let why = match *path == held.group.path {
                true if held.which == fence.which => return,
                true => format!("{path} is fence {other:?} already"),
                false => {
                    let its = &held.group.path;
                    format!("{path} and {its}, fence {other:?}: one is inside of the other")
                }
            };
            return self.wait_for(&fence.name, &why);
        }
        let made = match &fence.which {
            Which::Cgroup(_) => group.make().map_err(|error| error.to_string()),
            Which::Cgroups(_) => group.want_cpus().map_err(|error| error.to_string()),
            Which::Unit(_) => Ok(()),
        };
        let taken = made.and_then(|()| fit(&group, &self.settings.lent)).and_then(|()| {
            let held = Held::take(fence, found, group, &self.folder);
            held.map_err(|error| error.to_string())
        });
        match taken {
            Ok(held) => self.held.push(held),
            Err(why) => self.wait_for(&fence.name, &why),
        }
    }

    fn mind_keeper(&mut self) {
        let held = &mut self.held;
        self.guarding.mind(|why| held.iter_mut().for_each(|held| held.freeze(why.clone())));
        if !self.guarding.may_start() || !self.has_all_lanes() {
            return;
        }
        self.guarding.start(&Duties {
            lanes: &self.opened.lanes,
            nap: &self.nap,
            poll_timing: self.settings.poll_timing,
            folder: &self.folder,
            hierarchies: &self.hierarchies,
        });
    }

    fn stop(&mut self) {
        notify("STOPPING=1");
        self.freeze_all(&Frozen::Unguarded);
        self.guarding.end();
        self.held.iter().for_each(|held| held.tally.end(&self.opened.lanes));
        let frozen = self.held.iter().map(|held| held.name.as_str()).collect::<Vec<_>>();
        if !frozen.is_empty() {
            let names = frozen.join(", ");
            let until = "frozen until it is back, or until `elfend --release`";
            say(Level::Notice, format_args!("stopped; {until}: {names}"));
        }
    }
}
