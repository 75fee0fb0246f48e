//! What the tests of fences play: a service on its page, an elfend with a folder and a cgroup of
//! its own, batches in it, and an observer who reads what the kernel says.
//!
//! Whatever a test does, its fence is thawed, emptied and removed when it ends.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elfen_machine::cgroup::{CgroupPath, Group, Hierarchies};
use elfen_machine::fence::status::{Answer, FenceStatus, Request, Status, ask};
use elfen_machine::process::threads_of;
use elfen_rt::service::Service;

use super::needs;

/// A user who has nothing.
pub(crate) const NOBODY: &str = "65534";

/// Waits for something that other processes do. A minute is for a machine that is busy.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Fails where no fence can be tested, with what is missing.
#[track_caller]
pub(crate) fn require_fences() {
    needs::root();
    needs::idle_lanes();
    if let Err(error) = Hierarchies::read() {
        panic!("needs cgroups: {error}");
    }
}

/// A cgroup of the test's own, which goes with everybody in it.
pub(crate) struct Own(pub(crate) Group);

impl Own {
    /// Not made yet.
    pub(crate) fn new(name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let path = format!("elfen-test-{}-{number}-{name}", std::process::id());
        let path = CgroupPath::parse(&path).unwrap();
        Self(Group::new(&Hierarchies::read().unwrap(), path))
    }

    /// One inside of this.
    pub(crate) fn child(&self, name: &str) -> Self {
        Self(Group::new(&Hierarchies::read().unwrap(), self.0.path.child(name)))
    }

