//! The facts that rules of the table of checks compare, by name.
//!
//! A fact is a word, or a word and a detail, as in `refused: EPERM`. Facts come from attempts, from
//! files, and from other facts. If a file cannot be read, only the checks that need its fact fail.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Display;

use super::attempts::ATTEMPTS;
use super::check::Machine;
use crate::cgroup::{self, Hierarchies, Version};
use crate::cpulist::CpuSet;
use crate::fence::rank::LEAST_WEIGHT;
use crate::lanes::{limits, remedy};
use crate::pair::Pair;
use crate::samplers::{self, EventConfig, Sampler, SamplerKind};
use crate::source::{Source, SourceError};

#[derive(Debug, Default)]
pub(super) struct Facts(BTreeMap<&'static str, Result<String, String>>);

/// Facts that are the text of a file.
const FILES: [(&str, &str); 8] = [
    ("autogroup", "/proc/sys/kernel/sched_autogroup_enabled"),
    ("perf-paranoid", "/proc/sys/kernel/perf_event_paranoid"),
    ("ptrace-scope", "/proc/sys/kernel/yama/ptrace_scope"),
    ("shmall", "/proc/sys/kernel/shmall"),
    ("shmmax", "/proc/sys/kernel/shmmax"),
    ("shmmni", "/proc/sys/kernel/shmmni"),
    ("umwait-c02", "/sys/devices/system/cpu/umwait_control/enable_c02"),
    ("unprivileged-bpf", "/proc/sys/kernel/unprivileged_bpf_disabled"),
];

type Derive = fn(&Machine<'_>) -> Result<String, SourceError>;

/// Facts that are derived from files.
const DERIVED: [(&str, Derive); 15] = [
    ("kernel", kernel),
    ("lockdown", lockdown),
    ("user-namespace", user_namespace),
    ("cgroup-cpu", |machine| controller(machine.source, "cpu")),
    ("cgroup-cpuset", |machine| controller(machine.source, "cpuset")),
    ("cgroup-freezer", |machine| controller(machine.source, "freezer")),
    ("home", home),
    ("clock", clock),
    ("sched-ext", sched_ext),
    ("isolation", isolation),
    ("open-lanes", |machine| open_lanes(machine).map(|lanes| lanes.to_string())),
    ("governor", governor),
    ("polls-only", polls_only),
    ("haltpoll", haltpoll),
    ("samplers", |machine| samplers(machine.source)),
];

impl Facts {
    /// Reads all files and makes all attempts. Fails only for a recording that lacks the result of
    /// an attempt.
    pub(super) fn of(machine: &Machine<'_>) -> Result<Self, SourceError> {
        let mut facts = Self::default();
        for (name, attempt) in ATTEMPTS {
            facts.set(name, machine.source.attempt(name, || attempt(machine))?);
        }
        for (name, path) in FILES {
            let text = machine.source.text(path);
            facts.set_read(name, text.map(|text| text.unwrap_or_else(|| "absent".to_owned())));
        }
        for (name, derive) in DERIVED {
            facts.set_read(name, derive(machine));
        }
        facts.set_lanes(machine);
        facts.set_privileges();
        facts.set_jvms();
        facts.set_irqs(machine);
        facts.set_slowest_exit(machine);
        Ok(facts)
    }

    fn set(&mut self, name: &'static str, fact: impl Display) {
        self.0.insert(name, Ok(fact.to_string()));
    }

    /// Sets a fact that is all detail. Its text may contain colons, so it gets the word `text`.
    fn set_text(&mut self, name: &'static str, text: &str) {
        self.set(name, format!("text: {text}"));
    }

    fn set_read(&mut self, name: &'static str, fact: Result<String, SourceError>) {
        self.0.insert(name, fact.map_err(|error| error.to_string()));
    }

    /// The word of a fact. An error names the file that cannot be read.
    pub(super) fn word(&self, name: &str) -> Result<&str, String> {
        let fact = self.get(name)?;
        Ok(fact.split_once(": ").map_or(fact, |(word, _)| word))
    }

    /// The detail of a fact, or its word if it has no detail.
    fn detail(&self, name: &str) -> Result<&str, String> {
        let fact = self.get(name)?;
        Ok(fact.split_once(": ").map_or(fact, |(_, detail)| detail))
    }

    fn get(&self, name: &str) -> Result<&str, String> {
        match self.0.get(name) {
            Some(Ok(fact)) => Ok(fact),
            Some(Err(unreadable)) => Err(unreadable.clone()),
            None => unreachable!("no fact {name:?}"),
        }
    }

    /// Replaces each `{fact}` in a text by the fact's detail.
    pub(super) fn fill(&self, text: &str) -> Result<String, String> {
        let mut filled = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').unwrap_or_default();
            filled += before;
            filled += self.detail(name)?;
            rest = after;
        }
        Ok(filled + rest)
    }

    fn set_lanes(&mut self, machine: &Machine<'_>) {
        let Machine { topology, lanes, .. } = machine;
        let limits = limits(topology);
        let clauses =
            |first: &str, more: &[String]| [&[first.to_owned()], more].concat().join("; ");
        let origin = if machine.by_hand { "given by hand" } else { "found in the topology" };
        let list = format!("{}, {origin}", first_of(&lanes.pairs, PAIRS_SHOWN, " ", " and"));
        if lanes.pairs.is_empty() {
            self.set("pairs", format!("none: {}", clauses("none", &limits)));
        } else if lanes.warnings.is_empty() {
            self.set("pairs", format!("sure: {}", clauses(&list, &limits)));
        } else {
            self.set("pairs", format!("doubtful: {}", clauses(&list, &lanes.warnings)));
        }
        self.set_text("remedy", &remedy(topology));
        let first = lanes.pairs.first();
        self.set("first-pair", first.map_or("0:1".to_owned(), Pair::to_string));
        let batch_lanes = lanes.pairs.iter().map(|pair| pair.batch.len()).sum::<usize>();
        self.set("batch-lanes", if batch_lanes > 1 { "several" } else { "one" });
        let siblings = topology.cores.iter().map(|core| core.lanes.len()).max().unwrap_or(0);
        let shown = if topology.shows_siblings() { "shown" } else { "hidden" };
        self.set("siblings", format!("{shown}: {siblings}"));
        self.set_text("smt-limit", limits.first().map_or("no siblings online", String::as_str));
        self.set("smt-control", topology.smt_control.as_deref().unwrap_or("absent"));
        self.set("hypervisor", if topology.hypervisor { "yes" } else { "no" });
        let request = machine.request_lanes();
        let ticking = request.without(&topology.nohz_full);
        let ticks = if ticking.is_empty() { "none" } else { "some" };
        let named = if ticking.is_empty() { &request } else { &ticking };
        self.set("ticks", format!("{ticks}: {}", lanes_text(named)));
        let tickless = ticking.without(&CpuSet::from_iter([0]));
        let none = tickless.is_empty();
        self.set("tickless", if none { "none".to_owned() } else { tickless.to_string() });
    }

    fn set_privileges(&mut self) {
        let lacks = |what: &str| self.get("capabilities").is_ok_and(|fact| fact.contains(what));
        let may = !lacks("unknown") && !lacks("CAP_PERFMON");
        self.set("perfmon", if may { "yes" } else { "no" });
        let note = match (self.word("filter-notes"), self.detail("filter-notes")) {
            (Ok("refused"), Ok(why)) => format!(
                "; eBPF does not show here when a program begins to filter its system calls \
                 ({why}), so code in the C library notes it: use --checks guard for a program that \
                 filters without that library, such as Go's"
            ),
            _ => String::new(),
        };
        self.set_text("filters-note", &note);
    }

    /// Sets how each running JVM can be observed, with the best available source.
    fn set_jvms(&mut self) {
        let running = self.get("running-jvms").unwrap_or_default().to_owned();
        let jvms: Vec<&str> = running.split(", ").filter(|jvm| !jvm.is_empty()).collect();
        let observed = |may_probe: bool| {
            let by = |jvm: &&str| match jvm.split(' ').next() {
                Some(pid) if may_probe && jvm.contains("probes") => {
                    format!("process {pid} by its probes")
                }
                Some(pid) if jvm.contains("counters") => format!("process {pid} by its counters"),
                pid => format!("process {} by the names of its threads", pid.unwrap_or_default()),
            };
            let all: Vec<String> = jvms.iter().map(by).collect();
            if all.is_empty() { "none runs now".to_owned() } else { all.join(", ") }
        };
        let all = jvms.iter().all(|jvm| jvm.contains("probes"));
        let word = if all { "built-with-probes" } else { "some-without" };
        self.set("jvms", format!("{word}: {}", observed(true)));
        self.set_text("jvms-without-probes", &observed(false));
    }

    fn set_irqs(&mut self, machine: &Machine<'_>) {
        let lanes = machine.request_lanes();
        let irqs = match device_irqs(machine.source, &lanes) {
            Ok(Some(irqs)) => irqs,
            Ok(None) => return self.set("irqs", "unknown"),
            Err(error) => return self.set_read("irqs", Err(error)),
        };
        let Some(busiest) = irqs.first() else {
            return self.set("irqs", format!("elsewhere: {}", lanes_text(&lanes)));
        };
        let shown = first_of(&irqs, IRQS_SHOWN, ", ", ", and");
        let there = lanes_text(&lanes);
        self.set("irqs", format!("here: {there} (times since boot): {shown}"));
        // Suggests the CPUs that are in no pair, or the batch lanes if every CPU is in a pair.
        let online = &machine.topology.online;
        let free = online.without(&machine.all_lanes());
        let others = if free.is_empty() { online.without(&lanes) } else { free };
        let file = format!("/proc/irq/{}/smp_affinity_list", busiest.number);
        self.set("irq-route", format!("{others} > {file}"));
    }

    fn set_slowest_exit(&mut self, machine: &Machine<'_>) {
        let exits = match idle_exits(machine) {
            Ok(exits) => exits,
            Err(error) => return self.set_read("idle-exit", Err(error)),
        };
        // `max_by_key` returns the last maximum, so `rev` makes it the first.
        let slowest = exits.iter().rev().max_by_key(|(_, _, latency_us)| latency_us);
        let Some((cpu, state, latency_us)) = slowest else {
            return self.set("idle-exit", "absent");
        };
        let word = if *latency_us < SLOW_EXIT_US { "fast" } else { "slow" };
        let why = format!("{word}: leaving {state} takes CPU {cpu} up to {latency_us} us");
        self.set("idle-exit", why);
        self.set("slowest-state", state);
        self.set("slowest-cpu", cpu);
    }
}

/// The most pairs that are printed. `elfen lanes` lists all.
const PAIRS_SHOWN: usize = 8;
/// The most interrupts that are printed, the most frequent first.
const IRQS_SHOWN: usize = 3;

/// The first items of a list, and the number of the others.
fn first_of<T: ToString>(items: &[T], shown: usize, separator: &str, and: &str) -> String {
    let first: Vec<String> = items.iter().take(shown).map(T::to_string).collect();
    match items.len().saturating_sub(shown) {
        0 => first.join(separator),
        more => format!("{}{and} {more} more", first.join(separator)),
    }
}

/// Names the lanes as in `request lane 0` or `request lanes 0,2`.
fn lanes_text(lanes: &CpuSet) -> String {
    let plural = if lanes.len() == 1 { "" } else { "s" };
    format!("request lane{plural} {lanes}")
}

const OLDEST_KERNEL: (u32, u32) = (5, 15);

fn kernel(machine: &Machine<'_>) -> Result<String, SourceError> {
    let release = machine.source.text("/proc/sys/kernel/osrelease")?.unwrap_or_default();
    Ok(match version(&release) {
        None => "unknown".to_owned(),
        Some(version) if version >= OLDEST_KERNEL => format!("new: {release}"),
        Some(_) => format!("old: {release}"),
    })
}

/// The first two numbers of a kernel release: 6 and 1 for `6.1.0-28-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The active level of kernel lockdown, which the file puts in brackets.
fn lockdown(machine: &Machine<'_>) -> Result<String, SourceError> {
    let levels = machine.source.text("/sys/kernel/security/lockdown")?.unwrap_or_default();
    let level = levels.split(['[', ']']).nth(1);
    Ok(level.unwrap_or("absent").to_owned())
}

fn user_namespace(machine: &Machine<'_>) -> Result<String, SourceError> {
    const EVERY_ID: [&str; 3] = ["0", "0", "4294967295"];
    let ids = machine.source.text("/proc/self/uid_map")?;
    let own = ids.is_some_and(|ids| !ids.split_whitespace().eq(EVERY_ID));
    Ok(if own { "own" } else { "initial" }.to_owned())
}

/// The cgroup version that has a controller, or the reason why no version has it.
fn controller(source: &Source, name: &'static str) -> Result<String, SourceError> {
    Ok(match mount_of(source, name)? {
        Ok((_, Version::One)) => "v1: cgroup version 1".to_owned(),
        Ok((_, Version::Two)) => "v2: cgroup version 2".to_owned(),
        Err(why) => format!("none: {why}"),
    })
}

/// The mount point of a controller.
fn mount_of(
    source: &Source,
    controller: &'static str,
) -> Result<Result<(String, Version), String>, SourceError> {
    let mounts = source.lines("/proc/self/mountinfo", |line| line.contains(" - cgroup"))?;
    let mounts = mounts.unwrap_or_default();
    let mut unread = None;
    let found = Hierarchies::mount_of(controller, &mounts, |point| {
        let has = source.text(&format!("{}/cgroup.controllers", point.display()));
        Ok(has
            .unwrap_or_else(|error| {
                unread = Some(error);
                None
            })
            .unwrap_or_default())
    });
    if let Some(error) = unread {
        return Err(error);
    }
    Ok(match found {
        Ok((point, version)) => Ok((point.display().to_string(), version)),
        Err(cgroup::Error::NoController(_)) if mounts.is_empty() => {
            Err("no whole hierarchy of cgroups is mounted here".to_owned())
        }
        Err(error) => Err(error.to_string()),
    })
}

/// The rank of system.slice, in which elfend.service runs. If root starts elfend by hand, its
/// guards are in root's cgroup instead.
fn home(machine: &Machine<'_>) -> Result<String, SourceError> {
    let Ok((point, _)) = mount_of(machine.source, "cpu")? else { return Ok("unknown".to_owned()) };
    let read = |file: &str| machine.source.text(&format!("{point}/system.slice/{file}"));
    let idle = read("cpu.idle")?;
    let weight = read("cpu.weight")?.and_then(|text| text.parse::<u64>().ok());
    Ok(match (idle.as_deref(), weight) {
        (Some("1"), _) => "idle".to_owned(),
        (_, Some(weight)) if weight < LEAST_WEIGHT => format!("light: {weight}"),
        (_, Some(weight)) => format!("weighs: {weight}"),
        (_, None) => "unknown".to_owned(),
    })
}

/// The devices that sample instructions. Without `swfilt`, IBS samples the kernel, too.
fn samplers(source: &Source) -> Result<String, SourceError> {
    let found = samplers::read(source)?;
    let Some(first) = found.first() else {
        return Ok(format!("none: {}", samplers::why_none(source)?));
    };
    let names: Vec<&str> = found.iter().map(|one| one.name).collect();
    let has_term = |one: &Sampler| one.set("swfilt", 1, &mut EventConfig::default()).is_some();
    let is_filtered = first.kind != SamplerKind::IbsOp || has_term(first);
    let word = if is_filtered { "some" } else { "unfiltered" };
    Ok(format!("{word}: {} ({})", first.kind.name(), names.join(", ")))
}

fn clock(machine: &Machine<'_>) -> Result<String, SourceError> {
    const CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    Ok(match machine.source.text(CLOCKS)? {
        Some(clocks) if clocks.split_whitespace().any(|clock| clock == "tsc") => "tsc".to_owned(),
        Some(clocks) => format!("others: {clocks}"),
        None => "absent".to_owned(),
    })
}

fn sched_ext(machine: &Machine<'_>) -> Result<String, SourceError> {
    let text = |file: &str| machine.source.text(&format!("/sys/kernel/sched_ext/{file}"));
    let Some(state) = text("state")? else { return Ok("absent".to_owned()) };
    // The folder of the loaded scheduler has the name `root`.
    let scheduler = text("root/ops")?;
    let scheduler = scheduler.as_deref().unwrap_or("a scheduler without a name");
    let all = text("switch_all")?.as_deref() != Some("0");
    let threads = if all { "all threads" } else { "threads of class SCHED_EXT" };
    Ok(format!("{state}: {state}: {scheduler} schedules {threads}"))
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Irq {
    number: u32,
    name: String,
    /// How often the interrupt arrived on request lanes since boot.
    arrived: u64,
}

impl Display for Irq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (IRQ {}: {})", self.name, self.number, self.arrived)
    }
}

