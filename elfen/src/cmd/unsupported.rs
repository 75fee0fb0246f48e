//! The screen of `elfen run` on a machine that lacks a requirement: what works, what does not and
//! why, and one next step.
//!
//! The findings are those of `elfen doctor`. This file selects the ones that matter to this run,
//! and shortens them to fit one screen. A run with a named mechanism, as in `--signal tasks`, fails
//! with one line about that mechanism instead.

use elfen_console::failure::{Failure, Status as Exit};
use elfen_console::paragraph::wrap;
use elfen_machine::doctor::verdict::Verdict;
use elfen_machine::doctor::{self, Check, Enough, Group, Machine, Status};
use elfen_machine::lane_args::{LaneArgs, topology};
use elfen_machine::source::Source;

use super::doctor::join_words;

const COLUMNS: usize = 80;
/// The columns of `yes  injection  `.
const MARGIN: usize = 16;
/// The message of the eBPF verifier alone could fill the screen.
const MECHANISM_LINES: usize = 2;
const STEP_LINES: usize = 4;

const NEEDS: [(Group, &str); 4] = [
    (Group::Lanes, "lanes"),
    (Group::Signals, "signal"),
    (Group::Naps, "nap"),
    (Group::Injection, "injection"),
];

const NEXT: &str = "next: ";
const LAST: &str = "`elfen doctor` lists every mechanism, and what would enable it\n";

/// Examines the machine for what is missing. `seen` is the failure of the run; it is returned if
/// the examination finds nothing missing.
pub(super) fn failure(lanes: &LaneArgs, names_a_service: bool, seen: Failure) -> Failure {
    let source = Source::live();
    let topology = match topology(&source) {
        Ok(topology) => topology,
        Err(failure) => return failure,
    };
    let by_hand = lanes.by_hand();
    let lanes = match lanes.resolve(&topology) {
        Ok(lanes) => lanes,
        Err(failure) => return failure,
    };
    let answers = super::doctor::query_kernel(&lanes, &topology);
    let machine =
        Machine { source: &source, topology: &topology, lanes: &lanes, by_hand, answers: &answers };
    explain(&machine, names_a_service).unwrap_or(seen)
}

/// The failure with its screen; `None` if nothing is missing.
fn explain(machine: &Machine<'_>, names_a_service: bool) -> Option<Failure> {
    let checks = adapt_to_run(doctor::examine(machine), names_a_service);
    let verdict = Verdict::of(&checks);
    let missing = |group| is_missing(&checks, group);
    // If lanes are missing too, the step is the one for lanes.
    let step = match (missing(Group::Lanes), missing(Group::Signals)) {
        (false, true) => signal_step(machine, &checks),
        _ => verdict.next.clone(),
    };
    if verdict.ok() {
        return None;
    }
    let without: Vec<String> = verdict.missing.iter().map(|what| negate(what)).collect();
    let without: Vec<&str> = without.iter().map(String::as_str).collect();
    let line = Failure::new(Exit::Unsupported, "run", join_words(&without), "see below");
    Some(line.with_screen(screen(&checks, &step)))
}

/// Turns `a signal` into `no signal`.
fn negate(what: &str) -> String {
    format!("no {}", what.split_once(' ').map_or(what, |(_, noun)| noun))
}

/// A service's page is enough for a run that names the service, and only for that.
fn adapt_to_run(mut checks: Vec<Check>, names_a_service: bool) -> Vec<Check> {
    for check in &mut checks {
        if let (Group::Signals, Enough::If(_)) = (check.group, check.enough) {
            check.enough = if names_a_service { Enough::Yes } else { Enough::No };
        }
    }
    checks
}

fn useful(checks: &[Check], group: Group) -> impl Iterator<Item = &Check> {
    checks.iter().filter(move |check| check.group == group && check.enough != Enough::No)
}

fn works(check: &Check) -> bool {
    check.finding.status != Status::No
}