    /// What a shell runs to be in it.
    pub(crate) fn enter_script(&self) -> String {
        let folders = self.0.folders();
        folders
            .iter()
            .map(|folder| format!("echo $$ >{}/cgroup.procs;", folder.display()))
            .collect()
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

impl Drop for Own {
    fn drop(&mut self) {
        // The cgroup of a test that failed early may not be there.
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

/// Waits until a process gets on: a batch on a lane that is lent.
pub(crate) fn borrows(process: u32) {
    let before = ran_ns(process);
    wait_until("borrowing", || ran_ns(process) > before + 2_000_000);
}

/// What a batch gets of a lane that idles, per mille: of a second in which others may have had
/// theirs.
pub(crate) fn idle_share(process: u32) -> u64 {
    borrows(process);
    let (before, began) = (ran_ns(process), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let passed = began.elapsed().as_nanos();
    u64::try_from(u128::from(ran_ns(process) - before) * 1000 / passed).unwrap()
}

/// An elfend that holds one fence, on lanes 0:1, beside a service of the test's own.
///
/// Both are in a cgroup that outweighs what else runs here: an idle one gets nothing for minutes
/// beside a compiler.
pub(crate) struct Fenced {
    pub(crate) daemon: Child,
    service: Option<Service>,
    pub(crate) fence: Own,
    pub(crate) home: Own,
    pub(crate) heavy: Own,
    folder: tempfile::TempDir,
    /// One at a time: they have the same lane, and what is idle gets little of a shared one.
    _alone: MutexGuard<'static, ()>,
}

impl Fenced {
    pub(crate) fn start() -> Self {
        Self::start_with_weight(100)
    }

    /// The cgroup of the guards has this weight.
    pub(crate) fn start_with_weight(weight: u64) -> Self {
        Self::start_in(|heavy| {
            let home = heavy.child("home");
            home.0.make().unwrap();
            home.set_weight(weight);
            (home, heavy.child("fence"))
        })
    }

    /// With the cgroups of the guards and of the fence that this makes in the heavy one.
    pub(crate) fn start_in(lay_out: impl FnOnce(&Own) -> (Own, Own)) -> Self {
        let mut fenced = Self::prepare(lay_out);
        fenced.wait_for_socket();
        fenced
    }

    /// Its guards go by who runs, and not by the service's page.
    pub(crate) fn start_by_tasks() -> Self {
        let mut fenced = Self::start();
        fenced.end_daemon();
        fs::write(fenced.settings_file(), fenced.settings_by_tasks()).unwrap();
        fenced.restart();
        fenced
    }

    pub(crate) fn settings_by_tasks(&self) -> String {
        let settings = settings(self.heavy.name(), self.fence.name());
        settings.replacen("signal = \"service\"", "signal = \"tasks\"", 1)
    }

    fn prepare(lay_out: impl FnOnce(&Own) -> (Own, Own)) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        // Users look for the socket in it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let heavy = Own::new("heavy");
        heavy.0.make().unwrap();
        heavy.set_weight(10_000);
        let (home, fence) = lay_out(&heavy);
        let service = Service::open_with_mode(heavy.name(), 1, 0o644).unwrap();
        fs::write(folder.path().join("elfend.toml"), settings(heavy.name(), fence.name())).unwrap();
        let daemon = daemon(&home, folder.path()).spawn().unwrap();
        Self { _alone: alone, daemon, service: Some(service), fence, home, heavy, folder }
    }

    pub(crate) fn wait_for_socket(&mut self) {
        wait_until("elfend's socket", || {
            assert_eq!(self.daemon.try_wait().unwrap(), None, "{}", self.said());
            self.ask(&Request::Status).is_some()
        });
    }

    pub(crate) fn service(&self) -> &Service {
        self.service.as_ref().unwrap()
    }

    /// A new daemon in the place of one that has ended.
    pub(crate) fn restart(&mut self) {
        self.daemon = daemon(&self.home, self.folder.path()).spawn().unwrap();
        self.wait_for_socket();
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub(crate) fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// What the daemon has written.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap()
    }

    pub(crate) fn ask(&self, request: &Request) -> Option<Answer> {
        ask(&self.run_dir().join("elfend.sock"), request).ok()
    }

    pub(crate) fn status(&self) -> Status {
        match self.ask(&Request::Status) {
            Some(Answer::Status(status)) => status,
            other => panic!("{other:?}: {}", self.said()),
        }
    }

    pub(crate) fn fence(&self) -> FenceStatus {
        let [fence] = self.status().fences.try_into().expect("one fence");
        fence
    }

    pub(crate) fn wait_until_it_runs(&self) {
        wait_until("running", || self.fence().frozen.is_none());
    }

    pub(crate) fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(words).env("ELFEN_RUN_DIR", self.run_dir());
        command.env("ELFEN_SETTINGS", self.folder.path().join("elfend.toml"));
        for variable in ["ELFEN_LANES", "SUDO_UID", "JOURNAL_STREAM", "NOTIFY_SOCKET"] {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn elfen(&self, words: &[&str]) -> Output {
        self.command(env!("CARGO_BIN_EXE_elfen"), words).output().unwrap()
    }

    /// A shell script in the fence, and the process that runs it.
    pub(crate) fn batch(&self, by: &[&str], user: &str, script: &str) -> Child {
        let elfen = env!("CARGO_BIN_EXE_elfen");
        let words = [elfen, "run", "--fence", "batch", "--user", user, "--", "sh", "-c", script];
        let words: Vec<&str> = by.iter().copied().chain(words).collect();
        let mut command = self.command(words[0], &words[1..]);
        command.current_dir("/").stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        // It becomes its program in the fence; a moment after its start it has our name yet.
        wait_until("a program in the fence", || {
            ["sh", "chrt", "sleep"].contains(&&*comm(child.id()))
        });
        child
    }

    /// The one guard, by its thread.
    pub(crate) fn guard(&self) -> Option<u32> {
        let threads = threads_of(self.status().keeper?);
        let is_guard = |thread: &u32| comm(*thread) == "elfen-guard";
        threads.into_iter().find(is_guard)
    }

    /// What a command says that starts from a cgroup.
    pub(crate) fn says_in(&self, cgroup: &Own, command: &Command) -> String {
        let script = format!("{} exec \"$0\" \"$@\"", cgroup.enter_script());
        let mut shell = self.command("sh", &["-c", &script]);
        shell.arg(command.get_program()).args(command.get_args());
        let output = shell.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// A copy of a program that every user can run, wherever this checkout lies.
    pub(crate) fn copy(&self, program: &Path) -> String {
        let copy = self.run_dir().join(program.file_name().unwrap());
        fs::copy(program, &copy).unwrap();
        copy.to_str().unwrap().to_owned()
    }

    pub(crate) fn settings_file(&self) -> PathBuf {
        self.folder.path().join("elfend.toml")
    }

    /// Other settings for the daemon that runs.
    pub(crate) fn reload(&self, settings: &str) {
        fs::write(self.settings_file(), settings).unwrap();
        kill(self.daemon.id(), libc::SIGHUP);
    }

    /// To start a daemon in the place of one that has ended.
    pub(crate) fn daemon_command(&self) -> Command {
        daemon(&self.home, self.folder.path())
    }

    pub(crate) fn end_daemon(&mut self) {
        kill(self.daemon.id(), libc::SIGTERM);
        self.daemon.wait().unwrap();
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
        "signal = \"service\"\nnap = \"spin\"\n[[service]]\nname = \"{service}\"\nlanes = \"0:1\"\n\
         [[fence]]\nname = \"batch\"\ncgroup = \"{cgroup}\"\n"
    )
}

fn daemon(home: &Own, folder: &Path) -> Command {
    let script = format!("{} exec {}", home.enter_script(), env!("CARGO_BIN_EXE_elfend"));
    let mut command = Command::new("sh");
    let log = fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.env("ELFEN_RUN_DIR", folder.join("run"));
    command.env("ELFEN_SETTINGS", folder.join("elfend.toml"));
    command.env_remove("JOURNAL_STREAM").env_remove("NOTIFY_SOCKET");
    command
}

/// One that has ended hears nothing.
pub(crate) fn kill(pid: u32, signal: i32) {
    // SAFETY: takes numbers; the caller started this process, or its parent.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
}

pub(crate) fn comm(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// How long a thread has run, by the scheduler's own account.
pub(crate) fn ran_ns(thread: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap_or_default();
    text.split_whitespace().next().map_or(0, |ns| ns.parse().unwrap())
}

/// What one thread gets of what two get that want the same CPU, per mille: it does not matter who
/// else wants it.
pub(crate) fn share(thread: u32, beside: u32) -> u64 {
    let began = [thread, beside].map(ran_ns);
    let ran = || [ran_ns(thread) - began[0], ran_ns(beside) - began[1]];
    wait_until("some time of both", || ran().iter().sum::<u64>() > 300_000_000);
    let [own, other] = ran();
    own * 1000 / (own + other)
}
