//! What fences need from this machine: see `elfend`. `elfen run` needs none of it.

use super::answers::Systemd;
use super::finding::{Enough, Finding, Machine, Mechanism};
use super::permission;
use crate::cgroup::{self, Hierarchies, Version};
use crate::fence::rank::LEAST_WEIGHT;
use crate::source::{Source, SourceError};

pub(super) const MECHANISMS: &[Mechanism] = &[
    fence("fence-idle", idle),
    fence("fence-rank", rank),
    fence("fence-cpuset", cpuset),
    fence("fence-freeze", freeze),
    fence("fence-systemd", systemd),
];

const fn fence(
    name: &'static str,
    examine: fn(&Machine<'_>) -> Result<Finding, SourceError>,
) -> Mechanism {
    Mechanism { name, enough: Enough::No, examine }
}

/// Both versions of cgroups got cpu.idle in this release.
const OLDEST_IDLE: (u32, u32) = (5, 15);
/// The first version with CPUWeight=idle.
const OLDEST_SYSTEMD: u32 = 252;
const MOUNTS: &str = "/proc/self/mountinfo";

/// The mount point of a controller and its version in words, or why there is none.
fn mount_of(
    source: &Source,
    controller: &'static str,
) -> Result<Result<(String, &'static str), String>, SourceError> {
    let mounts = source.lines(MOUNTS, |line| line.contains(" - cgroup"))?.unwrap_or_default();
    let mut unread = None;
    let found = Hierarchies::mount_of(controller, &mounts, |point| {
        let file = format!("{}/cgroup.controllers", point.display());
        let has = source.text(&file).unwrap_or_else(|error| {
            unread = Some(error);
            None
        });
        Ok(has.unwrap_or_default())
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

fn idle(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let release = machine.source.text("/proc/sys/kernel/osrelease")?.unwrap_or_default();
    let old = permission::version(&release).is_some_and(|version| version < OLDEST_IDLE);
    Ok(match mount_of(machine.source, "cpu")? {
        Ok(_) if old => {
            Finding::no("cgroups are never idle before Linux 5.15", "boot Linux 5.15 or newer")
        }
        Ok((_, version)) => {
            Finding::yes(format!("a fence ranks below its siblings: cpu.idle of {version}"))
        }
        Err(why) => Finding::no(why, USE_OTHER),
    })
}

/// The cgroup of elfend.service. Elsewhere, guards are in the cgroup where root starts them.
const HOME: &str = "system.slice";

fn rank(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let point = match mount_of(machine.source, "cpu")? {
        Ok((point, _)) => point,
        Err(why) => return Ok(Finding::no(why, "see fence-idle")),
    };
    let read = |file: &str| machine.source.text(&format!("{point}/{HOME}/{file}"));
    let idle = read("cpu.idle")?;
    let weight = read("cpu.weight")?;
    let weight = weight.and_then(|text| text.parse::<u64>().ok());
    Ok(match (idle.as_deref(), weight) {
        (Some("1"), _) => Finding::no(
            format!("{HOME}, where elfend.service is, is idle itself"),
            format!("`systemctl set-property {HOME} CPUWeight=100`"),
        ),
        (_, Some(weight)) if weight < LEAST_WEIGHT => Finding::no(
            format!("{HOME}, where elfend.service is, has weight {weight}: too light for guards"),
            format!("`systemctl set-property {HOME} CPUWeight=100`"),
        ),
        (_, Some(weight)) => {
            Finding::yes(format!("{HOME}, where elfend.service is, has weight {weight}"))
        }
        (_, None) => Finding::yes("guards outrank a fence next to elfend's own cgroup"),
    })
}

fn cpuset(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match mount_of(machine.source, "cpuset")? {
        Ok((_, version)) => {
            Finding::yes(format!("the kernel keeps a fence on its lanes: cpuset of {version}"))
        }
        Err(why) => Finding::no(why, USE_OTHER),
    })
}

fn freeze(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match mount_of(machine.source, "freezer")? {
        Ok((_, "cgroup version 1")) => Finding::yes("`elfen pause` stops it: freezer.state"),
        Ok(_) => Finding::yes("`elfen pause` stops it: cgroup.freeze"),
        Err(why) => Finding::no(why, USE_OTHER),
    })
}

fn systemd(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    const NAME_CGROUPS: &str = "name fences by cgroup, not by unit";
    Ok(match &machine.answers.systemd {
        Systemd::Elsewhere => Finding::warn("systemd is not the first process", NAME_CGROUPS),
        Systemd::Silent(why) => {
            Finding::warn(format!("`systemctl --version`: {why}"), NAME_CGROUPS)
        }
        Systemd::Version(version) if *version >= OLDEST_SYSTEMD => {
            Finding::yes(format!("systemd {version} keeps units in a fence (CPUWeight=idle)"))
        }
        Systemd::Version(version) => Finding::warn(
            format!("systemd {version} has no CPUWeight=idle: elfend writes cpu.idle itself"),
            format!("use systemd {OLDEST_SYSTEMD}, or make sure that systemd is not reloaded"),
        ),
    })
}