fn is_missing(checks: &[Check], group: Group) -> bool {
    !useful(checks, group).any(works)
}

fn screen(checks: &[Check], step: &str) -> String {
    let mut text = String::from("\n");
    for (group, label) in NEEDS {
        let missing = is_missing(checks, group);
        let paragraphs =
            if missing { why_not(checks, group) } else { vec![what_works(checks, group)] };
        let lines = paragraphs.iter().flat_map(|it| cut(it, COLUMNS - MARGIN, MECHANISM_LINES));
        let answer = if missing { "no" } else { "yes" };
        let lines: Vec<String> = lines.collect();
        text += &format!("{answer:5}{label:11}{}\n", lines.join(&format!("\n{:MARGIN$}", "")));
    }
    let step =
        cut(step, COLUMNS - NEXT.len(), STEP_LINES).join(&format!("\n{:1$}", "", NEXT.len()));
    text + "\n" + NEXT + &step + "\n" + LAST
}

/// If one mechanism works, its name and finding. If several work, their names.
fn what_works(checks: &[Check], group: Group) -> String {
    let working: Vec<&Check> = useful(checks, group).filter(|check| works(check)).collect();
    if let [only] = working.as_slice() {
        return format!("{}: {}", only.name, only.finding.why);
    }
    let names: Vec<&str> = working.iter().map(|check| check.name).collect();
    names.join(", ")
}

fn why_not(checks: &[Check], group: Group) -> Vec<String> {
    let explained = |check: &Check| format!("{}: {}", check.name, check.finding.why);
    let kernel = kernel_obstacle(checks).filter(|_| group == Group::Signals);
    let mut paragraphs: Vec<String> =
        kernel.into_iter().chain(useful(checks, group)).map(explained).collect();
    if group == Group::Signals && page_works(checks) {
        paragraphs.push("service-page: works next to a service that publishes".to_owned());
    }
    paragraphs
}

fn find_check<'a>(checks: &'a [Check], name: &str) -> Option<&'a Check> {
    checks.iter().find(|check| check.name == name)
}

fn page_works(checks: &[Check]) -> bool {
    find_check(checks, "service-page").is_some_and(works)
}

/// The failed check that rules out the task map on this kernel for all users, root included.
fn kernel_obstacle(checks: &[Check]) -> Option<&Check> {
    let of_kernel = ["kernel-version", "kernel-types", "sched-switch"];
    of_kernel.into_iter().filter_map(|name| find_check(checks, name)).find(|check| !works(check))
}

const PUBLISH: &str = "name a service that publishes its requests; this needs neither root nor \
                       eBPF (`elfen run --signal service --service NAME`)";

/// The step that enables a signal with the least effort.
///
/// If the kernel supports the task map, that is a step for root or elfend. Otherwise it is the page
/// of a service, which needs no permission, or else what would remove the kernel's obstacle.
fn signal_step(machine: &Machine<'_>, checks: &[Check]) -> String {
    let fix = |name: &str| {
        find_check(checks, name).map_or(String::new(), |check| check.finding.fix.clone())
    };
    let privileged = machine.answers.capabilities.is_some_and(|has| has.bpf && has.perfmon);
    match kernel_obstacle(checks) {
        None if privileged => fix("task-map-attach"),
        None => fix("task-map-elfend"),
        Some(_) if page_works(checks) => PUBLISH.to_owned(),
        Some(check) => check.finding.fix.clone(),
    }
}

const MORE: &str = " ...";

/// Wraps a text, and cuts it after `lines` lines. A cut text ends with `MORE`.
fn cut(text: &str, columns: usize, lines: usize) -> Vec<String> {
    let mut all = wrap(text, columns - MORE.len());
    if all.len() > lines {
        all.truncate(lines);
        all.last_mut().unwrap_or_else(|| unreachable!("a screen has lines")).push_str(MORE);
    }
    all
}

#[cfg(test)]
mod tests;
