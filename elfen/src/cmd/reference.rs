//! The pages of docs/reference that `elfen generate reference` writes. Each is made from the source
//! that the programs use: arguments, metrics, settings, the type of the report, and the tables of
//! `elfen --help`.

use clap::Command;
use elfen_console::reference::{GENERATED, Page, commands_page, marked, prose};
use elfen_run::report_reference;

use super::help::{STATUSES, VARIABLES};

const COMMANDS: &str = "\
`elfen lab` and `elfen demo` start the program `elfen-lab`. Its commands are in \
[commands-lab.md](commands-lab.md), those of the daemon in \
[commands-elfend.md](commands-elfend.md), and those of the proxy in \
[commands-hedge.md](commands-hedge.md).";

/// The exit statuses of each command, besides 2 for invalid arguments.
const BY_COMMAND: [(&str, &str); 27] = [
    ("elfen demo", "as `elfen lab`"),
    ("elfen doctor", "0 if borrow-idle can run here, 3 if not; 1 if the program does not exist"),
    ("elfen lab", "that of `elfen-lab`; 127 if it is not installed, 126 if it cannot be started"),
    (
        "elfen lanes",
        "0; 1 if the topology cannot be read; 2 for an invalid recorded machine; 3 without \
         sysfs, or for --slurm without pairs",
    ),
    (
        "elfen metrics",
        "0 with --once; 1 if the address cannot be used; 3 without System V shared memory",
    ),
    ("elfen pause", "0 once every fence is frozen; 1 if a process is not frozen after 5 s"),
    ("elfen profile compare", "0; 1 for an unusable profile, or one that is not exact"),
    (
        "elfen profile core",
        "0; 1 for an unusable trace or machine, or if `--pipeline` finds no instruction; 2 for an \
         invalid metric",
    ),
    ("elfen profile diff", "0; 1 for an unusable profile"),
    ("elfen profile export", "0; 1 for an unusable profile, or a file without symbols"),
    (
        "elfen profile record",
        "that of the program; 128 + N if signal N ended it; 126 if it cannot be run, 127 if it is \
         not found; 1 if the profile cannot be written, or the rules cannot be read; 2 for invalid \
         rules; 3 if it may not be traced, or the machine has no samples",
    ),
    (
        "elfen profile report",
        "0; 1 for an unusable profile, for `--sort line` without lines, or if `--annotate` finds \
         no function",
    ),
    (
        "elfen profile set",
        "0; 1 if no recording of this user watches the process; 2 for a setting that it lacks",
    ),
    (
        "elfen profile trace",
        "that of the program; 128 + N if signal N ended it; 126 if it cannot be run, 127 if it is \
         not found; 1 if nothing was recorded, or the trace cannot be written; 3 if it may not be \
         traced",
    ),
    ("elfen resume", "0; 1 if a fence cannot be thawed"),
    (
        "elfen run",
        "that of the program; 126 if it cannot be run, 127 if it is not found. Before the program \
         starts: 1 for failures, 3 if this machine lacks a requirement",
    ),
    (
        "elfen set",
        "0; 1 without such a batch, or if the policy needs a service; 3 if the policy needs \
         counters that are missing",
    ),
    (
        "elfen shim",
        "that of the observed program, 0 for a process that runs already; 1 if the recording is \
         cut short; 3 if this machine lacks a requirement; 128 + N after signal N",
    ),
    (
        "elfen status",
        "0; 1 with --healthy unless every fence runs, or if elfend does not answer; 3 without \
         System V shared memory",
    ),
    (
        "elfen tailor record",
        "0 after --duration, or after a signal without --duration; otherwise 128 + N after \
         signal N; 3 if the kernel lacks a requirement",
    ),
    (
        "elfen tailor report",
        "0; 1 for an unusable trace, or a trace without explained requests; 3 for pipelined and \
         HTTP/2 requests",
    ),
    (
        "elfen tailor watch",
        "0 after --duration; 128 + N after signal N; 3 if the kernel lacks a requirement",
    ),
    (
        "elfen top",
        "0 after q or Ctrl-C; 1 if the terminal cannot be used; 3 without System V shared memory",
    ),
    (
        "elfend",
        "0 after SIGTERM or Ctrl-C; 1 for failures; 2 also for invalid settings; 3 if this \
         machine cannot hold a fence",
    ),
    (
        "elfend check",
        "0 for valid settings; 2 for invalid settings; 3 if this machine cannot hold a fence",
    ),
    (
        "elfen-hedge",
        "0 after SIGTERM or Ctrl-C; 1 for failures; 3 if this machine lacks a requirement of the \
         policy",
    ),
    (
        "elfen-lab",
        "0; 1 for failures, or if a batch or a check had a wrong result; 3 if this machine lacks \
         a requirement; 128 + N after signal N",
    ),
];

const STATUS_INTRO: &str = "\
One rule holds for all programs: 2 means that the same arguments fail on any machine. 1 means that \
a file, a program or the machine was not usable this time. 3 means that this machine or its kernel \
lacks a requirement, which `elfen doctor` explains.";

