//! Tests of containers whose parent cgroup is a fence. Container engines do not know about fences.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use tempfile::TempDir;

use super::SPIN;
use super::needs;
use super::stage::{
    ELFEN, Fenced, KilledOnDrop, OwnCgroup, comm, idle_share, kill, ran_ns, wait_until,
    wait_until_borrowing,
};

pub(crate) const PODMAN: [&str; 3] = ["podman", "runc", "busybox"];
const BY_CRUN: [&str; 3] = ["podman", "crun", "busybox"];
const CONTAINERD: [&str; 4] = ["containerd", "ctr", "runc", "busybox"];

/// The podman command that runs a container in a cgroup, without the container's options. podman
/// keeps its files in the folder.
pub(crate) fn podman(folder: &Path, parent: &OwnCgroup) -> Command {
    with_options(Command::new("podman"), "runc", folder, parent)
}

/// The same command with crun, which requires hierarchies of one version. On a machine with both
/// versions, crun sees only the hierarchies of version 1.
fn podman_by_crun(folder: &Path, parent: &OwnCgroup) -> Command {
    let mut podman = Command::new("unshare");
    let script = "umount /sys/fs/cgroup/unified 2>&-; exec podman \"$@\"";
    podman.args(["--mount", "sh", "-c", script, "sh"]);
    with_options(podman, "crun", folder, parent)
}

fn with_options(mut podman: Command, runtime: &str, folder: &Path, parent: &OwnCgroup) -> Command {
    for (option, inside) in [("--root", "root"), ("--runroot", "runroot"), ("--tmpdir", "tmp")] {
        podman.arg(option).arg(folder.join(inside));
    }
    podman.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]);
    podman.args(["--runtime", runtime, "run", "--rm", "--network", "none"]);
    // The engine's default limits are too high for root without CAP_SYS_RESOURCE.
    podman.args(["--ulimit", "nofile=1000:1000", "--ulimit", "nproc=1000:1000"]);
    podman.args(["--cgroup-parent", parent.0.path.as_str()]);
    podman
}

/// A containerd with its own folder and socket.
struct Containerd {
    _daemon: KilledOnDrop,
    folder: PathBuf,
}

impl Containerd {
    fn start(folder: &Path) -> Self {
        let at = folder.display();
        let settings = format!(
            "version = 2\nroot = \"{at}/root\"\nstate = \"{at}/state\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
             [grpc]\naddress = \"{at}/socket\"\n"
        );
        fs::write(folder.join("config.toml"), settings).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(folder.join("config.toml")).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(fs::File::create(folder.join("daemon")).unwrap());
        let daemon = KilledOnDrop(command.spawn().unwrap());
        wait_until("containerd's socket", || {
            let log = || fs::read_to_string(folder.join("daemon")).unwrap();
            log().contains("successfully booted") && folder.join("socket").exists()
        });
        Self { _daemon: daemon, folder: folder.to_owned() }
    }

    /// The command that runs a container in a cgroup.
    fn ctr(&self, image: &Path, parent: &OwnCgroup) -> Command {
        let mut ctr = Command::new("ctr");
        ctr.arg("--address").arg(self.folder.join("socket"));
        ctr.args(["run", "--rm", "--cgroup", parent.0.path.child("ctr").as_str(), "--rootfs"]);
        ctr.arg(image).arg(parent.name().replace('/', "-"));
        ctr
    }
}

/// Creates the files of a container: a shell, and mount points for the host's programs.
fn make_image(folder: &Path) -> PathBuf {
    let image = folder.join("image");
    for inside in ["bin", "checked", "dev", "etc", "proc", "run/elfen", "sys", "tmp", "usr"] {
        fs::create_dir_all(image.join(inside)).unwrap();
    }
    for name in ["lib", "lib64"] {
        symlink(format!("usr/{name}"), image.join(name)).unwrap();
    }
    fs::copy(needs::find("busybox").unwrap(), image.join("bin/busybox")).unwrap();
    symlink("busybox", image.join("bin/sh")).unwrap();
    image
}

