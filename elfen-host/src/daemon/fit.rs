//! Whether this machine, and a cgroup of it, can be a fence.

use elfen_console::failure::{Failure, Status as Exit};

use super::settings::{Settings, Which};
use crate::cgroup::{CgroupPath, Group, Hierarchies};
use crate::systemd;

/// What of the settings this machine can hold, before anything is changed: the hierarchies, and
/// the daemon's own cgroup.
pub fn require(settings: &Settings) -> Result<(Hierarchies, CgroupPath), Failure> {
    let lacking = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Exit::Unsupported, "fences", why, fix)
    };
    let hierarchies = Hierarchies::read().map_err(|error| {
        lacking(&error, "use a kernel with the cpu and cpuset controllers, or `elfen run` alone")
    })?;
    let own = std::process::id();
    let home = hierarchies.home_of(own).map_err(|error| lacking(&error, "mount /proc"))?;
    for fence in &settings.fences {
        let path = match &fence.which {
            Which::Unit(unit) if !systemd::is_running() => {
                let why = format!(
                    "fence {:?}: unit {unit} takes systemd, which is not the first \
                                   process here",
                    fence.name
                );
                return Err(lacking(&why, "name a cgroup instead"));
            }
            Which::Unit(_) => continue,
            Which::Cgroup(path) => path,
        };
        let what = format!("fence {:?}", fence.name);
        let usage = |why: String, fix: &str| Failure::new(Exit::Usage, &what, why, fix);
        let group = Group::new(&hierarchies, path.clone());
        if group.exists() {
            fit(&group).map_err(|why| usage(why, "name another cgroup"))?;
        }
        let parent = path.parent();
        if !home.is_within(&parent) {
            let why = format!("from {home}, where elfend is, guards do not outrank {path}");
            return Err(usage(why, &format!("start elfend in {parent}")));
        }
    }
    Ok((hierarchies, home))
}

/// Whether a cgroup can be frozen without harm, and keeps whole processes.
pub(super) fn fit(group: &Group) -> Result<(), String> {
    for (process, who) in [(1, "the first process of the system"), (std::process::id(), "elfend")] {
        match group.holds(process) {
            Ok(true) => return Err(format!("cgroup {} holds {who}", group.path)),
            Ok(false) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    group.require_domain().map_err(|error| error.to_string())
}
