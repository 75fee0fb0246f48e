//! One fence of the daemon: decides whether it may run, and freezes or thaws it.
//!
//! A fence runs while nothing requires it to freeze: its guarantees hold, its guards run, one of
//! its lanes is online, and it is not paused. A reason freezes it at once. It is thawed after 60 ms
//! without a reason, so that the guards have started.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use elfen_rt::signal::account::Claim;

use super::fence_accounts::FenceAccounts;
use super::lent_lanes::LaneGroup;
use super::log::{Level, report};
use super::settings::{CgroupSelector, Fence};
use super::units::FoundCgroup;
use elfen_machine::cgroup::{CgroupPath, Error, Freezer, Group, Hierarchies};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::guarantees::{self, Broken, Guarantee, Terms};
use elfen_machine::fence::state::{Folder, RecordedFence};
use elfen_machine::fence::status::{FenceStatus, Frozen, Repaired};
use elfen_machine::systemd;
use elfen_machine::topology::nodes_of;
use elfen_run::channels::uncounted_warning;

/// Longer than guards take to start when a fence is populated: see the guard process.
const GUARDS_START: Duration = Duration::from_millis(60);

#[derive(Debug)]
pub(super) struct ManagedFence {
    pub(super) name: String,
    /// The part of the name behind the fence's own, if the fence has several cgroups.
    label: Option<String>,
    /// How the settings name the cgroup.
    pub(super) which: CgroupSelector,
    pub(super) group: Group,
    /// All batch lanes that the fence was given, online or not.
    lanes: CpuSet,
    /// The memory nodes of these lanes.
    nodes: CpuSet,
    /// The systemd unit that owns the cgroup, if one does.
    pub(super) unit: Option<String>,
    pub(super) freezer: Freezer,
    frozen: Option<Frozen>,
    /// Since when there has been no reason to freeze it.
    clear_since: Option<Instant>,
    /// Whether it was checked before. What the first check sets does not count as a repair.
    was_checked: bool,
    broken: Vec<Broken>,
    unreadable: Option<String>,
    repaired: BTreeMap<Guarantee, u64>,
    pub(super) accounts: FenceAccounts,
}

impl ManagedFence {
    /// Takes a cgroup over, and freezes it: until now it was not known to be guarded.
    pub(super) fn adopt(
        fence: &Fence,
        found: FoundCgroup,
        group: Group,
        folder: &Folder,
    ) -> io::Result<Self> {
        let freezer = group.freezer();
        let FoundCgroup { unit, label, .. } = found;
        let name = match &label {
            Some(label) => format!("{}:{label}", fence.name),
            None => fence.name.clone(),
        };
        let accounts = FenceAccounts::of(group.id().map_err(io::Error::other)?);
        let fence = Self {
            name,
            label,
            which: fence.which.clone(),
            group,
            lanes: fence.lanes.clone(),
            nodes: nodes_of(&fence.lanes),
            unit,
            freezer,
            frozen: Some(Frozen::Unguarded),
            clear_since: None,
            was_checked: false,
            broken: Vec::new(),
            unreadable: None,
            repaired: BTreeMap::new(),
            accounts,
        };
        folder.record(&fence.to_record())?;
        fence.freezer.freeze().map_err(io::Error::other)?;
        Ok(fence)
    }

    pub(super) fn to_record(&self) -> RecordedFence {
        RecordedFence {
            name: self.name.clone(),
            path: self.group.path.clone(),
            unit: self.unit.clone(),
            freezer: self.freezer.clone(),
        }
    }

    /// Applies settings that were read again.
    pub(super) fn apply_settings(&mut self, fence: &Fence, folder: &Folder) -> Result<(), Error> {
        self.lanes = fence.lanes.clone();
        self.nodes = nodes_of(&fence.lanes);
        // The next check sets the new lanes, which does not count as a repair.
        self.was_checked = false;
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
        folder.record(&self.to_record()).map_err(|error| Error::unrecorded(&path(), error))?;
        folder.forget(&old).map_err(|error| Error::unrecorded(&path(), error))
    }

