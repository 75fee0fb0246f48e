//! A service of the user's own, which stands already: where it is asked, the processes whose CPU
//! time is its, and whether it keeps to the request lanes.
//!
//! It is never ended, ranked or moved by us. So what could run beside it unseen is refused: a
//! thread that works and may leave the request lanes. Threads that did nothing while the service
//! was asked are let be, as runtimes have many that only sleep.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::process::{below, threads_of};
use serde::Deserialize;

use super::process::Process;
use super::scratch::Scratch;
use super::service::Helpers;
use super::{LiveError, Machine, Programs, usage};
use crate::record::Service;

/// For its working threads to show.
const PROBE: [&str; 6] = ["--rps", "50", "--duration", "1s", "--connections", "4"];
const TO_ANSWER: Duration = Duration::from_secs(30);

/// The processes whose CPU time is the service's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Members {
    /// A process, and those that it started.
    Pid(u32),
    /// A cgroup of version 2, and those below it.
    Cgroup(PathBuf),
}

/// A service that we did not start.
#[derive(Clone, Debug)]
pub struct Standing {
    pub service: Service,
    pub members: Members,
}

impl Members {
    /// How its threads are brought to their lanes.
    fn remedy(&self, lanes: &CpuSet) -> String {
        match self {
            Self::Pid(pid) => format!("bring it there, as in `sudo taskset -acp {lanes} {pid}`"),
            Self::Cgroup(folder) => format!(
                "bring it there: write {lanes} to {}, or `sudo systemctl set-property UNIT \
                 AllowedCPUs={lanes}`",
                folder.join("cpuset.cpus").display()
            ),
        }
    }

    fn processes(&self) -> Vec<u32> {
        match self {
            Self::Pid(pid) => below(*pid).into_iter().chain([*pid]).collect(),
            Self::Cgroup(folder) => processes_below(folder),
        }
    }

    /// Says what is wrong with it, if something is.
    fn check(&self) -> Result<(), LiveError> {
        let refuse = |why: String, fix: &'static str| Err(LiveError::Refused { why, fix });
        match self {
            Self::Pid(pid) if threads_of(*pid).is_empty() => {
                refuse(format!("there is no process {pid}"), "give the id of one that runs")
            }
            Self::Cgroup(folder) if used_by(folder).is_none() => refuse(
                format!("{} has no cpu.stat that counts CPU time", folder.display()),
                "give the folder of a cgroup of version 2, as under /sys/fs/cgroup/system.slice",
            ),
            Self::Cgroup(folder) if processes_below(folder).is_empty() => {
                let why = format!("no process is in cgroup {}", folder.display());
                refuse(why, "start the service first")
            }
            _ => Ok(()),
        }
    }

    fn used_ns(&self) -> u64 {
        match self {
            Self::Pid(pid) => usage::of_family(*pid),
            Self::Cgroup(folder) => used_by(folder).unwrap_or(0),
        }
    }

    /// CPU time of every thread, and the CPUs that it may use.
    fn threads(&self) -> BTreeMap<u32, Thread> {
        let of_process = |process: u32| {
            let thread = move |id| Some((id, Thread::of(process, id)?));
            threads_of(process).into_iter().filter_map(thread)
        };
        self.processes().into_iter().flat_map(of_process).collect()
    }
}

#[derive(Clone, Debug)]
struct Thread {
    process: u32,
    used_ns: u64,
    may_use: CpuSet,
}

impl Thread {
    /// Nothing of one that is gone.
    fn of(process: u32, id: u32) -> Option<Self> {
        let may_use = affinity::of(id).ok()?;
        Some(Self { process, used_ns: usage::of_thread(process, id)?, may_use })
    }
}

