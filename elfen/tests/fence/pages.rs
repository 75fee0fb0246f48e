//! Tests of programs with checks in a fence: elfend passes the pages that checks read to them, and
//! refuses other processes. Also tests the settings of lent lanes.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::Duration;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::memory::Access;
use elfen_rt::pages::Pages;
use elfen_rt::signal::lane::LaneState;

use super::preload;
use super::stage::{
    AS_NOBODY, ELFEN, ELFEND, Fenced, KilledOnDrop, NOBODY, comm, kill, ran_ns, wait_until,
};

pub(crate) const PROGRAM: &str = "checked";
const LIBRARY: &str = "libelfen_preload.so";

/// A folder that every user can read. It holds the program, the preload library, and the file into
/// which the program writes the time.
pub(crate) struct Checked {
    pub(crate) folder: tempfile::TempDir,
}

impl Checked {
    pub(crate) fn build() -> Self {
        let checked = Self { folder: tempfile::tempdir().unwrap() };
        let allow = |file: &Path, mode| {
            fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
        };
        allow(checked.folder.path(), 0o755);
        checked.compile("stamps.c", PROGRAM);
        fs::copy(preload::library().join(LIBRARY), checked.file(LIBRARY)).unwrap();
        fs::write(checked.file("last"), [0; 4096]).unwrap();
        allow(&checked.file("last"), 0o666);
        checked
    }

    /// Compiles a program of these tests into the folder.
    pub(crate) fn compile(&self, source: &str, program: &str) {
        compile(source, &self.file(program));
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn last_ns(&self) -> u64 {
        let mut word = [0; 8];
        fs::File::open(self.file("last")).unwrap().read_exact_at(&mut word, 0).unwrap();
        u64::from_ne_bytes(word)
    }

    pub(crate) fn wait_for_progress(&self) {
        let now = monotonic_ns();
        wait_until("progress of the program", || self.last_ns() > now);
    }

    /// Waits until the kernel reports the fence as frozen. From then on, the program does not run.
    pub(crate) fn wait_until_stopped(&self, fenced: &Fenced) {
        wait_until("being frozen", || fenced.fence.0.freezer().is_frozen().unwrap());
        let last = self.last_ns();
        sleep(Duration::from_millis(3));
        assert_eq!(self.last_ns(), last, "a frozen batch does not run");
    }

    /// Starts the program with a command that ends in these words.
    fn start(&self, fenced: &Fenced, words: &[&str]) -> KilledOnDrop {
        let mut command = fenced.command(words);
        command.arg(self.file(PROGRAM)).arg(self.file("last"));
        command.env("LD_PRELOAD", self.file(LIBRARY)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = KilledOnDrop(command.spawn().unwrap());
        wait_until("the program", || comm(child.id()) == PROGRAM);
        self.wait_for_progress();
        child
    }

    /// Starts the program in the fence, with a command that ends in these words.
    fn start_in_fence(&self, fenced: &Fenced, words: &[&str]) -> KilledOnDrop {
        let run = [ELFEN, "run", "--fence", "batch", "--user", NOBODY, "--"];
        self.start(fenced, &[&run, words].concat())
    }

    pub(crate) fn start_without_checks(&self, fenced: &Fenced) -> KilledOnDrop {
        self.start_in_fence(fenced, &["env", "--unset=LD_PRELOAD"])
    }
}

/// Compiles a program of these tests, with the headers of the runtime.
pub(crate) fn compile(source: &str, program: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror", "-I"]).arg(here.join("../elfen-rt/include"));
    cc.arg(here.join("tests/fence").join(source)).arg("-o").arg(program);
    assert!(cc.status().unwrap().success());
}

/// The pages of elfend, as root gets them.
pub(crate) fn handed_pages(fenced: &Fenced) -> Pages {
    fenced.pages(Access::Read).pages.into_iter().flatten().next().unwrap()
}

/// Whether a process has requested its pages.
pub(crate) fn has_fetched_pages(pages: &Pages) -> bool {
    pages.lanes.slot(0).unwrap().check_nap.load(Relaxed) != 0
}

pub(crate) fn is_napping(pages: &Pages) -> bool {
    let state = pages.lanes.slot(0).unwrap().state();
    state.is_some_and(|(state, _)| state == LaneState::Napping)
}

/// Asserts that the program naps: it gets its lane but makes no progress, and no guard occupies the
/// lane. Guards are stopped meanwhile, for less time than elfend's limit.
pub(crate) fn assert_naps_unguarded(fenced: &Fenced, program: u32, checked: &Checked) {
    let keeper = fenced.status().guard_process.unwrap();
    let (before, ran) = (checked.last_ns(), ran_ns(program));
    wait_until("time on the lane", || {
        kill(keeper, libc::SIGSTOP);
        sleep(Duration::from_millis(300));
        kill(keeper, libc::SIGCONT);
        sleep(Duration::from_millis(100));
        ran_ns(program) > ran + 50_000_000
    });
    assert_eq!(checked.last_ns(), before, "a napping program makes no progress");
}

/// Goal: a program with checks naps without help of a guard, and also receives pages after a
/// restart of elfend. Programs outside of the fence receive none. Method: a request on the
/// service's page, stopped guards, and the same program outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_with_checks_receives_its_pages() {
    let checked = Checked::build();
    let mut fenced = Fenced::start();
    let pages = handed_pages(&fenced);
    let variable = format!("ELFEN_SOCKET={}", fenced.socket().display());
    let outside = [&["setpriv"], &AS_NOBODY[..], &["env", &variable]].concat();
    let outside = checked.start(&fenced, &outside);
    assert!(!has_fetched_pages(&pages), "a process outside receives no pages");
    drop(outside);

    let inside = checked.start_in_fence(&fenced, &[]);
    assert!(has_fetched_pages(&pages));
    let worker = fenced.begin_request();
    wait_until("a nap", || is_napping(&pages));
    assert_naps_unguarded(&fenced, inside.id(), &checked);
    drop(worker);
    checked.wait_for_progress();

    fenced.end_daemon();
    fenced.restart();
    fenced.wait_until_running();
    checked.wait_for_progress();
    drop(inside);
    let pages = handed_pages(&fenced);
    assert!(!has_fetched_pages(&pages), "the new daemon has new pages");
    let _again = checked.start_in_fence(&fenced, &[]);
    assert!(has_fetched_pages(&pages));
}

/// Goal: if a program's library does not find elfend, the program runs without checks, and its
/// guard still occupies the lane. Method: a missing socket, next to a request; then no daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_that_finds_no_elfend_runs_unchecked() {
    let checked = Checked::build();
    let mut fenced = Fenced::start();
    let pages = handed_pages(&fenced);
    let nowhere = "ELFEN_SOCKET=/nonexistent/elfend.sock";
    let program = checked.start_in_fence(&fenced, &["env", nowhere]);
    assert!(!has_fetched_pages(&pages));
    let worker = fenced.begin_request();
    let busy = fenced.held_share(program.id());
    drop(worker);
    drop(program);
    assert!(busy <= 30, "{busy}");

