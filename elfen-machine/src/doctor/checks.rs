//! The probes of all checks but conflicts, in the order of the report. Each returns why, and what
//! to do about it.

use super::answers::{
    Attach, Counting, Handed, Jvm, KernelTypes, Nanonap, Segment, SegmentOutcome, Tracepoints,
};
use super::finding::{Found, Machine, first_of, no, warn, yes};
use crate::cgroup::{self, Hierarchies, Version};
use crate::fence::rank::LEAST_WEIGHT;
use crate::lanes::{SWITCH_SMT_ON, limits, remedy};
use crate::pair::Pair;
use crate::source::{Source, SourceError};

// Lanes: pairs, and the SMT that makes them.

/// More pairs are listed by `elfen lanes`.
const PAIRS_SHOWN: usize = 8;

pub(super) fn pairs(machine: &Machine<'_>) -> Found {
    let Machine { lanes, topology, .. } = machine;
    let clauses = |first: &str, more: &[String]| [&[first.to_owned()], more].concat().join("; ");
    let origin = if machine.by_hand { "given by hand" } else { "found in the topology" };
    let list = format!("{}, {origin}", first_of(&lanes.pairs, PAIRS_SHOWN, " ", " and"));
    if lanes.pairs.is_empty() {
        no(clauses("none", &limits(topology)), remedy(topology))
    } else if lanes.warnings.is_empty() {
        yes(clauses(&list, &limits(topology)))
    } else {
        let fix = "use the pairs that `elfen lanes` finds, or make sure that these share a core";
        warn(clauses(&list, &lanes.warnings), fix)
    }
}

pub(super) fn smt(machine: &Machine<'_>) -> Found {
    let topology = machine.topology;
    if topology.shows_siblings() {
        let lanes = topology.cores.iter().map(|core| core.lanes.len()).max().unwrap_or(0);
        return yes(format!("cores have up to {lanes} lanes online"));
    }
    let fix = match topology.smt_control.as_deref() {
        Some("off") => SWITCH_SMT_ON,
        Some("forceoff") => "boot without `nosmt=force`",
        Some("on") => "bring the siblings online",
        _ if topology.hypervisor => {
            "use a virtual machine that shows siblings (in QEMU, `-smp` with `threads=2`) and \
             whose vCPUs are pinned to them"
        }
        _ => "switch SMT on in the firmware, or use a CPU that has it",
    };
    no(limits(topology).into_iter().next().unwrap_or_else(|| "no siblings online".into()), fix)
}

// Signals: which thread runs on a request lane, and how many instructions it executes.

const OLDEST_KERNEL: (u32, u32) = (5, 15);
const BOOT_NEWER: &str = "boot Linux 5.15 or newer";
pub(super) const MOUNT_PROC: &str = "mount /proc (as root: `mount -t proc proc /proc`)";

/// The kernel's release, and its first two numbers: of `6.1.0-28-amd64`, 6 and 1.
type Release = (String, (u32, u32));