/// The interrupts that are routed to a lane now and have arrived there since boot, the most
/// frequent first. `None` if the table of interrupts is missing. Per-CPU interrupts of the
/// architecture (timer, IPIs) have no route and do not count.
fn device_irqs(source: &Source, lanes: &CpuSet) -> Result<Option<Vec<Irq>>, SourceError> {
    let Some(table) = source.text("/proc/interrupts")? else { return Ok(None) };
    let mut irqs = Vec::new();
    for irq in arrived(&table, lanes) {
        // If the route is unknown, the interrupt may arrive on a lane again.
        if route(source, irq.number)?.is_none_or(|cpus| !cpus.and(lanes).is_empty()) {
            irqs.push(irq);
        }
    }
    irqs.sort_by_key(|irq| Reverse(irq.arrived));
    Ok(Some(irqs))
}

/// The numbered interrupts of /proc/interrupts that have arrived on `lanes`.
fn arrived(table: &str, lanes: &CpuSet) -> Vec<Irq> {
    let mut lines = table.lines();
    let header = lines.next().unwrap_or_default();
    // Offline CPUs have no column.
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
        // After the counts come the chip, the chip's number with its trigger, and the devices.
        let name = match words.get(columns.len()..).unwrap_or_default() {
            [] => "a device without a name".to_owned(),
            [_, _, devices @ ..] if !devices.is_empty() => devices.join(" "),
            words => words.join(" "),
        };
        (arrived > 0).then_some(Irq { number, name, arrived })
    };
    lines.filter_map(irq).collect()
}

