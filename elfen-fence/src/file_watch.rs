//! Watches the cgroup files on which a fence's guarantees depend.
//!
//! A kubelet sets the weights of its tiers repeatedly, and the guarantees hold again only after a
//! repair. A watch costs nothing until a file is written. Writes to cgroups above the fence, and
//! changes that threads make to themselves, wait for the check of each second.

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use elfen_machine::cgroup::Group;

/// The watches of all fences; none where the kernel provides no inotify.
#[derive(Debug, Default)]
pub(super) struct FileWatch {
    watches: Option<Inotify>,
    /// The cgroup ids, and how many of these files each cgroup has: with version 2, files come with
    /// their controller.
    of: Vec<(Option<u64>, usize)>,
}

impl FileWatch {
    /// Watches the files of these cgroups from now on. Makes all watches again if one of the
    /// cgroups has changed: a watch stays on the kernel's remains of a removed cgroup.
    pub(super) fn watch<'a>(&mut self, groups: impl Iterator<Item = &'a Group> + Clone) {
        let there = |group: &Group| {
            let files = group.watched_files().into_iter().filter(|file| file.exists());
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
        for file in groups.flat_map(Group::watched_files) {
            // Fails for a file that this version of cgroups does not have.
            let _absent = watches.add_watch(&file, AddWatchFlags::IN_MODIFY);
        }
    }

    /// Whether any process, including the daemon, has written since the last call.
    pub(super) fn was_written(&self) -> bool {
        let Some(watches) = &self.watches else { return false };
        let mut written = false;
        while watches.read_events().is_ok_and(|events| !events.is_empty()) {
            written = true;
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_machine::cgroup::{CgroupPath, Hierarchies};

    /// Goal: a write into a fence is noticed once, also after its cgroup was made again. Method: a
    /// cgroup of the test's own.
    #[test]
    #[ignore = "needs root and cgroups"]
    fn a_write_is_noticed_once() {
        // SAFETY: takes nothing.
        assert_eq!(unsafe { libc::geteuid() }, 0, "needs root");
        let hierarchies =
            Hierarchies::read().unwrap_or_else(|error| panic!("needs cgroups: {error}"));
        let name = format!("elfen-test-{}-written", std::process::id());
        let group = Group::new(&hierarchies, CgroupPath::parse(&name).unwrap());
        let mut written = FileWatch::default();
        assert!(!written.was_written());
        for _ in 0..2 {
            group.make().unwrap();
            written.watch([&group].into_iter());
            assert!(!written.was_written());
            for idle in [true, false] {
                group.set_idle(idle).unwrap();
                written.watch([&group].into_iter());
                assert!(written.was_written() && !written.was_written());
            }
            group.keep_to(&group.effective_cpus().unwrap()).unwrap();
            assert!(written.was_written());
            group.remove().unwrap();
        }
    }
}
