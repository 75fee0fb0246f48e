//! Finds the processes that keep the task map's program attached. Each has a descriptor of its
//! link.

use std::fs;
use std::os::fd::AsFd;

use crate::bpf_call;
use crate::task_map;

/// A process that holds the link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    pub pid: u32,
    pub command: String,
}

/// Finds the holders of the attached program; `None` if no program is attached. Needs
/// CAP_SYS_ADMIN. Processes that hide their descriptors are not found.
pub fn find() -> Result<Option<Vec<Holder>>, task_map::Error> {
    let Some(parts) = task_map::find_attached()? else { return Ok(None) };
    let info = bpf_call::link_info(parts.link.as_fd());
    let info = info.map_err(task_map::Error::call("reading the link"))?;
    // Closed before the search, so that this process does not count.
    drop(parts);
    let holders = processes().into_iter().filter(|&pid| holds(pid, info.id));
    Ok(Some(holders.map(|pid| Holder { pid, command: command_of(pid) }).collect()))
}

fn processes() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut processes: Vec<u32> = numbers.collect();
    processes.sort_unstable();
    processes
}

/// Whether a process shows a descriptor of the link.
fn holds(pid: u32, link: u32) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return false };
    let mut infos = entries.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    infos.any(|info| is_link(&info, link))
}

fn is_link(info: &str, link: u32) -> bool {
    let id = info.lines().find_map(|line| line.strip_prefix("link_id:"));
    id.and_then(|id| id.trim().parse().ok()) == Some(link)
}

fn command_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.map_or_else(|_| "ended".to_owned(), |name| name.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_distinguished_by_their_link() {
        let info = "pos:\t0\nflags:\t02000000\nmnt_id:\t16\nlink_type:\ttracing\n\
                    link_id:\t12\nprog_id:\t34\n";
        assert!(is_link(info, 12));
        assert!(!is_link(info, 34) && !is_link(info, 1));
        assert!(!is_link("pos:\t0\nmap_id:\t12\n", 12));
    }
}