fn release(source: &Source) -> Result<Option<Release>, SourceError> {
    let release = source.text("/proc/sys/kernel/osrelease")?;
    Ok(release.and_then(|release| version(&release).map(|version| (release, version))))
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn kernel_version(machine: &Machine<'_>) -> Found {
    let Some((release, version)) = release(machine.source)? else {
        return warn("/proc/sys/kernel/osrelease does not say which kernel this is", MOUNT_PROC);
    };
    if version >= OLDEST_KERNEL {
        yes(format!("Linux {release}; 5.15 is enough"))
    } else if machine.answers.attach == Attach::Attached {
        // Vendors backport eBPF to kernels that keep an old version number.
        let why = format!("Linux {release} is older than 5.15, but the program attaches");
        warn(why, BOOT_NEWER)
    } else {
        no(format!("Linux {release} is older than 5.15"), BOOT_NEWER)
    }
}

const BUILD_WITH_BTF: &str = "use a kernel built with CONFIG_DEBUG_INFO_BTF";

pub(super) fn kernel_types(machine: &Machine<'_>) -> Found {
    match &machine.answers.kernel_types {
        KernelTypes::Absent => no("there is no /sys/kernel/btf/vmlinux (BTF)", BUILD_WITH_BTF),
        KernelTypes::Unreadable(error) => no(
            format!("/sys/kernel/btf/vmlinux: {error}"),
            "make /sys/kernel/btf/vmlinux readable for this user",
        ),
        KernelTypes::WithoutSchedSwitch | KernelTypes::WithSchedSwitch => {
            yes("the kernel describes its types in /sys/kernel/btf/vmlinux (BTF)")
        }
    }
}

pub(super) fn sched_switch(machine: &Machine<'_>) -> Found {
    match &machine.answers.kernel_types {
        KernelTypes::WithSchedSwitch => yes("the kernel has the sched_switch tracepoint"),
        KernelTypes::WithoutSchedSwitch => no(
            "the kernel was built without the sched_switch tracepoint",
            "use a kernel built with CONFIG_TRACEPOINTS and CONFIG_BPF_EVENTS",
        ),
        KernelTypes::Absent | KernelTypes::Unreadable(_) => {
            no("only the kernel's types show whether it exists", "see kernel-types")
        }
    }
}

/// For unprivileged users, who need root's help.
const START_ELFEND: &str = "have root start elfend, with lanes in /etc/elfen/elfend.toml, and add \
                            this user to group elfen";

pub(super) fn task_map_elfend(machine: &Machine<'_>) -> Found {
    match &machine.answers.handed {
        Handed::Mapped => yes("elfend gives it to this process, which can map it"),
        Handed::NotUp => no("no elfend answers on this machine", START_ELFEND),
        Handed::Refused { why, fix } => no(why, fix),
        Handed::Unusable(why) => {
            no(why, "as root, `systemctl restart elfend`, of the version in use")
        }
    }
}

pub(super) fn task_map_attach(machine: &Machine<'_>) -> Found {
    match &machine.answers.attach {
        Attach::Attached => yes("the sched_switch program was attached, and detached again"),
        Attach::NotPermitted => not_permitted(machine),
        Attach::NoKernelTypes => no("the kernel does not describe its types", BUILD_WITH_BTF),
        Attach::Refused(why) if is_locked(machine, "confidentiality")? => no(
            why,
            "boot with lockdown=integrity or none: confidentiality keeps programs from reading the \
             kernel",
        ),
        Attach::Refused(why) => no(
            why,
            "use Linux 5.15 or newer; if it is, report what `elfen doctor --dump-machine` prints",
        ),
    }
}

/// Whether kernel lockdown is at this level: the file has it in brackets.
fn is_locked(machine: &Machine<'_>, level: &str) -> Result<bool, SourceError> {
    let levels = machine.source.text("/sys/kernel/security/lockdown")?;
    Ok(levels.is_some_and(|levels| levels.contains(&format!("[{level}]"))))
}

const EVERY_ID: [&str; 3] = ["0", "0", "4294967295"];

/// Why the kernel does not let this process attach a program, and what to do.
///
/// bpf(2) returns EPERM for every reason. The reason is derived from the capabilities of this
/// process and the rules of the machine, the most likely one first.
fn not_permitted(machine: &Machine<'_>) -> Found {
    let source = machine.source;
    let fix = "see task-map-elfend above; or run as root, or with CAP_BPF and CAP_PERFMON";
    let Some(has) = machine.answers.capabilities else {
        let why = "not permitted, and /proc does not say which capabilities this process has";
        return no(why, fix);
    };
    let missing = match (has.bpf, has.perfmon) {
        (true, true) => "",
        (false, true) => "CAP_BPF",
        (true, false) => "CAP_PERFMON",
        (false, false) => "CAP_BPF and CAP_PERFMON",
    };
    if !missing.is_empty() {
        // Explains the setting that users tend to suspect first.
        let setting = source.text("/proc/sys/kernel/unprivileged_bpf_disabled")?;
        let setting = setting.map_or_else(String::new, |value| {
            format!(
                " (kernel.unprivileged_bpf_disabled is {value}, and no value of it permits \
                 programs that trace)"
            )
        });
        return no(format!("not permitted: this process lacks {missing}{setting}"), fix);
    }
    let ids = source.text("/proc/self/uid_map")?;
    if ids.is_some_and(|ids| !ids.split_whitespace().eq(EVERY_ID)) {
        return no(
            "not permitted: the capabilities of this process count only in its user namespace",
            "run elfend outside of the container, or this process with capabilities of the initial \
             user namespace",
        );
    }
    if is_locked(machine, "confidentiality")? {
        return no(
            "not permitted although this process has CAP_BPF and CAP_PERFMON: kernel lockdown is \
             at confidentiality, or a seccomp filter or a security module forbids bpf(2)",
            "boot with lockdown=integrity or none, or allow bpf(2) in the seccomp profile",
        );
    }
    no(
        "not permitted although this process has CAP_BPF and CAP_PERFMON: a seccomp filter or a \
         security module forbids bpf(2)",
        "allow bpf(2) in the seccomp profile, or in the security module's policy",
    )
}

pub(super) fn service_page(machine: &Machine<'_>) -> Found {
    let setting = |name: &str| {
        let value = machine.source.text(&format!("/proc/sys/kernel/{name}"))?;
        Ok::<_, SourceError>(value.unwrap_or_else(|| "unknown".to_owned()))
    };
    let shmmax = setting("shmmax")?;
    let shmall = setting("shmall")?;
    let shmmni = setting("shmmni")?;
    let Segment { bytes, outcome } = &machine.answers.segment;
    let segment = format!("a segment of {bytes} bytes of System V shared memory");
    match outcome {
        SegmentOutcome::Made => yes(format!("{segment} was made, and removed again")),
        SegmentOutcome::TooLarge => no(
            format!("{segment} was refused: kernel.shmmax is {shmmax} bytes"),
            format!("raise it (as root: `sysctl kernel.shmmax={bytes}`)"),
        ),
        SegmentOutcome::Exhausted => no(
            format!(
                "{segment} was refused: kernel.shmmni ({shmmni} segments) or kernel.shmall \
                 ({shmall} pages) is reached, or memory is short"
            ),
            "remove unused segments (`ipcs -m`, `ipcrm -m ID`), or raise these limits",
        ),
        SegmentOutcome::Refused(why) => no(
            format!("{segment} was refused: {why}"),
            "use a kernel built with CONFIG_SYSVIPC, and a seccomp profile that allows shmget(2)",
        ),
    }
}

/// The module's task map is used where no program can be attached.
pub(super) fn nanonap_module(machine: &Machine<'_>) -> Found {
    match &machine.answers.nanonap {
        Nanonap::Opened { ties, .. } => {
            yes(format!("/dev/nanonap opens; pairs of lanes that wake each other: {ties}"))
        }
        Nanonap::Absent => {
            let locked = is_locked(machine, "integrity")? || is_locked(machine, "confidentiality")?;
            let signed = if locked { "; kernel lockdown requires a signature" } else { "" };
            let fix = "build and load it (in kernel/nanonap, as root: `make install` and `modprobe \
                       nanonap`)";
            no("there is no /dev/nanonap: the module is not loaded", format!("{fix}{signed}"))
        }
        Nanonap::NotPermitted => no(
            "this user may not open /dev/nanonap",
            "add the user to the device's group (as root: `usermod -aG elfen USER`)",
        ),
        Nanonap::Refused(why) => no(why, "load the module of the version in use"),
    }
}

/// The alternative without hardware counters.
const INSTEAD: &str = "so dynamic-budget needs a service that publishes its own counters";

/// `dynamic-budget` uses the instructions of the lane; cycles stand for all hardware counters here.
pub(super) fn hardware_counters(machine: &Machine<'_>) -> Found {
    let paranoid = machine.source.text("/proc/sys/kernel/perf_event_paranoid")?;
    let paranoid = paranoid.as_deref().unwrap_or("unknown");
    let permit = "run as root or with CAP_PERFMON, or set kernel.perf_event_paranoid";
    let level = format!("kernel.perf_event_paranoid is {paranoid}");
    let may = machine.answers.capabilities.is_some_and(|has| has.perfmon);
    let cycles = &machine.answers.cycles;
    match (&cycles.of_this_thread, &cycles.of_a_lane) {
        (_, Counting::Counts) => yes("cycles of a whole lane can be counted"),
        (Counting::NoCall, _) | (_, Counting::NoCall) => no(
            format!("the kernel has no perf_event_open(2), {INSTEAD}"),
            "use a kernel built with CONFIG_PERF_EVENTS",
        ),
        (Counting::NoCounter(error), _) | (Counting::Counts, Counting::NoCounter(error)) => no(
            format!("no hardware counts cycles here (perf_event_open: {error}), {INSTEAD}"),
            if machine.topology.hypervisor {
                "use a machine, or an instance type, that shows its PMU to virtual machines"
            } else {
                "switch the CPU's performance counters on in the firmware"
            },
        ),
        (Counting::Counts, Counting::NotPermitted) => warn(
            format!("only own threads can be counted, not a whole lane: {level}"),
            format!("{permit} to 0 or less"),
        ),
        (Counting::NotPermitted, _) if may => no(
            format!("not permitted although this process has CAP_PERFMON, {INSTEAD}"),
            "allow perf_event_open(2) in the seccomp profile or the security module's policy",
        ),
        (Counting::NotPermitted, _) => no(
            format!("not permitted: {level}, {INSTEAD}"),
            format!("{permit} to 2 for own threads, 0 for whole lanes"),
        ),
    }
}

// Naps: how a batch thread frees its lane without giving the lane away.

const SHOWS_MONITOR: &str = "use a CPU with MONITOR/MWAIT, or a virtual machine that shows it";

pub(super) fn nap_device(machine: &Machine<'_>) -> Found {
    match &machine.answers.nanonap {
        // Says so now, before the user builds the module in vain.
        Nanonap::Absent if machine.answers.monitor == Some(false) => {
            no("this CPU shows no MONITOR/MWAIT that works, which the module needs", SHOWS_MONITOR)
        }
        Nanonap::Opened { waits: false, .. } => {
            no("the module finds no MONITOR/MWAIT that works on this CPU", SHOWS_MONITOR)
        }
        Nanonap::Opened { waits: true, ties: 0 } => {
            let pair = machine.lanes.pairs.first().map_or("0:1".to_owned(), Pair::to_string);
            let load = format!("`modprobe -r nanonap` and `modprobe nanonap pairs={pair}`");
            no(
                "the module found no siblings, so that no lane can wake another",
                format!("load it again with these pairs (as root: {load})"),
            )
        }
        Nanonap::Opened { .. } => {
            yes("the module waits in the kernel, on a word that the request lane writes")
        }
        Nanonap::Absent | Nanonap::NotPermitted | Nanonap::Refused(_) => {
            no("the nanonap module cannot be used", "see nanonap-module")
        }
    }
}

const C0_2: &str = "/sys/devices/system/cpu/umwait_control/enable_c02";

pub(super) fn nap_umwait(machine: &Machine<'_>) -> Found {
    let c0_2 = machine.source.text(C0_2)?;
    match &machine.answers.umwait {
        Err(why) => no(why, "use an Intel CPU with WAITPKG, or a virtual machine that shows it"),
        Ok(()) if c0_2.as_deref() == Some("0") => warn(
            "UMWAIT may not enter C0.2, so it frees less of the core",
            format!("permit it (as root: `echo 1 > {C0_2}`)"),
        ),
        Ok(()) => yes("UMWAIT on the request lane's task slot"),
    }
}

pub(super) fn nap_mwaitx(machine: &Machine<'_>) -> Found {
    match &machine.answers.mwaitx {
        Err(why) => no(why, "use an AMD CPU with MWAITX, or a virtual machine that shows it"),
        Ok(()) => yes("MWAITX on the request lane's task slot"),
    }
}

/// A process that may attach the sched_switch program may attach the waking program, too.
pub(super) fn nap_block(machine: &Machine<'_>) -> Found {
    if machine.answers.attach == Attach::Attached {
        yes("asleep in the kernel, for programs with checks; waking takes tens of microseconds")
    } else {
        let why = "no eBPF program can be attached, so nothing would wake a sleeping thread";
        no(why, "see task-map-attach")
    }
}

pub(super) fn nap_spin(_: &Machine<'_>) -> Found {
    // Thesis, section 5.2: next to PAUSE a request takes 1.37 times as long as without.
    warn(
        "PAUSE runs anywhere, but takes as much from a request on the same core as a program of \
         low IPC",
        "load the nanonap module, or use a CPU with WAITPKG or MWAITX",
    )
}

// Checks: how a batch program is kept off its lane, by checks inside it or by a guard.

/// The batch runs at SCHED_IDLE and its guard at nice 0, so that the guard gets the lane as soon as
/// it wakes.
pub(super) fn checks_guard(machine: &Machine<'_>) -> Found {
    match (&machine.answers.idle_class, &machine.answers.guard_rank) {
        (Ok(()), Ok(())) => yes(
            "any program: a guard, at nice 0 and so above its batch at SCHED_IDLE, holds its lane \
             while the request lane is busy",
        ),
        (Err(error), _) => no(
            format!("a batch thread may not lower itself to SCHED_IDLE: {error}"),
            "allow sched_setscheduler(2) in the seccomp profile or the security module's policy",
        ),
        (_, Err(error)) => no(
            format!("guards may not have nice 0 and SCHED_OTHER, so they hold no lane: {error}"),
            "start elfen without `nice`, `chrt` or a unit's Nice=, or give it CAP_SYS_NICE",
        ),
    }
}

const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";
const NEVER_LOWERED: &str = "boot with another kernel.yama.ptrace_scope; it cannot be lowered";

/// Only root with all capabilities may trace any process. Where Yama restricts it, only an ancestor
/// or a process with CAP_SYS_PTRACE may.
pub(super) fn checks_live(machine: &Machine<'_>) -> Found {
    if machine.answers.attach != Attach::Attached {
        return no(
            "running programs get no checks: checks read the eBPF task map, and another eBPF \
             program has to find the loops without checks",
            "see task-map-attach above",
        );
    }
    if machine.source.text(PTRACE_SCOPE)?.as_deref().map(str::trim) == Some("3") {
        let why = "running programs get no checks: Yama lets no process trace another";
        return no(why, NEVER_LOWERED);
    }
    let lanes = machine.lanes.pairs.iter().map(|pair| pair.batch.len()).sum::<usize>();
    let what = if lanes > 1 { ON_SEVERAL_LANES } else { ON_ONE_LANE };
    let unnoted = machine.answers.filters_refused.as_ref().map_or_else(String::new, |why| {
        format!(
            "; eBPF does not show here when a program begins to filter its system calls ({why}), \
             so code in the C library notes it: use --checks guard for a program that filters \
             without that library, such as Go's"
        )
    });
    yes(format!("{what}{unnoted}"))
}

const ON_ONE_LANE: &str = "any 64-bit program on one batch lane: while it runs, its guard writes \
     checks into its loops, and into the Java methods that HotSpot compiles; for the code of other \
     JITs and for time in the kernel, only the guard reacts";
const ON_SEVERAL_LANES: &str = "any 64-bit program whose threads register with rseq, as the GNU C \
     library since 2.35 has them do: while it runs, its guards write checks into its loops, and \
     into the Java methods that HotSpot compiles, for which they occupy all lanes for a moment; \
     other programs, such as Go's, get checks on one lane only (--lanes 0:1); for the code of \
     other JITs and for time in the kernel, only the guards react";

pub(super) fn checks_inlined(_: &Machine<'_>) -> Found {
    yes("programs with checks in their source: elfen_rt::check!(), elfen_check()")
}

pub(super) fn checks_hooks(machine: &Machine<'_>) -> Found {
    by_the_library("programs built with -pg, -pg -mfentry or -finstrument-functions", machine)
}

pub(super) fn checks_patchable(machine: &Machine<'_>) -> Found {
    by_the_library("programs built with -fpatchable-function-entry=43", machine)
}

fn by_the_library(what: &str, machine: &Machine<'_>) -> Found {
    match &machine.answers.preload_library {
        Ok(path) => yes(format!("{what}, by {path}")),
        Err(why) => no(
            format!("{what}: {why}"),
            "build all of Elfen (`cargo build --release`), or name the folder in ELFEN_LIB",
        ),
    }
}

// Fences: see `elfend`. `elfen run` needs none of it.

/// The mount point of a controller and its version in words, or why there is none.
fn mount_of(
    source: &Source,
    controller: &'static str,
) -> Result<Result<(String, &'static str), String>, SourceError> {
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
        Ok((point, Version::One)) => Ok((point.display().to_string(), "cgroup version 1")),
        Ok((point, Version::Two)) => Ok((point.display().to_string(), "cgroup version 2")),
        Err(cgroup::Error::NoController(_)) if mounts.is_empty() => {
            Err("no whole hierarchy of cgroups is mounted here".to_owned())
        }
        Err(error) => Err(error.to_string()),
    })
}

