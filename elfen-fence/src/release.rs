//! Releases fences and confined services: for `elfend --release`, and when the settings no longer
//! list them.
//!
//! Their processes go on, on every CPU of the parent cgroup.

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;

use elfen_machine::cgroup::{Error, Group, Hierarchies};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::state::{Confined, Folder, RecordedFence};
use elfen_machine::systemd;

/// What was released.
#[derive(Debug, Default)]
pub struct Released {
    pub fences: Vec<RecordedFence>,
    pub services: Vec<Confined>,
}

/// Releases everything that is recorded. A cgroup that is gone counts as released.
pub fn release(folder: &Folder) -> Result<Released, Failure> {
    let failed = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Failed, "releasing fences", why, fix)
    };
    let read = || Ok(Released { fences: folder.recorded_fences()?, services: folder.confined()? });
    let noted = read().map_err(|error: std::io::Error| failed(&error, "remove that file"))?;
    if !folder.path().exists() {
        return Ok(noted);
    }
    let lock = folder.lock().map_err(|error| failed(&error, "run it as root"))?;
    let _lock = lock.ok_or_else(|| failed(&"elfend runs, and holds them", "stop it first"))?;
    let hierarchies = Hierarchies::read().map_err(|error| failed(&error, "see `elfen doctor`"))?;
    for fence in &noted.fences {
        let group = Group::new(&hierarchies, fence.path.clone());
        open(fence, &group, folder).map_err(|error| failed(&error, "run it as root"))?;
    }
    for service in &noted.services {
        let freed = set_free(service, &hierarchies, folder);
        freed.map_err(|error| failed(&error, "run it as root"))?;
    }
    Ok(noted)
}

/// Freezes every recorded fence when neither daemon nor guards run. The unit calls this when both
/// have been killed. The next daemon thaws the fences that it can guard.
pub fn freeze(folder: &Folder) -> Result<Vec<RecordedFence>, Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(Status::Failed, "freezing fences", error, "run it as root")
    };
    let noted = folder.recorded_fences().map_err(|error| failed(&error))?;
    let mut frozen = Vec::new();
    let mut refused = Vec::new();
    for fence in noted {
        match fence.freezer.freeze() {
            Ok(()) => frozen.push(fence),
            Err(error) if error.is_gone() => {}
            Err(error) => refused.push(format!("{}: {error}", fence.name)),
        }
    }
    match refused.as_slice() {
        [] => Ok(frozen),
        _ => Err(failed(&refused.join("; "))),
    }
}

/// Turns a fence into an ordinary cgroup.
pub(super) fn open(fence: &RecordedFence, group: &Group, folder: &Folder) -> Result<(), Error> {
    let opened = group.parent().effective_memory().and_then(|nodes| {
        let release = |unit: &str, all: &CpuSet| systemd::release(unit, all, &nodes);
        tell(fence.unit.as_deref(), group, release)?;
        group.keep_to_parent()?;
        group.keep_memory_to(&nodes)?;
        group.set_idle(false)?;
        group.freezer().thaw()
    });
    forget(group, opened, || folder.forget(&fence.name))
}

/// Lets a confined service run on any CPU.
pub(super) fn set_free(
    service: &Confined,
    hierarchies: &Hierarchies,
    folder: &Folder,
) -> Result<(), Error> {
    let group = Group::new(hierarchies, service.path.clone());
    let freed = tell(service.unit.as_deref(), &group, systemd::keep_to)
        .and_then(|()| group.keep_to_parent());
    forget(&group, freed, || folder.forget_confined(service))
}

/// Sets properties in systemd first, where it owns the cgroup.
fn tell(
    unit: Option<&str>,
    group: &Group,
    tell: impl Fn(&str, &CpuSet) -> Result<(), systemd::Error>,
) -> Result<(), Error> {
    let Some(unit) = unit else { return Ok(()) };
    let all = group.parent().effective_cpus()?;
    if let Err(error) = tell(unit, &all) {
        warn(&format!("unit {unit}: {error}; writing the cgroup's files instead"));
    }
    Ok(())
}

fn forget(
    group: &Group,
    done: Result<(), Error>,
    forget: impl Fn() -> std::io::Result<()>,
) -> Result<(), Error> {
    match done {
        Err(error) if !error.is_gone() => Err(error),
        _ => forget().map_err(|error| Error::unrecorded(&group.path, error)),
    }
}
