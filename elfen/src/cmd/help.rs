//! What holds for every subcommand, as `elfen --help` and the man page have it:
//! exit statuses and variables.

use elfen_console::generate::Section;
use elfen_console::paragraph::wrap;

/// Exit statuses. `run` has those of the program as soon as it is started.
const STATUSES: [(&str, &str); 8] = [
    ("0", "success"),
    ("1", "failure: it could have worked, and did not"),
    ("2", "wrong arguments or variables"),
    ("3", "unsupported: this machine or kernel lacks what is needed"),
    ("126", "run: the program cannot be run"),
    ("127", "run: the program is not found"),
    ("130", "ended by Ctrl-C; 128 + N after signal N"),
    ("other", "run: the program's own; 128 + N after signal N"),
];

/// A flag goes before its variable.
const VARIABLES: [(&str, &str); 21] = [
    ("ELFEN_LANES", "default of --lanes"),
    ("ELFEN_POLICY", "default of --policy of `run` and `set`"),
    ("ELFEN_BUDGET", "default of their --budget"),
    ("ELFEN_SLO", "default of their --slo"),
    ("ELFEN_REF_IPC", "default of their --ref-ipc"),
    ("ELFEN_SERVICE", "default of `run --service`"),
    ("ELFEN_SERVICE_USER", "default of `run --service-user`"),
    ("ELFEN_USER", "default of `run --user`"),
    ("ELFEN_SIGNAL", "default of `run --signal`"),
    ("ELFEN_NAP", "default of `run --nap`"),
    ("ELFEN_INJECT", "default of `run --inject`"),
    ("ELFEN_LOOK_EVERY", "default of `run --look-every`"),
    ("ELFEN_LOOK_SLACK", "default of `run --look-slack`"),
    ("ELFEN_RUN_DIR", "default of --run-dir: /run/elfen, where fences are noted"),
    ("ELFEN_SETTINGS", "default of `elfend --settings`: /etc/elfen/elfend.toml"),
    ("ELFEN_LIB", "a further folder with libraries and programs of Elfen"),
    ("ELFEN_MACHINE", "a file of --dump-machine, for `lanes` and `doctor`"),
    ("ELFEN_RUN", "set by `run` for its program: where its channels are"),
    ("ELFEN_SOCKET", "where elfend hands out channels: /run/elfen/elfend.sock"),
    ("ELFEN_SHIM", "set by `shim` for its program: where its tags are"),
    ("NO_COLOR", "if set and not empty, no colours on a terminal"),
];

pub(crate) fn sections() -> [Section; 2] {
    let owned = |(left, right): &(&str, &str)| ((*left).to_owned(), (*right).to_owned());
    [
        Section {
            heading: "Exit status",
            rows: STATUSES.iter().map(owned).collect(),
            note: Some(FAILURES),
        },
        Section { heading: "Environment", rows: VARIABLES.iter().map(owned).collect(), note: None },
    ]
}

/// A failure's shape.
const FAILURES: &str = "\
     A failure is one line on stderr: `elfen: what failed: why; what to do`. Where the machine \
     lacks what `run` needs, a screen below it says what works, what doesn't, and the next step.";

const COLUMNS: usize = 78;

pub(crate) fn all() -> String {
    let table = |table: &Section| {
        let width = table.rows.iter().map(|(left, _)| left.len()).max().unwrap_or(0);
        let row = |(left, right): &(String, String)| format!("  {left:width$}  {right}\n");
        format!("{}:\n{}\n", table.heading, table.rows.iter().map(row).collect::<String>())
    };
    let [status, environment] = sections();
    let example =
        "Example:\n  elfen doctor     what works on this machine, and what to do next\n\n";
    let failures = wrap(FAILURES, COLUMNS).join("\n");
    format!("{example}{}{failures}\n\n{}", table(&status), table(&environment))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use elfen_console::usage::help_faults;

    use super::super::Cli;

    #[test]
    fn every_command_has_an_example() {
        assert_eq!(help_faults(&Cli::command()), Vec::<String>::new());
    }
}
