//! elfend's one file: whose lanes are lent, and to which cgroups.
//!
//! Nothing is lent that no `[[service]]` or `[[lent]]` names. What a key means that is not known
//! here is not guessed: the file is refused, with the line.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use elfen_console::duration;
use elfen_console::failure::Failure;
use elfen_rt::clock::nanos;
use elfen_rt::nap::Nap;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::{PolicyKind, Settings as Policy};
use serde::Deserialize;

use crate::args::nap::NapName;
use crate::cgroup::CgroupPath;
use crate::cpulist::CpuSet;
use crate::fence::rank;
use crate::pair::{self, Pair};
use crate::run::channels::Wanted;
use crate::run::looks::Looks;

/// Where it is, unless it is named.
pub const FILE: &str = "/etc/elfen/elfend.toml";

/// What is wrong with the file, and with which.
#[derive(Debug, thiserror::Error)]
#[error("settings {file:?}: {why}")]
pub struct Wrong {
    pub file: PathBuf,
    pub why: String,
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub looks: Looks,
    pub nap: NapName,
    pub signal: Wanted,
    pub lent: Vec<Lent>,
    pub fences: Vec<Fence>,
}

/// Lanes with one policy: a service's, or some without a service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lent {
    pub service: Option<String>,
    /// The user whose page is heeded besides root's.
    pub user: Option<String>,
    pub pairs: Vec<Pair>,
    pub policy: Policy,
    pub slo: Option<Slo>,
    /// The cgroups of the service, as far as they are named.
    pub places: Vec<Which>,
    /// Whether those are kept to the request lanes.
    pub confine: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fence {
    pub name: String,
    pub which: Which,
    pub lanes: CpuSet,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Which {
    Cgroup(CgroupPath),
    /// A unit of systemd's, or a pattern of several.
    Unit(String),
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cgroup(path) => write!(f, "cgroup {path}"),
            Self::Unit(unit) => write!(f, "unit {unit}"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    look_every: Option<String>,
    look_slack: Option<String>,
    nap: Option<String>,
    signal: Option<String>,
    #[serde(default)]
    service: Vec<ServiceTable>,
    #[serde(default)]
    lent: Vec<LentTable>,
    #[serde(default)]
    fence: Vec<FenceTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceTable {
    name: String,
    user: Option<String>,
    lanes: String,
    policy: Option<String>,
    budget: Option<String>,
    slo: Option<String>,
    #[serde(default)]
    unit: Names,
    #[serde(default)]
    cgroup: Names,
    #[serde(default)]
    confine: bool,
}

/// One, or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Several(Vec<String>),
}

impl Default for Names {
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

impl Names {
    fn all(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Several(names) => names,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LentTable {
    lanes: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FenceTable {
    name: String,
    cgroup: Option<String>,
    unit: Option<String>,
    lanes: Option<String>,
}

impl Settings {
    pub fn open(file: &Path) -> Result<Self, Wrong> {
        let wrong = |why: String| Wrong { file: file.to_owned(), why };
        let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
        Self::parse(&text).map_err(wrong)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| one_line(&error))?;
        let signal = word("signal", file.signal.as_deref().unwrap_or("auto"))?;
        let mut lent = Vec::new();
        for service in &file.service {
            lent.push(service.read()?);
        }
        for table in &file.lent {
            if signal == Wanted::Service {
                return Err("[[lent]] goes by the task map, and signal is \"service\"".to_owned());
            }
            lent.push(Lent {
                service: None,
                user: None,
                pairs: pairs("[[lent]]", &table.lanes)?,
                policy: Policy::BORROW_IDLE,
                slo: None,
                places: Vec::new(),
                confine: false,
            });
        }
        require_one_role(&lent)?;
        let all: CpuSet =
            lent.iter().flat_map(|lent| &lent.pairs).flat_map(|pair| pair.batch.iter()).collect();
        if all.is_empty() {
            return Err("no [[service]] and no [[lent]] names lanes to lend".to_owned());
        }
        let fences: Result<Vec<Fence>, String> =
            file.fence.iter().map(|fence| fence.read(&all)).collect();
        let fences = fences?;
        require_apart(&fences)?;
        require_beside(&fences, &lent)?;
        let time = |key: &str, text: &Option<String>, usual| match text {
            None => Ok(usual),
            Some(text) => duration::parse(text).map_err(|why| format!("{key}: {why}")),
        };
        let every = time("look-every", &file.look_every, Duration::from_micros(500))?;
        if every.is_zero() {
            return Err("look-every: the guards would never sleep".to_owned());
        }
        let slack = time("look-slack", &file.look_slack, Duration::from_millis(4))?;
        let nap = word("nap", file.nap.as_deref().unwrap_or("auto"))?;
        if nap == NapName::Block {
            return Err("nap: what is fenced has no checks, so nothing of it blocks".to_owned());
        }
        Ok(Self { looks: Looks { every, slack }, nap, signal, lent, fences })
    }

    /// What naps on these lanes.
    pub(super) fn open_nap(&self) -> Result<Nap, Failure> {
        let pairs: Vec<_> = self.lent.iter().flat_map(|lent| lent.pairs.clone()).collect();
        Ok(self.nap.open_for(&pairs)?.0)
    }

    /// Every request lane.
    pub fn requests(&self) -> CpuSet {
        self.lent.iter().flat_map(|lent| &lent.pairs).map(|pair| pair.request).collect()
    }
}

impl ServiceTable {
    fn read(&self) -> Result<Lent, String> {
        let Self { name, user, lanes, policy, budget, slo, .. } = self;
        let what = format!("service {name:?}");
        let places = self.places(&what)?;
        let kind = policy.as_deref().unwrap_or(PolicyKind::BorrowIdle.name());
        let kind = PolicyKind::ALL.into_iter().find(|known| known.name() == kind);
        let kind = kind.ok_or_else(|| format!("{what}: policy {:?} is none", policy.as_deref()))?;
        let budget = budget.as_deref().map(duration::parse).transpose();
        let budget = budget.map_err(|why| format!("{what}: budget: {why}"))?;
        let slo = slo.as_deref().map(str::parse::<Slo>).transpose();
        let slo = slo.map_err(|why| format!("{what}: slo: {why}"))?;
        let mut policy = Policy { policy: kind, ..Policy::BORROW_IDLE };
        match (kind, budget, slo) {
            (PolicyKind::BorrowIdle, None, None) => {}
            (PolicyKind::FixedBudget | PolicyKind::RefreshBudget, Some(budget), None) => {
                policy.budget_ns = nanos(budget);
            }
            (PolicyKind::SloBudget, None, Some(slo)) => {
                policy.slo_latency_ns = slo.latency_ns;
                policy.slo_per_million = slo.per_million.into();
            }
            (PolicyKind::DynamicBudget, ..) => {
                return Err(format!("{what}: dynamic-budget is for `elfen run` alone"));
            }
            _ => {
                return Err(format!(
                    "{what}: fixed-budget and refresh-budget take a budget, slo-budget an slo, \
                     borrow-idle neither"
                ));
            }
        }
        Ok(Lent {
            service: Some(name.clone()),
            user: user.clone(),
            pairs: pairs(&what, lanes)?,
            policy,
            slo,
            places,
            confine: self.confine,
        })
    }

    fn places(&self, what: &str) -> Result<Vec<Which>, String> {
        let units = self.unit.all().iter().map(|unit| checked_unit(what, unit).map(Which::Unit));
        let cgroups = self.cgroup.all().iter().map(|path| checked_cgroup(what, path));
        let places = units.chain(cgroups).collect::<Result<Vec<Which>, String>>()?;
        if self.confine && places.is_empty() {
            return Err(format!("{what}: confine takes its unit or its cgroup"));
        }
        Ok(places)
    }
}

impl FenceTable {
    fn read(&self, all: &CpuSet) -> Result<Fence, String> {
        let Self { name, cgroup, unit, lanes } = self;
        let what = format!("fence {name:?}");
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if ["", "none"].contains(&&**name) || !name.chars().all(plain) || name.starts_with('.') {
            return Err(format!("{what}: a name is letters, digits, - _ and ., and not none"));
        }
        let which = match (cgroup, unit) {
            (Some(path), None) => checked_cgroup(&what, path)?,
            (None, Some(unit)) => Which::Unit(checked_unit(&what, unit)?),
            _ => return Err(format!("{what}: it takes either a cgroup or a unit")),
        };
        let lanes = match lanes.as_deref() {
            None | Some("all") => all.clone(),
            Some(list) => list.parse().map_err(|why| format!("{what}: lanes {list:?}: {why}"))?,
        };
        if !lanes.is_subset(all) {
            let others = lanes.without(all);
            return Err(format!("{what}: CPUs {others} are nobody's batch lanes"));
        }
        Ok(Fence { name: name.clone(), which, lanes })
    }
}

/// Slices and scopes of systemd's that hold what a fence would keep from running.
const NEEDED: [&str; 4] = ["system.slice", "user.slice", "-.slice", "init.scope"];

fn checked_cgroup(what: &str, path: &str) -> Result<Which, String> {
    match CgroupPath::parse(path) {
        Some(path) if NEEDED.contains(&path.as_str().trim_start_matches('/')) => {
            Err(format!("{what}: {path} holds what has to run at once"))
        }
        Some(path) if !path.is_root() => Ok(Which::Cgroup(path)),
        Some(_) => Err(format!("{what}: the root holds everything")),
        None => Err(format!("{what}: {path:?} is no path of a cgroup")),
    }
}

/// Goes to systemctl as one argument; a unit's name has no other characters.
fn checked_unit(what: &str, unit: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.@:\\*?[]".contains(c);
    let kinds = [".slice", ".scope", ".service"];
    if unit.starts_with('-') || !unit.chars().all(plain) {
        return Err(format!("{what}: {unit:?} is no name of a unit"));
    }
    if !kinds.iter().any(|kind| unit.ends_with(kind)) {
        return Err(format!("{what}: {unit:?} is no slice, scope or service"));
    }
    if NEEDED.contains(&unit) {
        return Err(format!("{what}: {unit} holds what has to run at once"));
    }
    Ok(unit.to_owned())
}

fn word<W: ValueEnum>(key: &str, text: &str) -> Result<W, String> {
    let names = || {
        let known = W::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        known.map(|value| value.get_name().to_owned()).collect::<Vec<_>>().join(", ")
    };
    W::from_str(text, false).map_err(|_| format!("{key}: {text:?} is none of {}", names()))
}

fn pairs(what: &str, lanes: &str) -> Result<Vec<Pair>, String> {
    pair::parse(lanes).map_err(|why| format!("{what}: lanes {lanes:?}: {why}"))
}

/// Each CPU is one lane of one service.
fn require_one_role(lent: &[Lent]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let lanes = lent.iter().flat_map(|lent| &lent.pairs).flat_map(Pair::lanes);
    match lanes.into_iter().find(|cpu| !seen.insert(*cpu)) {
        Some(cpu) => Err(format!("CPU {cpu} is named twice, and a lane has one role")),
        None => Ok(()),
    }
}

/// No two fences of a name or of a cgroup, none inside of another, and one place to guard them
/// from.
fn require_apart(fences: &[Fence]) -> Result<(), String> {
    let mut names = BTreeSet::new();
    if let Some(twice) = fences.iter().find(|fence| !names.insert(&fence.name)) {
        return Err(format!("fence {:?} is there twice", twice.name));
    }
    let is_again = |at: usize| fences[..at].iter().any(|fence| fence.which == fences[at].which);
    if let Some(again) = (0..fences.len()).find(|&at| is_again(at)) {
        return Err(format!("{} is two fences", fences[again].which));
    }
    let paths: Vec<CgroupPath> = fences
        .iter()
        .filter_map(|fence| match &fence.which {
            Which::Cgroup(path) => Some(path.clone()),
            Which::Unit(_) => None,
        })
        .collect();
    for (at, one) in paths.iter().enumerate() {
        if let Some(other) = paths[..at].iter().find(|o| one.is_within(o) || o.is_within(one)) {
            return Err(format!("cgroups {other} and {one}: one is inside of the other"));
        }
    }
    rank::home_of(&paths).map(drop).map_err(|(one, other)| {
        format!("no place outranks both {one} and {other}: their parents are not in one chain")
    })
}

/// A fence is lent, and a service lends: neither lies in the other.
fn require_beside(fences: &[Fence], lent: &[Lent]) -> Result<(), String> {
    for fence in fences {
        for (lent, place) in lent.iter().flat_map(|lent| lent.places.iter().map(move |p| (lent, p)))
        {
            let both = match (&fence.which, place) {
                (Which::Cgroup(one), Which::Cgroup(other)) => {
                    one.is_within(other) || other.is_within(one)
                }
                (one, other) => one == other,
            };
            if both {
                let service = lent.service.as_deref().unwrap_or_default();
                return Err(format!(
                    "fence {:?}, {}: it would hold service {service:?}, {place}",
                    fence.name, fence.which
                ));
            }
        }
    }
    Ok(())
}

fn one_line(error: &toml::de::Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
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
    fn the_usual_file_is_read() {
        let settings = Settings::parse(USUAL).unwrap();
        assert_eq!(settings.lent.len(), 2);
        assert_eq!(settings.fences[0].lanes, "16-18".parse().unwrap());
        assert_eq!(settings.requests(), "0-2".parse().unwrap());
        assert_eq!(settings.lent[0].policy.slo_latency_ns, 5_000_000);
        let places =
            "unit = [\"a.service\", \"b.service\"]\ncgroup = \"c\"\nconfine = true\n[[lent]]";
        let settings = Settings::parse(&USUAL.replace("[[lent]]", places)).unwrap();
        let places: Vec<String> = settings.lent[0].places.iter().map(Which::to_string).collect();
        assert_eq!(places, ["unit a.service", "unit b.service", "cgroup /c"]);
    }

    #[test]
    fn the_example_is_read() {
        let settings = Settings::parse(include_str!("../../../packaging/elfend.toml")).unwrap();
        assert!(settings.lent[0].confine && settings.lent.len() == 2);
        assert_eq!(settings.fences[0].which.to_string(), "unit elfen.slice");
    }

    /// Goal: what is wrong is refused with the word that is wrong. Method: one mistake at a time.
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
            (USUAL.replace("slo-budget", "slow"), "is none"),
            (USUAL.replace("slo-budget", "borrow-idle"), "borrow-idle neither"),
            (USUAL.replace("slo-budget", "dynamic-budget"), "`elfen run` alone"),
            (USUAL.replace("elfen.slice", "/"), "the root holds everything"),
            (USUAL.replace("elfen.slice", "a/../b"), "no path of a cgroup"),
            (USUAL.replace("elfen.slice", "a\\nb"), "no path of a cgroup"),
            (fence("name = \"b\"\ncgroup = \"elfen.slice/x\""), "one is inside of the other"),
            (fence("name = \"batch\"\ncgroup = \"x\""), "there twice"),
            (fence("name = \"b\"\ncgroup = \"/elfen.slice/\""), "is two fences"),
            (fence("name = \"b\""), "either a cgroup or a unit"),
            (fence("name = \"b\"\ncgroup = \"x\"\nlanes = \"3\""), "nobody's batch lanes"),
            (fence("name = \"none\"\ncgroup = \"x\""), "and not none"),
            (fence("name = \"../b\"\ncgroup = \"x\""), "a name is letters"),
            (fence("name = \"b\"\nunit = \"a\\nb.slice\""), "no name of a unit"),
            (fence("name = \"b\"\nunit = \"--now.slice\""), "no name of a unit"),
            (fence("name = \"b\"\nunit = \"system.slice\""), "has to run at once"),
            (fence("name = \"b\"\ncgroup = \"/system.slice\""), "has to run at once"),
            (fence("name = \"b\"\nunit = \"elfen\""), "no slice, scope or service"),
            (
                format!(
                    "{USUAL}[[fence]]\nname = \"s\"\ncgroup = \"a/s\"\n[[fence]]\nname = \"k\"\n\
                     cgroup = \"b/k\"\n"
                ),
                "not in one chain",
            ),
            (service("confine = true"), "takes its unit or its cgroup"),
            (service("cgroup = [\"search\", \"/\"]"), "the root holds everything"),
            (service("unit = \"search\""), "no slice, scope or service"),
            (service("cgroup = \"elfen.slice/x\""), "it would hold service \"search\""),
            (service("cgroup = [\"a\", \"elfen.slice\"]"), "it would hold service"),
            (format!("signal = \"service\"\n{USUAL}"), "goes by the task map"),
            (format!("signal = \"smoke\"\n{USUAL}"), "is none of auto, tasks"),
            (format!("look-every = \"0us\"\n{USUAL}"), "never sleep"),
            (format!("nap = \"block\"\n{USUAL}"), "nothing of it blocks"),
            (String::new(), "names lanes to lend"),
        ];
        for (text, why) in cases {
            let found = Settings::parse(&text).expect_err(why);
            assert!(found.contains(why) && !found.contains('\n'), "{why}: {found}");
        }
    }
}
