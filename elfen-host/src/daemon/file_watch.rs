//! That somebody writes what a fence's promises go by: the kernel tells who watches those files.
//!
//! A kubelet sets the weight of its tiers again and again, and a fence is as good as its lanes only
//! while that is put right. A watch costs nothing until something is written. What is written to a
//! cgroup above a fence, or what a thread in it makes of itself, waits for the look of each second.

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use crate::cgroup::Group;

/// Watches of the fences that are held; none where the kernel gives none.
#[derive(Debug, Default)]
pub(super) struct Written {
    watches: Option<Inotify>,
    /// The cgroups as the kernel knows them, and how many of these files each has: on version 2
    /// they come with a controller.
    of: Vec<(Option<u64>, usize)>,
}

impl Written {
    /// Watches these from now on. All anew when one is another, as a watch keeps the kernel's part
    /// of a cgroup that was removed.
    pub(super) fn follow<'a>(&mut self, groups: impl Iterator<Item = &'a Group> + Clone) {
        let there = |group: &Group| {
            let files = group.promised_files().into_iter().filter(|file| file.exists());
            (group.id().ok(), files.count())
        };
        let of: Vec<_> = groups.clone().map(there).collect();
        if of == self.of {
            return;
        }
        self.of = of;
        let watches = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC);
        self.watches = watches.ok();
        let Some(watches) = &self.watches else { return };
        for file in groups.flat_map(Group::promised_files) {
            // One that this version of cgroups does not have.
            let _absent = watches.add_watch(&file, AddWatchFlags::IN_MODIFY);
        }
    }

    /// Whether anybody has written since the last time, the daemon included.
    pub(super) fn heard(&self) -> bool {
        let Some(watches) = &self.watches else { return false };
        let mut heard = false;
        while watches.read_events().is_ok_and(|events| !events.is_empty()) {
            heard = true;
        }
        heard
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::{CgroupPath, Hierarchies};

    /// Goal: what is written into a fence is heard once, also after its cgroup was made anew, and
    /// silence is silence. Method: a cgroup of the test's own.
    #[test]
    fn what_is_written_is_heard() {
        // SAFETY: takes nothing.
        let root = unsafe { libc::geteuid() } == 0;
        let Some(hierarchies) = Hierarchies::read().ok().filter(|_| root) else {
            use std::io::Write;
            let why = "skipped: what_is_written_is_heard: it takes root and cgroups";
            return writeln!(std::io::stderr(), "{why}").unwrap();
        };
        let name = format!("elfen-test-{}-written", std::process::id());
        let group = Group::new(&hierarchies, CgroupPath::parse(&name).unwrap());
        let mut written = Written::default();
        assert!(!written.heard());
        for _ in 0..2 {
            group.make().unwrap();
            written.follow([&group].into_iter());
            assert!(!written.heard());
            for idle in [true, false] {
                group.set_idle(idle).unwrap();
                written.follow([&group].into_iter());
                assert!(written.heard() && !written.heard());
            }
            group.keep_to(&group.effective_cpus().unwrap()).unwrap();
            assert!(written.heard());
            group.remove().unwrap();
        }
    }
}
