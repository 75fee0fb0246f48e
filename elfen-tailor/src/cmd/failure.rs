//! Failures of `elfen tailor` if a service is not found, or a trace has nothing to report, with
//! fixes.

use std::io;
use std::path::Path;

use crate::report::NothingToReport;
use crate::trace;
use elfen_console::failure::{Failure, Status, named};
use elfen_kernel::events::Error;

use crate::service::NotFound;

/// The file of a recording, if the user names none.
pub(super) const DEFAULT_TRACE: &str = "elfen.trace";

pub(super) fn not_found(missing: &NotFound) -> Failure {
    const WHAT: &str = "finding the service";
    let (why, fix) = match missing {
        NotFound::NothingListens(port) => (
            format!("nothing listens on port {port}"),
            "start the service first; in a container, name its process with --pid".to_owned(),
        ),
        NotFound::NoProcess(process) => {
            (format!("there is no process {process}"), "see `ps -e`".to_owned())
        }
        NotFound::NoPort(process) => (
            format!("process {process} listens on no TCP port that you may see"),
            "name a process that does, or run this as root".to_owned(),
        ),
        NotFound::SeveralPorts(process, ports) => {
            let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
            let why = format!("process {process} listens on ports {}", ports.join(", "));
            (why, "choose one with --port".to_owned())
        }
        NotFound::NotPublished(name) => (
            format!("no service publishes under the name {name:?}"),
            "start it, or name its --port; `elfen top` lists services that publish".to_owned(),
        ),
        NotFound::NoWriter(name) => {
            (format!("no living process serves {name:?}"), "start the service first".to_owned())
        }
        NotFound::OtherNamespace(name) => (
            format!("{name:?} serves in another pid namespace, so its ids are not valid here"),
            "name its --port, or its process with --pid".to_owned(),
        ),
        NotFound::OtherClock(process) => (
            format!("process {process} has a monotonic clock of its own (a time namespace)"),
            "name its --port, or its process with --pid".to_owned(),
        ),
        NotFound::Page(why) => (why.clone(), "name its --port instead".to_owned()),
        NotFound::Hidden(port) => {
            (format!("you may not see what listens on port {port}"), "run it as root".to_owned())
        }
    };
    Failure::new(Status::Failed, WHAT, why, fix)
}

pub fn no_events(error: &Error) -> Failure {
    let (status, fix) = match error {
        Error::NotPermitted => (Status::Failed, "run it as root, or with CAP_BPF and CAP_PERFMON"),
        Error::NoKernelTypes => {
            (Status::Unsupported, "use a kernel built with CONFIG_DEBUG_INFO_BTF")
        }
        Error::Lacks { .. } => {
            (Status::Unsupported, "use Linux 6.3 or newer, which shows sockets to eBPF programs")
        }
        Error::Refused(_) => (Status::Unsupported, "use Linux 6.3 or newer"),
        _ => (Status::Failed, "see `elfen doctor`"),
    };
    Failure::new(status, "recording events of the kernel", error, fix)
}

pub(super) fn unreadable(path: &Path, error: &trace::Error) -> Failure {
    if let trace::Error::Read(read) = error
        && read.kind() == io::ErrorKind::NotFound
        && path == Path::new(DEFAULT_TRACE)
    {
        let fix = "record one with `sudo elfen tailor record -d 10s --port PORT`, or name a file";
        return Failure::new(Status::Failed, named("trace", path), "no recording here yet", fix);
    }
    let fix = match error {
        trace::Error::Version(_) => "read it with the elfen version that recorded it",
        trace::Error::Damaged(_) => "record it again",
        trace::Error::Read(_) | trace::Error::Foreign => "name a file of `elfen tailor record`",
    };
    Failure::new(Status::Failed, named("trace", path), error, fix)
}

pub(super) fn nothing(what: &str, nothing: &NothingToReport) -> Failure {
    let (status, fix) = match nothing {
        NothingToReport::NoRequests { .. } => {
            (Status::Failed, "record while the service has requests, on the port that it serves")
        }
        NothingToReport::NoneComplete(_) => (Status::Failed, "record with a larger --ring"),
        NothingToReport::NoSuchCause { .. } => {
            (Status::Usage, "name one of these causes, or a kind of cause, as `preempted`")
        }
        NothingToReport::Unclear { .. } => (
            Status::Unsupported,
            "pipelined and HTTP/2 requests are indistinguishable by sockets: let clients use a \
             separate connection for each request",
        ),
    };
    Failure::new(status, what, nothing, fix)
}
