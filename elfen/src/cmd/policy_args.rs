//! The options of `run` and `set` for the policy and its parameters.

use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_rt::clock::nanos;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_run::channels::Service;

/// Parses the name of a policy of the runtime.
fn policy_parser() -> impl TypedValueParser<Value = PolicyKind> {
    let value = |kind: PolicyKind| PossibleValue::new(kind.name()).help(help(kind));
    PossibleValuesParser::new(PolicyKind::ALL.map(value)).try_map(|name| {
        let kind = PolicyKind::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or("unknown policy")
    })
}

fn help(policy: PolicyKind) -> &'static str {
    match policy {
        PolicyKind::BorrowIdle => "Nap whenever the request lane is busy",
        PolicyKind::FixedBudget => {
            "Run for one budget next to a request that did not wait in the queue"
        }
        PolicyKind::RefreshBudget => {
            "As fixed-budget, with a new budget for each request while the queue is empty"
        }
        PolicyKind::DynamicBudget => {
            "As refresh-budget; the less a request is slowed, the larger its budget"
        }
        PolicyKind::SloBudget => {
            "As refresh-budget, with a budget that follows the measured tail latency"
        }
    }
}

#[derive(clap::Args, Debug)]
pub(crate) struct PolicyArgs {
    /// When the batch may run next to a request [default of a new run: borrow-idle]
    #[arg(help_heading = "Policy", long, value_name = "POLICY", value_parser = policy_parser(),
        env = "ELFEN_POLICY")]
    policy: Option<PolicyKind>,

    /// How long the batch may share a core with a request
    ///
    /// Default with --slo: the SLO minus the tail latency of the service so far. Default without
    /// --slo: a tenth of the median latency of the service.
    #[arg(help_heading = "Policy", long, value_name = "TIME", value_parser = duration::parse,
        allow_hyphen_values = true,
        env = "ELFEN_BUDGET")]
    budget: Option<Duration>,

    /// The latency to keep, as in p99=100ms: slo-budget controls it; others derive a budget from it
    #[arg(help_heading = "Policy", long, value_name = "SLO", env = "ELFEN_SLO")]
    slo: Option<Slo>,

    /// For dynamic-budget: instructions per cycle of the service alone, as in 0.9
    #[arg(help_heading = "Policy", long, value_name = "IPC", value_parser = per_thousand,
        env = "ELFEN_REF_IPC")]
    ref_ipc: Option<u64>,
}

/// The settings that the options select.
#[derive(Debug)]
pub(crate) struct ChosenSettings {
    pub(crate) settings: Settings,
    /// For slo-budget: the SLO to keep.
    pub(crate) slo: Option<Slo>,
    /// How the budget was derived, if the user gave none.
    pub(crate) budget_origin: Option<String>,
}

impl PolicyArgs {
    pub(crate) fn policy(&self) -> PolicyKind {
        self.policy.unwrap_or(PolicyKind::BorrowIdle)
    }

    /// Whether the user gave none of the options.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { policy, budget, slo, ref_ipc } = self;
        policy.is_none() && budget.is_none() && slo.is_none() && ref_ipc.is_none()
    }

    /// The initial settings. Rejects missing options, and options that the policy does not use.
    pub(crate) fn choose(&self, service: Option<&Service>) -> Result<ChosenSettings, Failure> {
        self.change(&Settings { policy: self.policy(), ..Settings::BORROW_IDLE }, service)
    }

    /// The settings that replace `now`. If the policy stays the same, values without an option stay
    /// the same.
    pub(crate) fn change(
        &self,
        now: &Settings,
        service: Option<&Service>,
    ) -> Result<ChosenSettings, Failure> {
        let policy = self.policy.unwrap_or(now.policy);
        let mut settings = Settings { policy, ..Settings::BORROW_IDLE };
        if policy == now.policy {
            settings = *now;
        }
        let has_budget = !matches!(policy, PolicyKind::BorrowIdle | PolicyKind::SloBudget);
        let has_slo = policy != PolicyKind::BorrowIdle;
        let has_ipc = policy == PolicyKind::DynamicBudget;
        refuse_unused(policy, self.budget.is_some(), has_budget, "--budget")?;
        refuse_unused(policy, self.slo.is_some(), has_slo, "--slo")?;
        refuse_unused(policy, self.ref_ipc.is_some(), has_ipc, "--ref-ipc")?;
        settings.ref_ipc_milli = self.ref_ipc.unwrap_or(settings.ref_ipc_milli);
        if has_ipc && settings.ref_ipc_milli == 0 {
            return Err(missing_option(policy, "--ref-ipc", "--ref-ipc 0.9"));
        }
        let mut slo = None;
        if policy == PolicyKind::SloBudget {
            slo = self.slo.or_else(|| slo_of(&settings));
            let Some(slo) = slo else {
                return Err(missing_option(policy, "--slo", "--slo p99=100ms"));
            };
            settings.slo_latency_ns = slo.latency_ns;
            settings.slo_per_million = slo.per_million.into();
        }
        let mut budget_origin = None;
        if let Some(budget) = self.budget {
            settings.budget_ns = nanos(budget);
        } else if has_budget && (settings.budget_ns == 0 || self.slo.is_some()) {
            let (budget_ns, origin) = derive_budget(policy, service, self.slo)?;
            settings.budget_ns = budget_ns;
            budget_origin = Some(origin);
        }
        Ok(ChosenSettings { settings, slo, budget_origin })
    }
}