const STATUS_NOTES: &str = "\
A failure prints one line on stderr: `elfen: what failed: why; what to do`. A command whose reader \
closes the output, as in `elfen lanes | head -1`, ends with 0.";

const ENVIRONMENT_INTRO: &str = "\
An option takes precedence over its variable. The variables of options are read by the commands \
that have the option. `elfen run` in a fence ignores the variables of options that only guards of \
its own would use.";

/// Variables that do not belong to Elfen. The help leaves them out.
const OTHERS: [(&str, &str); 6] = [
    ("PATH", "where programs are searched"),
    (
        "LD_PRELOAD",
        "`run` and `shim` add their library to it, if the program gets checks or tags from it",
    ),
    ("SUDO_UID", "`run` as root: the default of --user"),
    ("TERM", "`dumb`: no colours"),
    ("JOURNAL_STREAM", "set by systemd: elfend prefixes its log lines with their level"),
    ("NOTIFY_SOCKET", "set by systemd: elfend reports when it is ready"),
];

const SHIM: &str = "program process children on from [observers] began_monotonic_ns \
                    began_realtime_ns period_ns samples observed_ns gap_ns gaps longest_gap_ns \
                    steal_ns line_round_trip_ns clock_step_ns resolution_ns signals tags \
                    not_running_percent rates [two_percent_at_ns] returns ended missed_switches \
                    dte cost_percent stopped_ns stopped_at_end_ns refused_threads entries \
                    ambiguous_entries exit_status";

/// The commands with `--json`, and the keys of their objects besides `schema`. A key in brackets is
/// left out if there is nothing to print.
const JSON: [(&str, &str); 35] = [
    ("elfen doctor", "ok missing next only checks [program]"),
    (
        "elfen lanes",
        "smt pairs unpaired chosen_by limits warnings fix smt_control virtual_machine cpus_present \
         cpus_offline cpus_usable cpuset isolated nohz_full",
    ),
    ("elfen lanes --slurm", "NodeName CPUs Features"),
    ("elfen profile compare", "exact estimated rows [values]"),
    (
        "elfen profile core",
        "program machine instructions skipped untraced_accesses totals ipc windows every window \
         ways seed samples pairs empty fit metric rows left_out",
    ),
    ("elfen profile core --beside", "machine experimental threads"),
    ("elfen profile core --paths", "program samples seed rows"),
    ("elfen profile core --pipeline", "machine from cycles_per_column rows is_cut"),
    ("elfen profile diff", "before after sort rows left_out"),
    (
        "elfen profile report",
        "program by bursts ran_ns cost_ns instructions programs left functions calls \
         [lines] [rules] [paths] [values] [streams] [system_calls] [page_faults] [samples]",
    ),
    (
        "elfen profile report --annotate",
        "program by bursts function file instructions share_percent rows",
    ),
    ("elfen profile set", "process recorder by bursts cost_percent own_percent may_cost_percent"),
    ("elfen status", "batches elfend left hangs paused"),
    ("elfen shim", SHIM),
    ("elfen shim show", SHIM),
    ("elfen shim signals", "signals not"),
    (
        "elfen tailor report",
        "service port detail [lacks] seconds recorded_share requests complete unclear lost_events \
         whole slow_threshold_ns slow_requests latency_ns replay_error replay_aside replay_valid \
         unknown_share causes [stages] [beside] [faults] [without] slowest",
    ),
    ("elfen tailor watch", "ended_ns latency_ns threshold_ns charges"),
    (
        "elfen-hedge",
        "requests duplicates won_by_backup swaps retries refused_by_budget moved unanswered late \
         replayed refused timed_out evicted",
    ),
    ("elfen lab bench", "benchmark metrics left_out [tables and parameters of the benchmark]"),
    ("elfen lab calibrate", "file model"),
    ("elfen lab check", "requests complete lost_events scores left_out stolen holds"),
    ("elfen lab check --steal", "by_events_ns by_kernel_ns"),
    ("elfen lab check --what-if", "rows holds"),
    ("elfen lab demo", "lanes smt capacity_rps verdict why_no_verdict rows remarks html"),
    ("elfen lab experiment", "results setup rows remarks"),
    ("elfen lab hps", "seed handler_instructions programs sampling overheads published left_out"),
    ("elfen lab ladder", "plan policy rungs charged rows fold_p999 not_recorded iterations"),
    (
        "elfen lab plan",
        "slo held seed service_machines batch_load_cores highest_load policies parameters",
    ),
    ("elfen lab profileme", "figures machine seed programs loops counters missing"),
    ("elfen lab report", "title command notes tables figures appendix"),
    ("elfen lab shadow", "configurations calls missing"),
    (
        "elfen lab simulate",
        "policy budget_ms machines cores seed requests p50_ms p95_ms p99_ms p999_ms mean_ms \
         mean_wait_ms utilisation request_lane_utilisation batch_lane_utilisation \
         borrowed_fraction overlapped_fraction overlapped batch_work naps slo_windows slo_held \
         simulated_seconds simulated_requests_per_second parameters",
    ),
    ("elfen lab simulate --scenario", "seed scenarios parameters"),
    ("elfen lab thesis", "seed rows"),
];