/// The CPUs to which the kernel routes an interrupt. Most machines report one CPU, some the whole
/// affinity mask.
fn route(source: &Source, irq: u32) -> Result<Option<CpuSet>, SourceError> {
    let folder = format!("/proc/irq/{irq}");
    let effective = source.cpus(&format!("{folder}/effective_affinity_list"))?;
    match effective.filter(|cpus| !cpus.is_empty()) {
        Some(cpus) => Ok(Some(cpus)),
        None => source.cpus(&format!("{folder}/smp_affinity_list")),
    }
}

/// The files that list the CPUs of isolated cpuset partitions, for each usual mount of cgroup
/// version 2.
const PARTITIONS: [&str; 2] =
    ["/sys/fs/cgroup/cpuset.cpus.isolated", "/sys/fs/cgroup/unified/cpuset.cpus.isolated"];

/// The request lanes to which the kernel may move other threads, because nothing isolates them.
fn open_lanes(machine: &Machine<'_>) -> Result<CpuSet, SourceError> {
    let mut open = machine.request_lanes().without(&machine.topology.isolated);
    for file in PARTITIONS {
        open = open.without(&machine.source.cpus(file)?.unwrap_or_default());
    }
    Ok(open)
}

fn isolation(machine: &Machine<'_>) -> Result<String, SourceError> {
    let open = open_lanes(machine)?;
    Ok(if open.is_empty() {
        format!("complete: {}", lanes_text(&machine.request_lanes()))
    } else {
        format!("incomplete: {}", lanes_text(&open))
    })
}

