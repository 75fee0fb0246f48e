//! Whether Elfen can find out which thread runs on a request lane, and count the instructions
//! there. The sources of the task map are in the order in which they are tried.

use super::answers::{
    Attach, Counting, Cycles, Handed, KernelTypes, Nanonap, Segment, SegmentOutcome,
};
use super::finding::{Enough, Finding, Machine, Mechanism};
use super::permission::{self, Rules};
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "kernel-version", enough: Enough::No, examine: kernel_version },
    Mechanism { name: "kernel-types", enough: Enough::No, examine: kernel_types },
    Mechanism { name: "sched-switch", enough: Enough::No, examine: sched_switch },
    Mechanism { name: "task-map-elfend", enough: Enough::Yes, examine: handed },
    Mechanism { name: "task-map-attach", enough: Enough::Yes, examine: attach },
    Mechanism { name: "service-page", enough: Enough::If(A_SERVICE), examine: service_page },
    Mechanism { name: "nanonap-module", enough: Enough::Yes, examine: nanonap },
    Mechanism { name: "hardware-counters", enough: Enough::No, examine: counters },
];

const A_SERVICE: &str =
    "for requests that a service publishes (`elfen run --signal service --service NAME`)";

const OLDEST_KERNEL: (u32, u32) = (5, 15);
const BOOT_NEWER: &str = "boot Linux 5.15 or newer";

fn kernel_version(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let release = machine.source.text("/proc/sys/kernel/osrelease")?;
    let Some((release, version)) =
        release.and_then(|text| permission::version(&text).map(|version| (text, version)))
    else {
        let why = "/proc/sys/kernel/osrelease does not say which kernel this is";
        return Ok(Finding::warn(why, "mount /proc (as root: `mount -t proc proc /proc`)"));
    };
    let works = machine.answers.attach == Attach::Attached;
    Ok(if version >= OLDEST_KERNEL {
        Finding::yes(format!("Linux {release}; 5.15 is enough"))
    } else if works {
        // Vendors backport eBPF to kernels that keep an old version number.
        let why = format!("Linux {release} is older than 5.15, but the program attaches");
        Finding::warn(why, BOOT_NEWER)
    } else {
        Finding::no(format!("Linux {release} is older than 5.15"), BOOT_NEWER)
    })
}

const BUILD_WITH_BTF: &str = "use a kernel built with CONFIG_DEBUG_INFO_BTF";

fn kernel_types(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.kernel_types {
        KernelTypes::Absent => {
            Finding::no("there is no /sys/kernel/btf/vmlinux (BTF)", BUILD_WITH_BTF)
        }
        KernelTypes::Unreadable(error) => {
            let fix = "make /sys/kernel/btf/vmlinux readable for this user";
            Finding::no(format!("/sys/kernel/btf/vmlinux: {error}"), fix)
        }
        KernelTypes::WithoutSchedSwitch | KernelTypes::WithSchedSwitch => {
            Finding::yes("the kernel describes its types in /sys/kernel/btf/vmlinux (BTF)")
        }
    })
}

fn sched_switch(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.kernel_types {
        KernelTypes::WithSchedSwitch => Finding::yes("the kernel has the sched_switch tracepoint"),
        KernelTypes::WithoutSchedSwitch => {
            let why = "the kernel was built without the sched_switch tracepoint";
            Finding::no(why, "use a kernel built with CONFIG_TRACEPOINTS and CONFIG_BPF_EVENTS")
        }
        KernelTypes::Absent | KernelTypes::Unreadable(_) => {
            Finding::no("only the kernel's types show whether it exists", "see kernel-types")
        }
    })
}

fn attach(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let answers = machine.answers;
    Ok(match &answers.attach {
        Attach::Attached => {
            Finding::yes("the sched_switch program was attached, and detached again")
        }
        Attach::NotPermitted => permission::attaching(answers.capabilities, &Rules::read(machine)?),
        Attach::NoKernelTypes => {
            Finding::no("the kernel does not describe its types", BUILD_WITH_BTF)
        }
        Attach::Refused(why) => {
            let rules = Rules::read(machine)?;
            let fix = if rules.hides_the_kernel() {
                "boot with lockdown=integrity or none: confidentiality keeps programs from reading \
                 the kernel"
            } else {
                "use Linux 5.15 or newer; if it is, report what `elfen doctor --record` prints"
            };
            Finding::no(why.as_str(), fix)
        }
    })
}

fn handed(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.handed {
        Handed::Mapped => Finding::yes("elfend gives it to this process, which can map it"),
        Handed::NotUp => Finding::no("no elfend answers on this machine", START_ELFEND),
        Handed::Refused { why, fix } => Finding::no(why.as_str(), fix.as_str()),
        Handed::Unusable(why) => {
            Finding::no(why.as_str(), "as root, `systemctl restart elfend`, of the version in use")
        }
    })
}

