//! The CPUs that the cgroup of this process may use.
//!
//! The affinity mask is always inside the cgroup's cpuset, so this adds no limit that
//! sched_getaffinity misses. It tells whether the cgroup took a CPU away, which the process cannot
//! undo, or taskset, which it can. So the standard mount points suffice: where they are wrong, only
//! the explanation is less precise.

use super::cpulist::CpuSet;
use super::source::{Source, SourceError};

/// Mount points of the unified hierarchy: without version 1, and next to it.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const V1: &str = "/sys/fs/cgroup/cpuset";

/// The cpuset of the calling process's cgroup; `None` where no cpuset controller is visible.
pub(crate) fn effective(source: &Source) -> Result<Option<CpuSet>, SourceError> {
    let memberships = source.text("/proc/self/cgroup")?.unwrap_or_default();
    for membership in memberships.lines() {
        // hierarchy-ID:controllers:path, with no controllers for the unified hierarchy.
        let mut fields = membership.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let found = if controllers.is_empty() {
            nearest(source, UNIFIED[0], path, "cpuset.cpus.effective")?.or(nearest(
                source,
                UNIFIED[1],
                path,
                "cpuset.cpus.effective",
            )?)
        } else if controllers.split(',').any(|controller| controller == "cpuset") {
            nearest(source, V1, path, "cpuset.effective_cpus")?
        } else {
            None
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Reads the file in the cgroup, or in its nearest ancestor that has the file. A cgroup without the
/// controller has its parent's CPUs; and in a container the path may name directories that only the
/// host can see.
fn nearest(
    source: &Source,
    mount: &str,
    path: &str,
    file: &str,
) -> Result<Option<CpuSet>, SourceError> {
    let mut path = path.trim_end_matches('/');
    loop {
        let found = match source.cpus(&format!("{mount}{path}/{file}")) {
            // A hardened container hides its cgroup, so only the affinity mask is left.
            Err(SourceError::Unreadable { .. }) => return Ok(None),
            found => found?,
        };
        if found.is_some() || path.is_empty() {
            return Ok(found);
        }
        path = path.rfind('/').map_or("", |slash| &path[..slash]);
    }
}
