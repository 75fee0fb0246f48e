//! The `elfen-hedge` command: parse, run, exit status. It is a separate program, so that `elfen`
//! does not link an HTTP library.

use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use elfen_console::failure::Failure;

fn main() -> ExitCode {
    let mut out = BufWriter::new(io::stdout().lock());
    let words: Vec<OsString> = env::args_os().collect();
    let outcome = elfen_hedge::cmd::main(&words, &mut out).and_then(|code| {
        // A full disk or a closed pipe may only show now.
        out.flush().map_err(Failure::output)?;
        Ok(code)
    });
    outcome.unwrap_or_else(|failure| failure.report())
}
