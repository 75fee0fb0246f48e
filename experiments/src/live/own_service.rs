//! A service of the user's own that already runs: its URL, its processes, and a check that it stays
//! on the request lanes.
//!
//! Elfen never ends this service, never moves it, and never changes its priority. If a working
//! thread may leave the request lanes, the service is refused, because its work on other CPUs would
//! not be measured. Threads that did nothing during the probe are accepted, because many runtimes
//! have threads that only sleep.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::process::{below, threads_of};
use serde::Deserialize;

use super::process::Rig;
use super::service::Helpers;
use super::{LiveError, usage};
use crate::record::Service;

/// The load of the probe. It makes the working threads visible.
const PROBE: [&str; 6] = ["--rps", "50", "--duration", "1s", "--connections", "4"];
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The processes of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceProcesses {
    /// A process and its descendants.
    Pid(u32),
    /// A cgroup of version 2 and its descendants.
    Cgroup(PathBuf),
}

/// A service that the user has started.
#[derive(Clone, Debug)]
pub struct OwnService {
    pub service: Service,
    pub processes: ServiceProcesses,
}

impl ServiceProcesses {
    /// Returns how the user can move the threads to the request lanes.
    fn remedy(&self, lanes: &CpuSet) -> String {
        match self {
            Self::Pid(pid) => {
                format!("limit it to these lanes, as in `sudo taskset -acp {lanes} {pid}`")
            }
            Self::Cgroup(folder) => format!(
                "limit it to these lanes: write {lanes} to {}, or `sudo systemctl set-property \
                 UNIT AllowedCPUs={lanes}`",
                folder.join("cpuset.cpus").display()
            ),
        }
    }

    fn ids(&self) -> Vec<u32> {
        match self {
            Self::Pid(pid) => below(*pid).into_iter().chain([*pid]).collect(),
            Self::Cgroup(folder) => processes_below(folder),
        }
    }

    /// Refuses processes that do not exist or whose CPU time cannot be read.
    pub(super) fn check(&self) -> Result<(), LiveError> {
        let refuse = |why: String, fix: &'static str| Err(LiveError::Refused { why, fix });
        match self {
            Self::Pid(pid) if threads_of(*pid).is_empty() => {
                refuse(format!("there is no process {pid}"), "use the id of a running process")
            }
            Self::Cgroup(folder) if cgroup_cpu_ns(folder).is_none() => refuse(
                format!("{} has no cpu.stat that counts CPU time", folder.display()),
                "use the folder of a cgroup of version 2, such as under \
                    /sys/fs/cgroup/system.slice",
            ),
            Self::Cgroup(folder) if processes_below(folder).is_empty() => {
                let why = format!("cgroup {} has no processes", folder.display());
                refuse(why, "start the service first")
            }
            _ => Ok(()),
        }
    }

    pub(super) fn used_ns(&self) -> u64 {
        match self {
            Self::Pid(pid) => usage::family_cpu_ns(*pid),
            Self::Cgroup(folder) => cgroup_cpu_ns(folder).unwrap_or(0),
        }
    }

    /// Returns all threads by their ids, each with its process and its CPU time.
    fn threads(&self) -> Threads {
        let of_process = |process: u32| {
            let thread = move |id| Some((id, (process, usage::thread_cpu_ns(id)?)));
            threads_of(process).into_iter().filter_map(thread)
        };
        self.ids().into_iter().flat_map(of_process).collect()
    }
}

type Threads = BTreeMap<u32, (u32, u64)>;

/// Describes the first thread that worked between both samples and may leave the lanes. `allowed`
/// returns the CPUs of a thread, or `None` if the thread has ended.
fn find_stray(
    before: &Threads,
    after: &Threads,
    lanes: &CpuSet,
    allowed: impl Fn(u32) -> Option<CpuSet>,
) -> Option<String> {
    let worked = |(id, (_, used_ns)): &(&u32, &(u32, u64))| {
        *used_ns > before.get(id).map_or(0, |(_, used_ns)| *used_ns)
    };
    let mut strays = after.iter().filter(worked).filter_map(|(&id, (process, _))| {
        let cpus = allowed(id)?;
        (!cpus.is_subset(lanes)).then_some((id, process, cpus))
    });
    let (id, process, cpus) = strays.next()?;
    let more = strays.count();
    let more = if more > 0 { format!("; the same applies to {more} more") } else { String::new() };
    Some(format!(
        "thread {id} of process {process} works and may run on CPUs {cpus}, outside the request \
         lanes {lanes}{more}"
    ))
}

fn processes_below(folder: &Path) -> Vec<u32> {
    let own = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    let mut processes: Vec<u32> = own.lines().filter_map(|line| line.parse().ok()).collect();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            processes.extend(processes_below(&entry.path()));
        }
    }
    processes
}

/// Returns the CPU time of a cgroup in nanoseconds. The file exists only in version 2.
fn cgroup_cpu_ns(folder: &Path) -> Option<u64> {
    let stat = fs::read_to_string(folder.join("cpu.stat")).ok()?;
    let us = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
    Some(us.trim().parse::<u64>().ok()? * 1_000)
}

/// The fields of the generator's output that the probe uses.
#[derive(Deserialize)]
struct ProbeOutput {
    runs: [Counts; 1],
}

