//! Finds the mounts of the three cgroup controllers that a fence needs.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::file::{Error, read};
use super::path::CgroupPath;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Version {
    One,
    Two,
}

/// One mounted hierarchy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Hierarchy {
    point: PathBuf,
    pub(super) version: Version,
    /// The controller's name as in /proc/PID/cgroup; empty on version 2.
    controller: &'static str,
}

impl Hierarchy {
    pub(super) fn folder(&self, path: &CgroupPath) -> PathBuf {
        path.parts().fold(self.point.clone(), |folder, part| folder.join(part))
    }

    /// The cgroup of a process in this hierarchy.
    pub(super) fn path_of(&self, process: u32) -> Result<CgroupPath, Error> {
        let text = read(Path::new(&format!("/proc/{process}/cgroup")))?;
        let path = path_in(&text, self.controller).ok_or(Error::Elsewhere(process))?;
        CgroupPath::parse(path).ok_or(Error::Elsewhere(process))
    }
}

/// The hierarchies of the three controllers. A controller is in only one version at a time, so
/// version 1 is used if it has the controller.
#[derive(Clone, Debug)]
pub struct Hierarchies {
    pub(super) cpu: Hierarchy,
    pub(super) cpuset: Hierarchy,
    pub(super) freezer: Hierarchy,
}

impl Hierarchies {
    /// The hierarchies of this machine.
    pub fn read() -> Result<Self, Error> {
        let mounts = read(Path::new("/proc/self/mountinfo"))?;
        let of_v2 = |point: &Path| read(&point.join("cgroup.controllers"));
        Self::of(&mounts, of_v2)
    }

    fn of(
        mounts: &str,
        controllers_of_v2: impl Fn(&Path) -> Result<String, Error>,
    ) -> Result<Self, Error> {
        let find = |controller| {
            let (point, version) = Self::mount_of(controller, mounts, &controllers_of_v2)?;
            let controller = if version == Version::One { controller } else { "" };
            Ok(Hierarchy { point, version, controller })
        };
        Ok(Self { cpu: find("cpu")?, cpuset: find("cpuset")?, freezer: find("freezer")? })
    }

    /// The mount point of a controller, from the lines of mountinfo.
    pub fn mount_of(
        controller: &'static str,
        mounts: &str,
        controllers_of_v2: impl FnOnce(&Path) -> Result<String, Error>,
    ) -> Result<(PathBuf, Version), Error> {
        let mounts: Vec<Mounted<'_>> = mounts.lines().filter_map(Mounted::parse).collect();
        if let Some(mount) = mounts.iter().find(|mount| mount.is_v1_of(controller)) {
            return Ok((mount.point.into(), Version::One));
        }
        let new = mounts.iter().find(|mount| mount.kind == "cgroup2");
        let new = new.ok_or(Error::NoController(controller))?;
        let has = controllers_of_v2(Path::new(new.point))?;
        // On version 2 every cgroup can be frozen; no controller exists for it.
        if controller != "freezer" && !has.split_whitespace().any(|has| has == controller) {
            return Err(Error::NoController(controller));
        }
        Ok((new.point.into(), Version::Two))
    }

    /// The cgroup of a process in the hierarchy with the cpu controller.
    pub fn cgroup_of(&self, process: u32) -> Result<CgroupPath, Error> {
        self.cpu.path_of(process)
    }

    /// The cgroup version, for messages.
    pub fn name(&self) -> &'static str {
        match [&self.cpu, &self.cpuset, &self.freezer].map(|one| one.version) {
            [Version::Two, Version::Two, Version::Two] => "v2",
            [Version::One, Version::One, Version::One] => "v1",
            _ => "v1 and v2",
        }
    }
}

/// The folders of a process's cgroup and of those around it, for any controller, the innermost
/// first.
pub fn folders_of(
    process: u32,
    controller: &'static str,
) -> Result<(Vec<PathBuf>, Version), Error> {
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    let of_v2 = |point: &Path| read(&point.join("cgroup.controllers"));
    let (point, version) = Hierarchies::mount_of(controller, &mounts, of_v2)?;
    let controller = if version == Version::One { controller } else { "" };
    let hierarchy = Hierarchy { point, version, controller };
    let innermost = hierarchy.folder(&hierarchy.path_of(process)?);
    let all = innermost.ancestors().take_while(|folder| folder.starts_with(&hierarchy.point));
    Ok((all.map(Path::to_owned).collect(), version))
}

/// The fields of a mountinfo line that this module uses.
struct Mounted<'a> {
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mounted<'a> {
    /// Parses the mount of a whole hierarchy. Rejects a mount of a part, as in a container: there
    /// the paths of cgroups differ from those in /proc.
    fn parse(line: &'a str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let root = before.next()?;
        let point = before.next()?;
        let mut after = after.split(' ');
        let kind = after.next()?;
        let options = after.nth(1)?;
        (root == "/").then_some(Self { point, kind, options })
    }

    fn is_v1_of(&self, controller: &str) -> bool {
        self.kind == "cgroup" && self.options.split(',').any(|option| option == controller)
    }
}

/// The path in /proc/PID/cgroup for a controller; the empty text stands for version 2.
pub(crate) fn path_in<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?;
        controllers.split(',').any(|has| has == controller).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:3 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
";
    const UNIFIED: &str = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    fn points(mounts: &str, has: &str) -> Result<[(String, Version); 3], String> {
        let of_v2 = |_: &Path| Ok(has.to_owned());
        let all = Hierarchies::of(mounts, of_v2).map_err(|error| error.to_string())?;
        Ok([all.cpu, all.cpuset, all.freezer]
            .map(|one| (one.point.display().to_string(), one.version)))
    }

    /// Goal: each controller is found where it is mounted, in every mix of versions. Method:
    /// version 1; version 2; both with controllers on one side; the mounts of a container.
    #[test]
    fn controllers_are_found_where_they_are_mounted() {
        let old = ["cpu,cpuacct", "cpuset", "freezer"]
            .map(|name| (format!("/sys/fs/cgroup/{name}"), Version::One));
        assert_eq!(points(V1, ""), Ok(old.clone()));
        assert_eq!(points(&format!("{V1}{UNIFIED}"), ""), Ok(old));
        let new = ("/sys/fs/cgroup/unified".to_owned(), Version::Two);
        let all_new = Ok([new.clone(), new.clone(), new]);
        assert_eq!(points(UNIFIED, "cpuset cpu io"), all_new);
        let lacking = |what: &str| Err(format!("no hierarchy here has the {what} controller"));
        assert_eq!(points(UNIFIED, "memory"), lacking("cpu"));
        assert_eq!(points(UNIFIED, "cpu"), lacking("cpuset"));
        assert_eq!(points("", ""), lacking("cpu"));
        let part = UNIFIED.replace(" / ", " /docker/1 ");
        assert_eq!(points(&part, "cpu cpuset"), lacking("cpu"), "a part of a hierarchy");
    }

    #[test]
    fn the_path_of_a_process_is_found_by_controller() {
        let text = "9:name=systemd:/s\n2:cpu,cpuacct:/a/b\n3:cpuset:/c:d\n0::/e\n";
        assert_eq!(path_in(text, "cpu"), Some("/a/b"));
        assert_eq!(path_in(text, "cpuset"), Some("/c:d"));
        assert_eq!(path_in(text, ""), Some("/e"));
        assert_eq!(path_in(text, "freezer"), None);
    }
}