fn slo_of(settings: &Settings) -> Option<Slo> {
    let per_million = u32::try_from(settings.slo_per_million).ok()?;
    (settings.slo_latency_ns != 0)
        .then_some(Slo { per_million, latency_ns: settings.slo_latency_ns })
}

/// Derives a budget from the service's latencies so far. Also returns a text that says how.
fn derive_budget(
    policy: PolicyKind,
    service: Option<&Service>,
    slo: Option<Slo>,
) -> Result<(u64, String), Failure> {
    const PARTS: u64 = 10;
    let Some(service) = service else {
        return Err(missing_option(policy, "--budget", "--budget 2ms"));
    };
    let latency = |per_million| service.latency_ns(per_million);
    let none = || {
        let why =
            format!("service {:?} has finished no request to take a budget from", service.name);
        Failure::new(Status::Failed, format!("policy {}", policy.name()), why, "add --budget 2ms")
    };
    let Some(slo) = slo else {
        let median_ns = latency(500_000).ok_or_else(none)?;
        let median = duration::show(median_ns);
        return Ok((median_ns / PARTS, format!("a tenth of the median request, {median}")));
    };
    let tail_ns = latency(slo.per_million).ok_or_else(none)?;
    let tail = duration::show(tail_ns);
    match slo.latency_ns.checked_sub(tail_ns).filter(|&left_ns| left_ns > 0) {
        Some(left_ns) => Ok((left_ns, format!("the SLO minus the tail latency so far, {tail}"))),
        None => {
            let why = format!("the tail of service {:?} so far is {tail}", service.name);
            let fix = "this leaves no budget: use --policy borrow-idle, or a longer SLO";
            Err(Failure::new(Status::Failed, "a budget from the SLO", why, fix))
        }
    }
}

/// Rejects an option that the policy does not use.
fn refuse_unused(policy: PolicyKind, given: bool, used: bool, option: &str) -> Result<(), Failure> {
    if !given || used {
        return Ok(());
    }
    let variable = option.replacen("--", "ELFEN_", 1).replace('-', "_").to_uppercase();
    let what = format!("policy {}", policy.name());
    let why = format!("it does not use {option}");
    Err(Failure::new(Status::Usage, what, why, format!("omit {option}, and unset {variable}")))
}

fn missing_option(policy: PolicyKind, option: &str, example: &str) -> Failure {
    let what = format!("policy {}", policy.name());
    Failure::new(Status::Usage, what, format!("it needs {option}"), format!("add {example}"))
}

/// Parses an IPC such as `0.9`. Returns thousandths.
fn per_thousand(text: &str) -> Result<u64, String> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let number = format!("{whole}{fraction:0<3}").parse().ok();
    let fits = !whole.is_empty() && fraction.len() <= 3 && digits(whole) && digits(fraction);
    number.filter(|&milli| fits && (1..=100_000).contains(&milli)).ok_or_else(|| {
        "an IPC is a number like 0.9, with three digits at most after the point".into()
    })
}

#[cfg(test)]
mod tests {
    use super::per_thousand;

    #[test]
    fn an_ipc_is_a_decimal_number() {
        for (text, milli) in [("1", 1000), ("0.9", 900), ("1.25", 1250), ("0.001", 1), ("4.", 4000)]
        {
            assert_eq!(per_thousand(text), Ok(milli), "{text}");
        }
        for text in ["", "0", ".9", "-1", "1.2345", "1e3", "0.0", "1.2.3", "+1", "1000"] {
            assert!(per_thousand(text).is_err(), "{text}");
        }
    }
}
