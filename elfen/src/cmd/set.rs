//! `elfen set`: another policy or budget for a batch that runs.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_rt::signal::lane::LaneSlot;
use elfen_run::batches::Batch;
use elfen_run::channels::Service;

use super::pause::RunDir;
use super::policy_args::{Chosen, PolicyArgs};
use super::status::batches;

const EXAMPLES: &str = "\
Examples:
  elfen set --policy borrow-idle                      the one batch that runs
  elfen set --budget 3ms                              the same with another
  elfen set 4711 --policy fixed-budget --budget 2ms   that of process 4711
  sudo elfen set --service shop --slo p99=5ms         what elfend lends it";

/// Change the policy of a running batch
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program's process id, as `elfen status` lists it; may be left out
    /// if there is only one batch
    pid: Option<u32>,

    /// That beside this service: elfend's lanes have settings for each
    #[arg(long, value_name = "NAME")]
    service: Option<String>,

    #[command(flatten)]
    run_dir: RunDir,

    #[command(flatten)]
    policy: PolicyArgs,
}

/// The keeper looks ten times a second.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if args.policy.is_empty() {
        let fix = "say what: --policy borrow-idle, or --budget 3ms";
        return Err(Failure::new(Status::Usage, "set", "nothing is to be changed", fix));
    }
    let batch = chosen(args)?;
    let what = format!("setting the policy of process {}", batch.pid);
    let refuse = |why: &str, fix: &str| Err(Failure::new(Status::Failed, &what, why, fix));
    let Some(holds) = batch.control.slot(0) else {
        return refuse("its control page has no settings", "use the same version of elfen");
    };
    let Some((_, now)) = holds.settings() else {
        return refuse("its settings are being changed", "try again");
    };
    let segment = holds.service_segment.load(Relaxed).checked_sub(1);
    let segment = segment.and_then(|id| i32::try_from(id).ok());
    let service = segment.and_then(Service::of_segment);
    let Chosen { settings, taken, .. } = args.policy.change(&now, service.as_ref())?;
    let measured = |slot: &LaneSlot| slot.inputs.ipc_since_ns.load(Relaxed) != 0;
    require(&settings, segment.is_some(), batch.lanes.slots().any(measured), &what)?;
    if let Err(error) = batch.request_settings(&settings) {
        return match error.kind() {
            ErrorKind::PermissionDenied => {
                refuse("its settings are another user's", "run this as that user, or as root")
            }
            _ => refuse(&error.to_string(), "use the same version of elfen"),
        };
    }
    let start = Instant::now();
    while !holds.settings().is_some_and(|(_, found)| is_taken_over(&found, &settings)) {
        if start.elapsed() > TAKEN_OVER_WITHIN {
            return refuse("its keeper does not answer", "see `elfen status`");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let budget = match settings.policy {
        PolicyKind::BorrowIdle | PolicyKind::SloBudget => String::new(),
        _ => format!(" of {}", duration::show(settings.budget_ns)),
    };
    let taken = taken.map(|from| format!(" ({from})")).unwrap_or_default();
    writeln!(out, "process {}: {}{budget}{taken}", batch.pid, settings.policy.name())
        .map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// The service and the counters that the batch was started with have to allow the policy.
fn require(
    settings: &Settings,
    has_service: bool,
    is_counted: bool,
    what: &str,
) -> Result<(), Failure> {
    let needs_service =
        !matches!(settings.policy, PolicyKind::BorrowIdle | PolicyKind::FixedBudget);
    if needs_service && !has_service {
        let why = "it was started without a service, and only requests can be given this budget";
        let fix = "start it with --service, or use borrow-idle or fixed-budget";
        return Err(Failure::new(Status::Failed, what, why, fix));
    }
    if settings.policy == PolicyKind::DynamicBudget && !is_counted {
        let why = "nobody counts the instructions of its request lanes";
        let fix = "start the batch with --policy dynamic-budget, or use refresh-budget";
        return Err(Failure::new(Status::Unsupported, what, why, fix));
    }
    Ok(())
}

/// slo-budget goes on to set its budget, and until when it counts.
fn is_taken_over(found: &Settings, wanted: &Settings) -> bool {
    match wanted.policy {
        PolicyKind::SloBudget => {
            let (budget_ns, budget_until_ns) = (wanted.budget_ns, wanted.budget_until_ns);
            Settings { budget_ns, budget_until_ns, ..*found } == *wanted
        }
        _ => found == wanted,
    }
}

fn chosen(args: &Args) -> Result<Batch, Failure> {
    let mut found = batches(&args.run_dir)?;
    let named = |batch: &Batch| format!("{} ({})", batch.pid, batch.program);
    let listed: Vec<String> = found.iter().map(named).collect();
    let refuse = |why: &str| {
        let fix = match listed.as_slice() {
            [] => "start one with `elfen run`".to_owned(),
            listed => {
                let listed = listed.join(", ");
                format!("name one by its process, and by --service where that has more: {listed}")
            }
        };
        Err(Failure::new(Status::Usage, "choosing a batch", why, fix))
    };
    let wanted = |batch: &Batch| {
        args.pid.is_none_or(|pid| batch.pid == pid)
            && args.service.as_ref().is_none_or(|service| batch.is_lent_next_to(service))
    };
    found.retain(wanted);
    match (found.len(), args.pid.is_some() || args.service.is_some()) {
        (1, _) => Ok(found.swap_remove(0)),
        (0, true) => refuse("no batch that you may see is this one"),
        (0, false) => refuse("no batch runs"),
        _ => refuse("several batches run"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: `set` is done when what it asked for holds, and not when the policy's name does.
    /// Method: settings that differ in one word each.
    #[test]
    fn the_same_policy_with_another_budget_has_not_been_taken_over() {
        let wanted = Settings {
            policy: PolicyKind::FixedBudget,
            budget_ns: 3_000_000,
            ref_ipc_milli: 900,
            ..Settings::BORROW_IDLE
        };
        assert!(is_taken_over(&wanted, &wanted));
        for found in [
            Settings { budget_ns: 2_000_000, ..wanted },
            Settings { ref_ipc_milli: 800, ..wanted },
            Settings { policy: PolicyKind::RefreshBudget, ..wanted },
        ] {
            assert!(!is_taken_over(&found, &wanted), "{found:?}");
        }
    }

    /// Goal: an SLO is taken over although its keeper sets the budget itself from then on.
    #[test]
    fn a_budget_that_follows_the_tail_is_its_keepers() {
        let wanted = Settings {
            policy: PolicyKind::SloBudget,
            slo_latency_ns: 5_000_000,
            slo_per_million: 10_000,
            ..Settings::BORROW_IDLE
        };
        let steered = Settings { budget_ns: 40_000, budget_until_ns: 7, ..wanted };
        assert!(is_taken_over(&steered, &wanted));
        let other = Settings { slo_latency_ns: 6_000_000, ..steered };
        assert!(!is_taken_over(&other, &wanted));
    }

    /// Goal: no batch is given a policy that it cannot follow, which would be borrow-idle under
    /// another name. Method: each policy, for batches without a service and without counters.
    #[test]
    fn a_policy_is_refused_that_the_batch_cannot_follow() {
        use PolicyKind::{BorrowIdle, DynamicBudget, FixedBudget, RefreshBudget, SloBudget};
        let allowed = |policy, has_service, is_counted| {
            let settings = Settings { policy, ..Settings::BORROW_IDLE };
            require(&settings, has_service, is_counted, "set").is_ok()
        };
        for policy in [BorrowIdle, FixedBudget] {
            assert!(allowed(policy, false, false), "{policy:?}");
        }
        for policy in [RefreshBudget, SloBudget] {
            assert!(!allowed(policy, false, true), "{policy:?}");
            assert!(allowed(policy, true, false), "{policy:?}");
        }
        let dynamic = [(false, true), (true, false), (true, true)];
        let dynamic = dynamic.map(|(service, counts)| allowed(DynamicBudget, service, counts));
        assert_eq!(dynamic, [false, false, true]);
    }
}
