//! Other settings of this machine that disturb a request lane or override Elfen's scheduling. `yes`
//! means that there is no conflict.

use std::collections::BTreeMap;

use super::answers::CoreScheduling;
use super::finding::{Enough, Finding, Machine, Mechanism, request};
use super::{idle, irqs};
use crate::cpulist::CpuSet;
use crate::source::{Source, SourceError};

pub(super) const MECHANISMS: &[Mechanism] = &[
    of_the_machine("sched-ext-off", sched_ext),
    of_the_machine("core-scheduling-off", core_scheduling),
    of_the_machine("autogroup-off", autogroup),
    of_the_machine("topology-shown", topology),
    of_the_machine("irqs-elsewhere", |machine| on_lanes(machine, irqs::elsewhere)),
    of_the_machine("request-lanes-isolated", |machine| on_lanes(machine, isolated)),
    of_the_machine("nohz-full", |machine| on_lanes(machine, nohz_full)),
    of_the_machine("governor-performance", |machine| on_lanes(machine, governor)),
    of_the_machine("idle-yields-core", |machine| on_lanes(machine, idle::yields_core)),
    of_the_machine("idle-wakes-fast", |machine| on_lanes(machine, idle::wakes_fast)),
];

type ExamineFn = fn(&Machine<'_>) -> Result<Finding, SourceError>;

const fn of_the_machine(name: &'static str, examine: ExamineFn) -> Mechanism {
    Mechanism { name, enough: Enough::No, examine }
}

/// For checks of the lanes in use.
fn on_lanes(machine: &Machine<'_>, examine: ExamineFn) -> Result<Finding, SourceError> {
    if machine.lanes.pairs.is_empty() {
        return Ok(Finding::warn("no pair, so no request lane to check", "see pairs"));
    }
    examine(machine)
}

const SCHED_EXT: &str = "/sys/kernel/sched_ext";
/// sched_ext's name for the folder of the scheduler that is loaded.
const LOADED: &str = "root";

fn sched_ext(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    loaded_scheduler(machine.source)
}

fn loaded_scheduler(source: &Source) -> Result<Finding, SourceError> {
    let Some(state) = source.text(&format!("{SCHED_EXT}/state"))? else {
        return Ok(Finding::yes("the kernel has no sched_ext"));
    };
    if state == "disabled" {
        return Ok(Finding::yes("no sched_ext scheduler is loaded"));
    }
    let scheduler = source.text(&format!("{SCHED_EXT}/{LOADED}/ops"))?;
    let scheduler = scheduler.unwrap_or_else(|| "a scheduler without a name".to_owned());
    let all = source.text(&format!("{SCHED_EXT}/switch_all"))?.as_deref() != Some("0");
    let threads = if all { "all threads" } else { "threads of class SCHED_EXT" };
    let why = format!(
        "sched_ext is {state}: {scheduler} schedules {threads}, and decides whether a guard gets \
         its lane at once"
    );
    Ok(Finding::warn(why, "end it (its service, often `systemctl stop scx`), or measure with it"))
}

/// How many names of processes with cookies are shown.
const SHOWN: usize = 3;

fn core_scheduling(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let (processes, hidden, with_cookie) = match &machine.answers.core_scheduling {
        CoreScheduling::Absent => {
            return Ok(Finding::yes("the kernel was built without core scheduling"));
        }
        CoreScheduling::NoSmt => {
            return Ok(Finding::yes("without SMT the kernel does no core scheduling"));
        }
        CoreScheduling::Refused(error) => {
            let why = format!("prctl(PR_SCHED_CORE) fails: {error}");
            return Ok(Finding::warn(why, "allow prctl(PR_SCHED_CORE) in the seccomp profile"));
        }
        CoreScheduling::Looked { processes, hidden, with_cookie } => {
            (processes, hidden, with_cookie)
        }
    };
    let unseen = match hidden {
        0 => String::new(),
        hidden => format!("; {hidden} more are not visible to this user"),
    };
    if with_cookie.is_empty() {
        return Ok(Finding::yes(format!("none of {processes} processes has a cookie{unseen}")));
    }
    let mut names: Vec<&str> = with_cookie.iter().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    names.truncate(SHOWN);
    let why = format!(
        "{} of {processes} processes have core-scheduling cookies ({}){unseen}: while one runs, \
         its sibling idles unless it has the same cookie",
        with_cookie.len(),
        names.join(", ")
    );
    Ok(Finding::warn(why, "run the service and batch without cookies, or with the same one"))
}

/// SCHED_IDLE ranks a thread below others of its own group only. Where the kernel makes autogroups,
/// each session is a group: next to a batch that called setsid, a guard got 47 % of its lane
/// instead of 92 %, all that was available, on a 2-vCPU AMD EPYC VM under Linux 6.18.
fn autogroup(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let enabled = machine.source.text("/proc/sys/kernel/sched_autogroup_enabled")?;
    Ok(match enabled.as_deref() {
        None => Finding::yes("the kernel makes no autogroups"),
        Some("0") => Finding::yes("autogroups are off"),
        Some(_) => Finding::warn(
            "autogroups are on: a batch process that starts a session (setsid) shares its lane \
             with the guard, and does not give way",
            "switch them off (as root: `sysctl kernel.sched_autogroup_enabled=0`), or run in a \
             cgroup with the cpu controller, where they have no effect",
        ),
    })
}

fn topology(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let topology = machine.topology;
    Ok(match (topology.hypervisor, topology.shows_siblings()) {
        (false, _) => Finding::yes("no hypervisor stands between the lanes and the cores"),
        (true, true) => Finding::yes("a virtual machine that shows siblings; only its host knows"),
        (true, false) => Finding::warn(
            "a virtual machine without siblings, or which hides them: only its host knows",
            "pin vCPUs to siblings on the host and show them here, or name pairs with --lanes",
        ),
    })
}

/// Where each mount of the unified hierarchy lists the CPUs in isolated cpuset partitions.
const PARTITIONS: [&str; 2] =
    ["/sys/fs/cgroup/cpuset.cpus.isolated", "/sys/fs/cgroup/unified/cpuset.cpus.isolated"];

fn isolated(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let lanes = machine.request_lanes();
    let mut open = lanes.without(&machine.topology.isolated);
    for file in PARTITIONS {
        open = open.without(&machine.source.cpus(file)?.unwrap_or_default());
    }
    if open.is_empty() {
        return Ok(Finding::yes(format!("no thread is placed on {} by default", request(&lanes))));
    }
    let why = format!(
        "other threads may be placed on {}; the batch then naps for them as for the service",
        request(&open)
    );
    let fix = format!(
        "boot with isolcpus=domain,managed_irq,{open}, or run the service and batch in an isolated \
         cpuset partition that has both lanes"
    );
    Ok(Finding::warn(why, fix))
}

fn nohz_full(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let lanes = machine.request_lanes();
    let ticking = lanes.without(&machine.topology.nohz_full);
    if ticking.is_empty() {
        return Ok(Finding::yes(format!("no tick interrupts what runs on {}", request(&lanes))));
    }
    let why = format!("the timer tick interrupts what runs on {}", request(&ticking));
    // The boot CPU keeps the time for all CPUs, so it ticks even in nohz_full.
    let possible = ticking.without(&CpuSet::from_iter([0]));
    let fix = if possible.is_empty() {
        "use a pair without CPU 0, which keeps the time for all, and boot with its request lane in \
         nohz_full"
            .to_owned()
    } else {
        format!(
            "boot with nohz_full={possible} (CONFIG_NO_HZ_FULL); it makes system calls and \
             switches there more expensive, so measure"
        )
    };
    Ok(Finding::warn(why, fix))
}

fn governor(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let lanes = machine.all_lanes();
    let mut others: BTreeMap<String, CpuSet> = BTreeMap::new();
    let mut governed = false;
    for cpu in lanes.iter() {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
        let Some(governor) = machine.source.text(&file)? else { continue };
        governed = true;
        if governor != "performance" {
            others.entry(governor).or_default().insert(cpu);
        }
    }
    if !governed {
        return Ok(Finding::yes("the kernel does not set the frequency of these lanes"));
    }
    if others.is_empty() {
        return Ok(Finding::yes("the governor of all lanes is performance"));
    }
    let list: Vec<String> =
        others.iter().map(|(governor, cpus)| format!("{governor} on CPUs {cpus}")).collect();
    let why = format!("the frequency is not held high: {}", list.join(", "));
    Ok(Finding::warn(why, "use the governor performance (`cpupower frequency-set -g performance`)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    /// Goal: a loaded scheduler is named, with the threads that it schedules. Method: the files of
    /// sched_ext in each of its states.
    #[test]
    fn a_loaded_scheduler_is_named() {
        let found = |files: &[(&str, &str)]| {
            let line = |(file, text): &(&str, &str)| format!("{SCHED_EXT}/{file}: {text}\n");
            let recording: String = files.iter().map(line).collect();
            loaded_scheduler(&Source::parse_recording(&recording).unwrap()).unwrap()
        };
        let ops = format!("{LOADED}/ops");
        let enabled = [("state", "enabled"), ("switch_all", "1"), (&ops, "lavd_1.0.6")];
        let finding = found(&enabled);
        assert_eq!(finding.status, Status::Warn);
        assert!(finding.why.contains("enabled: lavd_1.0.6 schedules all threads"), "{finding:?}");
        let partly = [("state", "enabled"), ("switch_all", "0"), (&ops, "lavd_1.0.6")];
        assert!(found(&partly).why.contains("threads of class SCHED_EXT"));
        assert!(found(&[("state", "disabling")]).why.contains("a scheduler without a name"));
        assert_eq!(found(&[("state", "disabled"), ("switch_all", "0")]).status, Status::Yes);
        assert_eq!(found(&[]).status, Status::Yes);
    }
}