#[derive(Deserialize)]
struct Counts {
    requests: u64,
    errors: u64,
}

impl OwnService {
    /// Sends requests for a second. Refuses a service that does not answer or that may leave its
    /// lanes.
    pub(super) fn check_ready(&self, rig: &Rig, helpers: &Helpers) -> Result<(), LiveError> {
        self.processes.check()?;
        let before = self.processes.threads();
        let mut command = Command::new(&rig.programs.load);
        command.args(PROBE).args(["--json", "--allow-late", "--timeout", "5s"]);
        command.args(self.load_args());
        let mut probe = rig.start("elfen-load", command, &helpers.generator_setup())?;
        let url = &self.service.url;
        let probed = probe.finish_json(None, ANSWER_TIMEOUT).map_err(|error| match error {
            LiveError::Failed { message, .. } => {
                let why = format!("{url} does not answer: {message}");
                LiveError::Refused { why, fix: "start the service, or correct --service-url" }
            }
            other => other,
        });
        let ProbeOutput { runs: [Counts { requests, errors }] } = probed?;
        if errors > 0 || requests == 0 {
            let why = format!("{errors} of {requests} requests to {url} failed");
            let fix = "check the answer of the service, for example with `curl -v`";
            return Err(LiveError::Refused { why, fix });
        }
        let lanes: CpuSet = rig.machine.pairs.iter().map(|pair| pair.request).collect();
        let allowed = |thread| affinity::of(thread).ok();
        find_stray(&before, &self.processes.threads(), &lanes, allowed).map_or(Ok(()), |why| {
            Err(LiveError::Misplaced { why, fix: self.processes.remedy(&lanes) })
        })
    }

    /// Returns the generator's arguments for the service and its requests.
    pub(super) fn load_args(&self) -> Vec<OsString> {
        let Service { url, queries, .. } = &self.service;
        let queries = queries.iter().flat_map(|file| ["--queries".into(), file.into()]);
        let target = match url.contains(PLACEHOLDER) {
            true => {
                let (host, path) = split_host(url);
                vec!["--template".into(), path.into(), host.into()]
            }
            false => vec![url.into()],
        };
        queries.chain(target).collect()
    }
}

/// The part of a URL that is replaced by a line of the queries.
pub const PLACEHOLDER: &str = "{}";

/// Splits a URL after its host.
fn split_host(url: &str) -> (&str, &str) {
    let host = url.find("://").map_or(0, |at| at + 3);
    url.split_at(url[host..].find('/').map_or(url.len(), |at| host + at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a working thread that may leave the lanes is reported, and a sleeping one is accepted.
    /// Method: threads of each kind, and a new thread.
    #[test]
    fn working_threads_outside_the_lanes_are_named() {
        let lanes: CpuSet = "0,2".parse().unwrap();
        let cpus = BTreeMap::from([(7, "0"), (8, "0-3"), (9, "2"), (10, "0-1")]);
        let before: Threads = [7, 8, 9].map(|id| (id, (70, 100))).into();
        let stray =
            |after: &Threads| find_stray(&before, after, &lanes, |id| cpus.get(&id)?.parse().ok());
        let mut after = before.clone();
        after.insert(7, (70, 900));
        assert_eq!(stray(&after), None);
        after.insert(10, (70, 5));
        let message = "thread 10 of process 70 works and may run on CPUs 0,1, outside the request \
                    lanes 0,2";
        assert_eq!(stray(&after).as_deref(), Some(message));
        after.insert(8, (70, 101));
        let message = stray(&after).unwrap();
        assert!(
            message.starts_with("thread 8 of") && message.ends_with("; the same applies to 1 more"),
            "{message}"
        );
    }

    /// Goal: a missing process is refused, and a folder that does not belong to a cgroup of version
    /// 2. Method: an id that no process has, this process, and folders with and without the
    /// kernel's files.
    #[test]
    fn missing_processes_are_refused() {
        let says =
            |processes: ServiceProcesses| processes.check().map_err(|error| error.to_string());
        assert_eq!(
            says(ServiceProcesses::Pid(u32::MAX)),
            Err(format!("there is no process {}", u32::MAX))
        );
        assert_eq!(says(ServiceProcesses::Pid(std::process::id())), Ok(()));
        let folder = tempfile::tempdir().unwrap();
        let cgroup = || ServiceProcesses::Cgroup(folder.path().to_owned());
        assert!(says(cgroup()).unwrap_err().contains("has no cpu.stat that counts"));
        fs::write(folder.path().join("cpu.stat"), "usage_usec 17\nuser_usec 9\n").unwrap();
        assert!(says(cgroup()).unwrap_err().contains("has no processes"));
        fs::create_dir(folder.path().join("below")).unwrap();
        fs::write(folder.path().join("below/cgroup.procs"), "12\n").unwrap();
        assert_eq!((says(cgroup()), cgroup().used_ns()), (Ok(()), 17_000));
    }

    #[test]
    fn urls_are_split_behind_the_host() {
        assert_eq!(split_host("http://a:80/x?q={}"), ("http://a:80", "/x?q={}"));
        assert_eq!(split_host("http://a"), ("http://a", ""));
    }
}
