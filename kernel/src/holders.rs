//! The processes that keep the program attached: each has a descriptor of its link.

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

/// The attached program and the processes that hold it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attached {
    pub program: u32,
    pub link: u32,
    pub holders: Vec<Holder>,
    /// Processes whose descriptors we may not see.
    pub hidden: usize,
}

/// Looks for the attached program and its holders; `None` if there is none. Needs CAP_SYS_ADMIN.
pub fn find() -> Result<Option<Attached>, task_map::Error> {
    let Some(parts) = task_map::running()? else { return Ok(None) };
    let info = bpf_call::link_info(parts.link.as_fd());
    let info = info.map_err(task_map::Error::call("reading the link"))?;
    // Ours must not count: closed before we look.
    drop(parts);
    let (mut holders, mut hidden) = (Vec::new(), 0);
    for pid in processes() {
        match holds(pid, info.id) {
            Some(true) => holders.push(Holder { pid, command: command_of(pid) }),
            Some(false) => {}
            None => hidden += 1,
        }
    }
    Ok(Some(Attached { program: info.program, link: info.id, holders, hidden }))
}

fn processes() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut processes: Vec<u32> = numbers.collect();
    processes.sort_unstable();
    processes
}

/// Whether a process has a descriptor of the link; `None` if it does not let us look.
fn holds(pid: u32, link: u32) -> Option<bool> {
    let entries = match fs::read_dir(format!("/proc/{pid}/fdinfo")) {
        Ok(entries) => entries,
        // A zombie's descriptors are closed, and no process may look. A process that ended
        // meanwhile has none either.
        Err(_) if has_ended(pid) => return Some(false),
        Err(_) => return None,
    };
    let infos = entries.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    Some(infos.into_iter().any(|info| is_link(&info, link)))
}

fn has_ended(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.map_or(true, |status| status.lines().any(|line| line.starts_with("State:\tZ")))
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
    fn descriptors_are_told_apart_by_their_link() {
        let info = "pos:\t0\nflags:\t02000000\nmnt_id:\t16\nlink_type:\ttracing\n\
                    link_id:\t12\nprog_id:\t34\n";
        assert!(is_link(info, 12));
        assert!(!is_link(info, 34) && !is_link(info, 1));
        assert!(!is_link("pos:\t0\nmap_id:\t12\n", 12));
    }
}