const USE_OTHER: &str = "use a kernel with it, outside of a container; or only `elfen run`";

/// Both versions of cgroups got cpu.idle in Linux 5.15.
pub(super) fn fence_idle(machine: &Machine<'_>) -> Found {
    let old = release(machine.source)?.is_some_and(|(_, version)| version < OLDEST_KERNEL);
    match mount_of(machine.source, "cpu")? {
        Ok(_) if old => no("cgroups are never idle before Linux 5.15", BOOT_NEWER),
        Ok((_, version)) => yes(format!("a fence ranks below its siblings: cpu.idle of {version}")),
        Err(why) => no(why, USE_OTHER),
    }
}

/// The cgroup of elfend.service. Elsewhere, guards are in the cgroup where root starts them.
const HOME: &str = "system.slice";

pub(super) fn fence_rank(machine: &Machine<'_>) -> Found {
    let point = match mount_of(machine.source, "cpu")? {
        Ok((point, _)) => point,
        Err(why) => return no(why, "see fence-idle"),
    };
    let read = |file: &str| machine.source.text(&format!("{point}/{HOME}/{file}"));
    let idle = read("cpu.idle")?;
    let weight = read("cpu.weight")?.and_then(|text| text.parse::<u64>().ok());
    let home = format!("{HOME}, where elfend.service is,");
    let fix = format!("`systemctl set-property {HOME} CPUWeight=100`");
    match (idle.as_deref(), weight) {
        (Some("1"), _) => no(format!("{home} is idle itself"), fix),
        (_, Some(weight)) if weight < LEAST_WEIGHT => {
            no(format!("{home} has weight {weight}: too light for guards"), fix)
        }
        (_, Some(weight)) => yes(format!("{home} has weight {weight}")),
        (_, None) => yes("guards outrank a fence next to elfend's own cgroup"),
    }
}

