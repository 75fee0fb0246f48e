//! The probes of conflicts: settings that disturb a request lane or override Elfen's scheduling.
//! `yes` means that there is no conflict.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::answers::CoreScheduling;
use super::checks::MOUNT_PROC;
use super::finding::{Found, Machine, first_of, warn, yes};
use crate::cpulist::CpuSet;
use crate::source::{Source, SourceError};

const SCHED_EXT: &str = "/sys/kernel/sched_ext";
/// sched_ext's name for the folder of the scheduler that is loaded.
const LOADED: &str = "root";

pub(super) fn sched_ext_off(machine: &Machine<'_>) -> Found {
    let source = machine.source;
    let Some(state) = source.text(&format!("{SCHED_EXT}/state"))? else {
        return yes("the kernel has no sched_ext");
    };
    if state == "disabled" {
        return yes("no sched_ext scheduler is loaded");
    }
    let scheduler = source.text(&format!("{SCHED_EXT}/{LOADED}/ops"))?;
    let scheduler = scheduler.as_deref().unwrap_or("a scheduler without a name");
    let all = source.text(&format!("{SCHED_EXT}/switch_all"))?.as_deref() != Some("0");
    let threads = if all { "all threads" } else { "threads of class SCHED_EXT" };
    let why = format!(
        "sched_ext is {state}: {scheduler} schedules {threads}, and decides whether a guard gets \
         its lane at once"
    );
    warn(why, "end it (its service, often `systemctl stop scx`), or measure with it")
}

/// How many names of processes with cookies are shown.
const COOKIES_SHOWN: usize = 3;