const REPORT: &str = "\
`elfen run --json-out FILE` writes one JSON object when the program has ended. \
[run-report.schema.json](run-report.schema.json) is its JSON Schema.

`schema` is the version of all JSON objects that commands print. A reader should ignore fields \
that it does not know.

If the value of a field is an object, its fields follow with its name in front: \
`reaction_ns.p99`.";

const OTHER_JSON: &str = "\
These commands print one object with --json; `elfen tailor watch` prints an object in each line. \
`elfen lab demo` and `elfen lab experiment` also write it to the file of --json-out. Each object \
begins with `schema`. A field in brackets is left out if there is nothing to print.";

/// All pages that belong to `elfen`.
pub(super) fn pages(cli: &Command) -> Vec<Page> {
    vec![
        ("commands-elfen.md", commands_page(cli, COMMANDS)),
        ("environment.md", environment()),
        ("exit-status.md", exit_status()),
        ("run-report.md", run_report()),
        report_reference::schema_page(),
        elfen_fence::metrics::reference::page(),
        elfen_fence::settings::reference::page(),
    ]
}

/// A table of two columns, whose first column is code.
fn table<'a>(heading: [&str; 2], rows: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let [left, right] = heading;
    let mut text = format!("| {left} | {right} |\n| --- | --- |\n");
    text.extend(rows.into_iter().map(|(left, right)| format!("| `{left}` | {right} |\n")));
    text
}

fn as_cells<'a>(
    rows: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> impl Iterator<Item = (&'a str, String)> {
    rows.into_iter().map(|(left, right)| (left, marked(right)))
}

fn environment() -> String {
    let mut text = format!("{GENERATED}\n# Environment variables\n\n");
    text += &format!("{}\n", prose(ENVIRONMENT_INTRO, ""));
    text += &table(["variable", "meaning"], as_cells(VARIABLES));
    text += "\nElfen also reads variables that others define:\n\n";
    text += &table(["variable", "meaning"], as_cells(OTHERS));
    text
}

fn exit_status() -> String {
    let mut text = format!("{GENERATED}\n# Exit status\n\n{}\n", prose(STATUS_INTRO, ""));
    text += &table(["status", "meaning"], as_cells(STATUSES));
    text += &format!("\n{}\n## By command\n\n", prose(STATUS_NOTES, ""));
    text += "Every command ends with 2 for invalid arguments.\n\n";
    text += &table(["command", "status"], as_cells(BY_COMMAND));
    text
}

fn run_report() -> String {
    let mut text = format!("{GENERATED}\n# Report of a run\n\n{}\n", prose(REPORT, ""));
    text += &report_reference::table();
    text += &format!("\n## Other JSON output\n\n{}\n", prose(OTHER_JSON, ""));
    let code = |key: &str| match key.strip_prefix('[').and_then(|key| key.strip_suffix(']')) {
        Some(key) => format!("[`{key}`]"),
        None => format!("`{key}`"),
    };
    let rows = JSON.map(|(command, keys)| {
        let fields = match keys.split_once(" [tables") {
            Some((keys, rest)) => {
                let keys: Vec<String> = keys.split(' ').map(code).collect();
                format!("{}, [the tables{rest}", keys.join(", "))
            }
            None => keys.split(' ').map(code).collect::<Vec<_>>().join(", "),
        };
        (command, fields)
    });
    text += &table(["command", "fields"], rows);
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::super::Cli;
    use super::*;

    /// The names of all visible commands, with the names of their parents.
    fn commands(command: &Command, name: &str) -> Vec<(String, bool)> {
        let mut all = Vec::new();
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let name = format!("{name} {}", sub.get_name());
            let json = sub.get_arguments().any(|arg| arg.get_id() == "json");
            all.extend(commands(sub, &name));
            all.push((name, json));
        }
        all
    }

    /// Goal: each command has a row about its exit status. Method: the commands of clap; a row of a
    /// command also holds for its subcommands.
    #[test]
    fn every_command_has_its_exit_statuses() {
        for (name, _) in commands(&Cli::command(), "elfen") {
            let has_row = BY_COMMAND.iter().any(|(row, _)| name.starts_with(row));
            let has_subs = BY_COMMAND.iter().any(|(row, _)| row.starts_with(&name));
            assert!(has_row || has_subs, "{name}");
        }
    }

    /// Goal: the page lists the fields of each command with --json. Method: the options of clap.
    #[test]
    fn every_command_with_json_is_listed() {
        let listed: BTreeSet<&str> = JSON.iter().map(|(name, _)| *name).collect();
        for (name, json) in commands(&Cli::command(), "elfen") {
            assert_eq!(listed.contains(name.as_str()), json, "{name}");
        }
    }
}
