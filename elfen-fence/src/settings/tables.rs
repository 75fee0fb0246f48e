//! Parses the settings file: its tables, and what each table says by itself.

use std::time::Duration;

use clap::ValueEnum;
use elfen_console::duration;
use elfen_rt::clock::nanos;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::{PolicyKind, Settings as Policy};
use serde::Deserialize;

use super::parts::{CgroupSelector, Fence, Lent, Settings};
use super::roles::{require_apart, require_beside, require_one_role};
use elfen_machine::cgroup::CgroupPath;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::pair::{self, Pair};
use elfen_run::args::nap::NapName;
use elfen_run::channels::SourceChoice;
use elfen_run::poll_timing::PollTiming;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    poll_interval: Option<String>,
    timer_slack: Option<String>,
    nap: Option<String>,
    source: Option<String>,
    metrics: Option<String>,
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

/// One name, or several.
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

pub(super) fn parse(text: &str) -> Result<Settings, String> {
    let file: File = toml::from_str(text).map_err(|error| one_line(&error))?;
    let source = word("source", file.source.as_deref().unwrap_or("auto"))?;
    let mut lent = Vec::new();
    for service in &file.service {
        lent.push(service.read()?);
    }
    for table in &file.lent {
        if source == SourceChoice::Service {
            return Err("[[lent]] requires the task map, but source is \"service\"".to_owned());
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
    let interval = time("poll-interval", &file.poll_interval, Duration::from_micros(500))?;
    if interval.is_zero() {
        return Err("poll-interval: the guards would never sleep".to_owned());
    }
    let slack = time("timer-slack", &file.timer_slack, Duration::from_millis(4))?;
    let nap = word("nap", file.nap.as_deref().unwrap_or("auto"))?;
    if nap == NapName::Block {
        return Err(
            "nap: block is for programs with checks, which fences do not require".to_owned()
        );
    }
    let metrics = file.metrics.as_deref().map(str::parse).transpose();
    let metrics = metrics.map_err(|_| {
        let found = file.metrics.as_deref().unwrap_or_default();
        format!("metrics: {found:?} is not an address with a port, such as \"127.0.0.1:9752\"")
    })?;
    Ok(Settings { poll_timing: PollTiming { interval, slack }, nap, source, metrics, lent, fences })
}

impl ServiceTable {
    fn read(&self) -> Result<Lent, String> {
        let Self { name, user, lanes, policy, budget, slo, .. } = self;
        let what = format!("service {name:?}");
        let places = self.places(&what)?;
        let named = policy.as_deref().unwrap_or(PolicyKind::BorrowIdle.name());
        let kind = PolicyKind::ALL.into_iter().find(|known| known.name() == named);
        let kind = kind.ok_or_else(|| {
            let known = PolicyKind::ALL.map(PolicyKind::name).join(", ");
            format!("{what}: policy {named:?} is none of {known}")
        })?;
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
                return Err(format!("{what}: dynamic-budget works only with `elfen run`"));
            }
            _ => {
                return Err(format!(
                    "{what}: fixed-budget and refresh-budget need a budget, slo-budget needs an \
                     slo, borrow-idle neither"
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

    fn places(&self, what: &str) -> Result<Vec<CgroupSelector>, String> {
        let units =
            self.unit.all().iter().map(|unit| checked_unit(what, unit).map(CgroupSelector::Unit));
        let cgroups = self.cgroup.all().iter().map(|path| match checked_cgroup(what, path)? {
            CgroupSelector::Cgroups(path) => {
                Err(format!("{what}: only a fence has a pattern like {path}"))
            }
            one => Ok(one),
        });
        let places = units.chain(cgroups).collect::<Result<Vec<CgroupSelector>, String>>()?;
        if self.confine && places.is_empty() {
            return Err(format!("{what}: confine requires its unit or its cgroup"));
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
            return Err(format!(
                "{what}: a name consists of letters, digits, -, _ and ., and is not \"none\""
            ));
        }
        let which = match (cgroup, unit) {
            (Some(path), None) => {
                refuse_tier(&what, path)?;
                checked_cgroup(&what, path)?
            }
            (None, Some(unit)) => {
                refuse_tier(&what, unit)?;
                CgroupSelector::Unit(checked_unit(&what, unit)?)
            }
            _ => return Err(format!("{what}: it needs either a cgroup or a unit")),
        };
        let lanes = match lanes.as_deref() {
            None | Some("all") => all.clone(),
            Some(list) => list.parse().map_err(|why| format!("{what}: lanes {list:?}: {why}"))?,
        };
        if !lanes.is_subset(all) {
            let others = lanes.without(all);
            return Err(format!("{what}: CPUs {others} are batch lanes of no service"));
        }
        Ok(Fence { name: name.clone(), which, lanes })
    }
}

/// Slices and scopes of systemd whose processes must never be frozen.
const NEEDED: [&str; 4] = ["system.slice", "user.slice", "-.slice", "init.scope"];

/// Refuses the tiers of a kubelet. A kubelet sets the weight of its tiers at each start. The kernel
/// refuses that for an idle cgroup, which a fence is, so the kubelet would not start.
fn refuse_tier(what: &str, place: &str) -> Result<(), String> {
    const TIERS: [&str; 6] = [
        "kubepods",
        "besteffort",
        "burstable",
        "kubepods.slice",
        "kubepods-besteffort.slice",
        "kubepods-burstable.slice",
    ];
    let name = place.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let is_kubelets = place.contains("kubepods");
    // A kubelet may use another prefix for the names of its slices.
    if is_kubelets && TIERS.iter().any(|tier| name == *tier || name.ends_with(&format!("-{tier}")))
    {
        return Err(format!(
            "{what}: a kubelet whose tier {name} is idle does not start (it writes its weight, \
             which the kernel refuses); fence its pods: cgroup = \"kubepods/besteffort/pod*\" or \
             unit = \"kubepods-besteffort-pod*.slice\""
        ));
    }
    Ok(())
}

fn checked_cgroup(what: &str, path: &str) -> Result<CgroupSelector, String> {
    match CgroupPath::parse(path) {
        Some(path) if NEEDED.contains(&path.as_str().trim_start_matches('/')) => {
            Err(format!("{what}: {path} holds processes that must never be frozen"))
        }
        Some(path) if path.as_str().starts_with("/sys/fs/cgroup") => {
            Err(format!("{what}: {path} is a folder; name the cgroup as /proc/PID/cgroup does"))
        }
        Some(path) if path.as_str().split('/').any(|name| name.trim() != name) => {
            Err(format!("{what}: \"{path}\" begins or ends a name with a space"))
        }
        Some(path) if path.parent().as_str().contains('*') => {
            Err(format!("{what}: {path}: only the last name of a path may have a *"))
        }
        Some(path) if path.as_str().contains('*') => Ok(CgroupSelector::Cgroups(path)),
        Some(path) if !path.is_root() => Ok(CgroupSelector::Cgroup(path)),
        Some(_) => Err(format!("{what}: the root contains all processes")),
        None => Err(format!("{what}: invalid cgroup path {path:?}")),
    }
}

/// Checks the name of a unit, which becomes an argument of systemctl.
fn checked_unit(what: &str, unit: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.@:\\*?[]".contains(c);
    let kinds = [".slice", ".scope", ".service"];
    if unit.starts_with('-') || !unit.chars().all(plain) {
        return Err(format!("{what}: invalid unit name {unit:?}"));
    }
    if !kinds.iter().any(|kind| unit.ends_with(kind)) {
        return Err(format!("{what}: {unit:?} is not a slice, scope or service"));
    }
    if NEEDED.contains(&unit) {
        return Err(format!("{what}: {unit} holds processes that must never be frozen"));
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

fn one_line(error: &toml::de::Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
