//! Confines services to their request lanes: `confine = true`.
//!
//! The cpuset of a service's cgroup confines it, whatever affinity the service requests. The daemon
//! verifies this once a second. Confined cgroups are recorded in the run folder, so that
//! `elfend --release` can undo it.

use std::collections::BTreeMap;

use super::log::{Level, PendingList, pet_watchdog, report};
use super::release;
use super::settings::{CgroupSelector, Lent};
use super::units::{FoundCgroup, Units};
use elfen_machine::cgroup::{CgroupPath, Error, Group, Hierarchies};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::state::{Confined, Folder};
use elfen_machine::fence::status::ConfinedStatus;
use elfen_machine::systemd;

/// What confining needs to know.
pub(super) struct Terms<'a> {
    pub(super) hierarchies: &'a Hierarchies,
    pub(super) folder: &'a Folder,
    pub(super) online: Option<&'a CpuSet>,
}

#[derive(Debug, Default)]
pub(super) struct Confinement {
    /// All confined cgroups, each with the CPUs that it was given last.
    kept: BTreeMap<CgroupPath, (ConfinedStatus, CpuSet)>,
}

/// One cgroup of a service.
struct ServiceCgroup<'a> {
    service: &'a str,
    which: &'a CgroupSelector,
    unit: Option<String>,
    group: Group,
    requests: CpuSet,
}

impl Confinement {
    /// Confines the services with `confine`, and releases cgroups that the settings no longer list.
    pub(super) fn enforce(
        &mut self,
        lent: &[Lent],
        terms: &Terms<'_>,
        units: &mut Units,
        pending: &mut PendingList,
    ) {
        for lent in lent.iter().filter(|lent| lent.confine) {
            let service = lent.service.as_deref().unwrap_or_default();
            for which in &lent.places {
                pet_watchdog();
                if let Err(why) = self.confine_service(lent, which, terms, units) {
                    pending.add(&format!("service {service:?}"), &why);
                }
            }
        }
        self.release_unlisted(lent, terms);
    }

    fn confine_service(
        &mut self,
        lent: &Lent,
        which: &CgroupSelector,
        terms: &Terms<'_>,
        units: &mut Units,
    ) -> Result<(), String> {
        let found = units.find(which, terms.hierarchies).map_err(|error| error.to_string())?;
        if found.is_empty() {
            return Err(format!("{which} does not run"));
        }
        for FoundCgroup { unit, path, .. } in found {
            let group = Group::new(terms.hierarchies, path);
            if !group.has_cpus() {
                return Err(format!("there is no cgroup {}", group.path));
            }
            let place = ServiceCgroup {
                service: lent.service.as_deref().unwrap_or_default(),
                which,
                unit,
                group,
                requests: lent.pairs.iter().map(|pair| pair.request).collect(),
            };
            self.confine_cgroup(&place, terms).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn confine_cgroup(
        &mut self,
        place: &ServiceCgroup<'_>,
        terms: &Terms<'_>,
    ) -> Result<(), Error> {
        let ServiceCgroup { service, which, unit, group, requests } = place;
        group.enable_cpuset()?;
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
        terms
            .folder
            .record_confined(&noted)
            .map_err(|error| Error::unrecorded(&noted.path, error))?;
        if let Some(unit) = unit
            && let Err(error) = systemd::keep_to(unit, &wanted)
        {
            report(Level::Warning, format_args!("unit {unit}: {error}; its files are written"));
        }
        if group.effective_cpus()? != wanted {
            group.keep_to(&wanted)?;
        }
        let repaired = match before {
            Some((status, last)) if *last == wanted => {
                report(Level::Notice, format_args!("service {service:?}: CPUs {wanted} restored"));
                status.repaired + 1
            }
            Some((status, _)) => status.repaired,
            None => 0,
        };
        if before.is_none_or(|(_, last)| *last != wanted) {
            if lanes.is_empty() {
                let why = "has no request lane left, so it may run on all CPUs";
                report(Level::Error, format_args!("service {service:?} {why}"));
            } else {
                let path = &group.path;
                let line = format_args!("service {service:?}: {path} is limited to CPUs {wanted}");
                report(Level::Info, line);
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

    /// Releases cgroups that the settings no longer list. The cgroup of a listed unit stays
    /// recorded while the unit does not run: it will have the same path again.
    fn release_unlisted(&mut self, lent: &[Lent], terms: &Terms<'_>) {
        let noted = match terms.folder.confined() {
            Ok(noted) => noted,
            Err(error) => return report(Level::Error, error),
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
                    report(
                        Level::Notice,
                        format_args!("cgroup {} may run on all CPUs again", one.path),
                    );
                }
                Err(error) => report(Level::Error, format_args!("cgroup {}: {error}", one.path)),
            }
        }
    }

    pub(super) fn status(&self) -> Vec<ConfinedStatus> {
        self.kept.values().map(|(status, _)| status.clone()).collect()
    }
}
