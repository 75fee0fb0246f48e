//! The `elfen-search` command; all of it is in [`workloads::search`].

use std::process::ExitCode;

fn main() -> ExitCode {
    workloads::search::command::main()
}
