//! Which processes a service is: some and all their descendants, or whoever is in a cgroup.
//!
//! The kernel keeps no list of descendants that survives their parents. So those once seen are
//! remembered, by id and start time, and belong to the service for as long as they live.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::host::process::{Stat, below, stat, threads_of};

/// Where hierarchies are mounted: version 2 alone, beside version 1, and systemd's own of version
/// 1.
const MOUNTS: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];
const PROCESSES: &str = "cgroup.procs";

#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("there is no process {0}")]
    NoProcess(u32),
    #[error("there is no cgroup {0:?} under /sys/fs/cgroup")]
    NoCgroup(PathBuf),
    #[error("it is the root of its hierarchy, and holds everything that runs on this machine")]
    Root,
    #[error("this command is part of it itself")]
    HoldsUs,
    #[error("reading the cgroup: {0}")]
    Unreadable(io::Error),
    #[error("moving thread {thread}: {error}")]
    Immovable { thread: u32, error: io::Error },
    #[error("watching it: {0}")]
    Unwatchable(io::Error),
}

/// What was asked for.
#[derive(Debug)]
pub(crate) enum Service {
    /// Processes with their descendants, by id with start time.
    Processes(BTreeMap<u32, u64>),
    /// A cgroup with those below it.
    Cgroup(PathBuf),
}

impl Service {
    pub(crate) fn of_processes(roots: &[u32]) -> Result<Self, Refused> {
        let identify = |&root: &u32| match running(root) {
            Some(stat) => Ok((root, stat.started_ticks)),
            None => Err(Refused::NoProcess(root)),
        };
        Self::without_us(Self::Processes(roots.iter().map(identify).collect::<Result<_, _>>()?))
    }

    pub(crate) fn of_cgroup(path: &Path) -> Result<Self, Refused> {
        let below = path.strip_prefix("/").unwrap_or(path);
        let candidates = MOUNTS.iter().map(|mount| Path::new(mount).join(below));
        let is_cgroup = |folder: &PathBuf| folder.join(PROCESSES).exists();
        let under_a_mount = path.starts_with(MOUNTS[0]).then(|| path.to_owned());
        let folder = under_a_mount.into_iter().chain(candidates).find(is_cgroup);
        let folder = folder.ok_or_else(|| Refused::NoCgroup(path.to_owned()))?;
        let folder = folder.canonicalize().map_err(Refused::Unreadable)?;
        if folder.parent().is_none_or(|above| !above.join(PROCESSES).exists()) {
            return Err(Refused::Root);
        }
        Self::without_us(Self::Cgroup(folder))
    }

    /// The process that this one was forked from.
    pub(super) fn started_here(root: u32, started_ticks: u64) -> Self {
        Self::Processes(BTreeMap::from([(root, started_ticks)]))
    }

    /// Moving this command along with the service would be the lesser evil; that its shell, or the
    /// whole machine, was named by mistake is the greater.
    fn without_us(mut service: Self) -> Result<Self, Refused> {
        let processes = service.with_us().map_err(Refused::Unreadable)?.unwrap_or_default();
        if processes.contains(&std::process::id()) { Err(Refused::HoldsUs) } else { Ok(service) }
    }

    /// All its processes, now. `None` if it is gone: its processes have ended, or the cgroup was
    /// removed. A watcher whose service is process 1 of a container is its child, and no part of
    /// it.
    pub(super) fn processes(&mut self) -> io::Result<Option<Vec<u32>>> {
        let own = std::process::id();
        let without = |mut all: Vec<u32>| {
            all.retain(|&process| process != own);
            all
        };
        Ok(self.with_us()?.map(without))
    }

    /// How many processes and threads it has now.
    pub(crate) fn count(&mut self) -> io::Result<(usize, usize)> {
        let processes = self.processes()?.unwrap_or_default();
        let threads = processes.iter().map(|&process| threads_of(process).len()).sum();
        Ok((processes.len(), threads))
    }

    fn with_us(&mut self) -> io::Result<Option<Vec<u32>>> {
        match self {
            Self::Cgroup(folder) => processes_in(folder),
            Self::Processes(known) => {
                known.retain(|&pid, &mut started| {
                    running(pid).is_some_and(|stat| stat.started_ticks == started)
                });
                let mut found = BTreeSet::new();
                for &process in known.keys() {
                    if !found.contains(&process) {
                        found.extend(below(process));
                    }
                }
                let identify = |pid: u32| Some((pid, running(pid)?.started_ticks));
                known.extend(found.into_iter().filter_map(identify));
                Ok((!known.is_empty()).then(|| known.keys().copied().collect()))
            }
        }
    }
}

fn running(process: u32) -> Option<Stat> {
    stat(process).filter(|stat| !stat.ended)
}

/// Processes of a cgroup and those below it.
fn processes_in(folder: &Path) -> io::Result<Option<Vec<u32>>> {
    let mut processes = Vec::new();
    let mut ahead = vec![folder.to_owned()];
    while let Some(folder) = ahead.pop() {
        match fs::read_to_string(folder.join(PROCESSES)) {
            Ok(list) => processes.extend(list.lines().filter_map(|pid| pid.parse::<u32>().ok())),
            // ENODEV says that it is being removed just now.
            Err(e) if e.kind() == io::ErrorKind::NotFound || is_gone(&e) => continue,
            Err(error) => return Err(error),
        }
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                ahead.push(entry.path());
            }
        }
    }
    Ok(folder.exists().then_some(processes))
}

fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    /// Goal: a child still belongs to the service when its parent has ended. Method: a shell that
    /// starts a sleep and, when told to, ends before it.
    #[test]
    fn orphans_still_belong() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 600 >/dev/null & echo $!; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let orphan: u32 = line.trim().parse().unwrap();
        let mut service = Service::of_processes(&[shell.id()]).unwrap();
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert_eq!(service.processes().unwrap(), Some(vec![orphan]));
        // SAFETY: takes numbers; this test started the process.
        unsafe { libc::kill(i32::try_from(orphan).unwrap(), libc::SIGKILL) };
        while running(orphan).is_some() {
            std::thread::yield_now();
        }
        assert_eq!(service.processes().unwrap(), None);
    }

    /// Goal: what would move this command, or the machine, is refused. Method: our own process, its
    /// ancestors, a root.
    #[test]
    fn refuses_itself_and_everything() {
        let refused = |pid| Service::of_processes(&[pid]).unwrap_err();
        assert!(matches!(refused(std::process::id()), Refused::HoldsUs));
        assert!(matches!(refused(std::os::unix::process::parent_id()), Refused::HoldsUs));
        assert!(matches!(refused(u32::MAX), Refused::NoProcess(_)));
        let none = Service::of_cgroup(Path::new("/no/such/cgroup")).unwrap_err();
        assert!(matches!(none, Refused::NoCgroup(_)));
    }
}
