//! Explains why `elfen run` cannot work on a machine: one screen with what works, what does not and
//! why, and the next step.
//!
//! The findings are those of `elfen doctor`, reduced to what the run needs and to one screen. A run
//! that names a mechanism, as in `--source tasks`, prints one line about that mechanism instead.

use elfen_console::failure::{Failure, Status as Exit};
use elfen_console::paragraph::wrap;
use elfen_machine::doctor::{self, Check, Enough, Group, Machine, NEEDS, Verdict, alternatives};
use elfen_machine::lane_args::{LaneArgs, topology};
use elfen_machine::source::Source;

use super::doctor::listed;

const COLUMNS: usize = 80;
/// The width of the text before each explanation, such as `yes  checks  `.
const MARGIN: usize = 16;
/// The most lines for a mechanism and for the next step: a message of the eBPF verifier could fill
/// the screen.
const LINES_A_MECHANISM: usize = 2;
const LINES_OF_STEP: usize = 4;

/// The rows of the screen, one for each of [`NEEDS`].
const LABELS: [&str; 4] = ["lanes", "source", "nap", "checks"];

const NEXT: &str = "next: ";
const LAST: &str = "`elfen doctor` lists every mechanism, and what would make it work\n";

/// Explains the failure of a run. Returns `failure` unchanged if this machine lacks nothing.
pub(super) fn explain(lanes: &LaneArgs, names_a_service: bool, failure: Failure) -> Failure {
    let source = Source::live();
    let screen = || {
        let topology = topology(&source)?;
        let resolved = lanes.resolve(&topology)?;
        let by_hand = lanes.by_hand();
        let machine = Machine { source: &source, topology: &topology, lanes: &resolved, by_hand };
        // Only recordings can lack results of attempts.
        Ok(doctor::examine(&machine).ok().and_then(|checks| lacking(checks, names_a_service)))
    };
    screen().unwrap_or_else(Some).unwrap_or(failure)
}

/// The failure with its screen; `None` if nothing is missing.
fn lacking(mut checks: Vec<Check>, names_a_service: bool) -> Option<Failure> {
    for check in &mut checks {
        // A run that names a service needs only that service's page. Another run cannot use a page.
        if let (Group::Signals, Enough::If(_)) = (check.group, check.enough) {
            check.enough = if names_a_service { Enough::Yes } else { Enough::No };
        }
    }
    let verdict = Verdict::of(&checks);
    if verdict.ok() {
        return None;
    }
    // If lanes are missing, the next step is about lanes, and other steps come later.
    let step = match (is_missing(&checks, Group::Lanes), is_missing(&checks, Group::Signals)) {
        (false, true) => signal_step(&checks),
        _ => &verdict.next,
    };
    // Turns `a pair of lanes` into `no pair of lanes`.
    let no = |what: &&str| format!("no {}", what.trim_start_matches("a "));
    let without: Vec<String> = verdict.missing.iter().map(no).collect();
    let line = Failure::new(Exit::Unsupported, "run", listed(&without), "see below");
    Some(line.with_screen(screen(&checks, step)))
}

fn is_missing(checks: &[Check], group: Group) -> bool {
    !alternatives(checks, group).any(Check::works)
}

fn screen(checks: &[Check], step: &str) -> String {
    let mut text = String::from("\n");
    for ((group, _), label) in NEEDS.into_iter().zip(LABELS) {
        let (answer, paragraphs) = match is_missing(checks, group) {
            true => ("no", reasons(checks, group)),
            false => ("yes", vec![working(checks, group)]),
        };
        let lines = paragraphs.iter().flat_map(|it| cut(it, COLUMNS - MARGIN, LINES_A_MECHANISM));
        let lines = lines.collect::<Vec<_>>().join(&format!("\n{:MARGIN$}", ""));
        text += &format!("{answer:5}{label:11}{lines}\n");
    }
    let step = cut(step, COLUMNS - NEXT.len(), LINES_OF_STEP);
    text + "\n" + NEXT + &step.join(&format!("\n{:1$}", "", NEXT.len())) + "\n" + LAST
}

fn name_and_why(check: &Check) -> String {
    format!("{}: {}", check.name, check.finding.why)
}

/// The name and reason of the only mechanism that works, or the names of several.
fn working(checks: &[Check], group: Group) -> String {
    let working: Vec<&Check> = alternatives(checks, group).filter(|check| check.works()).collect();
    match working.as_slice() {
        [only] => name_and_why(only),
        several => several.iter().map(|check| check.name).collect::<Vec<_>>().join(", "),
    }
}

/// The reasons why no mechanism of a group works.
fn reasons(checks: &[Check], group: Group) -> Vec<String> {
    let kernel = kernel_obstacle(checks).filter(|_| group == Group::Signals);
    let mut paragraphs: Vec<String> =
        kernel.into_iter().chain(alternatives(checks, group)).map(name_and_why).collect();
    if group == Group::Signals && find(checks, "service-page").is_some_and(Check::works) {
        paragraphs.push("service-page: works next to a service that publishes".to_owned());
    }
    paragraphs
}

fn find<'a>(checks: &'a [Check], name: &str) -> Option<&'a Check> {
    checks.iter().find(|check| check.name == name)
}

/// The check that says why this kernel cannot report tasks even to root.
fn kernel_obstacle(checks: &[Check]) -> Option<&Check> {
    let of_kernel = ["kernel-version", "kernel-types", "sched-switch"];
    of_kernel.into_iter().filter_map(|name| find(checks, name)).find(|check| !check.works())
}

const PUBLISH: &str = "name a service that publishes its requests, which takes neither root nor \
                       eBPF (`elfen run --source service --service NAME`)";

/// The next step to a source of signals. If the kernel supports the task map, the step is to get
/// root's help, or to fix what prevents root from attaching. Otherwise it is a service's page,
/// which needs no permission.
fn signal_step(checks: &[Check]) -> &str {
    let fix = |name: &str| find(checks, name).map_or("", |check| check.finding.fix.as_str());
    let of_attaching = fix("task-map-attach");
    match kernel_obstacle(checks) {
        // An unprivileged process gets the task map from elfend.
        None if of_attaching.starts_with("see task-map-elfend") => fix("task-map-elfend"),
        None => of_attaching,
        Some(_) if find(checks, "service-page").is_some_and(Check::works) => PUBLISH,
        Some(check) => &check.finding.fix,
    }
}

const MORE: &str = " ...";

/// The first lines of a text, with a mark at the end if lines are left out.
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
