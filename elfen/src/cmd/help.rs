//! What holds for every subcommand, as `elfen --help` and the man page have it: exit statuses,
//! variables, files.

use super::settings::KNOWN;
use crate::host::settings::{MACHINE_FILE, VARIABLE};

/// A heading, and rows of two columns.
pub(crate) struct Table {
    pub(crate) heading: &'static str,
    pub(crate) rows: Vec<(String, String)>,
}

/// Exit statuses. `run` and `serve` have those of the program as soon as it is started.
const STATUSES: [(&str, &str); 7] = [
    ("0", "success"),
    ("1", "failure: it could have worked, and did not"),
    ("2", "wrong arguments, variables or settings"),
    ("3", "unsupported: this machine or kernel lacks what is needed"),
    ("126", "run, serve: the program cannot be run"),
    ("127", "run, serve: the program is not found"),
    ("other", "run, serve: the program's own; 128 + N after signal N"),
];

/// Variables that are no default of an option.
const OTHER_VARIABLES: [(&str, &str); 6] = [
    (VARIABLE, "one settings file to read instead of those below"),
    ("ELFEN_GROUP", "default of `signals up --group`: elfen"),
    ("ELFEN_LIB", "a further folder with libraries and programs of Elfen"),
    ("ELFEN_MACHINE", "a recorded machine for `lanes` and `doctor`; see --record"),
    ("ELFEN_RUN", "set by `run` for its program: where its channels are"),
    ("NO_COLOR", "if set and not empty, no colours on a terminal"),
];

const FILES: [(&str, &str); 2] = [
    ("$XDG_CONFIG_HOME/elfen/config.toml", "settings of the user; ~/.config without it"),
    (MACHINE_FILE, "settings of the machine"),
];

pub(crate) fn tables() -> [Table; 3] {
    let owned = |(left, right): &(&str, &str)| ((*left).to_owned(), (*right).to_owned());
    let option = |known: &super::settings::Known| {
        (known.variable.to_owned(), format!("default of --{}", known.key))
    };
    let variables = KNOWN.iter().map(option).chain(OTHER_VARIABLES.iter().map(owned));
    [
        Table { heading: "Exit status", rows: STATUSES.iter().map(owned).collect() },
        Table { heading: "Environment", rows: variables.collect() },
        Table { heading: "Files", rows: FILES.iter().map(owned).collect() },
    ]
}

/// A flag goes before a variable, and so on; how a file looks.
pub(crate) const ORDER: &str = "\
A flag goes before a variable, a variable before the user's file, that before the machine's, and \
that before what is built in; `elfen config` shows what holds. Keys of the files are the names of \
the options: policy = \"fixed-budget\", budget = \"2ms\".";

/// A failure's shape.
pub(crate) const FAILURES: &str = "A failure is one line on stderr: `elfen: what failed: why; what to do`. Where the machine lacks \
     what `run` needs, a screen below it says what works, what doesn't, and the next step.";

const COLUMNS: usize = 78;

pub(crate) fn all() -> String {
    let table = |table: &Table| {
        let width = table.rows.iter().map(|(left, _)| left.len()).max().unwrap_or(0);
        let row = |(left, right): &(String, String)| format!("  {left:width$}  {right}\n");
        format!("{}:\n{}\n", table.heading, table.rows.iter().map(row).collect::<String>())
    };
    let [status, environment, files] = tables();
    let example =
        "Example:\n  elfen doctor     what works on this machine, and what to do next\n\n";
    let (failures, order) = (filled(FAILURES), filled(ORDER));
    format!(
        "{example}{}{failures}\n\n{}{}{order}",
        table(&status),
        table(&environment),
        table(&files)
    )
}

/// Lines of one column's width, broken between words.
fn filled(text: &str) -> String {
    let mut filled = String::new();
    let mut column = 0;
    for word in text.split(' ') {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > COLUMNS {
            filled.push('\n');
            column = 0;
        } else if column > 0 {
            filled.push(' ');
            column += 1;
        }
        filled += word;
        column += width;
    }
    filled
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Cli;

    /// Every command and its subcommands.
    fn all(command: &clap::Command) -> Vec<&clap::Command> {
        let mut found = vec![command];
        found.extend(command.get_subcommands().flat_map(all));
        found
    }

    /// Goal: every command's help ends with an example, and is whole on a terminal of 80 columns. Method: what stands after
    /// the options; prose has one line a paragraph, for clap to break.
    #[test]
    fn every_command_has_an_example() {
        let cli = Cli::command();
        for command in all(&cli) {
            let name = command.get_name();
            let text = command.get_after_help().expect(name).to_string();
            assert!(text.contains("Example:\n  ") || text.contains("Examples:\n  "), "{name}");
            let lines: Vec<&str> = text.lines().collect();
            let verbatim = |line: &&&str| line.starts_with(' ');
            let long = lines.iter().filter(verbatim).find(|line| line.chars().count() > 80);
            assert_eq!(long, None, "{name}");
            let broken = |pair: &&[&str]| {
                pair.iter().all(|line| !line.is_empty() && !line.starts_with(' '))
                    && !pair[0].ends_with('.')
            };
            // The command's own is filled to its columns already.
            let broken = lines.windows(2).find(broken).filter(|_| name != "elfen");
            assert_eq!(broken, None, "{name}");
        }
    }
}
