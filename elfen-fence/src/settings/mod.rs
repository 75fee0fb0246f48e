//! The settings of elfend: which lanes are lent, and to which cgroups.
//!
//! Only lanes in a `[[service]]` or `[[lent]]` table are lent. A file with an unknown key is
//! refused, with the line of that key. [`tables`] parses the tables as they are written, and
//! [`roles`] checks that its parts do not contradict each other. [`mod@reference`] explains the
//! keys.

mod parts;
pub mod reference;
mod roles;
mod tables;

use std::path::{Path, PathBuf};

pub use parts::{CgroupSelector, Fence, Lent, Settings};

/// The default path of the file.
pub const FILE: &str = "/etc/elfen/elfend.toml";

/// Why a settings file is invalid.
#[derive(Debug, thiserror::Error)]
#[error("settings {file:?}: {why}")]
pub struct SettingsError {
    pub file: PathBuf,
    pub why: String,
}

impl Settings {
    pub fn open(file: &Path) -> Result<Self, SettingsError> {
        let wrong = |why: String| SettingsError { file: file.to_owned(), why };
        let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
        tables::parse(&text).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::tables::parse;
    use super::*;

    const USUAL: &str = "\
[[service]]
name = \"search\"
lanes = \"0:16,1:17\"
policy = \"slo-budget\"
slo = \"p99=5ms\"
[[lent]]
lanes = \"2:18\"
[[fence]]
name = \"batch\"
cgroup = \"elfen.slice\"
";

    #[test]
    fn the_usual_file_is_accepted() {
        let settings = parse(USUAL).unwrap();
        assert_eq!(settings.lent.len(), 2);
        assert_eq!(settings.fences[0].lanes, "16-18".parse().unwrap());
        assert_eq!(settings.requests(), "0-2".parse().unwrap());
        assert_eq!(settings.lent[0].policy.slo_latency_ns, 5_000_000);
        let places =
            "unit = [\"a.service\", \"b.service\"]\ncgroup = \"c\"\nconfine = true\n[[lent]]";
        let settings = parse(&USUAL.replace("[[lent]]", places)).unwrap();
        let places: Vec<String> =
            settings.lent[0].places.iter().map(CgroupSelector::to_string).collect();
        assert_eq!(places, ["unit a.service", "unit b.service", "cgroup /c"]);
    }

    #[test]
    fn pods_of_a_tier_are_named_by_a_pattern() {
        for (place, reads) in [
            ("cgroup = \"kubepods/besteffort/pod*\"", "cgroup /kubepods/besteffort/pod*"),
            ("unit = \"kubepods-besteffort-pod*.slice\"", "unit kubepods-besteffort-pod*.slice"),
        ] {
            let settings = parse(&USUAL.replace("cgroup = \"elfen.slice\"", place)).unwrap();
            assert_eq!(settings.fences[0].which.to_string(), reads);
        }
    }

    #[test]
    fn the_packaged_example_is_accepted() {
        let settings = parse(include_str!("../../../packaging/elfend.toml")).unwrap();
        assert!(settings.lent[0].confine && settings.lent.len() == 2);
        assert_eq!(settings.fences[0].which.to_string(), "unit elfen.slice");
    }

    #[test]
    fn the_minimal_example_is_accepted() {
        let text = include_str!("../../../packaging/elfend-minimal.toml");
        assert_eq!(parse(text).unwrap().fences.len(), 1);
    }

    /// Goal: an error names the invalid text. Method: one mistake at a time.
    #[test]
    fn mistakes_are_named() {
        let fence = |more: &str| format!("{USUAL}[[fence]]\n{more}");
        let service = |more: &str| USUAL.replace("[[lent]]", &format!("{more}\n[[lent]]"));
        let cases = [
            (USUAL.replace("policy", "polcy"), "unknown field `polcy`"),
            (format!("looks = 1\n{USUAL}"), "unknown field `looks`"),
            (USUAL.replace("2:18", "0:18"), "CPU 0 is named twice"),
            (USUAL.replace("2:18", "16:18"), "CPU 16 is named twice"),
            (USUAL.replace("2:18", ""), "the list of pairs is empty"),
            (fence("name = \"b\"\ncgroup = \"x\"\nlanes = \"\""), "lanes \"\""),
            (USUAL.replace("slo-budget", "slow"), "policy \"slow\" is none of borrow-idle, "),
            (USUAL.replace("slo-budget", "borrow-idle"), "borrow-idle neither"),
            (USUAL.replace("slo-budget", "dynamic-budget"), "only with `elfen run`"),
            (USUAL.replace("elfen.slice", "/"), "the root contains all processes"),
            (USUAL.replace("elfen.slice", "/sys/fs/cgroup/x"), "as /proc/PID/cgroup does"),
            (USUAL.replace("elfen.slice", " "), "begins or ends a name with a space"),
            (USUAL.replace("elfen.slice", "a/../b"), "invalid cgroup path"),
            (USUAL.replace("elfen.slice", "a\\nb"), "invalid cgroup path"),
            (fence("name = \"b\"\ncgroup = \"elfen.slice/x\""), "one is inside of the other"),
            (fence("name = \"batch\"\ncgroup = \"x\""), "two fences have this name"),
            (fence("name = \"b\"\ncgroup = \"/elfen.slice/\""), "two fences name"),
            (fence("name = \"b\""), "either a cgroup or a unit"),
            (fence("name = \"b\"\ncgroup = \"x\"\nlanes = \"3\""), "are batch lanes of no service"),
            (fence("name = \"none\"\ncgroup = \"x\""), "and is not \"none\""),
            (fence("name = \"../b\"\ncgroup = \"x\""), "a name consists of letters"),
            (fence("name = \"b\"\nunit = \"a\\nb.slice\""), "invalid unit name"),
            (fence("name = \"b\"\nunit = \"--now.slice\""), "invalid unit name"),
            (fence("name = \"b\"\nunit = \"system.slice\""), "must never be frozen"),
            (fence("name = \"b\"\ncgroup = \"/system.slice\""), "must never be frozen"),
            (fence("name = \"b\"\nunit = \"elfen\""), "not a slice, scope or service"),
            (fence("name = \"b\"\ncgroup = \"kubepods/besteffort/\""), "fence its pods"),
            (fence("name = \"b\"\nunit = \"kubepods-besteffort.slice\""), "does not start"),
            (fence("name = \"b\"\nunit = \"k3s-kubepods-burstable.slice\""), "does not start"),
            (fence("name = \"b\"\ncgroup = \"a*/b\""), "only the last name"),
            (service("cgroup = \"pod*\""), "only a fence has a pattern"),
            (
                format!(
                    "{USUAL}[[fence]]\nname = \"s\"\ncgroup = \"a/s\"\n[[fence]]\nname = \"k\"\n\
                     cgroup = \"b/k\"\n"
                ),
                "not in one chain",
            ),
            (service("confine = true"), "requires its unit or its cgroup"),
            (service("cgroup = [\"search\", \"/\"]"), "the root contains all processes"),
            (service("unit = \"search\""), "not a slice, scope or service"),
            (service("cgroup = \"elfen.slice/x\""), "it would hold service \"search\""),
            (service("cgroup = [\"a\", \"elfen.slice\"]"), "it would hold service"),
            (format!("source = \"service\"\n{USUAL}"), "requires the task map"),
            (format!("source = \"smoke\"\n{USUAL}"), "is none of auto, tasks"),
            (format!("poll-interval = \"0us\"\n{USUAL}"), "never sleep"),
            (format!("metrics = \"9752\"\n{USUAL}"), "is not an address with a port"),
            (format!("nap = \"block\"\n{USUAL}"), "which fences do not require"),
            (String::new(), "names lanes to lend"),
        ];
        for (text, why) in cases {
            let found = parse(&text).expect_err(why);
            assert!(found.contains(why) && !found.contains('\n'), "{why}: {found}");
        }
    }
}
