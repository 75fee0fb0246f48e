//! `elfen set`: another policy or budget for a batch that runs.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::control::PolicyKind;

use super::failure::{Failure, Status};
use super::policy_args::PolicyArgs;
use super::status::batches;
use crate::host::run::find::Batch;

const EXAMPLES: &str = "\
Examples:
  elfen set --policy borrow-idle                      the one batch that runs
  elfen set 4711 --policy fixed-budget --budget 2ms   that of process 4711";

/// Change the policy of a running batch
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program's process id, as `elfen status` lists it; may be left out if there is only one batch
    pid: Option<u32>,

    #[command(flatten)]
    policy: PolicyArgs,
}

/// The keeper looks ten times a second.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (settings, _) = args.policy.settings()?;
    let batch = chosen(args.pid)?;
    let what = format!("setting the policy of process {}", batch.pid);
    let refuse = |why: &str, fix: &str| Err(Failure::new(Status::Failed, &what, why, fix));
    let Some(page) = batch.writable() else {
        return refuse("its control page is another user's", "run this as that user, or as root");
    };
    let (Some(wanted), Some(holds)) = (page.slot(1), page.slot(0)) else {
        return refuse("its control page has no room for wishes", "use the same version of elfen");
    };
    let counted = || batch.lanes.slots().any(|slot| slot.ipc_milli(monotonic_ns()).is_some());
    if settings.policy == PolicyKind::DynamicBudget && !counted() {
        let why = "nobody counts the instructions of its request lanes";
        let fix = "start the batch with --policy dynamic-budget, or use refresh-budget";
        return Err(Failure::new(Status::Unsupported, what, why, fix));
    }
    wanted.publish(&settings);
    let start = Instant::now();
    let taken_over = || {
        let found = holds.settings().map(|(_, found)| found);
        // slo-budget goes on to set the budget.
        found.is_some_and(|found| found.policy == settings.policy)
    };
    while !taken_over() {
        if start.elapsed() > TAKEN_OVER_WITHIN {
            return refuse("its keeper does not answer", "see `elfen status`");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    writeln!(out, "process {}: {}", batch.pid, args.policy.name()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

fn chosen(pid: Option<u32>) -> Result<Batch, Failure> {
    let mut found = batches()?;
    let listed: Vec<String> = found.iter().map(|batch| batch.pid.to_string()).collect();
    let refuse = |why: &str| {
        let fix = match listed.as_slice() {
            [] => "start one with `elfen run`".to_owned(),
            listed => format!("name one of {}", listed.join(", ")),
        };
        Err(Failure::new(Status::Usage, "choosing a batch", why, fix))
    };
    match pid {
        Some(pid) => match found.iter().position(|batch| batch.pid == pid) {
            Some(index) => Ok(found.swap_remove(index)),
            None => refuse("no batch that you may see has this process id"),
        },
        None if found.len() == 1 => Ok(found.swap_remove(0)),
        None if found.is_empty() => refuse("no batch runs"),
        None => refuse("several batches run"),
    }
}
