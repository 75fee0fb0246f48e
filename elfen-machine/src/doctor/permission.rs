//! Why the kernel does not let this process attach a program.
//!
//! bpf(2) returns EPERM for every reason. The reason is derived from the capabilities of this
//! process and the rules of the machine, the most likely one first.

use super::answers::Capabilities;
use super::finding::{Finding, Machine};
use crate::source::SourceError;

/// The rules of the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Rules {
    /// kernel.unprivileged_bpf_disabled: 0, 1 (until the next boot) or 2.
    pub(super) unprivileged: Option<String>,
    /// none, integrity or confidentiality; `None` in a kernel without lockdown.
    pub(super) lockdown: Option<String>,
    /// This process is in a user namespace that is smaller than the machine.
    pub(super) user_namespace: bool,
}

const EVERY_ID: [&str; 3] = ["0", "0", "4294967295"];

impl Rules {
    pub(super) fn read(machine: &Machine<'_>) -> Result<Self, SourceError> {
        let source = machine.source;
        let lockdown = source.text("/sys/kernel/security/lockdown")?;
        let ids = source.text("/proc/self/uid_map")?;
        Ok(Self {
            unprivileged: source.text("/proc/sys/kernel/unprivileged_bpf_disabled")?,
            lockdown: lockdown.as_deref().and_then(in_brackets),
            user_namespace: ids.is_some_and(|ids| !ids.split_whitespace().eq(EVERY_ID)),
        })
    }

    /// Whether the kernel loads only signed modules.
    pub(super) fn wants_signatures(&self) -> bool {
        self.hides_the_kernel() || self.lockdown.as_deref() == Some("integrity")
    }

    pub(super) fn hides_the_kernel(&self) -> bool {
        self.lockdown.as_deref() == Some("confidentiality")
    }
}

/// The word in brackets, which is in force: `none [integrity] confidentiality`.
fn in_brackets(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// The first two numbers of `6.1.0-28-amd64`.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Why a program may not be attached, and what to do.
pub(super) fn attaching(capabilities: Option<Capabilities>, rules: &Rules) -> Finding {
    let fix = "see task-map-elfend above; or run as root, or with CAP_BPF and CAP_PERFMON";
    let Some(capabilities) = capabilities else {
        let why = "not permitted, and /proc does not say which capabilities this process has";
        return Finding::no(why, fix);
    };
    let missing = missing(capabilities);
    if !missing.is_empty() {
        let missing = missing.join(" and ");
        let why = format!("not permitted: this process lacks {missing}{}", unprivileged(rules));
        return Finding::no(why, fix);
    }
    if rules.user_namespace {
        let why =
            "not permitted: the capabilities of this process count only in its user namespace";
        let fix = "run elfend outside of the container, or this process with capabilities of the \
                   initial user namespace";
        return Finding::no(why, fix);
    }
    if rules.hides_the_kernel() {
        let why = "not permitted although this process has CAP_BPF and CAP_PERFMON: kernel \
                   lockdown is at confidentiality, or a seccomp filter or a security module \
                   forbids bpf(2)";
        let fix = "boot with lockdown=integrity or none, or allow bpf(2) in the seccomp profile";
        return Finding::no(why, fix);
    }
    let why = "not permitted although this process has CAP_BPF and CAP_PERFMON: a seccomp filter \
               or a security module forbids bpf(2)";
    let fix = "allow bpf(2) in the seccomp profile, or in the security module's policy";
    Finding::no(why, fix)
}

fn missing(has: Capabilities) -> Vec<&'static str> {
    let missing = [("CAP_BPF", has.bpf), ("CAP_PERFMON", has.perfmon)];
    missing.into_iter().filter(|(_, has)| !has).map(|(name, _)| name).collect()
}

/// Explains the setting that users tend to suspect first.
fn unprivileged(rules: &Rules) -> String {
    match rules.unprivileged.as_deref() {
        None => String::new(),
        Some(value) => format!(
            " (kernel.unprivileged_bpf_disabled is {value}, and no value of it permits programs \
             that trace)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Option<Capabilities> = Some(Capabilities { bpf: true, perfmon: true });
    const NONE: Option<Capabilities> = Some(Capabilities { bpf: false, perfmon: false });

    fn rules() -> Rules {
        Rules {
            unprivileged: Some("2".into()),
            lockdown: Some("none".into()),
            user_namespace: false,
        }
    }

    /// Goal: the causes of EPERM are distinguished. Method: one cause at a time, and words that
    /// only its sentence contains.
    #[test]
    fn the_causes_of_a_refused_attach_are_distinguished() {
        let perfmon = Some(Capabilities { bpf: false, perfmon: true });
        let bpf = Some(Capabilities { bpf: true, perfmon: false });
        let locked = Rules { lockdown: Some("confidentiality".into()), ..rules() };
        let integrity = Rules { lockdown: Some("integrity".into()), ..rules() };
        let container = Rules { user_namespace: true, ..rules() };
        let cases = [
            (NONE, rules(), "lacks CAP_BPF and CAP_PERFMON (kernel.unprivileged_bpf_disabled is 2"),
            (None, rules(), "/proc does not say"),
            (perfmon, rules(), "lacks CAP_BPF ("),
            (bpf, rules(), "lacks CAP_PERFMON ("),
            (ALL, container, "count only in its user namespace"),
            (ALL, locked, "lockdown is at confidentiality, or"),
            (ALL, integrity, "CAP_PERFMON: a seccomp filter"),
            (ALL, rules(), "CAP_PERFMON: a seccomp filter"),
        ];
        for (capabilities, rules, words) in cases {
            let finding = attaching(capabilities, &rules);
            assert!(finding.why.contains(words), "{rules:?}: {finding:?}");
        }
        let silent = Rules { unprivileged: None, ..rules() };
        assert!(attaching(NONE, &silent).why.ends_with("lacks CAP_BPF and CAP_PERFMON"));
    }

    /// Goal: files are parsed as kernels write them. Method: one of each shape.
    #[test]
    fn releases_and_lockdown_are_parsed_as_kernels_write_them() {
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
        assert_eq!(in_brackets("none [integrity] confidentiality").as_deref(), Some("integrity"));
        assert_eq!(in_brackets("none"), None);
    }
}