pub(super) fn fence_cpuset(machine: &Machine<'_>) -> Found {
    match mount_of(machine.source, "cpuset")? {
        Ok((_, version)) => {
            yes(format!("the kernel keeps a fence on its lanes: cpuset of {version}"))
        }
        Err(why) => no(why, USE_OTHER),
    }
}

pub(super) fn fence_freeze(machine: &Machine<'_>) -> Found {
    match mount_of(machine.source, "freezer")? {
        Ok((_, "cgroup version 1")) => yes("`elfen pause` stops it: freezer.state"),
        Ok(_) => yes("`elfen pause` stops it: cgroup.freeze"),
        Err(why) => no(why, USE_OTHER),
    }
}

/// The first version with CPUWeight=idle.
const OLDEST_SYSTEMD: u32 = 252;

pub(super) fn fence_systemd(machine: &Machine<'_>) -> Found {
    const NAME_CGROUPS: &str = "name fences by cgroup, not by unit";
    match &machine.answers.systemd {
        None => warn("systemd is not the first process", NAME_CGROUPS),
        Some(Err(why)) => warn(format!("`systemctl --version`: {why}"), NAME_CGROUPS),
        Some(Ok(version)) if *version >= OLDEST_SYSTEMD => {
            yes(format!("systemd {version} keeps units in a fence (CPUWeight=idle)"))
        }
        Some(Ok(version)) => warn(
            format!("systemd {version} has no CPUWeight=idle: elfend writes cpu.idle itself"),
            format!("use systemd {OLDEST_SYSTEMD}, or make sure that systemd is not reloaded"),
        ),
    }
}

