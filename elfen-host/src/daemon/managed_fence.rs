//! One fence that the daemon holds: whether it may run, and making it so.
//!
//! A fence runs while nothing speaks against it: its promises hold, guards stand, a lane of it is
//! online, nobody paused it. What speaks against it freezes it at once; it is thawed when nothing
//! has for a moment, by when guards that rested are awake.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use elfen_rt::signal::account::Claim;

use super::fence_accounts::Tally;
use super::lent_lanes::Lanes;
use super::log::{Level, say};
use super::settings::{Fence, Which};
use super::units::Found;
use crate::cgroup::{CgroupPath, Error, Freezer, Group, Hierarchies};
use crate::cpulist::CpuSet;
use crate::fence::guarantees::{self, Broken, Promise, Terms};
use crate::fence::state::{Folder, Noted};
use crate::fence::status::{FenceStatus, Frozen, Repaired};
use crate::run::channels::uncounted_warning;
use crate::systemd;
use crate::topology::nodes_of;

/// Longer than guards rest: see the keeper.
const GUARDS_WAKE: Duration = Duration::from_millis(60);

#[derive(Debug)]
pub(super) struct Held {
    pub(super) name: String,
    /// What comes behind its fence's name, where that means several cgroups.
    label: Option<String>,
    /// What the settings say of it.
    pub(super) which: Which,
    pub(super) group: Group,
    /// All batch lanes that it was given.
    lanes: CpuSet,
    /// Whose memory they are beside.
    nodes: CpuSet,
    /// Its unit, where systemd owns it.
    pub(super) unit: Option<String>,
    pub(super) freezer: Freezer,
    frozen: Option<Frozen>,
    /// Since when nothing speaks against running.
    clear: Option<Instant>,
    /// Whether it was looked at before: what its first look sets is no repair.
    was_seen: bool,
    broken: Vec<Broken>,
    unreadable: Option<String>,
    repaired: BTreeMap<Promise, u64>,
    pub(super) tally: Tally,
}

impl Held {
    /// Takes a cgroup over, frozen: what it was before is not known to be guarded.
    pub(super) fn take(
        fence: &Fence,
        found: Found,
        group: Group,
        folder: &Folder,
    ) -> io::Result<Self> {
        let freezer = group.freezer();
        let Found { unit, label, .. } = found;
        let name = match &label {
            Some(label) => format!("{}:{label}", fence.name),
            None => fence.name.clone(),
        };
        let tally = Tally::of(group.id().map_err(io::Error::other)?);
        let held = Self {
            name,
            label,
            which: fence.which.clone(),
            group,
            lanes: fence.lanes.clone(),
            nodes: nodes_of(&fence.lanes),
            unit,
            freezer,
            frozen: Some(Frozen::Unguarded),
            clear: None,
            was_seen: false,
            broken: Vec::new(),
            unreadable: None,
            repaired: BTreeMap::new(),
            tally,
        };
        folder.note(&held.noted())?;
        held.freezer.freeze().map_err(io::Error::other)?;
        Ok(held)
    }

    pub(super) fn noted(&self) -> Noted {
        Noted {
            name: self.name.clone(),
            path: self.group.path.clone(),
            unit: self.unit.clone(),
            freezer: self.freezer.clone(),
        }
    }

    /// What is said of it now.
    pub(super) fn follow(&mut self, fence: &Fence, folder: &Folder) -> Result<(), Error> {
        self.lanes = fence.lanes.clone();
        self.nodes = nodes_of(&fence.lanes);
        // Its next look sets other lanes, which is no repair.
        self.was_seen = false;
        let before = match &self.label {
            Some(label) => self.name.strip_suffix(&format!(":{label}")).unwrap_or(&self.name),
            None => &self.name,
        };
        if before == fence.name {
            return Ok(());
        }
        let name = self.name.replacen(before, &fence.name, 1);
        let old = std::mem::replace(&mut self.name, name);
        let path = || self.group.path.clone();
        folder.note(&self.noted()).map_err(|error| Error::unnoted(&path(), error))?;
        folder.forget(&old).map_err(|error| Error::unnoted(&path(), error))
    }

    /// All batch lanes that it was given.
    pub(super) fn lanes(&self) -> &CpuSet {
        &self.lanes
    }

