//! Giving fences up: `elfend --release`.
//!
//! What is inside runs on, on every CPU that its parent has, as an ordinary cgroup.

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;

use crate::cgroup::{Error, Group, Hierarchies};
use crate::fence::state::{Folder, Noted};
use crate::systemd;

/// Lets every fence go that is noted; says which. A cgroup that is gone is let go already.
pub fn release(folder: &Folder) -> Result<Vec<Noted>, Failure> {
    let failed = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Failed, "letting fences go", why, fix)
    };
    let noted = folder.noted().map_err(|error| failed(&error, "remove that file"))?;
    let lock = match folder.path().exists() {
        true => folder.lock().map_err(|error| failed(&error, "run it as root"))?,
        false => return Ok(noted),
    };
    let _lock = lock.ok_or_else(|| failed(&"elfend runs, and holds them", "stop it first"))?;
    let hierarchies = Hierarchies::read().map_err(|error| failed(&error, "see `elfen doctor`"))?;
    for fence in &noted {
        let group = Group::new(&hierarchies, fence.path.clone());
        match open(&group, fence.unit.as_deref()) {
            Err(error) if !error.is_gone() => return Err(failed(&error, "run it as root")),
            _ => folder.forget(&fence.name).map_err(|error| failed(&error, "run it as root"))?,
        }
    }
    Ok(noted)
}

fn open(group: &Group, unit: Option<&str>) -> Result<(), Error> {
    if let Some(unit) = unit {
        let all = group.parent().effective_cpus()?;
        if let Err(error) = systemd::release(unit, &all) {
            warn(&format!("unit {unit}: {error}; its files are written"));
        }
    }
    group.keep_to_parent()?;
    group.set_idle(false)?;
    group.freezer().thaw()
}