// Shim: a program that `elfen shim` starts itself can always be observed if there is a clock.

const CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// The kernel offers the time stamp counter as a clock only if it has found no fault with it.
pub(super) fn shim_clock(machine: &Machine<'_>) -> Found {
    match machine.source.text(CLOCKS)? {
        Some(clocks) if clocks.split_whitespace().any(|clock| clock == "tsc") => {
            yes("the kernel trusts the time stamp counter, which dates each sample")
        }
        Some(clocks) => no(
            format!("the kernel does not trust the time stamp counter; its clocks are {clocks}"),
            "use a machine whose counter neither stops nor changes its rate",
        ),
        None => warn(format!("there is no {CLOCKS}"), "mount /sys"),
    }
}

pub(super) fn shim_tasks(machine: &Machine<'_>) -> Found {
    match (&machine.answers.attach, &machine.answers.handed) {
        (Attach::Attached, _) | (_, Handed::Mapped) => yes(
            "each sample shows the thread that runs on the lane, so threads are followed from one \
             lane to another",
        ),
        _ => warn(
            "samples do not show which thread runs: while a thread waits for a CPU, its state is \
             read from /proc each 100 us, and its tags are its last ones",
            "see task-map-elfend or task-map-attach above",
        ),
    }
}

pub(super) fn shim_map_files(machine: &Machine<'_>) -> Found {
    match &machine.answers.map_files {
        Ok(()) => yes("memory that other programs share can be mapped, so a sample is one load: \
             /proc/PID/map_files opens"),
        Err(why) => warn(
            format!(
                "/proc/PID/map_files: {why}; memory that other programs share is read by system \
                 calls instead, each 100 us"
            ),
            "run it as root, or with CAP_CHECKPOINT_RESTORE",
        ),
    }
}