/// A container that runs in a cgroup. When this drops, it kills the container's processes and waits
/// for the engine to clean up.
pub(crate) struct Contained {
    engine: Child,
    parent: Group,
    /// The process whose name `start` waited for.
    pub(crate) process: u32,
}

impl Contained {
    /// Starts `engine`, and waits for a process of this name in the cgroup.
    pub(crate) fn start(engine: &mut Command, parent: &OwnCgroup, name: &str) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        engine.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.reopen().unwrap());
        let parent = Group::new(&Hierarchies::read().unwrap(), parent.0.path.clone());
        let mut contained = Self { engine: engine.spawn().unwrap(), parent, process: 0 };
        let mut inside = None;
        wait_until("a container", || {
            assert!(contained.is_running(), "{}", fs::read_to_string(log.path()).unwrap());
            let all = contained.parent.processes().unwrap();
            inside = all.into_iter().find(|process| comm(*process) == name);
            inside.is_some()
        });
        contained.process = inside.unwrap();
        contained
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.engine.try_wait().unwrap().is_none()
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        let began = Instant::now();
        while matches!(self.engine.try_wait(), Ok(None)) {
            // A failed test may have left the fence frozen.
            self.parent.freezer().thaw().ok();
            let inside = self.parent.processes().unwrap_or_default();
            // podman's monitor process conmon is in the cgroup, too. It must live to unmount the
            // container's files.
            let own = inside.into_iter().filter(|process| comm(*process) != "conmon");
            own.for_each(|process| kill(process, libc::SIGKILL));
            if began.elapsed() > Duration::from_secs(30) {
                eprintln!("the engine of a container in {} does not end", self.parent.path);
                self.engine.kill().ok();
                self.engine.wait().ok();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A running fence, and the files of an engine.
pub(crate) struct Stage {
    /// Dropped before the fence, because the fence removes only its own cgroups.
    _elsewhere: LeftoverCgroups,
    pub(crate) fenced: Fenced,
    pub(crate) folder: TempDir,
    pub(crate) image: PathBuf,
}

impl Stage {
    pub(crate) fn of(programs: &[&str], start: fn() -> Fenced) -> Self {
        needs::programs(programs);
        let folder = tempfile::tempdir().unwrap();
        let image = make_image(folder.path());
        let fenced = start();
        Self { _elsewhere: LeftoverCgroups(fenced.heavy.0.path.clone()), fenced, folder, image }
    }
}

/// The path of cgroups that an engine also creates in hierarchies that a fence does not use.
/// Removes them when it drops.
struct LeftoverCgroups(CgroupPath);

impl Drop for LeftoverCgroups {
    fn drop(&mut self) {
        // Processes of an engine that ends after its container, or of a failed test, may remain for
        // a while.
        const PATIENCE: Duration = Duration::from_secs(3);
        let own = Group::new(&Hierarchies::read().unwrap(), self.0.clone()).folders();
        let began = Instant::now();
        for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            let left = hierarchy.path().join(self.0.as_str().trim_start_matches('/'));
            while left.exists() && !own.contains(&left) {
                let find = |words: &[&str]| {
                    let mut find = Command::new("find");
                    find.arg(&left).args(words).stdout(Stdio::piped()).stderr(Stdio::null());
                    String::from_utf8(find.output().unwrap().stdout).unwrap()
                };
                find(&["-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]);
                if began.elapsed() > 2 * PATIENCE {
                    eprintln!("cgroup {} is left behind", left.display());
                    break;
                }
                if began.elapsed() > PATIENCE {
                    let processes = find(&["-name", "cgroup.procs", "-exec", "cat", "{}", "+"]);
                    processes.lines().for_each(|id| kill(id.parse().unwrap(), libc::SIGKILL));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Asserts that a container's process is fenced. It borrows while the request lane idles, and runs
/// only on its lane even if it sets another affinity. It gets almost nothing of an occupied lane,
/// and a pause freezes it.
fn assert_fenced(fenced: &Fenced, process: u32, engine: &str) {
    let first = idle_share(process);
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    assert!(status.contains("Cpus_allowed_list:\t1\n"), "{status}");
    let mut taskset = Command::new("taskset");
    let elsewhere = taskset.args(["-pc", "0", &process.to_string()]).output().unwrap();
    assert!(!elsewhere.status.success(), "{elsewhere:?}");
    let worker = fenced.begin_request();
    let busy = fenced.held_share(process);
    drop(worker);
    let again = idle_share(process);
    println!(
        "a container of {engine} in the fence: {first} per mille of its lane while the request \
         lane idles, {busy} while its guard holds it, {again} again"
    );
    fenced.prints(&[ELFEN, "pause"]);
    std::thread::sleep(Duration::from_millis(100));
    let frozen_at_ns = ran_ns(process);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(ran_ns(process), frozen_at_ns);
    fenced.prints(&[ELFEN, "resume"]);
    wait_until_borrowing(process);
    assert!(busy <= 30, "{busy}");
}

/// Goal: a container with root inside is fenced by its parent cgroup, and by nothing else. Method:
/// podman with runc, in the fence and then in a sibling cgroup on the same lane. Reads the
/// scheduler's account of its process.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and runc"]
fn a_container_is_fenced_by_its_parent() {
    let stage = Stage::of(&PODMAN, Fenced::start);
    let Stage { fenced, folder, image, .. } = &stage;
    let start = |parent: &OwnCgroup, options: &[&str]| {
        let mut podman = podman(folder.path(), parent);
        podman.args(options).arg("--rootfs").arg(image).args(["/bin/sh", "-c", SPIN]);
        Contained::start(&mut podman, parent, "sh")
    };
    let inside = start(&fenced.fence, &[]);
    assert_fenced(fenced, inside.process, "podman");

    let sibling = fenced.heavy.child("beside");
    sibling.0.make().unwrap();
    let outside = start(&sibling, &["--cpuset-cpus", "1"]);
    let worker = fenced.begin_request();
    // A new cgroup may wait for its first time slice for seconds.
    let mut busy = 0;
    wait_until("a share of the lane", || {
        busy = fenced.held_share(outside.process);
        busy >= 100
    });
    println!("the same without the fence as its parent: {busy} per mille");
    drop(worker);
}

/// Goal: a container of the runtime crun is fenced. Method: podman with crun.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, podman and crun"]
fn a_container_by_crun_is_fenced() {
    let stage = Stage::of(&BY_CRUN, Fenced::start);
    let Stage { fenced, folder, image, .. } = &stage;
    let mut podman = podman_by_crun(folder.path(), &fenced.fence);
    // If crun's first process is killed, podman waits 20 s for the notification of its end.
    let spin = format!("trap exit TERM; {SPIN}");
    podman.arg("--rootfs").arg(image).args(["/bin/sh", "-c", &spin]);
    let mut inside = Contained::start(&mut podman, &fenced.fence, "sh");
    assert_fenced(fenced, inside.process, "podman by crun");
    kill(inside.process, libc::SIGTERM);
    wait_until("its end", || !inside.is_running());
}

/// Goal: a container of another engine is fenced. Method: containerd and its command, with the
/// cgroup as an option.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups, containerd"]
fn a_container_of_containerd_is_fenced() {
    let stage = Stage::of(&CONTAINERD, Fenced::start);
    let Stage { fenced, folder, image, .. } = &stage;
    let containerd = Containerd::start(folder.path());
    let mut ctr = containerd.ctr(image, &fenced.fence);
    let ctr = Contained::start(ctr.args(["/bin/sh", "-c", SPIN]), &fenced.fence, "sh");
    assert_fenced(fenced, ctr.process, "containerd");
}
