//! Interrupts that arrive on a request lane.
//!
//! An interrupt counts if the kernel routes it there now and it has arrived there since boot. The
//! architecture's per-CPU interrupts (timer, IPIs) have no route and do not count.

use super::finding::{Finding, Machine, request};
use crate::cpulist::CpuSet;
use crate::source::{Source, SourceError};

#[derive(Clone, PartialEq, Eq, Debug)]
struct Irq {
    number: u32,
    name: String,
    /// How often it arrived on request lanes since boot.
    arrived: u64,
}

/// How many interrupts are named, the most frequent ones.
const SHOWN: usize = 3;

pub(super) fn elsewhere(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let lanes = machine.request_lanes();
    let Some(table) = machine.source.text("/proc/interrupts")? else {
        let fix = "mount /proc (as root: `mount -t proc proc /proc`)";
        return Ok(Finding::warn("there is no /proc/interrupts", fix));
    };
    let mut irqs = Vec::new();
    for irq in arrived(&table, &lanes) {
        // If the route is unknown, the interrupt may come again.
        if route(machine.source, irq.number)?.is_none_or(|cpus| !cpus.and(&lanes).is_empty()) {
            irqs.push(irq);
        }
    }
    if irqs.is_empty() {
        return Ok(Finding::yes(format!("no device interrupts {}", request(&lanes))));
    }
    irqs.sort_by_key(|irq| std::cmp::Reverse(irq.arrived));
    let shown: Vec<String> = irqs.iter().take(SHOWN).map(Irq::to_string).collect();
    let more = match irqs.len() - shown.len() {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let why = format!(
        "devices interrupt {} (times since boot): {}{more}",
        request(&lanes),
        shown.join(", ")
    );
    let others = other_cpus(machine);
    let busiest = irqs[0].number;
    let fix = format!(
        "route them to other CPUs where possible (as root: `echo {others} > \
         /proc/irq/{busiest}/smp_affinity_list`), and keep irqbalance from undoing it"
    );
    Ok(Finding::warn(why, fix))
}

impl std::fmt::Display for Irq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (IRQ {}: {})", self.name, self.number, self.arrived)
    }
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
        let name = name_of(words.get(columns.len()..).unwrap_or_default());
        (arrived > 0).then_some(Irq { number, name, arrived })
    };
    lines.filter_map(irq).collect()
}

/// The device's name. Behind the counts are the chip, the chip's number with its trigger, and the
/// devices.
fn name_of(words: &[&str]) -> String {
    match words {
        [] => "a device without a name".to_owned(),
        [_, _, devices @ ..] if !devices.is_empty() => devices.join(" "),
        words => words.join(" "),
    }
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

/// CPUs in no pair; if there are none, the batch lanes.
fn other_cpus(machine: &Machine<'_>) -> CpuSet {
    let online = &machine.topology.online;
    let free = online.without(&machine.all_lanes());
    if free.is_empty() { online.without(&machine.request_lanes()) } else { free }
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