/// What `-p` and `--share` may do with processes that `elfen shim` has not started.
pub(super) fn shim_ptrace(machine: &Machine<'_>) -> Found {
    match (machine.source.text(PTRACE_SCOPE)?.as_deref(), machine.answers.trace_any) {
        (Some("3"), _) => no(
            "Yama lets no process trace another, so `-p` sees at most memory that others share",
            NEVER_LOWERED,
        ),
        (_, true) => yes("any running process may be observed (`-p`)"),
        (None | Some("0"), false) => yes("running processes of this user may be observed (`-p`)"),
        (Some(scope), false) => warn(
            format!(
                "kernel.yama.ptrace_scope is {scope}: only programs that `elfen shim` has started \
                 may be observed, not running ones (`-p`)"
            ),
            "run it as root, or set it to 0 (as root: `sysctl kernel.yama.ptrace_scope=0`)",
        ),
    }
}

pub(super) fn shim_names(machine: &Machine<'_>) -> Found {
    match machine.answers.debug_symbols {
        0 => warn(
            "functions and globals have the names in their own files; stripped files have none, \
             and /usr/lib/debug has no symbols for them",
            "install the debug symbols of programs to look at (Debian: PACKAGE-dbgsym)",
        ),
        _ => yes(
            "functions and globals have the names in their files, or those below /usr/lib/debug if \
             the files are stripped",
        ),
    }
}

