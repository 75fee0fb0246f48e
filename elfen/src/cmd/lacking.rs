//! The screen of `elfen run` on a machine that lacks something: what works, what does not and why,
//! and the next step.
//!
//! The findings are those of `elfen doctor`. Here they are only compared with what this run asked
//! for, and cut to what fits. A user who named a mechanism, as in `--source tasks`, gets one line
//! about the mechanism instead.

use elfen_console::failure::{Failure, Status as Exit};
use elfen_console::paragraph::wrap;
use elfen_machine::doctor::{self, Check, Enough, Group, Machine, NEEDS, Verdict, alternatives};
use elfen_machine::lane_args::{LaneArgs, topology};
use elfen_machine::source::Source;

use super::doctor::listed;

const COLUMNS: usize = 80;
/// `yes  checks     `.
const MARGIN: usize = 16;
/// The verifier's message can fill the screen by itself.
const LINES_A_MECHANISM: usize = 2;
const LINES_OF_STEP: usize = 4;

/// The rows of the screen, one for each of [`NEEDS`].
const LABELS: [&str; 4] = ["lanes", "source", "nap", "checks"];

const NEXT: &str = "next: ";
const LAST: &str = "`elfen doctor` lists every mechanism, and what would bring it\n";

/// Looks at the machine for what is missing. `seen` is the failure that the run itself met, and is
/// all there is to say where nothing else is missing.
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
    let answers = super::doctor::ask(&lanes, &topology);
    let machine =
        Machine { source: &source, topology: &topology, lanes: &lanes, by_hand, answers: &answers };
    explained(&machine, names_a_service).unwrap_or(seen)
}

/// The failure with its screen; `None` if nothing is missing.
fn explained(machine: &Machine<'_>, names_a_service: bool) -> Option<Failure> {
    let checks = asked_for(doctor::examine(machine), names_a_service);
    let verdict = Verdict::of(&checks);
    let missing = |group| is_missing(&checks, group);
    // Lanes come first: one step at a time.
    let step = match (missing(Group::Lanes), missing(Group::Signals)) {
        (false, true) => signal_step(machine, &checks),
        _ => verdict.next.clone(),
    };
    if verdict.ok() {
        return None;
    }
    // Of `a signal`, `no signal`.
    let no = |what: &&str| what.split_once(' ').map_or(String::new(), |(_, it)| format!("no {it}"));
    let without: Vec<String> = verdict.missing.iter().map(no).collect();
    let line = Failure::new(Exit::Unsupported, "run", listed(&without), "see below");
    Some(line.with_screen(screen(&checks, &step)))
}

/// A service's page is enough for the run that names the service.
fn asked_for(mut checks: Vec<Check>, names_a_service: bool) -> Vec<Check> {
    for check in &mut checks {
        if let (Group::Signals, Enough::If(_)) = (check.group, check.enough) {
            check.enough = if names_a_service { Enough::Yes } else { Enough::No };
        }
    }
    checks
}

fn is_missing(checks: &[Check], group: Group) -> bool {
    !alternatives(checks, group).any(Check::works)
}

fn screen(checks: &[Check], step: &str) -> String {
    let mut text = String::from("\n");
    for ((group, _), label) in NEEDS.into_iter().zip(LABELS) {
        let missing = is_missing(checks, group);
        let paragraphs =
            if missing { why_not(checks, group) } else { vec![what_works(checks, group)] };
        let lines = paragraphs.iter().flat_map(|it| cut(it, COLUMNS - MARGIN, LINES_A_MECHANISM));
        let answer = if missing { "no" } else { "yes" };
        let lines: Vec<String> = lines.collect();
        text += &format!("{answer:5}{label:11}{}\n", lines.join(&format!("\n{:MARGIN$}", "")));
    }
    let step =
        cut(step, COLUMNS - NEXT.len(), LINES_OF_STEP).join(&format!("\n{:1$}", "", NEXT.len()));
    text + "\n" + NEXT + &step + "\n" + LAST
}

/// The one mechanism that works and what its check found, or the names of several.
fn what_works(checks: &[Check], group: Group) -> String {
    let working: Vec<&Check> = alternatives(checks, group).filter(|check| check.works()).collect();
    if let [only] = working.as_slice() {
        return format!("{}: {}", only.name, only.finding.why);
    }
    let names: Vec<&str> = working.iter().map(|check| check.name).collect();
    names.join(", ")
}

fn why_not(checks: &[Check], group: Group) -> Vec<String> {
    let told = |check: &Check| format!("{}: {}", check.name, check.finding.why);
    let kernel = unable(checks).filter(|_| group == Group::Signals);
    let mut paragraphs: Vec<String> =
        kernel.into_iter().chain(alternatives(checks, group)).map(told).collect();
    if group == Group::Signals && page_works(checks) {
        paragraphs.push("service-page: works beside a service that publishes".to_owned());
    }
    paragraphs
}

fn named<'a>(checks: &'a [Check], name: &str) -> Option<&'a Check> {
    checks.iter().find(|check| check.name == name)
}

fn page_works(checks: &[Check]) -> bool {
    named(checks, "service-page").is_some_and(Check::works)
}

/// The check that keeps the kernel itself from telling who runs, whichever user asks.
fn unable(checks: &[Check]) -> Option<&Check> {
    let of_kernel = ["kernel-version", "kernel-types", "sched-switch"];
    of_kernel.into_iter().filter_map(|name| named(checks, name)).find(|check| !check.works())
}

const PUBLISH: &str = "name a service that publishes its requests, which takes neither root nor \
                       eBPF (`elfen run --source service --service NAME`)";

/// The step that brings a signal soonest: root's help where the kernel is able, the cure where root
/// itself is refused, and else the page, which needs no permission.
fn signal_step(machine: &Machine<'_>, checks: &[Check]) -> String {
    let fix = |name: &str| named(checks, name).map_or(String::new(), |it| it.finding.fix.clone());
    let privileged = machine.answers.capabilities.is_some_and(|has| has.bpf && has.perfmon);
    match unable(checks) {
        None if privileged => fix("task-map-attach"),
        None => fix("task-map-elfend"),
        Some(_) if page_works(checks) => PUBLISH.to_owned(),
        Some(check) => check.finding.fix.clone(),
    }
}

const MORE: &str = " ...";

/// At most `lines` of it, which say if there was more.
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
