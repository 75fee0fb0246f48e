//! A container that knows nothing of fences, in one by its parent cgroup.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use elfen_host::cgroup::CgroupPath;

use super::SPIN;
use super::stage::{Fenced, borrows, comm, found, kill, or_skip, ran_ns, share, wait_until};

/// Whether it takes a program that is not here; says which.
pub(crate) fn lacking(test: &str) -> bool {
    let lacks = ["podman", "runc", "busybox"].into_iter().find(|name| found(name).is_none());
    if let Some(lacks) = lacks {
        let mut terminal = std::io::stderr();
        writeln!(terminal, "skipped: {test}: there is no {lacks}").unwrap();
    }
    lacks.is_some()
}

/// What runs a container in the fence, up to its options; it keeps its files in the folder.
pub(crate) fn podman(folder: &Path, fenced: &Fenced) -> Command {
    let mut podman = Command::new("podman");
    for (option, inside) in [("--root", "root"), ("--runroot", "runroot"), ("--tmpdir", "tmp")] {
        podman.arg(option).arg(folder.join(inside));
    }
    podman.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]);
    podman.args(["--runtime", "runc", "run", "--rm", "--network", "none"]);
    // Where root has no CAP_SYS_RESOURCE, an engine's own limits are too high.
    podman.args(["--ulimit", "nofile=1000:1000", "--ulimit", "nproc=1000:1000"]);
    podman.args(["--cgroup-parent", fenced.fence.0.path.as_str()]);
    podman
}

/// A container's files: one shell, and room for the host's programs.
pub(crate) fn image(folder: &Path, busybox: &Path) -> PathBuf {
    let image = folder.join("image");
    for inside in ["bin", "checked", "dev", "etc", "proc", "run/elfen", "sys", "tmp", "usr"] {
        fs::create_dir_all(image.join(inside)).unwrap();
    }
    for name in ["lib", "lib64"] {
        symlink(format!("usr/{name}"), image.join(name)).unwrap();
    }
    fs::copy(busybox, image.join("bin/busybox")).unwrap();
    symlink("busybox", image.join("bin/sh")).unwrap();
    image
}

/// An engine makes its cgroups in hierarchies that a fence does not take, too.
pub(crate) struct Elsewhere(pub(crate) CgroupPath);

impl Drop for Elsewhere {
    fn drop(&mut self) {
        for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            let left = hierarchy.path().join(self.0.as_str().trim_start_matches('/'));
            let mut find = Command::new("find");
            find.arg(left).args(["-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]);
            // Those of the fence itself still hold it.
            find.stderr(Stdio::null()).status().ok();
        }
    }
}

/// Goal: a container with root inside borrows while the request lane idles, gets next to nothing of
/// a held lane, and stands still in a pause, by its parent cgroup alone. Method: podman with runc,
/// and what the scheduler says of its process.
#[test]
fn a_container_is_fenced_by_its_parent() {
    const NAME: &str = "a_container_is_fenced_by_its_parent";
    if !or_skip(NAME) || lacking(NAME) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), &found("busybox").unwrap());
    let fenced = Fenced::start();
    // Dropped before the fence, whose own cgroups go with it.
    let _elsewhere = Elsewhere(fenced.heavy.0.path.clone());
    fenced.wait_until_it_runs();
    let log = fs::File::create(folder.path().join("log")).unwrap();
    let mut podman = podman(folder.path(), &fenced);
    podman.arg("--rootfs");
    podman.arg(&image).args(["/bin/sh", "-c", SPIN]);
    podman.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut engine = podman.spawn().unwrap();
    let mut inside = None;
    wait_until("a container", || {
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        assert_eq!(engine.try_wait().unwrap(), None, "{log}");
        let all = fenced.fence.0.processes().unwrap();
        inside = all.into_iter().find(|process| comm(*process) == "sh");
        inside.is_some()
    });
    let process = inside.unwrap();
    borrows(process);
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    assert!(status.contains("Cpus_allowed_list:\t1\n"), "{status}");
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("a guard", || fenced.guard().is_some());
    let mut busy = [0; 3].map(|_: u64| share(process, fenced.guard().unwrap()));
    busy.sort_unstable();
    println!("a container in the fence: {} per mille of the held lane", busy[1]);
    worker.end();
    borrows(process);
    assert!(fenced.elfen(&["pause"]).status.success());
    std::thread::sleep(std::time::Duration::from_millis(100));
    let stands = ran_ns(process);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(ran_ns(process), stands);
    assert!(fenced.elfen(&["resume"]).status.success());
    borrows(process);
    kill(process, libc::SIGKILL);
    engine.wait().unwrap();
    assert!(busy[1] <= 30, "{busy:?}");
}
