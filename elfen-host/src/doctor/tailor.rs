//! What `elfen tailor` can see here, and as whom; and what each JVM that runs lets it see. Marks of
//! a service's own take nothing.

use super::answers::{Jvm, KernelTypes, Tracepoints};
use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "tailor-sched", enough: Enough::No, examine: sched },
    Mechanism { name: "tailor-sockets", enough: Enough::No, examine: sockets },
    Mechanism { name: "tailor-full", enough: Enough::No, examine: full },
    Mechanism { name: "tailor-jvm", enough: Enough::No, examine: jvm },
];

const WITHOUT: &str = "marks alone (`--service`) give queue and service times";

/// What stands between this process and any event of the kernel's.
fn obstacle(machine: &Machine<'_>) -> Option<Finding> {
    if matches!(machine.answers.kernel_types, KernelTypes::Absent | KernelTypes::Unreadable(_)) {
        let why = format!(
            "the kernel does not describe its types, so nothing can be attached; {WITHOUT}"
        );
        return Some(Finding::no(why, "boot a kernel with CONFIG_DEBUG_INFO_BTF"));
    }
    let may = machine.answers.capabilities.is_none_or(|may| may.bpf && may.perfmon);
    (!may).then(|| {
        let why = format!("the kernel shows its events to nobody without rights; {WITHOUT}");
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
        return Finding::warn("the recording does not say", "record the machine anew");
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
    let there = "who runs, sleeps and wakes whom is written down (`--detail sched`)";
    Ok(of(machine, |of| &of.sched_lacks, there, WITHOUT))
}

fn sockets(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let there = "requests of services that nobody changed are told by their sockets (`--port`)";
    let lacking = "name a service that marks its requests (`--service`)";
    Ok(of(machine, |of| &of.sockets_lack, there, lacking))
}

fn full(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let there = "interrupts, page faults and the kernel's own waits are as well (`--detail full`)";
    match &machine.answers.tracepoints {
        Some(Tracepoints { full_lacks, .. })
            if !full_lacks.is_empty() && obstacle(machine).is_none() =>
        {
            let lacks = full_lacks.join(", ");
            let why = format!("`--detail full` is without what the kernel does not tell: {lacks}");
            Ok(Finding::warn(why, "boot a newer kernel, or one that was built with them"))
        }
        _ => Ok(of(machine, |of| &of.full_lacks, there, "`--detail sched` is what there is")),
    }
}

/// How much of a JVM is seen, the best way first.
fn way(jvm: &Jvm, probes: bool) -> &'static str {
    match jvm {
        Jvm { has_probes: true, .. } if probes => "by its probes",
        Jvm { has_counters: true, .. } => "by its counters",
        _ => "by the names of its threads",
    }
}

fn jvm(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let Some(tracepoints) = &machine.answers.tracepoints else {
        return Ok(Finding::warn("the recording does not say", "record the machine anew"));
    };
    let probes = tracepoints.uprobes && obstacle(machine).is_none();
    let told: Vec<String> = tracepoints
        .jvms
        .iter()
        .map(|jvm| format!("process {} {}", jvm.process, way(jvm, probes)))
        .collect();
    let running = match told.as_slice() {
        [] => "none runs now".to_owned(),
        told => told.join(", "),
    };
    let poor = |jvm: &Jvm| !way(jvm, probes).ends_with("probes");
    Ok(match (probes, tracepoints.jvms.iter().any(poor)) {
        (true, false) => Finding::yes(format!(
            "JVMs are listened to by their probes, where they were built with them: {running}"
        )),
        (true, true) => Finding::warn(
            format!("not each JVM has probes: {running}"),
            "use one that was built with them (Debian's is), and leave -XX:+UsePerfData on",
        ),
        (false, _) => Finding::warn(
            format!(
                "no probes can be set here, so counters and names are what there is: {running}"
            ),
            "run it as root, on a kernel with uprobes",
        ),
    })
}