/// For unprivileged users, who need root's help.
const START_ELFEND: &str = "have root start elfend, with lanes in /etc/elfen/elfend.toml, and add \
                            this user to group elfen";

fn service_page(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let limit = |name: &str| {
        let value = machine.source.text(&format!("/proc/sys/kernel/{name}"))?;
        Ok::<_, SourceError>(value.unwrap_or_else(|| "unknown".to_owned()))
    };
    let shmmax = limit("shmmax")?;
    let shmall = limit("shmall")?;
    let shmmni = limit("shmmni")?;
    let Segment { bytes, outcome } = &machine.answers.segment;
    let segment = format!("a segment of {bytes} bytes of System V shared memory");
    Ok(match outcome {
        SegmentOutcome::Made => Finding::yes(format!("{segment} was made, and removed again")),
        SegmentOutcome::TooLarge => Finding::no(
            format!("{segment} was refused: kernel.shmmax is {shmmax} bytes"),
            format!("raise it (as root: `sysctl kernel.shmmax={bytes}`)"),
        ),
        SegmentOutcome::Exhausted => Finding::no(
            format!(
                "{segment} was refused: kernel.shmmni ({shmmni} segments) or kernel.shmall \
                 ({shmall} pages) is reached, or memory is short"
            ),
            "remove unused segments (`ipcs -m`, `ipcrm -m ID`), or raise these limits",
        ),
        SegmentOutcome::Refused(why) => Finding::no(
            format!("{segment} was refused: {why}"),
            "use a kernel built with CONFIG_SYSVIPC, and a seccomp profile that allows shmget(2)",
        ),
    })
}

/// The module's task map is used where no program can be attached.
fn nanonap(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.nanonap {
        Nanonap::Opened { ties, .. } => {
            Finding::yes(format!("/dev/nanonap opens; pairs of lanes that wake each other: {ties}"))
        }
        Nanonap::Absent => {
            let signed = if Rules::read(machine)?.wants_signatures() {
                "; kernel lockdown requires a signature"
            } else {
                ""
            };
            let fix = "build and load it (in kernel/nanonap, as root: `make install` and `modprobe \
                       nanonap`)";
            Finding::no(
                "there is no /dev/nanonap: the module is not loaded",
                format!("{fix}{signed}"),
            )
        }
        Nanonap::NotPermitted => Finding::no(
            "this user may not open /dev/nanonap",
            "add the user to the device's group (as root: `usermod -aG elfen USER`)",
        ),
        Nanonap::Refused(why) => Finding::no(why.as_str(), "load the module of the version in use"),
    })
}

/// The alternative without hardware counters.
const INSTEAD: &str = "so dynamic-budget needs a service that publishes its own counters";

/// `dynamic-budget` uses the instructions of the lane; cycles stand for all hardware counters here.
fn counters(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let paranoid = machine.source.text("/proc/sys/kernel/perf_event_paranoid")?;
    let paranoid = paranoid.unwrap_or_else(|| "unknown".to_owned());
    let permit = "run as root or with CAP_PERFMON, or set kernel.perf_event_paranoid";
    let level = format!("kernel.perf_event_paranoid is {paranoid}");
    let may = machine.answers.capabilities.is_some_and(|has| has.perfmon);
    let Cycles { of_this_thread, of_a_lane } = &machine.answers.cycles;
    Ok(match (of_this_thread, of_a_lane) {
        (_, Counting::Counts) => Finding::yes("cycles of a whole lane can be counted"),
        (Counting::NoCall, _) | (_, Counting::NoCall) => Finding::no(
            format!("the kernel has no perf_event_open(2), {INSTEAD}"),
            "use a kernel built with CONFIG_PERF_EVENTS",
        ),
        (Counting::NoCounter(error), _) | (Counting::Counts, Counting::NoCounter(error)) => {
            let why =
                format!("no hardware counts cycles here (perf_event_open: {error}), {INSTEAD}");
            let fix = if machine.topology.hypervisor {
                "use a machine, or an instance type, that shows its PMU to virtual machines"
            } else {
                "switch the CPU's performance counters on in the firmware"
            };
            Finding::no(why, fix)
        }
        (Counting::Counts, Counting::NotPermitted) => Finding::warn(
            format!("only own threads can be counted, not a whole lane: {level}"),
            format!("{permit} to 0 or less"),
        ),
        (Counting::NotPermitted, _) if may => Finding::no(
            format!("not permitted although this process has CAP_PERFMON, {INSTEAD}"),
            "allow perf_event_open(2) in the seccomp profile or the security module's policy",
        ),
        (Counting::NotPermitted, _) => Finding::no(
            format!("not permitted: {level}, {INSTEAD}"),
            format!("{permit} to 2 for own threads, 0 for whole lanes"),
        ),
    })
}
