//! The policy and its parameters, as `run` and `set` take them.

use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_rt::clock::nanos;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_run::channels::Service;

/// Of the runtime's policies, by their names.
fn policies() -> impl TypedValueParser<Value = PolicyKind> {
    let value = |kind: PolicyKind| PossibleValue::new(kind.name()).help(help(kind));
    PossibleValuesParser::new(PolicyKind::ALL.map(value)).try_map(|name| {
        let kind = PolicyKind::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or("it is none of them")
    })
}

fn help(policy: PolicyKind) -> &'static str {
    match policy {
        PolicyKind::BorrowIdle => "Nap whenever the request lane is busy",
        PolicyKind::FixedBudget => "Share for one budget with a request that did not wait",
        PolicyKind::RefreshBudget => {
            "The same, with a new budget for each request while the queue is empty"
        }
        PolicyKind::DynamicBudget => {
            "The same, with a budget that grows the less the request suffers"
        }
        PolicyKind::SloBudget => "The same, with a budget that follows the measured tail",
    }
}

#[derive(clap::Args, Debug)]
pub(crate) struct PolicyArgs {
    /// When to run next to a request; at first, borrow-idle
    #[arg(long, value_name = "POLICY", value_parser = policies(), env = "ELFEN_POLICY")]
    policy: Option<PolicyKind>,

    /// How long the batch may share a core with a request
    ///
    /// Without it: what the SLO leaves above the tail of the service so far, where --slo is given;
    /// else a tenth of the median request's time.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, allow_hyphen_values = true,
        env = "ELFEN_BUDGET")]
    budget: Option<Duration>,

    /// The latency to keep, as in p99=100ms: slo-budget steers by it, others take a budget from it
    #[arg(long, value_name = "SLO", env = "ELFEN_SLO")]
    slo: Option<Slo>,

    /// For dynamic-budget: instructions per cycle of the service alone, as in 0.9
    #[arg(long, value_name = "IPC", value_parser = per_thousand, env = "ELFEN_REF_IPC")]
    ref_ipc: Option<u64>,
}

/// The settings that the options ask for.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) settings: Settings,
    /// For slo-budget: the SLO to steer by.
    pub(crate) slo: Option<Slo>,
    /// Where a budget that the user did not give was taken from.
    pub(crate) taken: Option<String>,
}

impl PolicyArgs {
    pub(crate) fn policy(&self) -> PolicyKind {
        self.policy.unwrap_or(PolicyKind::BorrowIdle)
    }

    /// Whether the user asks for nothing at all.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { policy, budget, slo, ref_ipc } = self;
        policy.is_none() && budget.is_none() && slo.is_none() && ref_ipc.is_none()
    }

    /// The settings to begin with; an option too many or too few is refused.
    pub(crate) fn choose(&self, service: Option<&Service>) -> Result<Chosen, Failure> {
        self.change(&Settings { policy: self.policy(), ..Settings::BORROW_IDLE }, service)
    }

    /// The settings that follow `now`: what the options leave open stays as
    /// it is, if the policy does.
    pub(crate) fn change(
        &self,
        now: &Settings,
        service: Option<&Service>,
    ) -> Result<Chosen, Failure> {
        let policy = self.policy.unwrap_or(now.policy);
        let mut settings = Settings { policy, ..Settings::BORROW_IDLE };
        if policy == now.policy {
            settings = *now;
        }
        let has_budget = !matches!(policy, PolicyKind::BorrowIdle | PolicyKind::SloBudget);
        let has_slo = policy != PolicyKind::BorrowIdle;
        let has_ipc = policy == PolicyKind::DynamicBudget;
        hold(policy, self.budget.is_some(), has_budget, "--budget")?;
        hold(policy, self.slo.is_some(), has_slo, "--slo")?;
        hold(policy, self.ref_ipc.is_some(), has_ipc, "--ref-ipc")?;
        settings.ref_ipc_milli = self.ref_ipc.unwrap_or(settings.ref_ipc_milli);
        if has_ipc && settings.ref_ipc_milli == 0 {
            return Err(needs(policy, "--ref-ipc", "--ref-ipc 0.9"));
        }
        let mut slo = None;
        if policy == PolicyKind::SloBudget {
            slo = self.slo.or_else(|| slo_of(&settings));
            let Some(slo) = slo else { return Err(needs(policy, "--slo", "--slo p99=100ms")) };
            settings.slo_latency_ns = slo.latency_ns;
            settings.slo_per_million = slo.per_million.into();
        }
        let mut taken = None;
        if let Some(budget) = self.budget {
            settings.budget_ns = nanos(budget);
        } else if has_budget && (settings.budget_ns == 0 || self.slo.is_some()) {
            let (budget_ns, from) = taken_from(policy, service, self.slo)?;
            settings.budget_ns = budget_ns;
            taken = Some(from);
        }
        Ok(Chosen { settings, slo, taken })
    }
}

fn slo_of(settings: &Settings) -> Option<Slo> {
    let per_million = u32::try_from(settings.slo_per_million).ok()?;
    (settings.slo_latency_ns != 0)
        .then_some(Slo { per_million, latency_ns: settings.slo_latency_ns })
}

/// A budget by what the service has done so far, and the words that say where it comes from.
fn taken_from(
    policy: PolicyKind,
    service: Option<&Service>,
    slo: Option<Slo>,
) -> Result<(u64, String), Failure> {
    const PARTS: u64 = 10;
    let Some(service) = service else { return Err(needs(policy, "--budget", "--budget 2ms")) };
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
        Some(left_ns) => Ok((left_ns, format!("the SLO less the tail so far, {tail}"))),
        None => {
            let why = format!("the tail of service {:?} so far is {tail}", service.name);
            let fix = "there is nothing to give: use --policy borrow-idle, or a later SLO";
            Err(Failure::new(Status::Failed, "a budget from the SLO", why, fix))
        }
    }
}

/// Refuses an option that the policy has no use for.
fn hold(policy: PolicyKind, given: bool, used: bool, option: &str) -> Result<(), Failure> {
    if !given || used {
        return Ok(());
    }
    let variable = option.replacen("--", "ELFEN_", 1).replace('-', "_").to_uppercase();
    let what = format!("policy {}", policy.name());
    let why = format!("it has no use for {option}");
    Err(Failure::new(Status::Usage, what, why, format!("leave that out, and {variable} unset")))
}

fn needs(policy: PolicyKind, option: &str, example: &str) -> Failure {
    let what = format!("policy {}", policy.name());
    Failure::new(Status::Usage, what, format!("it needs {option}"), format!("add {example}"))
}

/// An IPC in thousandths.
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
