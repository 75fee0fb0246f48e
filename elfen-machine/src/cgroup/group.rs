//! One cgroup, in all hierarchies that a fence uses.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::file::{Error, read, write};
use super::freezer::Freezer;
use super::hierarchies::{Hierarchies, Hierarchy, Version};
use super::path::CgroupPath;
use crate::cpulist::CpuSet;

/// The default weight of a cgroup: cpu.shares on version 1, cpu.weight on version 2.
const SHARES: u64 = 1024;
const WEIGHT: u64 = 100;

#[derive(Clone, Debug)]
pub struct Group {
    hierarchies: Hierarchies,
    pub path: CgroupPath,
}

/// A cgroup's rank, as the kernel reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    pub idle: bool,
    /// In units of version 2, where 100 is the default.
    pub weight: u64,
}

impl Group {
    pub fn new(hierarchies: &Hierarchies, path: CgroupPath) -> Self {
        Self { hierarchies: hierarchies.clone(), path }
    }

    pub fn parent(&self) -> Self {
        Self::new(&self.hierarchies, self.path.parent())
    }

    /// The folders of this cgroup, without duplicates.
    pub fn folders(&self) -> Vec<PathBuf> {
        let Hierarchies { cpu, cpuset, freezer } = &self.hierarchies;
        let mut folders: Vec<PathBuf> = Vec::new();
        for hierarchy in [cpu, cpuset, freezer] {
            let folder = hierarchy.folder(&self.path);
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        folders
    }

    fn cpu(&self, file: &str) -> PathBuf {
        self.hierarchies.cpu.folder(&self.path).join(file)
    }

    fn cpuset(&self, file: &str) -> PathBuf {
        self.hierarchies.cpuset.folder(&self.path).join(file)
    }

    /// The files by which another program could move the cgroup off its lanes or raise its rank.
    /// Some of them exist only in one cgroup version.
    pub fn watched_files(&self) -> Vec<PathBuf> {
        let place = ["cpuset.cpus", "cpuset.mems", "cpuset.cpus.partition"];
        let mut files = vec![self.cpu("cpu.idle")];
        files.extend(place.map(|file| self.cpuset(file)));
        files
    }

    pub fn freezer(&self) -> Freezer {
        let Hierarchy { version, .. } = self.hierarchies.freezer;
        Freezer { folder: self.hierarchies.freezer.folder(&self.path), version }
    }

    /// The kernel's id of the cgroup, in the hierarchy with the cpu controller.
    pub fn id(&self) -> Result<u64, Error> {
        let folder = self.hierarchies.cpu.folder(&self.path);
        let found = fs::metadata(&folder);
        found.map(|found| found.ino()).map_err(|error| Error::File { file: folder, error })
    }

    /// Whether the cgroup exists in each hierarchy.
    pub fn exists(&self) -> bool {
        self.folders().iter().all(|folder| folder.is_dir())
    }

    /// Creates the cgroup and its missing ancestors, and enables the controllers that it needs.
    pub fn make(&self) -> Result<(), Error> {
        let Hierarchies { cpu, cpuset, freezer } = &self.hierarchies;
        for hierarchy in [cpu, cpuset, freezer] {
            let mut above = CgroupPath::root();
            for part in self.path.parts() {
                ask_for_controllers(hierarchy, &above)?;
                above = above.child(part);
                let folder = hierarchy.folder(&above);
                match fs::create_dir(&folder) {
                    Ok(()) => inherit_cpus(hierarchy, &above)?,
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(Error::File { file: folder, error }),
                }
            }
        }
        Ok(())
    }

    /// Whether the cgroup exists in the cpuset hierarchy, so that the kernel can confine it to
    /// CPUs.
    pub fn has_cpus(&self) -> bool {
        self.hierarchies.cpuset.folder(&self.path).is_dir()
    }

    /// Enables the cpuset controller in all ancestors, so that the cgroup has its own CPU list.
    pub fn enable_cpuset(&self) -> Result<(), Error> {
        let mut above = CgroupPath::root();
        for part in self.path.parts() {
            ask_for_controllers(&self.hierarchies.cpuset, &above)?;
            above = above.child(part);
        }
        Ok(())
    }

    /// Rejects a threaded cgroup: its threads may be in different cgroups, and the files that list
    /// processes do not show that.
    pub fn require_domain(&self) -> Result<(), Error> {
        if self.hierarchies.cpuset.version == Version::One {
            return Ok(());
        }
        let file = self.cpuset("cgroup.type");
        match read(&file)? {
            found if found == "domain" => Ok(()),
            found => Err(Error::Threaded { file, found }),
        }
    }

    /// The cgroup's rank. On version 2, a cgroup without its own cpu controller has the default
    /// rank: its tasks compete as tasks of its parent.
    pub fn rank(&self) -> Result<Rank, Error> {
        const ORDINARY: Rank = Rank { idle: false, weight: WEIGHT };
        if self.path.is_root() {
            return Ok(ORDINARY);
        }
        let idle = match number(&self.cpu("cpu.idle")) {
            Err(error) if error.is_gone() && self.shares(&self.hierarchies.cpu) => {
                return Ok(ORDINARY);
            }
            found => found? != 0,
        };
        let weight = match self.hierarchies.cpu.version {
            Version::One => number(&self.cpu("cpu.shares"))?.saturating_mul(WEIGHT) / SHARES,
            Version::Two => number(&self.cpu("cpu.weight"))?,
        };
        Ok(Rank { idle, weight })
    }

    /// Makes the cgroup idle, so that it ranks below its siblings, or makes it an ordinary cgroup
    /// again.
    pub fn set_idle(&self, idle: bool) -> Result<(), Error> {
        write(&self.cpu("cpu.idle"), if idle { "1" } else { "0" })
    }

    /// Whether the cgroup exists but may lack a controller. On version 2, a cgroup has only the
    /// controllers that its parent enables. For other controllers its parent's values apply.
    fn shares(&self, hierarchy: &Hierarchy) -> bool {
        hierarchy.version == Version::Two && hierarchy.folder(&self.path).is_dir()
    }

    /// Reads a limit of the cgroup, or of its nearest ancestor that has the file.
    fn effective(&self, file: &str) -> Result<CpuSet, Error> {
        match cpus(&self.cpuset(file)) {
            Err(error)
                if error.is_gone()
                    && !self.path.is_root()
                    && self.shares(&self.hierarchies.cpuset) =>
            {
                self.parent().effective(file)
            }
            found => found,
        }
    }

    /// The CPUs that tasks of the cgroup can run on, as the kernel reports them.
    pub fn effective_cpus(&self) -> Result<CpuSet, Error> {
        match self.hierarchies.cpuset.version {
            Version::One => cpus(&self.cpuset("cpuset.effective_cpus")),
            Version::Two => self.effective("cpuset.cpus.effective"),
        }
    }

    /// The memory nodes that tasks of the cgroup can use, as the kernel reports them.
    pub fn effective_memory(&self) -> Result<CpuSet, Error> {
        match self.hierarchies.cpuset.version {
            Version::One => cpus(&self.cpuset("cpuset.effective_mems")),
            Version::Two => self.effective("cpuset.mems.effective"),
        }
    }

    /// Confines the cgroup to CPUs. On version 1 this also confines all cgroups below it, because a
    /// parent must have all CPUs of its children.
    pub fn keep_to(&self, lanes: &CpuSet) -> Result<(), Error> {
        self.keep("cpuset.cpus", lanes)
    }

    /// Confines the cgroup to memory of these nodes, in the same way.
    pub fn keep_memory_to(&self, nodes: &CpuSet) -> Result<(), Error> {
        self.keep("cpuset.mems", nodes)
    }

    fn keep(&self, file: &str, to: &CpuSet) -> Result<(), Error> {
        let folder = self.hierarchies.cpuset.folder(&self.path);
        match self.hierarchies.cpuset.version {
            Version::One => keep_all_to(&folder, file, to),
            Version::Two => write(&folder.join(file), &to.to_string()),
        }
    }

    /// Whether the cgroup is an ordinary member of its parent's CPU partition. Always true on
    /// version 1.
    pub fn is_member(&self) -> Result<bool, Error> {
        match self.hierarchies.cpuset.version {
            Version::One => Ok(true),
            Version::Two => match read(&self.cpuset("cpuset.cpus.partition")) {
                Err(error) if error.is_gone() && self.shares(&self.hierarchies.cpuset) => Ok(true),
                found => Ok(found? == "member"),
            },
        }
    }

    pub fn set_member(&self) -> Result<(), Error> {
        write(&self.cpuset("cpuset.cpus.partition"), "member")
    }

    /// Gives the cgroup all CPUs of its parent again.
    pub fn keep_to_parent(&self) -> Result<(), Error> {
        self.keep_to(&self.parent().effective_cpus()?)
    }

    /// All processes in the cgroup and below it, in any of its hierarchies.
    pub fn processes(&self) -> Result<BTreeSet<u32>, Error> {
        let mut found = BTreeSet::new();
        for folder in self.folders() {
            below(&folder, &mut found)?;
        }
        Ok(found)
    }

    /// Whether a process is in the cgroup or below it.
    pub fn is_populated(&self) -> Result<bool, Error> {
        if self.hierarchies.cpuset.version == Version::Two {
            return match read(&self.cpuset("cgroup.events")) {
                Ok(events) => Ok(events.lines().any(|line| line == "populated 1")),
                Err(error) if error.is_gone() => Ok(false),
                Err(error) => Err(error),
            };
        }
        any_below(&self.hierarchies.cpuset.folder(&self.path))
    }

    /// Processes that are in the cgroup in some of its hierarchies, but not in all.
    pub fn partly_inside(&self) -> Result<BTreeSet<u32>, Error> {
        let mut all = Vec::new();
        for folder in self.folders() {
            let mut found = BTreeSet::new();
            below(&folder, &mut found)?;
            all.push(found);
        }
        let union: BTreeSet<u32> = all.iter().flatten().copied().collect();
        Ok(union
            .into_iter()
            .filter(|process| !all.iter().all(|set| set.contains(process)))
            .collect())
    }

    /// Whether a process is in the cgroup, in any of its hierarchies.
    pub fn holds(&self, process: u32) -> Result<bool, Error> {
        let Hierarchies { cpu, cpuset, freezer } = &self.hierarchies;
        for hierarchy in [cpu, cpuset, freezer] {
            if hierarchy.path_of(process)?.is_within(&self.path) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Moves a process into the cgroup in each hierarchy. The freezer is last, because the process
    /// may be frozen there.
    pub fn add_process(&self, process: u32) -> Result<(), Error> {
        let folders = self.folders();
        folders
            .iter()
            .try_for_each(|folder| write(&folder.join("cgroup.procs"), &process.to_string()))
    }

    /// The first `cgroup.procs` file, here or in an ancestor, that users other than root can write.
    /// With it they could move processes out of the cgroup.
    pub fn writable_by_others(&self) -> Result<Option<PathBuf>, Error> {
        let Hierarchies { cpu, cpuset, freezer } = &self.hierarchies;
        for hierarchy in [cpu, cpuset, freezer] {
            let mut path = self.path.clone();
            loop {
                let file = hierarchy.folder(&path).join("cgroup.procs");
                let found = fs::symlink_metadata(&file);
                let found = found.map_err(|error| Error::File { file: file.clone(), error })?;
                if found.uid() != 0 || found.mode() & 0o022 != 0 || !found.is_file() {
                    return Ok(Some(file));
                }
                if path.is_root() {
                    break;
                }
                path = path.parent();
            }
        }
        Ok(None)
    }

    /// Removes the cgroup and all cgroups below it. None of them may contain a process.
    pub fn remove(&self) -> Result<(), Error> {
        self.folders().iter().filter(|folder| folder.is_dir()).try_for_each(|folder| rmdir(folder))
    }
}

/// Enables the controllers for the children of a cgroup, as version 2 requires.
fn ask_for_controllers(hierarchy: &Hierarchy, of: &CgroupPath) -> Result<(), Error> {
    if hierarchy.version == Version::One {
        return Ok(());
    }
    let folder = hierarchy.folder(of);
    let given = read(&folder.join("cgroup.subtree_control"))?;
    for controller in ["cpu", "cpuset"] {
        if !given.split_whitespace().any(|has| has == controller) {
            write(&folder.join("cgroup.subtree_control"), &format!("+{controller}"))?;
        }
    }
    Ok(())
}

/// Gives a new cgroup the CPUs and memory nodes of its parent. On version 1 both start empty, and
/// the cgroup accepts no process until they are set.
fn inherit_cpus(hierarchy: &Hierarchy, path: &CgroupPath) -> Result<(), Error> {
    let own = hierarchy.folder(path);
    let parent = hierarchy.folder(&path.parent());
    for file in ["cpuset.mems", "cpuset.cpus"] {
        if hierarchy.version == Version::One && own.join(file).exists() {
            write(&own.join(file), &read(&parent.join(file))?)?;
        }
    }
    Ok(())
}

fn keep_all_to(folder: &Path, name: &str, to: &CpuSet) -> Result<(), Error> {
    let file = folder.join(name);
    let all: CpuSet = cpus(&file)?.iter().chain(to.iter()).collect();
    write(&file, &all.to_string())?;
    children(folder)?.iter().try_for_each(|child| keep_all_to(child, name, to))?;
    write(&file, &to.to_string())
}

fn number(file: &Path) -> Result<u64, Error> {
    let text = read(file)?;
    text.parse().map_err(|_| Error::Malformed { file: file.to_owned(), text })
}

fn cpus(file: &Path) -> Result<CpuSet, Error> {
    let text = read(file)?;
    if text.is_empty() {
        return Ok(CpuSet::default());
    }
    text.parse().map_err(|_| Error::Malformed { file: file.to_owned(), text })
}

/// Collects the processes of a cgroup and of those below it. A cgroup that is removed meanwhile has
/// no processes.
fn below(folder: &Path, found: &mut BTreeSet<u32>) -> Result<(), Error> {
    let text = match read(&folder.join("cgroup.procs")) {
        Ok(text) => text,
        Err(error) if error.is_gone() => return Ok(()),
        Err(error) => return Err(error),
    };
    found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
    for child in children(folder)? {
        below(&child, found)?;
    }
    Ok(())
}

fn any_below(folder: &Path) -> Result<bool, Error> {
    match read(&folder.join("cgroup.procs")) {
        Ok(text) if !text.is_empty() => return Ok(true),
        Ok(_) => {}
        Err(error) if error.is_gone() => return Ok(false),
        Err(error) => return Err(error),
    }
    for child in children(folder)? {
        if any_below(&child)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn children(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::File { file: folder.to_owned(), error }),
    };
    let entries = entries.flatten().filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(entries.map(|entry| entry.path()).collect())
}

fn rmdir(folder: &Path) -> Result<(), Error> {
    children(folder)?.iter().try_for_each(|child| rmdir(child))?;
    fs::remove_dir(folder).map_err(|error| Error::File { file: folder.to_owned(), error })
}
