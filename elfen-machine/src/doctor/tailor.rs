//! What `elfen tailor` can record here, and with which rights, and how much it sees of each running
//! JVM. A service's own marks need nothing.

use super::answers::{Jvm, KernelTypes, Tracepoints};
use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "tailor-sched", enough: Enough::No, examine: sched },
    Mechanism { name: "tailor-sockets", enough: Enough::No, examine: sockets },
    Mechanism { name: "tailor-full", enough: Enough::No, examine: full },
    Mechanism { name: "tailor-jvm", enough: Enough::No, examine: jvm },
];

const WITHOUT: &str = "only marks (`--service`) give queue and service times";

/// Why this process cannot record any event of the kernel.
fn obstacle(machine: &Machine<'_>) -> Option<Finding> {
    if matches!(machine.answers.kernel_types, KernelTypes::Absent | KernelTypes::Unreadable(_)) {
        let why = format!(
            "the kernel does not describe its types, so nothing can be attached; {WITHOUT}"
        );
        return Some(Finding::no(why, "boot a kernel with CONFIG_DEBUG_INFO_BTF"));
    }
    let may = machine.answers.capabilities.is_none_or(|may| may.bpf && may.perfmon);
    (!may).then(|| {
        let why = format!("the kernel shows its events only to privileged processes; {WITHOUT}");
        Finding::no(why, "run it as root, or with CAP_BPF and CAP_PERFMON")
    })
}

fn of(
    machine: &Machine<'_>,
    part: fn(&Tracepoints) -> &[String],
    there: &str,
    lacking: &str,
) -> Finding {
    let Some(tracepoints) = &machine.answers.tracepoints else {
        return Finding::warn("the recording does not say", "record the machine again");
    };
    if let Some(obstacle) = obstacle(machine) {
        return obstacle;
    }
    match part(tracepoints) {
        [] => Finding::yes(there),
        lacks => Finding::no(
            format!("the kernel has no tracepoint {}; {lacking}", lacks.join(", ")),
            "boot a newer kernel",
        ),
    }
}

fn sched(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let there = "running, sleeping and waking of threads is recorded (`--detail sched`)";
    Ok(of(machine, |of| &of.sched_lacks, there, WITHOUT))
}

fn sockets(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let there = "requests of unmodified services are recognised by their sockets (`--port`)";
    let lacking = "name a service that marks its requests (`--service`)";
    Ok(of(machine, |of| &of.sockets_lack, there, lacking))
}

fn full(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let there = "interrupts, page faults and waits in the kernel are recorded (`--detail full`)";
    match &machine.answers.tracepoints {
        Some(Tracepoints { full_lacks, .. })
            if !full_lacks.is_empty() && obstacle(machine).is_none() =>
        {
            let lacks = full_lacks.join(", ");
            let why = format!("`--detail full` lacks what this kernel does not report: {lacks}");
            Ok(Finding::warn(why, "boot a newer kernel, or one with these tracepoints"))
        }
        _ => Ok(of(machine, |of| &of.full_lacks, there, "only `--detail sched` is possible")),
    }
}

/// How a JVM is observed, by the best possible means.
fn means(jvm: &Jvm, probes: bool) -> &'static str {
    match jvm {
        Jvm { has_probes: true, .. } if probes => "by its probes",
        Jvm { has_counters: true, .. } => "by its counters",
        _ => "by the names of its threads",
    }
}

fn jvm(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let Some(tracepoints) = &machine.answers.tracepoints else {
        return Ok(Finding::warn("the recording does not say", "record the machine again"));
    };
    let probes = tracepoints.uprobes && obstacle(machine).is_none();
    let observed: Vec<String> = tracepoints
        .jvms
        .iter()
        .map(|jvm| format!("process {} {}", jvm.process, means(jvm, probes)))
        .collect();
    let running = match observed.as_slice() {
        [] => "none runs now".to_owned(),
        observed => observed.join(", "),
    };
    let poor = |jvm: &Jvm| !means(jvm, probes).ends_with("probes");
    Ok(match (probes, tracepoints.jvms.iter().any(poor)) {
        (true, false) => Finding::yes(format!(
            "JVMs are observed by their probes, if they were built with probes: {running}"
        )),
        (true, true) => Finding::warn(
            format!("not every JVM has probes: {running}"),
            "use a JVM that was built with probes (Debian's is), and leave -XX:+UsePerfData on",
        ),
        (false, _) => Finding::warn(
            format!("no probes can be set here, so only counters and names are left: {running}"),
            "run it as root, on a kernel with uprobes",
        ),
    })
}
