//! The `elfen-hedge` command: parse, run, exit status. It is a separate program, so that `elfen`
//! does not link an HTTP library.

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use elfen_console::command;

fn main() -> ExitCode {
    let words: Vec<OsString> = env::args_os().collect();
    command::with_output(|out| elfen_hedge::cmd::main(&words, out))
}
