//! What a command prints: its result, and warnings.

use std::io::{self, IsTerminal, Write};

use crate::failure::{Failure, to_stderr};

/// Prints a result: for scripts as one JSON object, for people as text.
pub fn print(
    out: &mut dyn Write,
    json: bool,
    result: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), Failure> {
    match json {
        true => print_json(out, result),
        false => out.write_all(text().as_bytes()).map_err(Failure::output),
    }
}

/// What `--json` prints: one object, and a line break.
pub fn print_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(|e| Failure::output(e.into()))?;
    writeln!(out).map_err(Failure::output)
}

/// A warning: one line on stderr, like a failure, and the command goes on.
pub fn warn(warning: &str) {
    to_stderr(&format!("warning: {warning}"));
}

/// Whether to colour: on a terminal, unless the user or the terminal does not want it.
pub fn colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !unwanted && !dumb
}
