//! The `elfen-batch` command; all of it is in [`workloads::batch`].

use std::process::ExitCode;

fn main() -> ExitCode {
    workloads::batch::command::main()
}