/// What `--count-at` needs: hardware that counts for own threads.
pub(super) fn shim_counts(machine: &Machine<'_>) -> Found {
    match &machine.answers.cycles.of_this_thread {
        Counting::Counts => yes(
            "functions that `--count-at` names can publish the instructions and cycles of their \
             thread",
        ),
        Counting::NoCounter(error) => warn(
            format!("no hardware counts for threads (perf_event_open: {error}): no `--count-at`"),
            "see hardware-counters above; a program may publish its own counts",
        ),
        Counting::NotPermitted | Counting::NoCall => warn(
            "threads may not count what they execute: no `--count-at`",
            "see hardware-counters above",
        ),
    }
}

// Tailor: what it can record here, and how much it sees of each running JVM. A service's own marks
// need nothing.

const WITHOUT: &str = "only marks (`--service`) give queue and service times";

/// Why this process cannot record any event of the kernel, and what to do.
fn obstacle(machine: &Machine<'_>) -> Option<(&'static str, &'static str)> {
    if matches!(machine.answers.kernel_types, KernelTypes::Absent | KernelTypes::Unreadable(_)) {
        let why = "the kernel does not describe its types, so nothing can be attached";
        return Some((why, "boot a kernel with CONFIG_DEBUG_INFO_BTF"));
    }
    let may = machine.answers.capabilities.is_none_or(|may| may.bpf && may.perfmon);
    let why = "the kernel shows its events only to privileged processes";
    (!may).then_some((why, "run it as root, or with CAP_BPF and CAP_PERFMON"))
}

