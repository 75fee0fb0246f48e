//! The exit statuses and environment variables of all subcommands, for `elfen --help`, the man page
//! and the reference.

use elfen_console::paragraph::wrap;

/// After `run` has started its program, it exits with the program's status.
pub(super) const STATUSES: [(&str, &str); 8] = [
    ("0", "success"),
    ("1", "failure; the arguments and the machine are right"),
    ("2", "invalid arguments or variables, on any machine"),
    ("3", "unsupported: this machine or kernel lacks a requirement"),
    ("126", "run: the program cannot be run"),
    ("127", "run: the program was not found"),
    ("130", "ended by Ctrl-C; 128 + N after signal N"),
    ("other", "run: the exit status of the program; 128 + N after signal N"),
];

/// A flag takes precedence over its variable.
pub(super) const VARIABLES: [(&str, &str); 21] = [
    ("ELFEN_LANES", "default of --lanes"),
    ("ELFEN_POLICY", "default of --policy of `run` and `set`"),
    ("ELFEN_BUDGET", "default of --budget of `run` and `set`"),
    ("ELFEN_SLO", "default of --slo of `run` and `set`"),
    ("ELFEN_REF_IPC", "default of --ref-ipc of `run` and `set`"),
    ("ELFEN_SERVICE", "default of `run --service`"),
    ("ELFEN_SERVICE_USER", "default of `run --service-user`"),
    ("ELFEN_USER", "default of `run --user`"),
    ("ELFEN_SOURCE", "default of `run --source`"),
    ("ELFEN_NAP", "default of `run --nap`"),
    ("ELFEN_CHECKS", "default of `run --checks`"),
    ("ELFEN_POLL_INTERVAL", "default of `run --poll-interval`"),
    ("ELFEN_TIMER_SLACK", "default of `run --timer-slack`"),
    ("ELFEN_RUN_DIR", "default of --run-dir: /run/elfen, with records of fences"),
    ("ELFEN_SETTINGS", "default of `elfend --settings`: /etc/elfen/elfend.toml"),
    ("ELFEN_LIB", "another folder with libraries and programs of Elfen"),
    ("ELFEN_MACHINE", "a file of --dump-machine, for `lanes` and `doctor`"),
    ("ELFEN_RUN", "set by `run` for its program: addresses of its channels"),
    ("ELFEN_SOCKET", "the socket of elfend: /run/elfen/elfend.sock"),
    ("ELFEN_SHIM", "set by `shim` for its program: the address of its tags"),
    ("NO_COLOR", "if set and not empty, no colours on a terminal"),
];

const FAILURES: &str = "\
     A failure is one line on stderr: `elfen: what failed: why; what to do`. If the machine lacks \
     a requirement of `run`, a screen below the line lists what works, what does not, and the \
     next step.";

const COLUMNS: usize = 78;

/// The help without options: the commands by what they are for, and examples.
pub(crate) const TEMPLATE: &str = "\
{about}

Usage: elfen COMMAND [OPTIONS]

Start     doctor   check what works on this machine
          demo     see what a batch costs a service, with and without Elfen
Run       run      run a program on the batch lanes
          set      change the policy of a running batch
          status   list running batches and fences
          top      watch lanes and batches
          pause    freeze all fences now
          resume   end a pause
Diagnose  tailor   explain why the slowest requests of a service were slow
          shim     sample what a running thread does, without stopping it
          profile  count which code of a program runs, and how often
Operate   lanes    list the pairs of lanes of this machine
          metrics  serve metrics to Prometheus
Measure   lab      experiments, benchmarks, simulator, planner{after-help}";

pub(crate) const EXAMPLES: &str = "\
Examples:
  sudo elfen run --lanes 0:1 -- xz -9 backup.tar
  sudo elfen tailor record -d 10s --port 6379 && elfen tailor report

`elfen COMMAND --help` explains a command; `elfen --help`, exit statuses and variables.";

/// The text below the commands. Blocks with a heading become sections of the man page.
pub(crate) fn all() -> String {
    let table = |rows: &[(&str, &str)]| {
        let width = rows.iter().map(|(left, _)| left.len()).max().unwrap_or(0);
        rows.iter().map(|(left, right)| format!("  {left:width$}  {right}\n")).collect::<String>()
    };
    format!(
        "{EXAMPLES}\n\nExit status:\n{}\n{}\n\nEnvironment:\n{}\n",
        table(&STATUSES),
        wrap(FAILURES, COLUMNS).join("\n"),
        table(&VARIABLES)
    )
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use elfen_console::usage::help_faults;

    use super::super::Cli;
    use super::TEMPLATE;

    #[test]
    fn every_command_has_an_example() {
        assert_eq!(help_faults(&Cli::command()), Vec::<String>::new());
    }

    /// Goal: the short help has every command, once. Method: the second column of its groups.
    #[test]
    fn the_short_help_has_every_command() {
        let cli = Cli::command();
        let shown = cli.get_subcommands().filter(|sub| !sub.is_hide_set());
        let mut commands: Vec<&str> = shown.map(|sub| sub.get_name()).collect();
        let groups = TEMPLATE.lines().filter_map(|line| line.get(10..18));
        let mut listed: Vec<&str> = groups.map(str::trim).filter(|name| !name.is_empty()).collect();
        listed.retain(|name| commands.contains(name));
        commands.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, commands);
        assert!(TEMPLATE.lines().count() < 24);
    }
}
