//! The options for a batch program and for a service of the user's own.
//!
//! A batch program can get checks in any way that `elfen run` supports. A service is given by its
//! URL, and by the processes whose CPU time is measured.

use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;

use elfen_console::failure::{Failure, Status, named};
use elfen_instrument::{CheckMethod, Reason, inspect};
use elfen_run::channels::SourceChoice;

use crate::live::own_service::{PLACEHOLDER, ServiceProcesses};
use crate::record::Service;

pub(super) const AUTO: &str = "auto";

/// The values of `elfen run --checks`.
pub(super) fn methods() -> impl Iterator<Item = &'static str> {
    [AUTO].into_iter().chain(CheckMethod::BEST_FIRST.map(CheckMethod::name))
}

/// Refuses a file that cannot be executed, before a measurement of several minutes begins.
///
/// Other errors of the inspection are ignored, because the file may still be executable.
pub(super) fn check_program(program: &OsStr) -> Result<(), Failure> {
    let why = match inspect(program) {
        Err(reason @ Reason::NotFound) => reason.to_string(),
        Err(reason @ (Reason::NotExecutable | Reason::Unreadable(_))) => format!("it {reason}"),
        _ => return Ok(()),
    };
    let what = format!("program {:?}", program.to_string_lossy());
    Err(Failure::new(Status::Failed, what, why, "use a program in PATH, or the path of its file"))
}

#[derive(clap::Args, Debug)]
pub(super) struct ServiceArgs {
    /// Measure the service at this URL instead of elfen-search; the service must already run
    ///
    /// Each request is the same GET. If the URL contains {}, each request replaces it by a line of
    /// --queries.
    #[arg(long, value_name = "URL", conflicts_with_all = ["docs", "index"])]
    service_url: Option<String>,

    /// The process of the service; it and all of its descendants must be limited to the request
    /// lanes
    #[arg(long, value_name = "PID", requires = "service_url")]
    service_pid: Option<u32>,

    /// The cgroup of the service, as in /sys/fs/cgroup/system.slice/nginx.service
    #[arg(long, value_name = "FOLDER", requires = "service_url", conflicts_with = "service_pid")]
    service_cgroup: Option<PathBuf>,

    /// The name under which the service publishes its requests; without a name, only the task map
    /// is used
    #[arg(long, value_name = "NAME", requires = "service_url")]
    service: Option<String>,

    /// The requests, one per line: the text for {} in the URL, or a target as in /search?q=a
    #[arg(long, value_name = "FILE", requires = "service_url")]
    queries: Option<PathBuf>,
}

fn wrong(why: impl std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Usage, "the service", why, fix)
}

impl ServiceArgs {
    /// Returns the service, checked as far as possible without sending requests.
    pub(super) fn own_service(&self) -> Result<Option<(Service, ServiceProcesses)>, Failure> {
        let Some(url) = &self.service_url else { return Ok(None) };
        if !["http://", "redis://"].iter().any(|protocol| url.starts_with(protocol)) {
            let why = format!("{url:?} does not begin with http:// or redis://");
            return Err(wrong(why, "write it as http://127.0.0.1:8080/path"));
        }
        let processes = match (self.service_pid, &self.service_cgroup) {
            (Some(pid), _) => ServiceProcesses::Pid(pid),
            (None, Some(folder)) => ServiceProcesses::Cgroup(folder.clone()),
            (None, None) => {
                let fix = "name them with --service-pid or --service-cgroup";
                return Err(wrong("the processes of the service are not given", fix));
            }
        };
        match &self.queries {
            None if url.contains(PLACEHOLDER) => {
                let why = format!(
                    "{url:?} contains {PLACEHOLDER}, and there are no queries to replace it"
                );
                return Err(wrong(why, "add a file with one query per line: --queries FILE"));
            }
            None => {}
            Some(file) => {
                File::open(file).map_err(|error| {
                    let fix = "choose a file that can be read";
                    Failure::new(Status::Failed, named("queries", file), error, fix)
                })?;
            }
        }
        let (url, name, queries) = (url.clone(), self.service.clone(), self.queries.clone());
        Ok(Some((Service { url, name, queries }, processes)))
    }
}

/// Returns the default of `--source`: only the task map, unless the user names the service's page.
/// A page with another name may belong to another service.
pub(super) fn source(service: &Service) -> SourceChoice {
    if service.name.is_some() { SourceChoice::Auto } else { SourceChoice::Tasks }
}

/// Returns the rate that counts as 100 % if the user gives no capacity. It is the highest rate.
/// Loads in percent require a capacity.
pub(super) fn capacity(
    loads: Option<&[f64]>,
    rates: &[f64],
    limits: &mut Vec<String>,
) -> Result<f64, Failure> {
    let highest = rates.iter().copied().max_by(f64::total_cmp);
    let Some(highest) = highest.filter(|_| loads.is_none_or(<[f64]>::is_empty)) else {
        let why = "loads in percent require a capacity, and the command does not measure the \
                   capacity of your own service";
        return Err(wrong(why, "add --capacity in requests per second, or use --rps instead"));
    };
    limits
        .push("the capacity of the service was not measured: 100 % is the highest rate".to_owned());
    Ok(highest)
}