    /// All batch lanes that the fence was given, online or not.
    pub(super) fn lanes(&self) -> &CpuSet {
        &self.lanes
    }

    pub(super) fn lanes_online(&self, online: Option<&CpuSet>) -> CpuSet {
        online.map_or_else(|| self.lanes.clone(), |online| self.lanes.and(online))
    }

    /// Adds the kernel's counts to the fence's accounts. A cgroup that was removed and made again
    /// has another id.
    pub(super) fn update_accounts(&mut self, opened: &[LaneGroup], known: &[Claim]) {
        let Ok(id) = self.group.id() else { return };
        self.accounts.set_cgroup(id, opened);
        for lane in self.accounts.update(opened, &self.lanes, known) {
            report(
                Level::Warning,
                format_args!("fence {:?}: {}", self.name, uncounted_warning(lane)),
            );
        }
    }

    /// Checks every guarantee, and repairs what can be repaired.
    pub(super) fn check(
        &mut self,
        hierarchies: &Hierarchies,
        home: &CgroupPath,
        online: Option<&CpuSet>,
    ) {
        let lanes = self.lanes_online(online);
        let nodes = self.nodes.clone();
        let terms = Terms { hierarchies, home, lanes: &lanes, nodes: &nodes };
        let found = self.check_and_repair(&terms);
        let (broken, unreadable) = match found {
            Ok(broken) => (broken, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        for one in broken.iter().filter(|one| !self.broken.contains(one)) {
            let Broken { guarantee, why } = one;
            report(
                Level::Error,
                format_args!("fence {:?}: {}: {why}", self.name, guarantee.name()),
            );
        }
        if let Some(why) = unreadable.as_ref().filter(|_| self.unreadable != unreadable) {
            report(Level::Error, format_args!("fence {:?}: {why}", self.name));
        }
        self.broken = broken;
        self.unreadable = unreadable;
    }

    fn check_and_repair(&mut self, terms: &Terms<'_>) -> Result<Vec<Broken>, Error> {
        if !self.group.exists() && self.unit.is_none() {
            self.group.make()?;
        }
        let broken = guarantees::check(&self.group, terms)?;
        if broken.is_empty() {
            self.was_checked = true;
            if guarantees::lacks_lanes(&self.group, terms)? {
                let why = format!("its batch lanes are {} again", terms.lanes);
                report(Level::Info, format_args!("fence {:?}: {why}", self.name));
                self.repair(&Broken { guarantee: Guarantee::Place, why }, terms)?;
            }
            return Ok(broken);
        }
        for one in &broken {
            if let Err(error) = self.repair(one, terms) {
                report(Level::Warning, format_args!("fence {:?}: {error}", self.name));
            }
        }
        let left = guarantees::check(&self.group, terms)?;
        if !std::mem::replace(&mut self.was_checked, true) {
            return Ok(left);
        }
        for one in broken {
            if left.iter().all(|left| left.guarantee != one.guarantee) {
                *self.repaired.entry(one.guarantee).or_default() += 1;
                let name = &self.name;
                let guarantee = one.guarantee.name();
                report(
                    Level::Notice,
                    format_args!("fence {name:?}: {guarantee} repaired: {}", one.why),
                );
            }
        }
        Ok(left)
    }

    /// Repairs a guarantee. A systemd unit gets its properties first: at its next reload systemd
    /// would undo what is only written into the cgroup.
    fn repair(&self, broken: &Broken, terms: &Terms<'_>) -> Result<(), Error> {
        let by_unit = matches!(broken.guarantee, Guarantee::Rank | Guarantee::Place);
        let unit_result = self.unit.as_ref().filter(|_| by_unit).map(|unit| {
            systemd::fence(unit, terms.lanes, terms.nodes)
                .map_err(|why| format!("unit {unit}: {why}"))
        });
        if let Some(Err(why)) = unit_result {
            report(Level::Warning, format_args!("{why}; writing the cgroup's files instead"));
        }
        guarantees::repair(&self.group, broken, terms)
    }

    /// Freezes the fence if there is a reason, or thaws it.
    pub(super) fn freeze_or_thaw(
        &mut self,
        folder: &Folder,
        unguarded: Option<&Frozen>,
        online: Option<&CpuSet>,
    ) {
        let reason = self.reason_to_freeze(folder, unguarded, online);
        self.clear_since = match reason {
            Some(_) => None,
            None => self.clear_since.or_else(|| Some(Instant::now())),
        };
        let is_clear = self.clear_since.is_some_and(|since| since.elapsed() >= GUARDS_START);
        let done = match (&reason, &self.frozen) {
            (Some(why), _) => self.keep_frozen(why),
            (None, None | Some(Frozen::ByOthers)) => self.notice_foreign_freeze(),
            (None, Some(_)) if is_clear && self.was_checked => self.thaw(folder),
            (None, Some(_)) => return,
        };
        if let Err(error) = done {
            report(Level::Error, format_args!("fence {:?}: {error}", self.name));
        }
    }

    fn reason_to_freeze(
        &self,
        folder: &Folder,
        unguarded: Option<&Frozen>,
        online: Option<&CpuSet>,
    ) -> Option<Frozen> {
        match folder.paused() {
            Ok(None) => {}
            Ok(Some(why)) => return Some(Frozen::Paused(why)),
            Err(error) => return Some(Frozen::Unreadable(format!("reading the pause: {error}"))),
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

    fn keep_frozen(&mut self, why: &Frozen) -> Result<(), Error> {
        let is_new = self.frozen.as_ref() != Some(why);
        // Another program may have thawed it meanwhile.
        if is_new || !self.freezer.is_requested()? {
            self.freezer.freeze()?;
        }
        self.frozen = Some(why.clone());
        if is_new {
            let why = self.status(0).why().unwrap_or_default();
            report(Level::Warning, format_args!("fence {:?} is frozen: {why}", self.name));
        }
        Ok(())
    }

    /// Notices whether another program has frozen or thawed a fence that should run.
    fn notice_foreign_freeze(&mut self) -> Result<(), Error> {
        let frozen = self.freezer.is_requested()?.then_some(Frozen::ByOthers);
        if frozen != self.frozen {
            let now = if frozen.is_some() { "was frozen" } else { "was thawed" };
            report(Level::Warning, format_args!("fence {:?} {now} by another program", self.name));
        }
        self.frozen = frozen;
        Ok(())
    }

    /// Ends a pause, also one that began and ended between two checks.
    pub(super) fn resume(&mut self) -> Result<(), Error> {
        let by_others = matches!(self.frozen, None | Some(Frozen::ByOthers));
        if by_others && self.freezer.is_requested()? {
            self.frozen = Some(Frozen::Paused(String::new()));
        }
        Ok(())
    }

    fn thaw(&mut self, folder: &Folder) -> Result<(), Error> {
        self.freezer.thaw()?;
        self.frozen = None;
        // `elfen pause` may have come between the last check and the thaw.
        if let Ok(Some(why)) = folder.paused() {
            return self.keep_frozen(&Frozen::Paused(why));
        }
        report(Level::Info, format_args!("fence {:?} runs", self.name));
        Ok(())
    }

    /// Puts a process into the fence.
    pub(super) fn enter(&self, process: u32) -> Result<(), String> {
        match &self.unit {
            None => self.group.add_process(process).map_err(|error| error.to_string()),
            Some(unit) if unit.ends_with(".slice") => {
                systemd::put_into(unit, process).map_err(|error| error.to_string())
            }
            Some(unit) => Err(format!("unit {unit} is not a slice, so no process can be added")),
        }
    }

    /// Freezes the fence at once.
    pub(super) fn freeze(&mut self, why: Frozen) {
        self.clear_since = None;
        if let Err(error) = self.keep_frozen(&why) {
            report(Level::Error, format_args!("fence {:?} does not freeze: {error}", self.name));
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
            repaired: repaired.map(|(&guarantee, &times)| Repaired { guarantee, times }).collect(),
            accounts: self.accounts.lanes(),
        }
    }

    pub(super) fn count(&self) -> u64 {
        // A cgroup that cannot be read reports so in its status.
        self.group.processes().map_or(0, |all| all.len() as u64)
    }
}
