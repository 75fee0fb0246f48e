//! The environment of the fence tests. It has a service with its page, an elfend with its own
//! folder and cgroups, batches in its fence, and readings of what the kernel reports.
//!
//! At the end of each test, its fence is thawed, emptied and removed.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::fence::status::{Answer, FenceStatus, Request, Status, ask};
use elfen_machine::process::threads_of;
use elfen_rt::memory::Access;
use elfen_rt::pages;
use elfen_rt::service::{Service, Worker};

use super::needs;
pub(crate) use super::process::{KilledOnDrop, wait_until};

pub(crate) const ELFEN: &str = env!("CARGO_BIN_EXE_elfen");
pub(crate) const ELFEND: &str = env!("CARGO_BIN_EXE_elfend");

/// A user without privileges or files.
pub(crate) const NOBODY: &str = "65534";

/// The options of `setpriv` for user `nobody`.
pub(crate) const AS_NOBODY: [&str; 5] = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];

/// A cgroup of the test. Dropping it kills its processes and removes it.
pub(crate) struct OwnCgroup(pub(crate) Group);

impl OwnCgroup {
    /// Chooses a path. The cgroup does not exist yet.
    pub(crate) fn new(name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let path = format!("elfen-test-{}-{number}-{name}", std::process::id());
        let path = CgroupPath::parse(&path).unwrap();
        Self(Group::new(&Hierarchies::read().unwrap(), path))
    }

    /// A cgroup inside of this cgroup. It does not exist yet.
    pub(crate) fn child(&self, name: &str) -> Self {
        Self(Group::new(&Hierarchies::read().unwrap(), self.0.path.child(name)))
    }

    /// The script by which a shell enters the cgroup.
    pub(crate) fn enter_script(&self) -> String {
        let folders = self.0.folders();
        folders
            .iter()
            .map(|folder| format!("echo $$ >{}/cgroup.procs;", folder.display()))
            .collect()
    }