fn governor(machine: &Machine<'_>) -> Result<String, SourceError> {
    let mut governors: BTreeMap<String, CpuSet> = BTreeMap::new();
    for cpu in machine.all_lanes().iter() {
        let governor = machine.source.text(&format!("{CPU}/cpu{cpu}/cpufreq/scaling_governor"))?;
        if let Some(governor) = governor {
            governors.entry(governor).or_default().insert(cpu);
        }
    }
    if governors.is_empty() {
        return Ok("absent".to_owned());
    }
    governors.remove("performance");
    if governors.is_empty() {
        return Ok("performance".to_owned());
    }
    let list = governors.iter().map(|(governor, cpus)| format!("{governor} on CPUs {cpus}"));
    Ok(format!("others: {}", list.collect::<Vec<_>>().join(", ")))
}

const CPU: &str = "/sys/devices/system/cpu";

/// The enabled idle states of a CPU, with their exit latencies in microseconds. Empty if the kernel
/// lists no states.
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

/// The first request lane that has POLL as its only enabled idle state. In POLL the kernel spins;
/// all other idle states halt the lane.
fn polls_only(machine: &Machine<'_>) -> Result<String, SourceError> {
    for cpu in machine.request_lanes().iter() {
        let states = idle_states(machine.source, cpu)?;
        if !states.is_empty() && states.iter().all(|(name, _)| name == "POLL") {
            return Ok(format!("cpu: {cpu}"));
        }
    }
    Ok("none".to_owned())
}

