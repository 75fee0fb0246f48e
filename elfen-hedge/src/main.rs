//! The `elfen-hedge` command. It is a separate program, so that `elfen` does not link an HTTP
//! library.

use std::process::ExitCode;

fn main() -> ExitCode {
    elfen_hedge::cmd::main()
}
