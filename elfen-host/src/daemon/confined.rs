//! Services that are kept to their request lanes: `confine = true`.
//!
//! By the CPUs of their cgroup, which the kernel holds against whatever a service asks for itself.
//! Once a second this looks whether that still is so. What is kept is noted, so that
//! `elfend --release` can undo it.

use std::collections::BTreeMap;

use super::log::{Level, gets_on, say};
use super::pending::Waiting;
use super::release;
use super::settings::{Lent, Which};
use super::units::{Found, Units};
use crate::cgroup::{CgroupPath, Error, Group, Hierarchies};
use crate::cpulist::CpuSet;
use crate::fence::state::{Confined, Folder};
use crate::fence::status::ConfinedStatus;
use crate::systemd;

/// What they are held by.
pub(super) struct Terms<'a> {
    pub(super) hierarchies: &'a Hierarchies,
    pub(super) folder: &'a Folder,
    pub(super) online: Option<&'a CpuSet>,
}

#[derive(Debug, Default)]
pub(super) struct Confining {
    /// All that are kept, each with the CPUs that it was given last.
    kept: BTreeMap<CgroupPath, (ConfinedStatus, CpuSet)>,
}

/// One cgroup of a service.
struct Place<'a> {
    service: &'a str,
    which: &'a Which,
    unit: Option<String>,
    group: Group,
    requests: CpuSet,
}

impl Confining {
    /// Keeps what is to be kept, and lets go what the settings do not name any more.
    pub(super) fn look(
        &mut self,
        lent: &[Lent],
        terms: &Terms<'_>,
        units: &mut Units,
        waiting: &mut Waiting,
    ) {
        for lent in lent.iter().filter(|lent| lent.confine) {
            let service = lent.service.as_deref().unwrap_or_default();
            for which in &lent.places {
                gets_on();
                if let Err(why) = self.keep(lent, which, terms, units) {
                    waiting.add(&format!("service {service:?}"), &why);
                }
            }
        }
        self.let_go_of_others(lent, terms);
    }

    fn keep(
        &mut self,
        lent: &Lent,
        which: &Which,
        terms: &Terms<'_>,
        units: &mut Units,
    ) -> Result<(), String> {
        let found = units.find(which, terms.hierarchies).map_err(|error| error.to_string())?;
        if found.is_empty() {
            return Err(format!("{which} does not run"));
        }
        for Found { unit, path, .. } in found {
            let group = Group::new(terms.hierarchies, path);
            if !group.has_cpus() {
                return Err(format!("there is no cgroup {}", group.path));
            }
            let place = Place {
                service: lent.service.as_deref().unwrap_or_default(),
                which,
                unit,
                group,
                requests: lent.pairs.iter().map(|pair| pair.request).collect(),
            };
            self.hold(&place, terms).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn hold(&mut self, place: &Place<'_>, terms: &Terms<'_>) -> Result<(), Error> {
        let Place { service, which, unit, group, requests } = place;
        group.want_cpus()?;
        let above = group.parent().effective_cpus()?;
        let lanes = terms.online.map_or_else(|| requests.clone(), |now| requests.and(now));
        let lanes = lanes.and(&above);
        let wanted = if lanes.is_empty() { above } else { lanes.clone() };
        let before = self.kept.get(&group.path);
        if group.effective_cpus()? == wanted && before.is_some_and(|(_, last)| *last == wanted) {
            return Ok(());
        }
        let noted = Confined {
            service: (*service).to_owned(),
            place: which.to_string(),
            path: group.path.clone(),
            unit: unit.clone(),
        };
        terms.folder.note_confined(&noted).map_err(|error| Error::unnoted(&noted.path, error))?;
        if let Some(unit) = unit
            && let Err(error) = systemd::keep_to(unit, &wanted)
        {
            say(Level::Warning, format_args!("unit {unit}: {error}; its files are written"));
        }
        if group.effective_cpus()? != wanted {
            group.keep_to(&wanted)?;
        }
        let repaired = match before {
            Some((status, last)) if *last == wanted => {
                say(Level::Notice, format_args!("service {service:?} is on CPUs {wanted} again"));
                status.repaired + 1
            }
            Some((status, _)) => status.repaired,
            None => 0,
        };
        if before.is_none_or(|(_, last)| *last != wanted) {
            match lanes.is_empty() {
                true => say(
                    Level::Error,
                    format_args!("service {service:?} has no request lane left: it runs anywhere"),
                ),
                false => {
                    let path = &group.path;
                    let line = format_args!("service {service:?}: {path} is kept to CPUs {wanted}");
                    say(Level::Info, line);
                }
            }
        }
        let status = ConfinedStatus {
            service: (*service).to_owned(),
            path: group.path.clone(),
            cpus: wanted.to_string(),
            repaired,
        };
        self.kept.insert(group.path.clone(), (status, wanted));
        Ok(())
    }

    /// A unit that does not run at the moment is not let go: it comes back where it was.
    fn let_go_of_others(&mut self, lent: &[Lent], terms: &Terms<'_>) {
        let noted = match terms.folder.confined() {
            Ok(noted) => noted,
            Err(error) => return say(Level::Error, error),
        };
        let is_named = |one: &Confined| {
            let mut places = lent.iter().filter(|lent| lent.confine).flat_map(|lent| {
                lent.places.iter().map(|which| (lent.service.as_deref(), which.to_string()))
            });
            places
                .any(|(service, place)| service == Some(one.service.as_str()) && place == one.place)
        };
        for one in noted.iter().filter(|one| !is_named(one)) {
            match release::set_free(one, terms.hierarchies, terms.folder) {
                Ok(()) => {
                    self.kept.remove(&one.path);
                    say(Level::Notice, format_args!("cgroup {} may run anywhere again", one.path));
                }
                Err(error) => say(Level::Error, format_args!("cgroup {}: {error}", one.path)),
            }
        }
    }

    pub(super) fn status(&self) -> Vec<ConfinedStatus> {
        self.kept.values().map(|(status, _)| status.clone()).collect()
    }
}