fn haltpoll(machine: &Machine<'_>) -> Result<String, SourceError> {
    let text = |file: &str| machine.source.text(file);
    let driver = text(&format!("{CPU}/cpuidle/current_driver"))?;
    let governor = text(&format!("{CPU}/cpuidle/current_governor"))?;
    let limit_ns = text("/sys/module/haltpoll/parameters/guest_halt_poll_ns")?;
    let limit_ns = limit_ns.and_then(|limit| limit.parse::<u64>().ok()).unwrap_or(0);
    let is_used = [driver, governor].iter().all(|name| name.as_deref() == Some("haltpoll"));
    Ok(if is_used && limit_ns > 0 { format!("on: {limit_ns}") } else { "off".to_owned() })
}

/// A longer exit latency is reported as slow: waking the lane takes longer than a short request.
const SLOW_EXIT_US: u64 = 100;

/// CPU, name and exit latency in microseconds of each idle state of each request lane.
fn idle_exits(machine: &Machine<'_>) -> Result<Vec<(u32, String, u64)>, SourceError> {
    let mut exits = Vec::new();
    for cpu in machine.request_lanes().iter() {
        let states = idle_states(machine.source, cpu)?.into_iter();
        exits.extend(states.map(|(name, latency_us)| (cpu, name, latency_us)));
    }
    Ok(exits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: counts come from the right columns, and interrupts have the names of their devices.
    /// Method: CPU 1 is offline, so columns and CPU numbers differ; lines of each shape that
    /// kernels write.
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

    /// Goal: releases are parsed as kernels write them. Method: one release of each shape.
    #[test]
    fn releases_are_parsed_as_kernels_write_them() {
        let releases = [
            ("6.1.0-28-amd64", Some((6, 1))),
            ("5.15.0-1051-aws", Some((5, 15))),
            ("6.12-rc3", Some((6, 12))),
            ("7.0", Some((7, 0))),
            ("six", None),
            ("", None),
        ];
        for (release, numbers) in releases {
            assert_eq!(version(release), numbers, "{release}");
        }
    }
}