pub(super) fn core_scheduling_off(machine: &Machine<'_>) -> Found {
    let (processes, hidden, with_cookie) = match &machine.answers.core_scheduling {
        CoreScheduling::Absent => return yes("the kernel was built without core scheduling"),
        CoreScheduling::NoSmt => return yes("without SMT the kernel does no core scheduling"),
        CoreScheduling::Refused(error) => {
            let why = format!("prctl(PR_SCHED_CORE) fails: {error}");
            return warn(why, "allow prctl(PR_SCHED_CORE) in the seccomp profile");
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
        return yes(format!("none of {processes} processes has a cookie{unseen}"));
    }
    let mut names: Vec<&str> = with_cookie.iter().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    names.truncate(COOKIES_SHOWN);
    let why = format!(
        "{} of {processes} processes have core-scheduling cookies ({}){unseen}: while one runs, \
         its sibling idles unless it has the same cookie",
        with_cookie.len(),
        names.join(", ")
    );
    warn(why, "run the service and batch without cookies, or with the same one")
}

/// SCHED_IDLE ranks a thread below others of its own group only. Where the kernel makes autogroups,
/// each session is a group: next to a batch that called setsid, a guard got 47 % of its lane
/// instead of 92 %, all that was available, on a 2-vCPU AMD EPYC VM under Linux 6.18.
pub(super) fn autogroup_off(machine: &Machine<'_>) -> Found {
    match machine.source.text("/proc/sys/kernel/sched_autogroup_enabled")?.as_deref() {
        None => yes("the kernel makes no autogroups"),
        Some("0") => yes("autogroups are off"),
        Some(_) => warn(
            "autogroups are on: a batch process that starts a session (setsid) shares its lane \
             with the guard, and does not give way",
            "switch them off (as root: `sysctl kernel.sched_autogroup_enabled=0`), or run in a \
             cgroup with the cpu controller, where they have no effect",
        ),
    }
}

pub(super) fn topology_shown(machine: &Machine<'_>) -> Found {
    match (machine.topology.hypervisor, machine.topology.shows_siblings()) {
        (false, _) => yes("no hypervisor stands between the lanes and the cores"),
        (true, true) => yes("a virtual machine that shows siblings; only its host knows"),
        (true, false) => warn(
            "a virtual machine without siblings, or which hides them: only its host knows",
            "pin vCPUs to siblings on the host and show them here, or name pairs with --lanes",
        ),
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Irq {
    number: u32,
    name: String,
    /// How often it arrived on request lanes since boot.
    arrived: u64,
}

impl std::fmt::Display for Irq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (IRQ {}: {})", self.name, self.number, self.arrived)
    }
}

/// How many interrupts are named, the most frequent ones.
const IRQS_SHOWN: usize = 3;

/// An interrupt counts if the kernel routes it to a request lane now and it has arrived there since
/// boot. The architecture's per-CPU interrupts (timer, IPIs) have no route and do not count.
pub(super) fn irqs_elsewhere(machine: &Machine<'_>) -> Found {
    let lanes = machine.request_lanes();
    let Some(table) = machine.source.text("/proc/interrupts")? else {
        return warn("there is no /proc/interrupts", MOUNT_PROC);
    };
    let mut irqs = Vec::new();
    for irq in arrived(&table, &lanes) {
        // If the route is unknown, the interrupt may come again.
        if route(machine.source, irq.number)?.is_none_or(|cpus| !cpus.and(&lanes).is_empty()) {
            irqs.push(irq);
        }
    }
    irqs.sort_by_key(|irq| Reverse(irq.arrived));
    let Some(busiest) = irqs.first() else {
        return yes(format!("no device interrupts {}", request(&lanes)));
    };
    let shown = first_of(&irqs, IRQS_SHOWN, ", ", ", and");
    let why = format!("devices interrupt {} (times since boot): {shown}", request(&lanes));
    // CPUs in no pair; if there are none, the batch lanes.
    let online = &machine.topology.online;
    let free = online.without(&machine.all_lanes());
    let others = if free.is_empty() { online.without(&lanes) } else { free };
    let fix = format!(
        "route them to other CPUs where possible (as root: `echo {others} > \
         /proc/irq/{}/smp_affinity_list`), and keep irqbalance from undoing it",
        busiest.number
    );
    warn(why, fix)
}

/// The numbered interrupts of /proc/interrupts that have arrived on `lanes`.
fn arrived(table: &str, lanes: &CpuSet) -> Vec<Irq> {
    let mut lines = table.lines();
    let header = lines.next().unwrap_or_default();
    // CPUs that are offline have no column.
    let columns: Vec<Option<u32>> = header
        .split_whitespace()
        .map(|title| title.strip_prefix("CPU").and_then(|cpu| cpu.parse().ok()))
        .collect();
    let irq = |line: &str| {
        let (number, rest) = line.split_once(':')?;
        let number = number.trim().parse().ok()?;
        let words: Vec<&str> = rest.split_whitespace().collect();
        let counts = columns.iter().zip(&words);
        let on_lanes = counts.filter(|(cpu, _)| cpu.is_some_and(|cpu| lanes.contains(cpu)));
        let arrived = on_lanes.filter_map(|(_, count)| count.parse::<u64>().ok()).sum();
        // Behind the counts are the chip, the chip's number with its trigger, and the devices.
        let name = match words.get(columns.len()..).unwrap_or_default() {
            [] => "a device without a name".to_owned(),
            [_, _, devices @ ..] if !devices.is_empty() => devices.join(" "),
            words => words.join(" "),
        };
        (arrived > 0).then_some(Irq { number, name, arrived })
    };
    lines.filter_map(irq).collect()
}

/// The CPUs to which the kernel routes an interrupt: one CPU on most machines, the whole mask on
/// some.
fn route(source: &Source, irq: u32) -> Result<Option<CpuSet>, SourceError> {
    let folder = format!("/proc/irq/{irq}");
    let effective = source.cpus(&format!("{folder}/effective_affinity_list"))?;
    match effective.filter(|cpus| !cpus.is_empty()) {
        Some(cpus) => Ok(Some(cpus)),
        None => source.cpus(&format!("{folder}/smp_affinity_list")),
    }
}

/// `request lane 0`, `request lanes 0,2`.
fn request(lanes: &CpuSet) -> String {
    let plural = if lanes.len() == 1 { "" } else { "s" };
    format!("request lane{plural} {lanes}")
}

/// Where each mount of the unified hierarchy lists the CPUs in isolated cpuset partitions.
const PARTITIONS: [&str; 2] =
    ["/sys/fs/cgroup/cpuset.cpus.isolated", "/sys/fs/cgroup/unified/cpuset.cpus.isolated"];

pub(super) fn request_lanes_isolated(machine: &Machine<'_>) -> Found {
    let lanes = machine.request_lanes();
    let mut open = lanes.without(&machine.topology.isolated);
    for file in PARTITIONS {
        open = open.without(&machine.source.cpus(file)?.unwrap_or_default());
    }
    if open.is_empty() {
        return yes(format!("no thread is placed on {} by default", request(&lanes)));
    }
    let why = format!(
        "other threads may be placed on {}; the batch then naps for them as for the service",
        request(&open)
    );
    let fix = format!(
        "boot with isolcpus=domain,managed_irq,{open}, or run the service and batch in an isolated \
         cpuset partition that has both lanes"
    );
    warn(why, fix)
}

pub(super) fn nohz_full(machine: &Machine<'_>) -> Found {
    let lanes = machine.request_lanes();
    let ticking = lanes.without(&machine.topology.nohz_full);
    if ticking.is_empty() {
        return yes(format!("no tick interrupts what runs on {}", request(&lanes)));
    }
    let why = format!("the timer tick interrupts what runs on {}", request(&ticking));
    // The boot CPU keeps the time for all CPUs, so it ticks even in nohz_full.
    let possible = ticking.without(&CpuSet::from_iter([0]));
    if possible.is_empty() {
        let fix = "use a pair without CPU 0, which keeps the time for all, and boot with its \
                   request lane in nohz_full";
        return warn(why, fix);
    }
    let fix = format!(
        "boot with nohz_full={possible} (CONFIG_NO_HZ_FULL); it makes system calls and switches \
         there more expensive, so measure"
    );
    warn(why, fix)
}

pub(super) fn governor_performance(machine: &Machine<'_>) -> Found {
    let mut governors: BTreeMap<String, CpuSet> = BTreeMap::new();
    for cpu in machine.all_lanes().iter() {
        let governor = machine.source.text(&format!("{CPU}/cpu{cpu}/cpufreq/scaling_governor"))?;
        if let Some(governor) = governor {
            governors.entry(governor).or_default().insert(cpu);
        }
    }
    if governors.is_empty() {
        return yes("the kernel does not set the frequency of these lanes");
    }
    governors.remove("performance");
    if governors.is_empty() {
        return yes("the governor of all lanes is performance");
    }
    let list = governors.iter().map(|(governor, cpus)| format!("{governor} on CPUs {cpus}"));
    let list = list.collect::<Vec<_>>().join(", ");
    let why = format!("the frequency is not held high: {list}");
    warn(why, "use the governor performance (`cpupower frequency-set -g performance`)")
}

const CPU: &str = "/sys/devices/system/cpu";

/// The enabled idle states of a CPU, with the exit latencies in microseconds; none if the kernel
/// lists none.
fn idle_states(source: &Source, cpu: u32) -> Result<Vec<(String, u64)>, SourceError> {
    let mut states = Vec::new();
    for number in 0.. {
        let file =
            |name: &str| source.text(&format!("{CPU}/cpu{cpu}/cpuidle/state{number}/{name}"));
        let Some(name) = file("name")? else { break };
        if file("disable")?.as_deref().unwrap_or("0") != "0" {
            continue;
        }
        let latency = file("latency")?.and_then(|latency| latency.parse().ok());
        states.push((name, latency.unwrap_or(0)));
    }
    Ok(states)
}

const HALT_POLL: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";

/// A lane that polls while it idles takes half of the core that it should lend.
pub(super) fn idle_yields_core(machine: &Machine<'_>) -> Found {
    let source = machine.source;
    match machine.answers.idle_poll {
        Some(false) => {}
        Some(true) => {
            let why =
                "booted with idle=poll: an idle request lane spins, and slows its batch lane down";
            return warn(why, "boot without idle=poll");
        }
        None => {
            let why = "/proc/cmdline does not say whether the kernel was booted with idle=poll";
            return warn(why, "make /proc/cmdline readable for this user");
        }
    }
    for cpu in machine.request_lanes().iter() {
        let states = idle_states(source, cpu)?;
        // The kernel spins in the state POLL; every other state stops the lane.
        if !states.is_empty() && states.iter().all(|(name, _)| name == "POLL") {
            let why = format!(
                "all idle states of CPU {cpu} but POLL are off: an idle request lane spins, and \
                 slows its batch lane down"
            );
            let file = format!("{CPU}/cpu{cpu}/cpuidle/state1/disable");
            return warn(why, format!("switch one on (as root: `echo 0 > {file}`)"));
        }
    }
    // A guest may spin before it halts, to avoid the exit to the hypervisor.
    let driver = source.text(&format!("{CPU}/cpuidle/current_driver"))?;
    let governor = source.text(&format!("{CPU}/cpuidle/current_governor"))?;
    let limit = source.text(HALT_POLL)?.and_then(|limit| limit.parse::<u64>().ok());
    let haltpoll = [driver, governor].iter().all(|name| name.as_deref() == Some("haltpoll"));
    match limit {
        Some(limit_ns) if haltpoll && limit_ns > 0 => warn(
            format!("haltpoll: an idle request lane spins for up to {limit_ns} ns first"),
            format!("do without it (as root: `echo 0 > {HALT_POLL}`)"),
        ),
        _ => yes("an idle request lane stops and leaves the core to its sibling"),
    }
}

/// With a longer exit latency, waking a lane takes longer than a short request.
const SLOW_EXIT_US: u64 = 100;

pub(super) fn idle_wakes_fast(machine: &Machine<'_>) -> Found {
    if machine.answers.idle_poll == Some(true) {
        return yes("booted with idle=poll: an idle lane spins and never sleeps");
    }
    if machine.topology.hypervisor {
        return warn(
            "a virtual machine: an idle lane halts, and how long it takes to wake depends on the \
             hypervisor",
            "let the guest idle by itself (in QEMU, `-overcommit cpu-pm=on`), or use the machine \
             without a hypervisor",
        );
    }
    let mut states = Vec::new();
    for cpu in machine.request_lanes().iter() {
        let own = idle_states(machine.source, cpu)?.into_iter();
        states.extend(own.map(|(name, latency_us)| (cpu, name, latency_us)));
    }
    // Of equal states, the first.
    let slowest = states.iter().rev().max_by_key(|(_, _, latency_us)| latency_us);
    let Some((cpu, name, latency_us)) = slowest else {
        return yes("the kernel lists no idle states: lanes halt and wake at once");
    };
    let why = format!("leaving {name} takes CPU {cpu} up to {latency_us} us");
    if *latency_us < SLOW_EXIT_US {
        return yes(why);
    }
    let fix = format!(
        "if the first request after a pause is late: switch {name} off on the request lanes \
         (`disable` in {CPU}/cpu{cpu}/cpuidle); while a batch runs next to it the core is awake"
    );
    warn(why, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: counts come from the right columns, and names are those that people know. Method: CPU
    /// 1 is offline, so columns and CPUs differ; lines of each shape that kernels write.
    #[test]
    fn the_columns_of_online_cpus_are_read() {
        let table = "            CPU0       CPU2       CPU3\n\x20  8:          0          5        \
                       0   IO-APIC   8-edge      rtc0\n\x20 24:          7          0          9   \
                     PCI-MSIX-0000:00:04.0   0-edge      nvme0q0, nvme0q1\n\x20 25:          1     \
                          1          0   dummy\n\x20 26:          2\nNMI:          4          4    \
                           4   Non-maskable interrupts\nERR:          3\n";
        let irq = |number, name: &str, arrived| Irq { number, name: name.into(), arrived };
        let on = |cpus: &str| arrived(table, &cpus.parse().unwrap());
        assert_eq!(on("2"), [irq(8, "rtc0", 5), irq(25, "dummy", 1)]);
        assert_eq!(
            on("0,3"),
            [
                irq(24, "nvme0q0, nvme0q1", 16),
                irq(25, "dummy", 1),
                irq(26, "a device without a name", 2)
            ]
        );
        assert_eq!(on("1"), []);
        assert_eq!(arrived("", &"0".parse().unwrap()), []);
    }
}
