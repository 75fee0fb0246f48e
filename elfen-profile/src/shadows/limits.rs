//! Whether the limits of a program's cgroups leave room for a shadow. Otherwise the kernel would
//! kill the program, or it could start no thread.

use std::fs;
use std::path::{Path, PathBuf};

use elfen_machine::cgroup::{Version, folders_of};

/// Room that a memory limit must leave at least, of large programs.
const ROOM_BYTES: u64 = 64 << 20;
/// Processes and threads that a limit must leave.
const ROOM_TASKS: u64 = 16;

/// The files of a limit, of its use, and of the part of the use that the kernel gives back.
struct Files {
    most: &'static str,
    now: &'static str,
    spare: Option<(&'static str, &'static str)>,
}

const MEMORY_V1: Files = Files {
    most: "memory.limit_in_bytes",
    now: "memory.usage_in_bytes",
    spare: Some(("memory.stat", "total_inactive_file")),
};
const MEMORY_V2: Files = Files {
    most: "memory.max",
    now: "memory.current",
    spare: Some(("memory.stat", "inactive_file")),
};
const TASKS: Files = Files { most: "pids.max", now: "pids.current", spare: None };

/// What limit leaves no room for a shadow of a process; `memory` is its resident memory in bytes.
pub(super) fn lacks_room(process: u32, memory: u64) -> Option<&'static str> {
    // What is not limited has no folders.
    let folders = |controller| folders_of(process, controller).ok();
    if let Some((all, version)) = folders("memory") {
        let files = if version == Version::One { &MEMORY_V1 } else { &MEMORY_V2 };
        if !have_room(&all, files, ROOM_BYTES.min(memory) + memory / 8) {
            return Some("its memory limit is nearly reached");
        }
    }
    let (all, _) = folders("pids")?;
    (!have_room(&all, &TASKS, ROOM_TASKS)).then_some("its limit of processes is nearly reached")
}

/// Whether all cgroups leave room for `needs`.
fn have_room(folders: &[PathBuf], files: &Files, needs: u64) -> bool {
    folders.iter().all(|folder| {
        // A root lacks the files, and `max` means without a limit.
        let (Some(most), Some(now)) = (number(folder, files.most), number(folder, files.now))
        else {
            return true;
        };
        let spare = files.spare.and_then(|(file, name)| line(folder, file, name)).unwrap_or(0);
        most.saturating_sub(now.saturating_sub(spare)) > needs
    })
}

fn number(folder: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
}

/// The number behind a name in a file of names and numbers.
fn line(folder: &Path, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(folder.join(file)).ok()?;
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    found?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the tightest cgroup decides, and memory that the kernel gives back counts as free.
    /// Method: a cgroup in another one.
    #[test]
    fn the_tightest_limit_decides() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let folders = [inner.clone(), root.path().to_owned()];
        let write = |folder: &Path, file: &str, text: &str| {
            fs::write(folder.join(file), text).unwrap();
        };
        let has = |needs| have_room(&folders, &MEMORY_V2, needs);
        assert!(has(1 << 40), "no limit");
        write(&inner, "memory.max", "1000\n");
        write(&inner, "memory.current", "900\n");
        assert!(has(99) && !has(100));
        write(&inner, "memory.stat", "anon 5\ninactive_file 300\n");
        assert!(has(399) && !has(400));
        write(root.path(), "memory.max", "50\n");
        write(root.path(), "memory.current", "60\n");
        assert!(!has(1), "over the limit");
        write(root.path(), "memory.max", "max\n");
        assert!(has(399));
        write(&inner, "pids.max", "20\n");
        write(&inner, "pids.current", "3\n");
        assert!(have_room(&folders, &TASKS, 16) && !have_room(&folders, &TASKS, 17));
    }
}