/// Of all threads that worked in between, the first that may run elsewhere.
fn strays(
    before: &BTreeMap<u32, Thread>,
    after: &BTreeMap<u32, Thread>,
    lanes: &CpuSet,
) -> Option<String> {
    let worked = |(id, thread): &(&u32, &Thread)| {
        thread.used_ns > before.get(id).map_or(0, |before| before.used_ns)
    };
    let mut strays = after
        .iter()
        .filter(worked)
        .filter(|(_, thread)| !thread.may_use.is_subset(lanes))
        .map(|(id, thread)| (*id, thread));
    let (id, thread) = strays.next()?;
    let more = strays.count();
    let more = if more > 0 { format!(", and so may {more} more") } else { String::new() };
    Some(format!(
        "thread {id} of process {} works and may run on CPUs {}, outside the request lanes \
         {lanes}{more}",
        thread.process, thread.may_use
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

/// CPU time of a cgroup in nanoseconds; only version 2 counts it so.
fn used_by(folder: &Path) -> Option<u64> {
    let stat = fs::read_to_string(folder.join("cpu.stat")).ok()?;
    let us = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
    Some(us.trim().parse::<u64>().ok()? * 1_000)
}

/// What the generator says of the probe.
#[derive(Deserialize)]
struct Probed {
    invocations: [Counts; 1],
}

#[derive(Deserialize)]
struct Counts {
    requests: u64,
    errors: u64,
}

impl Standing {
    /// Asks the service for a second, and refuses one that does not answer or does not keep to its
    /// lanes.
    pub(super) fn begin(
        &self,
        programs: &Programs,
        scratch: &Scratch,
        machine: &Machine,
        helpers: &Helpers,
    ) -> Result<(), LiveError> {
        self.members.check()?;
        let before = self.members.threads();
        let mut command = Command::new(&programs.load);
        command.args(PROBE).args(["--json", "--allow-late", "--timeout", "5s"]);
        self.ask(&mut command);
        let name = "elfen-load";
        let probe = Process::start(name, command, &helpers.generator_place(), scratch)?;
        let url = &self.service.url;
        let probed = probe.finish_json(None, TO_ANSWER).map_err(|error| match error {
            LiveError::Failed { said, .. } => {
                let why = format!("{url} does not answer: {said}");
                LiveError::Refused { why, fix: "start the service, or correct --service-url" }
            }
            other => other,
        });
        let Probed { invocations: [counts] } = probed?;
        let Counts { requests, errors } = counts;
        if errors > 0 || requests == 0 {
            let why = format!("{errors} of {requests} requests to {url} failed");
            let fix = "see what the service answers there, as with `curl -v`";
            return Err(LiveError::Refused { why, fix });
        }
        let lanes: CpuSet = machine.pairs.iter().map(|pair| pair.request).collect();
        strays(&before, &self.members.threads(), &lanes).map_or(Ok(()), |why| {
            Err(LiveError::Misplaced { why, fix: self.members.remedy(&lanes) })
        })
    }

    /// Tells the generator what to ask.
    pub(super) fn ask(&self, command: &mut Command) {
        let Service { url, queries, .. } = &self.service;
        if let Some(queries) = queries {
            command.arg("--queries").arg(queries);
        }
        if !url.contains(HOLE) {
            command.arg(url);
            return;
        }
        let (host, path) = split(url);
        command.args(["--template", path]).arg(host);
    }

    pub(super) fn lives(&self) -> Result<(), LiveError> {
        self.members.check()
    }

    pub(super) fn used_ns(&self) -> u64 {
        self.members.used_ns()
    }
}

/// Where a line of the queries goes.
pub const HOLE: &str = "{}";

/// A URL as far as its host, and the rest.
fn split(url: &str) -> (&str, &str) {
    let host = url.find("://").map_or(0, |at| at + 3);
    url.split_at(url[host..].find('/').map_or(url.len(), |at| host + at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(used_ns: u64, may_use: &str) -> Thread {
        Thread { process: 7, used_ns, may_use: may_use.parse().unwrap() }
    }

    /// Goal: a thread that works and may leave the lanes is named, one that sleeps is let be.
    /// Method: threads of each kind, and one that is new.
    #[test]
    fn threads_that_work_elsewhere_are_strays() {
        let lanes: CpuSet = "0,2".parse().unwrap();
        let before =
            BTreeMap::from([(7, thread(100, "0")), (8, thread(100, "0-3")), (9, thread(100, "2"))]);
        let mut after = before.clone();
        after.insert(7, thread(900, "0"));
        assert_eq!(strays(&before, &after, &lanes), None);
        after.insert(10, thread(5, "0-1"));
        let said = "thread 10 of process 7 works and may run on CPUs 0,1, outside the request \
                    lanes 0,2";
        assert_eq!(strays(&before, &after, &lanes).as_deref(), Some(said));
        after.insert(8, thread(101, "0-3"));
        let said = strays(&before, &after, &lanes).unwrap();
        assert!(said.starts_with("thread 8 of") && said.ends_with(", and so may 1 more"), "{said}");
    }

    /// Goal: what is no process and no cgroup of version 2 is refused. Method: an id that no
    /// machine gives out, this process, folders with and without the kernel's files.
    #[test]
    fn members_that_are_none_are_refused() {
        let says = |members: Members| members.check().map_err(|error| error.to_string());
        assert_eq!(says(Members::Pid(u32::MAX)), Err(format!("there is no process {}", u32::MAX)));
        assert_eq!(says(Members::Pid(std::process::id())), Ok(()));
        let folder = tempfile::tempdir().unwrap();
        let cgroup = || Members::Cgroup(folder.path().to_owned());
        assert!(says(cgroup()).unwrap_err().contains("has no cpu.stat that counts"));
        fs::write(folder.path().join("cpu.stat"), "usage_usec 17\nuser_usec 9\n").unwrap();
        assert!(says(cgroup()).unwrap_err().contains("no process is in cgroup"));
        fs::create_dir(folder.path().join("below")).unwrap();
        fs::write(folder.path().join("below/cgroup.procs"), "12\n").unwrap();
        assert_eq!((says(cgroup()), cgroup().used_ns()), (Ok(()), 17_000));
    }

    #[test]
    fn urls_are_cut_behind_the_host() {
        assert_eq!(split("http://a:80/x?q={}"), ("http://a:80", "/x?q={}"));
        assert_eq!(split("http://a"), ("http://a", ""));
    }
}
