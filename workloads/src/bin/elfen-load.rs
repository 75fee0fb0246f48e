//! The `elfen-load` command; all of it is in [`workloads::load`].

use std::process::ExitCode;

fn main() -> ExitCode {
    workloads::load::command::main()
}