    /// A command that starts in the cgroup.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("sh");
        let script = format!("{} exec \"$0\" \"$@\"", self.enter_script());
        command.args(["-c", &script]).args(words).stdin(Stdio::null());
        command
    }

    /// Starts a program in the cgroup.
    pub(crate) fn start(&self, words: &[&str]) -> KilledOnDrop {
        KilledOnDrop(self.command(words).spawn().unwrap())
    }

    pub(crate) fn set_weight(&self, weight: u64) {
        for folder in self.0.folders() {
            for (file, value) in [("cpu.weight", weight), ("cpu.shares", weight * 1024 / 100)] {
                if folder.join(file).exists() {
                    fs::write(folder.join(file), value.to_string()).unwrap();
                }
            }
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.0.path.as_str().trim_start_matches('/')
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        // If a test fails early, the cgroup may not exist.
        for _ in 0..2_000 {
            self.0.freezer().thaw().ok();
            for process in self.0.processes().unwrap_or_default() {
                kill(process, libc::SIGKILL);
            }
            if self.0.remove().is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        eprintln!("cgroup {} is left behind", self.0.path);
    }
}

/// Waits until a process gets CPU time, as a batch does on a lent lane.
pub(crate) fn wait_until_borrowing(process: u32) {
    let before = ran_ns(process);
    wait_until("borrowing", || ran_ns(process) > before + 2_000_000);
}

/// The share of an idle lane that a batch gets over one second, in per mille. Other processes may
/// also use the lane.
pub(crate) fn idle_share(process: u32) -> u64 {
    wait_until_borrowing(process);
    let (before, began) = (ran_ns(process), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let passed = began.elapsed().as_nanos();
    u64::try_from(u128::from(ran_ns(process) - before) * 1000 / passed).unwrap()
}

/// An elfend with one fence on lanes 0:1, and a service of the test.
///
/// Guards and fence are in a cgroup that outweighs other processes of the machine. Otherwise an
/// idle cgroup might get no time for minutes, for example next to a compiler.
pub(crate) struct Fenced {
    pub(crate) daemon: Child,
    service: Option<Service>,
    pub(crate) fence: OwnCgroup,
    pub(crate) home: OwnCgroup,
    pub(crate) heavy: OwnCgroup,
    folder: tempfile::TempDir,
    /// Only one test runs at a time: all tests use the same lane, and an idle cgroup gets little
    /// time of a shared lane.
    _alone: MutexGuard<'static, ()>,
}

impl Fenced {
    /// Starts elfend, and waits until the fence runs.
    pub(crate) fn start() -> Self {
        let fenced = Self::start_with_weight(100);
        fenced.wait_until_running();
        fenced
    }

    /// Starts elfend with this weight for the guards' cgroup.
    pub(crate) fn start_with_weight(weight: u64) -> Self {
        Self::start_in(|heavy| {
            let home = heavy.child("home");
            home.0.make().unwrap();
            home.set_weight(weight);
            (home, heavy.child("fence"))
        })
    }

    /// Starts an elfend whose guards read the task map instead of the service's page.
    pub(crate) fn start_by_tasks() -> Self {
        let mut fenced = Self::start();
        fenced.end_daemon();
        fs::write(fenced.settings_file(), fenced.settings_by_tasks()).unwrap();
        fenced.restart();
        fenced.wait_until_running();
        fenced
    }

    /// Starts elfend. `lay_out` chooses the cgroups of the guards and of the fence in the heavy
    /// cgroup.
    #[track_caller]
    pub(crate) fn start_in(lay_out: impl FnOnce(&OwnCgroup) -> (OwnCgroup, OwnCgroup)) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        needs::root();
        needs::idle_lanes();
        if let Err(error) = Hierarchies::read() {
            panic!("needs cgroups: {error}");
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        // Other users must be able to open the socket in this folder.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let heavy = OwnCgroup::new("heavy");
        heavy.0.make().unwrap();
        heavy.set_weight(10_000);
        let (home, fence) = lay_out(&heavy);
        let service = Service::open_with_mode(heavy.name(), 1, 0o644).unwrap();
        fs::write(folder.path().join("elfend.toml"), settings(heavy.name(), fence.name())).unwrap();
        let daemon = daemon(&home, folder.path(), &["env"]).spawn().unwrap();
        let service = Some(service);
        let mut fenced = Self { _alone: alone, daemon, service, fence, home, heavy, folder };
        fenced.wait_for_socket();
        fenced
    }

    /// The settings with which this daemon starts.
    pub(crate) fn settings(&self) -> String {
        settings(self.heavy.name(), self.fence.name())
    }

    pub(crate) fn settings_by_tasks(&self) -> String {
        self.settings().replacen("source = \"service\"", "source = \"tasks\"", 1)
    }

    fn wait_for_socket(&mut self) {
        wait_until("elfend's socket", || {
            assert_eq!(self.daemon.try_wait().unwrap(), None, "{}", self.log());
            self.ask(&Request::Status).is_some()
        });
    }

    pub(crate) fn service(&self) -> &Service {
        self.service.as_ref().unwrap()
    }

    /// Begins a request on the request lane. It ends when the worker drops.
    pub(crate) fn begin_request(&self) -> Worker<'_> {
        let mut worker = self.service().claim(0, 0).unwrap();
        worker.begin(1);
        worker
    }

    /// Starts a new daemon after the last daemon has ended.
    pub(crate) fn restart(&mut self) {
        self.restart_by(&["env"]);
    }

    /// Starts a new daemon by another program.
    pub(crate) fn restart_by(&mut self, by: &[&str]) {
        self.daemon = daemon(&self.home, self.folder.path(), by).spawn().unwrap();
        self.wait_for_socket();
    }

    pub(crate) fn end_daemon(&mut self) {
        kill(self.daemon.id(), libc::SIGTERM);
        self.daemon.wait().unwrap();
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.run_dir().join("elfend.sock")
    }

    /// The lines that the daemon has written.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    pub(crate) fn ask(&self, request: &Request) -> Option<Answer> {
        ask(&self.socket(), request).ok()
    }

    /// The pages of each service, as root gets them.
    pub(crate) fn pages(&self, access: Access) -> pages::Answer {
        pages::request_pages(self.socket().as_os_str().as_bytes(), access).unwrap()
    }

    pub(crate) fn status(&self) -> Status {
        match self.ask(&Request::Status) {
            Some(Answer::Status(status)) => status,
            other => panic!("{other:?}: {}", self.log()),
        }
    }

    pub(crate) fn fence(&self) -> FenceStatus {
        let [fence] = self.status().fences.try_into().expect("one fence");
        fence
    }

    pub(crate) fn wait_until_running(&self) {
        wait_until("running", || self.fence().frozen.is_none());
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).current_dir("/");
        set_environment(&mut command, self.folder.path());
        command
    }

    /// Runs a command. Returns its exit status, and its output followed by its errors.
    pub(crate) fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        run(&mut self.command(words))
    }

    /// The output of a command that must succeed, followed by its errors.
    #[track_caller]
    pub(crate) fn prints(&self, words: &[&str]) -> String {
        let (status, printed) = self.run(words);
        assert_eq!(status, Some(0), "{words:?}: {printed}");
        printed
    }

    /// Asserts that a command ends with this status and prints these words.
    #[track_caller]
    pub(crate) fn ends(&self, words: &[&str], status: i32, why: &str) {
        let (found, printed) = self.run(words);
        let right = found == Some(status) && printed.contains(why);
        assert!(right, "{words:?}: {found:?}, not {status} and {why}: {printed}");
    }

    /// The output of `elfend check` in the guards' cgroup.
    pub(crate) fn check(&self) -> String {
        self.check_in(&self.home)
    }

    pub(crate) fn check_in(&self, cgroup: &OwnCgroup) -> String {
        let mut command = cgroup.command(&[ELFEND, "check"]);
        set_environment(&mut command, self.folder.path());
        run(&mut command).1
    }

    /// Starts a shell script in the fence. `by` is a program that starts `elfen`, with its
    /// arguments.
    pub(crate) fn batch(&self, by: &[&str], user: &str, script: &str) -> KilledOnDrop {
        let words = [ELFEN, "run", "--fence", "batch", "--user", user, "--", "sh", "-c", script];
        let mut command = self.command(&[by, &words].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let child = KilledOnDrop(command.spawn().unwrap());
        // Right after its start, the child still has the name of this process.
        wait_until("a program in the fence", || {
            ["sh", "chrt", "sleep"].contains(&&*comm(child.id()))
        });
        child
    }

    /// The thread of the only guard; `None` while it does not run.
    pub(crate) fn guard(&self) -> Option<u32> {
        let threads = threads_of(self.status().guard_process?);
        let is_guard = |thread: &u32| comm(*thread) == "elfen-guard";
        threads.into_iter().find(is_guard)
    }

    /// The share of the lane that a process gets while the guard occupies it, in per mille. It is
    /// the median of three measurements.
    pub(crate) fn held_share(&self, process: u32) -> u64 {
        wait_until("a guard", || self.guard().is_some());
        let mut shares = [0; 3].map(|_: u64| cpu_share(process, self.guard().unwrap()));
        shares.sort_unstable();
        shares[1]
    }

    /// Copies a program into a folder where every user can run it.
    pub(crate) fn copy(&self, program: &str) -> String {
        let copy = self.run_dir().join(Path::new(program).file_name().unwrap());
        fs::copy(program, &copy).unwrap();
        copy.to_str().unwrap().to_owned()
    }

    pub(crate) fn settings_file(&self) -> PathBuf {
        self.folder.path().join("elfend.toml")
    }

    /// Gives the running daemon other settings.
    pub(crate) fn reload(&self, settings: &str) {
        fs::write(self.settings_file(), settings).unwrap();
        kill(self.daemon.id(), libc::SIGHUP);
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        kill(self.daemon.id(), libc::SIGCONT);
        if let Ok(None) = self.daemon.try_wait() {
            kill(self.daemon.id(), libc::SIGTERM);
        }
        self.daemon.wait().ok();
        self.service.take().unwrap().remove().ok();
    }
}