    pub(super) fn lanes_online(&self, online: Option<&CpuSet>) -> CpuSet {
        online.map_or_else(|| self.lanes.clone(), |online| self.lanes.and(online))
    }

    /// Takes over what the kernel has counted of it. A cgroup that somebody has made anew is
    /// another one to the kernel.
    pub(super) fn add_up(&mut self, opened: &[Lanes], known: &[Claim]) {
        let Ok(id) = self.group.id() else { return };
        self.tally.follow(id, opened);
        for lane in self.tally.count(opened, &self.lanes, known) {
            say(Level::Warning, format_args!("fence {:?}: {}", self.name, uncounted_warning(lane)));
        }
    }

    /// Holds every promise against what the kernel says, and puts right what can be.
    pub(super) fn look(
        &mut self,
        hierarchies: &Hierarchies,
        home: &CgroupPath,
        online: Option<&CpuSet>,
    ) {
        let lanes = self.lanes_online(online);
        let nodes = self.nodes.clone();
        let terms = Terms { hierarchies, home, lanes: &lanes, nodes: &nodes };
        let found = self.see_and_repair(&terms);
        let (broken, unreadable) = match found {
            Ok(broken) => (broken, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        for one in broken.iter().filter(|one| !self.broken.contains(one)) {
            let Broken { promise, why } = one;
            say(Level::Error, format_args!("fence {:?}: {}: {why}", self.name, promise.name()));
        }
        if let Some(why) = unreadable.as_ref().filter(|_| self.unreadable != unreadable) {
            say(Level::Error, format_args!("fence {:?}: {why}", self.name));
        }
        (self.broken, self.unreadable) = (broken, unreadable);
    }

    fn see_and_repair(&mut self, terms: &Terms<'_>) -> Result<Vec<Broken>, Error> {
        if !self.group.exists() && self.unit.is_none() {
            self.group.make()?;
        }
        let broken = guarantees::look(&self.group, terms)?;
        if broken.is_empty() {
            self.was_seen = true;
            if guarantees::lacks_lanes(&self.group, terms)? {
                let why = format!("its batch lanes are {} again", terms.lanes);
                say(Level::Info, format_args!("fence {:?}: {why}", self.name));
                self.repair(&Broken { promise: Promise::Place, why }, terms)?;
            }
            return Ok(broken);
        }
        for one in &broken {
            if let Err(error) = self.repair(one, terms) {
                say(Level::Warning, format_args!("fence {:?}: {error}", self.name));
            }
        }
        let left = guarantees::look(&self.group, terms)?;
        if !std::mem::replace(&mut self.was_seen, true) {
            return Ok(left);
        }
        for one in broken {
            if left.iter().all(|left| left.promise != one.promise) {
                *self.repaired.entry(one.promise).or_default() += 1;
                let (name, promise) = (&self.name, one.promise.name());
                say(Level::Notice, format_args!("fence {name:?}: {promise} repaired: {}", one.why));
            }
        }
        Ok(left)
    }

    /// Where systemd owns the cgroup, it is told first: what is written behind its back it would
    /// undo at its next reload.
    fn repair(&self, broken: &Broken, terms: &Terms<'_>) -> Result<(), Error> {
        let by_unit = matches!(broken.promise, Promise::Rank | Promise::Place);
        let told = self.unit.as_ref().filter(|_| by_unit).map(|unit| {
            systemd::fence(unit, terms.lanes, terms.nodes)
                .map_err(|why| format!("unit {unit}: {why}"))
        });
        if let Some(Err(why)) = told {
            say(Level::Warning, format_args!("{why}; its files are written"));
        }
        guarantees::repair(&self.group, broken, terms)
    }

    /// Freezes or thaws, by what speaks against running.
    pub(super) fn settle(
        &mut self,
        folder: &Folder,
        unguarded: Option<&Frozen>,
        online: Option<&CpuSet>,
    ) {
        let against = self.against(folder, unguarded, online);
        self.clear = match against {
            Some(_) => None,
            None => self.clear.or_else(|| Some(Instant::now())),
        };
        let is_clear = self.clear.is_some_and(|since| since.elapsed() >= GUARDS_WAKE);
        let done = match (&against, &self.frozen) {
            (Some(why), _) => self.hold_still(why),
            (None, None | Some(Frozen::ByOthers)) => self.see_others(),
            (None, Some(_)) if is_clear && self.was_seen => self.let_go(folder),
            (None, Some(_)) => return,
        };
        if let Err(error) = done {
            say(Level::Error, format_args!("fence {:?}: {error}", self.name));
        }
    }

    fn against(
        &self,
        folder: &Folder,
        unguarded: Option<&Frozen>,
        online: Option<&CpuSet>,
    ) -> Option<Frozen> {
        match folder.paused() {
            Ok(None) => {}
            Ok(Some(why)) => return Some(Frozen::Paused(why)),
            Err(error) => return Some(Frozen::Unreadable(format!("is it paused: {error}"))),
        }
        if let Some(why) = &self.unreadable {
            return Some(Frozen::Unreadable(why.clone()));
        }
        if self.lanes_online(online).is_empty() {
            return Some(Frozen::NoLane);
        }
        if let Some(why) = unguarded {
            return Some(why.clone());
        }
        (!self.broken.is_empty()).then_some(Frozen::Broken)
    }

    fn hold_still(&mut self, why: &Frozen) -> Result<(), Error> {
        let is_new = self.frozen.as_ref() != Some(why);
        // Someone else may have let it go meanwhile.
        if is_new || !self.freezer.is_told()? {
            self.freezer.freeze()?;
        }
        self.frozen = Some(why.clone());
        if is_new {
            let why = self.status(0).why().unwrap_or_default();
            say(Level::Warning, format_args!("fence {:?} is frozen: {why}", self.name));
        }
        Ok(())
    }

    /// A fence that ought to run, and that somebody else may have frozen.
    fn see_others(&mut self) -> Result<(), Error> {
        let frozen = self.freezer.is_told()?.then_some(Frozen::ByOthers);
        if frozen != self.frozen {
            let now = if frozen.is_some() { "was frozen" } else { "was let go" };
            say(Level::Warning, format_args!("fence {:?} {now} by somebody else", self.name));
        }
        self.frozen = frozen;
        Ok(())
    }

    /// The pause is over, also one that came and went between two looks.
    pub(super) fn resume(&mut self) -> Result<(), Error> {
        let by_others = matches!(self.frozen, None | Some(Frozen::ByOthers));
        if by_others && self.freezer.is_told()? {
            self.frozen = Some(Frozen::Paused(String::new()));
        }
        Ok(())
    }

    fn let_go(&mut self, folder: &Folder) -> Result<(), Error> {
        self.freezer.thaw()?;
        self.frozen = None;
        // The kill switch may have come between the last look and this.
        if let Ok(Some(why)) = folder.paused() {
            return self.hold_still(&Frozen::Paused(why));
        }
        say(Level::Info, format_args!("fence {:?} runs", self.name));
        Ok(())
    }

    /// Puts a process into it.
    pub(super) fn enter(&self, process: u32) -> Result<(), String> {
        match &self.unit {
            None => self.group.take_in(process).map_err(|error| error.to_string()),
            Some(unit) if unit.ends_with(".slice") => {
                systemd::put_into(unit, process).map_err(|error| error.to_string())
            }
            Some(unit) => Err(format!("unit {unit} is no slice, and takes no other's processes")),
        }
    }

    /// At once, and before anything else is done.
    pub(super) fn freeze(&mut self, why: Frozen) {
        self.clear = None;
        if let Err(error) = self.hold_still(&why) {
            say(Level::Error, format_args!("fence {:?} does not freeze: {error}", self.name));
        }
    }

    pub(super) fn status(&self, processes: u64) -> FenceStatus {
        let repaired = self.repaired.iter();
        FenceStatus {
            name: self.name.clone(),
            path: self.group.path.clone(),
            lanes: self.lanes.to_string(),
            processes,
            frozen: self.frozen.clone(),
            broken: self.broken.clone(),
            repaired: repaired.map(|(&promise, &times)| Repaired { promise, times }).collect(),
            accounts: self.tally.accounts(),
        }
    }

    pub(super) fn count(&self) -> u64 {
        // One that cannot be read says so in its status.
        self.group.processes().map_or(0, |all| all.len() as u64)
    }
}
