//! Whether this machine supports the settings, and whether a cgroup can be a fence.

use elfen_console::failure::{Failure, Status as Exit};
use elfen_rt::process::Liveness;
use elfen_rt::signal::service::Writer;

use super::lent_lanes;
use super::settings::{CgroupSelector, Lent, Settings};
use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::pair::Pair;
use elfen_machine::systemd;
use elfen_run::hotplug::online;

/// Moves this process to a cgroup, and creates the cgroup if it is missing. In a container, elfend
/// starts in the container's cgroup, from which guards may not outrank the fences.
pub fn enter_cgroup(path: &str) -> Result<(), Failure> {
    let failed = |status, why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(status, format_args!("entering cgroup {path:?}"), why, fix)
    };
    let parsed = CgroupPath::parse(path).ok_or_else(|| {
        let why = "not the path of a cgroup";
        failed(Exit::Usage, &why, "name it from the root: /kubepods.slice/elfend")
    })?;
    let entered = Hierarchies::read().and_then(|hierarchies| {
        let group = Group::new(&hierarchies, parsed);
        group.make()?;
        group.add_process(std::process::id())
    });
    let fix = "mount the host's /sys/fs/cgroup read-write, and run elfend privileged";
    entered.map_err(|error| failed(Exit::Failed, &error, fix))
}

/// Verifies that this machine supports the settings, before anything is changed. Returns the
/// hierarchies and the daemon's own cgroup.
pub fn require(settings: &Settings) -> Result<(Hierarchies, CgroupPath), Failure> {
    let lacking = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Exit::Unsupported, "fences", why, fix)
    };
    let hierarchies = Hierarchies::read().map_err(|error| {
        lacking(&error, "use a kernel with the cpu and cpuset controllers, or only `elfen run`")
    })?;
    let own = std::process::id();
    let home = hierarchies.cgroup_of(own).map_err(|error| lacking(&error, "mount /proc"))?;
    let takes_systemd = |what: &str, which: &CgroupSelector| match which {
        CgroupSelector::Unit(unit) if !systemd::is_running() => {
            let why =
                format!("{what}: unit {unit} requires systemd, which does not run this machine");
            Err(lacking(&why, "name a cgroup instead"))
        }
        _ => Ok(()),
    };
    let usage = |what: &str, why: String, fix: &str| Failure::new(Exit::Usage, what, why, fix);
    for lent in &settings.lent {
        let what = format!("service {:?}", lent.service.as_deref().unwrap_or_default());
        for place in &lent.places {
            takes_systemd(&what, place)?;
            if let Some(path) = holds_home(place, &home).filter(|_| lent.confine) {
                let why = format!("cgroup {path} holds elfend, whose guards need the batch lanes");
                return Err(usage(&what, why, "start elfend in another cgroup"));
            }
        }
    }
    for fence in &settings.fences {
        let what = format!("fence {:?}", fence.name);
        takes_systemd(&what, &fence.which)?;
        // Units come and go; they are verified when they are there.
        let (CgroupSelector::Cgroup(path) | CgroupSelector::Cgroups(path)) = &fence.which else {
            continue;
        };
        let group = Group::new(&hierarchies, path.clone());
        if matches!(fence.which, CgroupSelector::Cgroup(_)) && group.exists() {
            let fits = fit(&group, &settings.lent);
            fits.map_err(|why| usage(&what, why, "name another cgroup"))?;
        }
        let parent = path.parent();
        if !home.is_within(&parent) {
            let why = format!("guards in {home}, the cgroup of elfend, do not outrank {path}");
            return Err(usage(&what, why, &format!("start elfend in {parent}")));
        }
    }
    Ok((hierarchies, home))
}

/// A message about lanes that are offline now, which is not a mistake.
pub fn offline(settings: &Settings) -> Option<String> {
    let lanes = settings.lent.iter().flat_map(|lent| &lent.pairs);
    let gone = lanes.flat_map(Pair::lanes).collect::<CpuSet>().without(&online()?.0);
    let line = format!("CPUs {gone} are offline; they are lent once they are online");
    (!gone.is_empty()).then_some(line)
}

fn holds_home<'a>(place: &'a CgroupSelector, home: &CgroupPath) -> Option<&'a CgroupPath> {
    match place {
        CgroupSelector::Cgroup(path) => home.is_within(path).then_some(path),
        CgroupSelector::Unit(_) | CgroupSelector::Cgroups(_) => None,
    }
}

/// Whether a cgroup can be frozen without harm, and holds whole processes.
pub(super) fn fit(group: &Group, lent: &[Lent]) -> Result<(), String> {
    let ours = [(1, "the first process of the system".to_owned())];
    let own = [(std::process::id(), "elfend".to_owned())];
    for (process, who) in ours.into_iter().chain(own).chain(lent.iter().flat_map(publishers)) {
        match group.holds(process) {
            Ok(true) => return Err(format!("cgroup {} holds {who}", group.path)),
            Ok(false) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    group.require_domain().map_err(|error| error.to_string())
}

/// The processes that write a service's page now, if their ids are valid in our pid namespace.
fn publishers(lent: &Lent) -> Vec<(u32, String)> {
    let Ok(Some(Ok(service))) = lent_lanes::service_page(lent) else { return Vec::new() };
    let writer = |lane| match service.reader.writer(lane) {
        Writer::Process(identity, Liveness::Alive) => {
            let process = identity.pid().unsigned_abs();
            Some((process, format!("process {process} of service {:?}", service.name)))
        }
        _ => None,
    };
    (0..service.reader.lanes()).filter_map(writer).collect()
}