fn tracepoints(machine: &Machine<'_>, lacks: &[String], there: &str, lacking: &str) -> Found {
    match obstacle(machine) {
        Some((why, fix)) => no(format!("{why}; {WITHOUT}"), fix),
        None if lacks.is_empty() => yes(there),
        None => no(
            format!("the kernel has no tracepoint {}; {lacking}", lacks.join(", ")),
            "boot a newer kernel",
        ),
    }
}

pub(super) fn tailor_sched(machine: &Machine<'_>) -> Found {
    let there = "running, sleeping and waking of threads is recorded (`--detail sched`)";
    tracepoints(machine, &machine.answers.tracepoints.sched_lacks, there, WITHOUT)
}

pub(super) fn tailor_sockets(machine: &Machine<'_>) -> Found {
    let there = "requests of unmodified services are recognised by their sockets (`--port`)";
    let lacking = "name a service that marks its requests (`--service`)";
    tracepoints(machine, &machine.answers.tracepoints.sockets_lack, there, lacking)
}

pub(super) fn tailor_full(machine: &Machine<'_>) -> Found {
    let lacks = &machine.answers.tracepoints.full_lacks;
    if !lacks.is_empty() && obstacle(machine).is_none() {
        let lacks = lacks.join(", ");
        let why = format!("`--detail full` lacks what this kernel does not report: {lacks}");
        return warn(why, "boot a newer kernel, or one with these tracepoints");
    }
    let there = "interrupts, page faults and waits in the kernel are recorded (`--detail full`)";
    tracepoints(machine, lacks, there, "only `--detail sched` is possible")
}

pub(super) fn tailor_jvm(machine: &Machine<'_>) -> Found {
    let Tracepoints { uprobes, jvms, .. } = &machine.answers.tracepoints;
    let probes = *uprobes && obstacle(machine).is_none();
    // By the best possible means.
    let observed = |jvm: &Jvm| {
        let means = match jvm {
            Jvm { has_probes: true, .. } if probes => "by its probes",
            Jvm { has_counters: true, .. } => "by its counters",
            _ => "by the names of its threads",
        };
        format!("process {} {means}", jvm.process)
    };
    let running = match jvms.as_slice() {
        [] => "none runs now".to_owned(),
        jvms => jvms.iter().map(observed).collect::<Vec<_>>().join(", "),
    };
    if !probes {
        warn(
            format!("no probes can be set here, so only counters and names are left: {running}"),
            "run it as root, on a kernel with uprobes",
        )
    } else if jvms.iter().all(|jvm| jvm.has_probes) {
        yes(format!("JVMs are observed by their probes, if they were built with probes: {running}"))
    } else {
        warn(
            format!("not every JVM has probes: {running}"),
            "use a JVM that was built with probes (Debian's is), and leave -XX:+UsePerfData on",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: releases are parsed as kernels write them. Method: one of each shape.
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
