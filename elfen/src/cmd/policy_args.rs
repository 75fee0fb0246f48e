//! The policy and its parameters, as `run` and `set` take them.

use std::time::Duration;

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

    /// For dynamic-budget: instructions per 1000 cycles of the service alone
    #[arg(long, value_name = "IPC")]
    ref_ipc: Option<u64>,
}

impl PolicyArgs {
    pub(crate) fn name(&self) -> &'static str {
        match self.policy {
            PolicyName::BorrowIdle => "borrow-idle",
            PolicyName::FixedBudget => "fixed-budget",
            PolicyName::RefreshBudget => "refresh-budget",
            PolicyName::DynamicBudget => "dynamic-budget",
            PolicyName::SloBudget => "slo-budget",
        }
    }

    /// The settings to begin with, and the SLO to steer by; an option too many or too few is refused.
    pub(crate) fn settings(&self) -> Result<(Settings, Option<Slo>), Failure> {
        let (needs_budget, needs_slo) = match self.policy {
            PolicyName::BorrowIdle => (false, false),
            PolicyName::FixedBudget | PolicyName::RefreshBudget => (true, false),
            PolicyName::SloBudget => (false, true),
            PolicyName::DynamicBudget => return Err(self.no_counters()),
        };
        self.hold(self.budget.is_some(), needs_budget, "--budget", "--budget 2ms")?;
        self.hold(self.slo.is_some(), needs_slo, "--slo", "--slo p99=100ms")?;
        self.hold(self.ref_ipc.is_some(), false, "--ref-ipc", "--policy dynamic-budget")?;
        let policy = match self.policy {
            PolicyName::BorrowIdle => PolicyKind::BorrowIdle,
            PolicyName::FixedBudget => PolicyKind::FixedBudget,
            PolicyName::RefreshBudget => PolicyKind::RefreshBudget,
            PolicyName::DynamicBudget => PolicyKind::DynamicBudget,
            PolicyName::SloBudget => PolicyKind::SloBudget,
        };
        let budget = self.budget.unwrap_or_default().as_nanos();
        let settings = Settings {
            policy,
            budget_ns: u64::try_from(budget).unwrap_or(u64::MAX),
            slo_latency_ns: self.slo.map_or(0, |slo| slo.latency_ns),
            slo_per_million: self.slo.map_or(0, |slo| slo.per_million.into()),
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

    /// Nothing in this version counts the instructions of a request lane, so the policy would be refresh-budget by
    /// another name.
    fn no_counters(&self) -> Failure {
        let why = "this version does not count the instructions of a request lane";
        let fix = "use --policy refresh-budget, which is what it comes to without them";
        Failure::new(Status::Unsupported, format!("policy {}", self.name()), why, fix)
    }
}
