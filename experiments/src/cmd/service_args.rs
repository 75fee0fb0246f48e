//! `elfen lab experiment` with a service of the user's own: where it is asked, and the processes
//! whose CPU time is its.

use std::fs::File;
use std::path::PathBuf;

use elfen_console::failure::{Failure, Status, named};
use elfen_run::channels::SourceChoice;

use crate::live::standing::{HOLE, Members, Standing};
use crate::record::Service;

#[derive(clap::Args, Debug)]
pub(super) struct ServiceArgs {
    /// Measure the service that answers there instead of elfen-search; it is asked and watched, and
    /// otherwise left alone
    ///
    /// The same GET each time, or a line of --queries where the URL has {}.
    #[arg(long, value_name = "URL", conflicts_with_all = ["docs", "index"])]
    service_url: Option<String>,

    /// Its process, which has to keep to the request lanes, with all that it started
    #[arg(long, value_name = "PID", requires = "service_url")]
    service_pid: Option<u32>,

    /// Its cgroup instead, as in /sys/fs/cgroup/system.slice/nginx.service
    #[arg(long, value_name = "FOLDER", requires = "service_url", conflicts_with = "service_pid")]
    service_cgroup: Option<PathBuf>,

    /// The name under which it publishes its requests; without one the task map alone is heeded
    #[arg(long, value_name = "NAME", requires = "service_url")]
    service: Option<String>,

    /// What it is asked, a line each: what goes where the URL has {}, or else a target, as in
    /// /search?q=a
    #[arg(long, value_name = "FILE", requires = "service_url")]
    queries: Option<PathBuf>,
}

fn wrong(why: impl std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Usage, "the service", why, fix)
}

impl ServiceArgs {
    pub(super) fn is_there(&self) -> bool {
        self.service_url.is_some()
    }

    /// The service, as far as it can be told without asking it.
    pub(super) fn standing(&self) -> Result<Option<Standing>, Failure> {
        let Some(url) = &self.service_url else { return Ok(None) };
        if !["http://", "redis://"].iter().any(|protocol| url.starts_with(protocol)) {
            let why = format!("{url:?} begins with neither http:// nor redis://");
            return Err(wrong(why, "write it as http://127.0.0.1:8080/path"));
        }
        let members = match (self.service_pid, &self.service_cgroup) {
            (Some(pid), _) => Members::Pid(pid),
            (None, Some(folder)) => Members::Cgroup(folder.clone()),
            (None, None) => {
                let why = "nothing says whose CPU time is the service's";
                return Err(wrong(why, "say it with --service-pid or --service-cgroup"));
            }
        };
        match &self.queries {
            None if url.contains(HOLE) => {
                let why = format!("{url:?} has {HOLE}, and nothing is there to put in its place");
                return Err(wrong(why, "give a file of lines with --queries"));
            }
            None => {}
            Some(file) => {
                File::open(file).map_err(|error| {
                    let fix = "name a file that can be read";
                    Failure::new(Status::Usage, named("queries", file), error, fix)
                })?;
            }
        }
        let (url, name, queries) = (url.clone(), self.service.clone(), self.queries.clone());
        Ok(Some(Standing { service: Service { url, name, queries }, members }))
    }
}

/// Unless the user says another: a page that the user did not name may be another service's.
pub(super) fn signal(standing: &Standing) -> SourceChoice {
    if standing.service.name.is_some() { SourceChoice::Auto } else { SourceChoice::Tasks }
}

/// The rate that counts as 100 % if the user does not say it: percent of it are not to be had.
pub(super) fn capacity(
    loads: Option<&[f64]>,
    rates: &[f64],
    limits: &mut Vec<String>,
) -> Result<f64, Failure> {
    let highest = rates.iter().copied().max_by(f64::total_cmp);
    match highest.filter(|_| loads.is_none_or(<[f64]>::is_empty)) {
        Some(highest) => {
            limits.push(
                "what the service can serve was not measured: 100 % are the highest rate"
                    .to_owned(),
            );
            Ok(highest)
        }
        None => {
            let why = "loads in percent need a capacity, and what your service can serve is not \
                       measured";
            Err(wrong(why, "say it in requests a second with --capacity, or give --rps alone"))
        }
    }
}