pub(crate) fn settings(service: &str, cgroup: &str) -> String {
    format!(
        "source = \"service\"\nnap = \"spin\"\n[[service]]\nname = \"{service}\"\nlanes = \"0:1\"\n\
         [[fence]]\nname = \"batch\"\ncgroup = \"{cgroup}\"\n"
    )
}

/// Makes a command use the daemon of a folder.
fn set_environment(command: &mut Command, folder: &Path) {
    command.env("ELFEN_RUN_DIR", folder.join("run"));
    command.env("ELFEN_SETTINGS", folder.join("elfend.toml"));
    for variable in ["ELFEN_LANES", "SUDO_UID", "JOURNAL_STREAM", "NOTIFY_SOCKET"] {
        command.env_remove(variable);
    }
}

/// The command that starts a daemon in its cgroup through another program.
fn daemon(home: &OwnCgroup, folder: &Path, by: &[&str]) -> Command {
    let inside = home.command(&[ELFEND]);
    let mut command = Command::new(by[0]);
    command.args(&by[1..]).arg(inside.get_program()).args(inside.get_args());
    set_environment(&mut command, folder);
    let log = fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command
}

/// Runs a command. Returns its exit status, and its output followed by its errors.
pub(crate) fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&printed).into_owned())
}

/// Sends a signal. It is not a failure if the process has ended.
pub(crate) fn kill(pid: u32, signal: i32) {
    // SAFETY: kill takes numbers; the caller started this process or its parent.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
}

pub(crate) fn comm(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// How long a thread has run, by the scheduler's account.
pub(crate) fn ran_ns(thread: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap_or_default();
    text.split_whitespace().next().map_or(0, |ns| ns.parse().unwrap())
}

/// The time of one thread as a share of the time of both threads on one CPU, in per mille. The time
/// of other threads on the CPU does not count.
pub(crate) fn cpu_share(thread: u32, rival: u32) -> u64 {
    let began = [thread, rival].map(ran_ns);
    let ran = || [ran_ns(thread) - began[0], ran_ns(rival) - began[1]];
    wait_until("some time of both", || ran().iter().sum::<u64>() > 300_000_000);
    let [own, other] = ran();
    own * 1000 / (own + other)
}
