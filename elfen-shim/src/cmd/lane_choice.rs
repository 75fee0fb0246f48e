//! Chooses the observed lanes, and those of the observers.

use elfen_console::failure::{Failure, Status};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::lane_args::topology;
use elfen_machine::source::Source;
use elfen_machine::topology::Topology;

use crate::observe::OBSERVERS_MAX;

/// The lanes of a run.
#[derive(Clone, Debug)]
pub(super) struct LaneChoice {
    pub(super) on: CpuSet,
    pub(super) from: CpuSet,
}

impl LaneChoice {
    /// Divides the observed lanes among the observers' lanes. Consecutive lanes go to one observer,
    /// because CPUs with consecutive numbers often share caches.
    pub(super) fn parts(&self) -> Vec<(u32, CpuSet)> {
        let (mut on, observers) = (self.on.iter(), self.from.len());
        let part = |(index, from): (usize, u32)| {
            let left = self.on.len() * (index + 1) / observers - self.on.len() * index / observers;
            (from, on.by_ref().take(left).collect())
        };
        self.from.iter().enumerate().map(part).collect()
    }

    /// The first observer's lane. The other threads of this command run there too.
    pub(super) fn first(&self) -> u32 {
        self.from.iter().next().unwrap_or(0)
    }
}

/// Checks the user's choice of lanes, and completes it. `allowed` contains the lanes that the
/// observed program may use.
pub(super) fn choose(
    on: Option<&CpuSet>,
    from: Option<&CpuSet>,
    sibling: bool,
    allowed: &CpuSet,
) -> Result<LaneChoice, Failure> {
    choose_of(&topology(&Source::live())?, on, from, sibling, allowed)
}

