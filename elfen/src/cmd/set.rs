//! `elfen set`: changes the policy or the budget of a running batch.

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
use super::policy_args::{ChosenSettings, PolicyArgs};
use super::status::batches;

const EXAMPLES: &str = "\
Examples:
  elfen set --policy borrow-idle                      the only batch
  elfen set --budget 3ms                              another budget for it
  elfen set 4711 --policy fixed-budget --budget 2ms   the batch of process 4711
  sudo elfen set --service shop --slo p99=5ms         lanes that elfend lends";

/// Change the policy of a running batch
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SetArgs {
    /// The program's process id, as `elfen status` lists it; not needed if there is only one batch
    pid: Option<u32>,

    /// The batch next to this service: elfend's lanes have settings for each service
    #[arg(long, value_name = "NAME")]
    service: Option<String>,

    #[command(flatten)]
    run_dir: RunDir,

    #[command(flatten)]
    policy: PolicyArgs,
}

/// How long to wait until the settings are in force. The supervisor reads requests ten times a
/// second.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &SetArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if args.policy.is_empty() {
        let fix = "give one, as in --policy borrow-idle or --budget 3ms";
        return Err(Failure::new(Status::Usage, "set", "no setting is given", fix));
    }
    let batch = choose_batch(args)?;
    let what = format!("setting the policy of process {}", batch.pid);
    let refuse = |why: &str, fix: &str| Err(Failure::new(Status::Failed, &what, why, fix));
    let Some(in_force) = batch.control.slot(0) else {
        return refuse("its control page has no settings", "use the same version of elfen");
    };
    let Some((_, now)) = in_force.settings() else {
        return refuse("its settings are being changed", "try again");
    };
    let segment = in_force.service_segment.load(Relaxed).checked_sub(1);
    let segment = segment.and_then(|id| i32::try_from(id).ok());
    let service = segment.and_then(Service::of_segment);
    let ChosenSettings { settings, budget_origin, .. } =
        args.policy.change(&now, service.as_ref())?;
    let is_counted = |slot: &LaneSlot| slot.inputs.ipc_since_ns.load(Relaxed) != 0;
    require_inputs(&settings, segment.is_some(), batch.lanes.slots().any(is_counted), &what)?;
    if let Err(error) = batch.request_settings(&settings) {
        return match error.kind() {
            ErrorKind::PermissionDenied => {
                refuse("it belongs to another user", "run this as that user, or as root")
            }
            _ => refuse(&error.to_string(), "use the same version of elfen"),
        };
    }
    let start = Instant::now();
    while !in_force.settings().is_some_and(|(_, found)| is_taken_over(&found, &settings)) {
        if start.elapsed() > TAKEN_OVER_WITHIN {
            return refuse("its supervisor does not answer", "see `elfen status`");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let budget = match settings.policy {
        PolicyKind::BorrowIdle | PolicyKind::SloBudget => String::new(),
        _ => format!(" of {}", duration::show(settings.budget_ns)),
    };
    let origin = budget_origin.map(|origin| format!(" ({origin})")).unwrap_or_default();
    writeln!(out, "process {}: {}{budget}{origin}", batch.pid, settings.policy.name())
        .map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// Rejects a policy that needs a service or counters, if the batch was started without them.
fn require_inputs(
    settings: &Settings,
    has_service: bool,
    is_counted: bool,
    what: &str,
) -> Result<(), Failure> {
    let needs_service =
        !matches!(settings.policy, PolicyKind::BorrowIdle | PolicyKind::FixedBudget);
    if needs_service && !has_service {
        let why = "it was started without a service, and this policy needs its requests";
        let fix = "start it with --service, or use borrow-idle or fixed-budget";
        return Err(Failure::new(Status::Failed, what, why, fix));
    }
    if settings.policy == PolicyKind::DynamicBudget && !is_counted {
        let why = "the instructions of its request lanes are not counted";
        let fix = "start the batch with --policy dynamic-budget, or use refresh-budget";
        return Err(Failure::new(Status::Unsupported, what, why, fix));
    }
    Ok(())
}

/// Whether the settings in force are the wanted ones. With slo-budget, the supervisor sets the
/// budget and its end itself.
fn is_taken_over(found: &Settings, wanted: &Settings) -> bool {
    match wanted.policy {
        PolicyKind::SloBudget => {
            let (budget_ns, budget_until_ns) = (wanted.budget_ns, wanted.budget_until_ns);
            Settings { budget_ns, budget_until_ns, ..*found } == *wanted
        }
        _ => found == wanted,
    }
}

/// The batch that the arguments name, or the only batch.
fn choose_batch(args: &SetArgs) -> Result<Batch, Failure> {
    let mut found = batches(&args.run_dir)?;
    let named = |batch: &Batch| format!("{} ({})", batch.pid, batch.program);
    let listed: Vec<String> = found.iter().map(named).collect();
    let refuse = |why: &str| {
        let (status, fix) = match listed.as_slice() {
            [] => (Status::Failed, "start one with `elfen run`".to_owned()),
            listed => {
                let listed = listed.join(", ");
                let fix = format!(
                    "name a batch by its process id, with --service if the process has \
                    several: {listed}"
                );
                (Status::Usage, fix)
            }
        };
        Err(Failure::new(status, "choosing a batch", why, fix))
    };
    let wanted = |batch: &Batch| {
        args.pid.is_none_or(|pid| batch.pid == pid)
            && args.service.as_ref().is_none_or(|service| batch.is_lent_next_to(service))
    };
    found.retain(wanted);
    match (found.len(), args.pid.is_some() || args.service.is_some()) {
        (1, _) => Ok(found.swap_remove(0)),
        (0, _) if listed.is_empty() => refuse("no batch of this user runs"),
        (0, _) => refuse("no running batch matches the arguments"),
        _ => refuse("several batches run"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: `set` waits until all wanted settings are in force, not only the policy. Method:
    /// settings that differ in one word each.
    #[test]
    fn the_same_policy_with_another_budget_is_not_taken_over() {
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

    /// Goal: an SLO counts as in force, although the supervisor then changes the budget itself.
    #[test]
    fn an_slo_is_taken_over_although_its_budget_changes() {
        let wanted = Settings {
            policy: PolicyKind::SloBudget,
            slo_latency_ns: 5_000_000,
            slo_per_million: 10_000,
            ..Settings::BORROW_IDLE
        };
        let controlled = Settings { budget_ns: 40_000, budget_until_ns: 7, ..wanted };
        assert!(is_taken_over(&controlled, &wanted));
        let other = Settings { slo_latency_ns: 6_000_000, ..controlled };
        assert!(!is_taken_over(&other, &wanted));
    }

    /// Goal: a batch never gets a policy without the inputs of that policy, which would act as
    /// borrow-idle. Method: each policy, for batches without a service and without counters.
    #[test]
    fn a_policy_without_its_inputs_is_refused() {
        use PolicyKind::{BorrowIdle, DynamicBudget, FixedBudget, RefreshBudget, SloBudget};
        let allowed = |policy, has_service, is_counted| {
            let settings = Settings { policy, ..Settings::BORROW_IDLE };
            require_inputs(&settings, has_service, is_counted, "set").is_ok()
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