    fenced.end_daemon();
    fenced.prints(&[ELFEND, "--release"]);
    let socket = format!("ELFEN_SOCKET={}", fenced.socket().display());
    checked.start(&fenced, &["env", &socket]);
}

/// Goal: root can change the settings of elfend's lanes while elfend runs, also for each service
/// separately. Method: two services, of which one does not run yet. `elfen set` with and without
/// `--service`, and the settings in the pages.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn root_changes_the_settings_of_lent_lanes() {
    let mut fenced = Fenced::start();
    let budgets = |fenced: &Fenced| {
        let answer = fenced.pages(Access::Read);
        let pages = answer.pages.iter().flatten();
        let settings = pages.map(|pages| pages.control.slot(0).unwrap().settings().unwrap().1);
        settings.map(|settings| settings.budget_ns).collect::<Vec<_>>()
    };
    let policy = ["--policy", "fixed-budget", "--budget", "3ms"];
    let pid = fenced.daemon.id().to_string();
    let listed = fenced.prints(&[ELFEN, "status"]);
    assert!(listed.contains(&pid) && listed.contains("borrow-idle"), "{listed}");
    fenced.prints(&[&[ELFEN, "set", &pid], &policy[..]].concat());
    assert_eq!(budgets(&fenced), [3_000_000]);
    fenced.ends(&[ELFEN, "top", "--once"], 0, "fixed-budget");

    fenced.end_daemon();
    let other = "[[service]]\nname = \"another\"\nlanes = \"8000:8001\"\n[[fence]]";
    let two = fenced.settings_by_tasks().replacen("[[fence]]", other, 1);
    fs::write(fenced.settings_file(), two).unwrap();
    fenced.restart();
    let pid = fenced.daemon.id().to_string();
    let set = |words: &[&str], status, why| {
        fenced.ends(&[&[ELFEN, "set"], words, &policy].concat(), status, why);
    };
    assert_eq!(budgets(&fenced), [0, 0]);
    set(&["--service", "another"], 0, "");
    assert_eq!(budgets(&fenced), [0, 3_000_000]);
    set(&[&pid], 2, "several batches run");
    set(&["--service", "none"], 2, "");
    set(&["--service", fenced.heavy.name()], 0, "");
    assert_eq!(budgets(&fenced), [3_000_000, 3_000_000]);
}
