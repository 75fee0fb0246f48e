//! The policy and its parameters, as `run` and `set` take them.

use std::time::Duration;

use elfen_rt::clock::nanos;
use elfen_rt::policy::slo::Slo;
use elfen_rt::signal::control::{PolicyKind, Settings};

use super::duration;
use super::failure::{Failure, Status};

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum PolicyName {
    /// Nap whenever the request lane is busy
    BorrowIdle,
    /// Share for one budget with a request that did not wait
    FixedBudget,
    /// The same, with a new budget for each request while the queue is empty
    RefreshBudget,
    /// The same, with a budget that grows the less the request suffers
    DynamicBudget,
    /// The same, with a budget that follows the measured tail
    SloBudget,
}

#[derive(clap::Args, Debug)]
pub(crate) struct PolicyArgs {
    /// When to run next to a request
    #[arg(long, value_enum, default_value = "borrow-idle")]
    policy: PolicyName,

    /// How long the batch may share a core with a request
    #[arg(long, value_name = "TIME", value_parser = duration::parse, allow_hyphen_values = true)]
    budget: Option<Duration>,

    /// For slo-budget: the latency to keep, as in p99=100ms
    #[arg(long, value_name = "SLO")]
    slo: Option<Slo>,

    /// For dynamic-budget: instructions per cycle of the service alone, as in 0.9
    #[arg(long, value_name = "IPC", value_parser = per_thousand)]
    ref_ipc: Option<u64>,
}

impl PolicyArgs {
    pub(crate) fn name(&self) -> &'static str {
        self.kind().name()
    }

    fn kind(&self) -> PolicyKind {
        match self.policy {
            PolicyName::BorrowIdle => PolicyKind::BorrowIdle,
            PolicyName::FixedBudget => PolicyKind::FixedBudget,
            PolicyName::RefreshBudget => PolicyKind::RefreshBudget,
            PolicyName::DynamicBudget => PolicyKind::DynamicBudget,
            PolicyName::SloBudget => PolicyKind::SloBudget,
        }
    }

    /// The settings to begin with, and the SLO to steer by; an option too many or too few is refused.
    pub(crate) fn settings(&self) -> Result<(Settings, Option<Slo>), Failure> {
        let (needs_budget, needs_slo) = match self.policy {
            PolicyName::BorrowIdle => (false, false),
            PolicyName::FixedBudget | PolicyName::RefreshBudget => (true, false),
            PolicyName::SloBudget => (false, true),
            PolicyName::DynamicBudget => (true, false),
        };
        let needs_ipc = self.policy == PolicyName::DynamicBudget;
        self.hold(self.budget.is_some(), needs_budget, "--budget", "--budget 2ms")?;
        self.hold(self.slo.is_some(), needs_slo, "--slo", "--slo p99=100ms")?;
        self.hold(self.ref_ipc.is_some(), needs_ipc, "--ref-ipc", "--ref-ipc 0.9")?;
        let settings = Settings {
            policy: self.kind(),
            budget_ns: self.budget.map_or(0, nanos),
            slo_latency_ns: self.slo.map_or(0, |slo| slo.latency_ns),
            slo_per_million: self.slo.map_or(0, |slo| slo.per_million.into()),
            ref_ipc_milli: self.ref_ipc.unwrap_or(0),
            ..Settings::BORROW_IDLE
        };
        Ok((settings, self.slo))
    }

    fn hold(&self, given: bool, needed: bool, option: &str, example: &str) -> Result<(), Failure> {
        if given == needed {
            return Ok(());
        }
        let policy = format!("policy {}", self.name());
        Err(if needed {
            Failure::new(
                Status::Usage,
                policy,
                format!("it needs {option}"),
                format!("add {example}"),
            )
        } else {
            Failure::new(
                Status::Usage,
                policy,
                format!("it has no use for {option}"),
                "leave that out",
            )
        })
    }
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
