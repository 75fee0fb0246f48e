//! What a user can do without a source of request signals.

use elfen_console::failure::{Failure, Status};
use elfen_kernel::task_map;
use elfen_rt::signal::service::OpenError;
use elfen_rt::signal::task::TaskMapError;

use crate::channels::Error;

/// Explains an error of a run's channels to the user.
pub fn refuse(error: &Error) -> Failure {
    const WHAT: &str = "reading the state of the request lanes";
    match error {
        Error::Tasks(error) => failure(WHAT, error),
        Error::Module(missing) => Failure::new(Status::Unsupported, WHAT, missing, missing.fix()),
        Error::Nothing(_) => {
            let fix = "run it as root, or as a member of group elfen where elfend runs, or name a \
                       service with --service";
            Failure::new(Status::Unsupported, WHAT, error, fix)
        }
        Error::Service { error: OpenError::Foreign(_), .. } => {
            let fix = "if that user runs the service, add --service-user";
            Failure::new(Status::Failed, WHAT, error, fix)
        }
        Error::Service { .. } => {
            Failure::new(Status::Failed, WHAT, error, "start the service first, and check its name")
        }
        Error::Counts(error) => {
            let fix = "let the service publish its own counts (`elfen_service_count`), or use \
                       --policy refresh-budget";
            Failure::new(
                Status::Unsupported,
                "counting instructions of the request lanes",
                error,
                fix,
            )
        }
        Error::NoService => Failure::new(Status::Usage, WHAT, error, "name one with --service"),
        Error::Pages(_) => Failure::new(
            Status::Failed,
            WHAT,
            error,
            "see `ipcs -l` and `ulimit -n` for the limits",
        ),
    }
}

/// Explains an error of the task map to the user.
pub fn failure(what: &str, error: &task_map::Error) -> Failure {
    let (status, fix) = match error {
        task_map::Error::NotPermitted => (
            Status::Failed,
            "run it as root, or with CAP_BPF and CAP_PERFMON, or as a member of group elfen where \
             elfend runs",
        ),
        task_map::Error::NoKernelTypes => {
            (Status::Unsupported, "use a kernel built with CONFIG_DEBUG_INFO_BTF")
        }
        task_map::Error::Refused(_) => (Status::Unsupported, "use Linux 5.15 or newer"),
        task_map::Error::Map(TaskMapError::Page(_)) => {
            (Status::Failed, "restart elfend, so that it has the same version")
        }
        _ => (Status::Failed, "see `elfen doctor`"),
    };
    Failure::new(status, what, error, fix)
}