fn choose_of(
    topology: &Topology,
    on: Option<&CpuSet>,
    from: Option<&CpuSet>,
    sibling: bool,
    allowed: &CpuSet,
) -> Result<LaneChoice, Failure> {
    let usage = |why: String| {
        let fix = format!("use CPUs {}", topology.usable);
        Failure::new(Status::Usage, "lanes", why, fix)
    };
    if topology.usable.len() < 2 {
        let why = "observer and program need a CPU each, and this process may use only one";
        let fix = "allow this process a second CPU";
        return Err(Failure::new(Status::Unsupported, "elfen shim", why, fix));
    }
    let named = on.into_iter().chain(from).flat_map(CpuSet::iter);
    if let Some(cpu) = named.into_iter().find(|&cpu| !topology.usable.contains(cpu)) {
        let why = match (topology.present.contains(cpu), topology.online.contains(cpu)) {
            (false, _) => format!("this machine has no CPU {cpu}"),
            (_, false) => format!("CPU {cpu} is offline"),
            _ => format!("this process may not use CPU {cpu}"),
        };
        return Err(usage(why));
    }
    let siblings = |cpu: u32| {
        let lanes = topology.core_of(cpu).map(|core| core.lanes.clone()).unwrap_or_default();
        lanes.without(&[cpu].into_iter().collect())
    };
    let near =
        |cpu: &u32| on.is_some_and(|on| on.iter().any(|other| siblings(other).contains(*cpu)));
    let from = match (from, on) {
        (Some(from), _) => from.clone(),
        (None, Some(on)) => {
            let free = topology.usable.without(on);
            let apart = free.iter().find(|cpu| !near(cpu));
            let lane = apart.or_else(|| free.iter().find(|_| sibling)).ok_or_else(|| {
                usage("every lane is observed, or shares a core with an observed lane".to_owned())
            })?;
            [lane].into_iter().collect()
        }
        (None, None) => topology.usable.last().into_iter().collect(),
    };
    if let Some(both) = from.iter().find(|&cpu| on.is_some_and(|on| on.contains(cpu))) {
        return Err(usage(format!("CPU {both} cannot observe itself")));
    }
    if let Some(near) = from.iter().find(near).filter(|_| !sibling) {
        let why = format!("CPU {near} shares a core with an observed lane");
        let fix =
            "name another lane with --observer-cpu, or use --sibling: it takes half of the core";
        return Err(Failure::new(Status::Usage, "lanes", why, fix));
    }
    let default = || allowed.and(&topology.usable).without(&from);
    let on = on.cloned().unwrap_or_else(default);
    if on.is_empty() {
        return Err(usage(format!("the program may use only the observer's CPU {from}")));
    }
    if from.len() > on.len().min(OBSERVERS_MAX) {
        let why = format!("{} observers for {} observed lanes", from.len(), on.len());
        let fix = format!("name at most one lane per observed lane, and at most {OBSERVERS_MAX}");
        return Err(Failure::new(Status::Usage, "--observer-cpu", why, fix));
    }
    Ok(LaneChoice { on, from })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(machine: &str) -> Topology {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../elfen/tests/sysfs");
        let source = Source::open_recording(&folder.join(machine)).unwrap();
        topology(&source).unwrap()
    }

    /// Goal: an observer shares a core with an observed lane only with `--sibling`, and a lane must
    /// exist. Method: recorded machines.
    #[test]
    fn lanes_are_checked_on_recorded_machines() {
        let of = |topology: &Topology, on: Option<&str>, from: Option<u32>, sibling| {
            let on = on.map(|on| on.parse::<CpuSet>().unwrap());
            let from = from.map(|from| [from].into_iter().collect());
            choose_of(topology, on.as_ref(), from.as_ref(), sibling, &topology.usable)
        };
        let why = |chosen: Result<LaneChoice, Failure>| chosen.unwrap_err().to_string();
        let desktop = recorded("desktop-2way.machine");
        let core = &desktop.core_of(0).unwrap().lanes;
        let sibling = core.iter().find(|&lane| lane != 0).unwrap();
        assert!(why(of(&desktop, Some("0"), Some(sibling), false)).contains("shares a core"));
        assert_eq!(of(&desktop, Some("0"), Some(sibling), true).unwrap().first(), sibling);
        let apart = of(&desktop, Some("0"), None, false).unwrap().first();
        assert!(!core.contains(apart), "CPU {apart}");
        let chosen = of(&desktop, None, Some(sibling), false).unwrap();
        assert!(chosen.on.contains(0) && !chosen.on.contains(sibling), "{chosen:?}");
        assert!(why(of(&desktop, Some("0"), Some(8000), false)).contains("has no CPU 8000"));
        let all = desktop.usable.to_string();
        assert!(why(of(&desktop, Some(&all), None, false)).contains("every lane is observed"));
        let offline = recorded("cpu-offline.machine");
        let gone = offline.present.without(&offline.online).iter().next().unwrap();
        assert!(why(of(&offline, None, Some(gone), false)).contains("is offline"));
        let single = recorded("one-cpu.machine");
        assert!(why(of(&single, None, None, false)).contains("a CPU each"));
    }

    /// Goal: each observed lane has one observer, and each observer has a lane. More observers than
    /// lanes are refused, and so is an observer on the core of any observed lane. Method: a
    /// recorded desktop.
    #[test]
    fn several_observers_divide_the_lanes() {
        let desktop = recorded("desktop-2way.machine");
        let cores: Vec<u32> = desktop
            .usable
            .iter()
            .filter(|&cpu| desktop.core_of(cpu).unwrap().lanes.iter().next() == Some(cpu))
            .collect();
        let set = |cpus: &[u32]| cpus.iter().copied().collect::<CpuSet>();
        let choose = |on: &[u32], from: &[u32]| {
            choose_of(&desktop, Some(&set(on)), Some(&set(from)), false, &desktop.usable)
        };
        let (from, on) = (&cores[..2], &cores[2..]);
        let parts = choose(on, from).unwrap().parts();
        assert_eq!(parts.iter().map(|part| part.0).collect::<Vec<_>>(), from);
        let all: Vec<u32> = parts.iter().flat_map(|part| part.1.iter()).collect();
        assert_eq!(all, on);
        let [first, second] = [0, 1].map(|part: usize| parts[part].1.len());
        assert!(first > 0 && second.abs_diff(first) <= 1, "{parts:?}");
        let why = |on: &[u32], from: &[u32]| choose(on, from).unwrap_err().to_string();
        assert!(why(&on[..1], from).contains("2 observers for 1 observed lanes"));
        assert!(why(on, &[from[0], on[0]]).contains("cannot observe itself"));
        let sibling = desktop.core_of(on[0]).unwrap().lanes.iter().last().unwrap();
        assert!(why(on, &[from[0], sibling]).contains("shares a core"));
    }
}
