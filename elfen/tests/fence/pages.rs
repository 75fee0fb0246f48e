//! Programs with checks in a fence: elfend passes them the pages that checks read, and refuses
//! other processes. Also the settings of lent lanes, and the fence that `elfen run` uses by
//! default.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::Duration;

use elfen_rt::memory::Access;
use elfen_rt::pages::{self, Pages};
use elfen_rt::signal::lane::LaneState;

use super::preload;
use super::stage::{
    AS_NOBODY, Fenced, NOBODY, comm, end, kill, ran_ns, require_fences, run, wait_until,
};

pub(crate) const PROGRAM: &str = "checked";
const LIBRARY: &str = "libelfen_preload.so";

/// A folder that every user can read: the program, the preload library, and the file in which the
/// program writes the time.
pub(crate) struct Checked {
    pub(crate) folder: tempfile::TempDir,
}

impl Checked {
    pub(crate) fn build() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-DCHECKED", "-I"]).arg(here.join("../elfen-rt/include"));
        cc.arg(here.join("tests/fence/stamps.c")).arg("-o").arg(folder.path().join(PROGRAM));
        assert!(cc.status().unwrap().success());
        fs::copy(preload::library().join(LIBRARY), folder.path().join(LIBRARY)).unwrap();
        let checked = Self { folder };
        fs::write(checked.last_file(), [0; 4096]).unwrap();
        let everybody = fs::Permissions::from_mode(0o666);
        fs::set_permissions(checked.last_file(), everybody).unwrap();
        checked
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn last_file(&self) -> PathBuf {
        self.file("last")
    }

    pub(crate) fn last_ns(&self) -> u64 {
        let mut word = [0; 8];
        fs::File::open(self.last_file()).unwrap().read_exact_at(&mut word, 0).unwrap();
        u64::from_ne_bytes(word)
    }

    pub(crate) fn wait_for_progress(&self) {
        let before = self.last_ns();
        wait_until("progress of the program", || self.last_ns() > before);
    }

    /// Starts the program by these words.
    fn start(&self, fenced: &Fenced, words: &[&str]) -> Child {
        let mut command = fenced.command(words[0], &words[1..]);
        command.arg(self.file(PROGRAM)).arg(self.last_file()).current_dir("/");
        command.env("LD_PRELOAD", self.file(LIBRARY)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        wait_until("the program", || comm(child.id()) == PROGRAM);
        child
    }

    fn start_in_fence(&self, fenced: &Fenced) -> Child {
        self.start_in_fence_by(fenced, &[])
    }

    /// Starts the program in the fence by these words.
    fn start_in_fence_by(&self, fenced: &Fenced, words: &[&str]) -> Child {
        let elfen = env!("CARGO_BIN_EXE_elfen");
        let run = [elfen, "run", "--fence", "batch", "--user", NOBODY, "--"];
        self.start(fenced, &[&run, words].concat())
    }
}

/// The pages of elfend, as root gets them.
pub(crate) fn handed_pages(fenced: &Fenced) -> Pages {
    let socket = fenced.run_dir().join("elfend.sock");
    let answer = pages::request_pages(socket.as_os_str().as_bytes(), Access::Read).unwrap();
    answer.pages.into_iter().flatten().next().unwrap()
}

/// Whether a process has requested its pages.
pub(crate) fn has_fetched_pages(pages: &Pages) -> bool {
    pages.lanes.slot(0).unwrap().check_nap.load(Relaxed) != 0
}

pub(crate) fn is_napping(pages: &Pages) -> bool {
    let state = pages.lanes.slot(0).unwrap().state();
    state.is_some_and(|(state, _)| state == LaneState::Napping)
}

/// Asserts that the program naps: it gets its lane and makes no progress, while no guard holds the
/// lane. Guards are stopped meanwhile, for less time than elfend would notice.
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

/// Goal: a program with checks naps in them without help of a guard, and receives pages after a
/// restart of elfend too. Programs outside receive none. Method: a request on the service's page,
/// stopped guards, and the same program outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_with_checks_receives_its_pages() {
    require_fences();
    let checked = Checked::build();
    let mut fenced = Fenced::start();
    fenced.wait_until_running();
    let pages = handed_pages(&fenced);
    let socket = fenced.run_dir().join("elfend.sock");
    let variable = format!("ELFEN_SOCKET={}", socket.display());
    let outside = [&["setpriv"], &AS_NOBODY[..], &["env", &variable]].concat();
    let mut outside = checked.start(&fenced, &outside);
    checked.wait_for_progress();
    assert!(!has_fetched_pages(&pages), "a process outside receives no pages");
    end(&mut outside);

    let mut inside = checked.start_in_fence(&fenced);
    checked.wait_for_progress();
    assert!(has_fetched_pages(&pages));
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("a nap", || is_napping(&pages));
    assert_naps_unguarded(&fenced, inside.id(), &checked);
    worker.end();
    drop(worker);
    checked.wait_for_progress();

    fenced.end_daemon();
    fenced.restart();
    fenced.wait_until_running();
    checked.wait_for_progress();
    end(&mut inside);
    let pages = handed_pages(&fenced);
    assert!(!has_fetched_pages(&pages), "the new daemon has new pages");
    let mut again = checked.start_in_fence(&fenced);
    checked.wait_for_progress();
    assert!(has_fetched_pages(&pages));
    end(&mut again);
}

/// Goal: a program whose library finds no elfend runs without checks, and its guard still holds the
/// lane. Method: a missing socket, next to a request; and then no daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_that_finds_no_elfend_runs_unchecked() {
    require_fences();
    let checked = Checked::build();
    let mut fenced = Fenced::start();
    fenced.wait_until_running();
    let pages = handed_pages(&fenced);
    let nowhere = "ELFEN_SOCKET=/nonexistent/elfend.sock";
    let mut program = checked.start_in_fence_by(&fenced, &["env", nowhere]);
    checked.wait_for_progress();
    assert!(!has_fetched_pages(&pages));
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    let busy = fenced.held_share(program.id());
    worker.end();
    drop(worker);
    end(&mut program);
    assert!(busy <= 30, "{busy}");

    fenced.end_daemon();
    let released = fenced.command(env!("CARGO_BIN_EXE_elfend"), &["--release"]).output().unwrap();
    assert!(released.status.success(), "{released:?}");
    let socket = format!("ELFEN_SOCKET={}", fenced.run_dir().join("elfend.sock").display());
    let mut program = checked.start(&fenced, &["env", &socket]);
    checked.wait_for_progress();
    end(&mut program);
}

/// Goal: root can change the settings of elfend's lanes while elfend runs. Method: `elfen set`, and
/// the settings in the pages.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn root_changes_the_settings_of_lent_lanes() {
    require_fences();
    let fenced = Fenced::start();
    let pages = handed_pages(&fenced);
    let settings = || pages.control.slot(0).unwrap().settings().map(|(_, settings)| settings);
    let pid = fenced.daemon.id().to_string();
    let listed = String::from_utf8(fenced.elfen(&["status"]).stdout).unwrap();
    assert!(listed.contains(&pid) && listed.contains("borrow-idle"), "{listed}");
    let set = fenced.elfen(&["set", &pid, "--policy", "fixed-budget", "--budget", "3ms"]);
    assert!(set.status.success(), "{set:?}");
    assert_eq!(settings().unwrap().budget_ns, 3_000_000);
    let printed = fenced.elfen(&["top", "--once"]);
    assert!(String::from_utf8_lossy(&printed.stdout).contains("fixed-budget"), "{printed:?}");
}

/// Goal: the lanes of each service have separate settings. Method: two services, of which one does
/// not run yet; `elfen set --service` changes the settings of one.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn each_service_has_separate_settings() {
    require_fences();
    let mut fenced = Fenced::start_by_tasks();
    fenced.end_daemon();
    let usual = fenced.settings_by_tasks();
    let other = "[[service]]\nname = \"another\"\nlanes = \"8000:8001\"\n[[fence]]";
    fs::write(fenced.settings_file(), usual.replacen("[[fence]]", other, 1)).unwrap();
    fenced.restart();
    let socket = fenced.run_dir().join("elfend.sock");
    let answer = pages::request_pages(socket.as_os_str().as_bytes(), Access::Read).unwrap();
    let budgets = || {
        let pages = answer.pages.iter().flatten();
        let settings = pages.map(|pages| pages.control.slot(0).unwrap().settings().unwrap().1);
        settings.map(|settings| settings.budget_ns).collect::<Vec<_>>()
    };
    assert_eq!(budgets(), [0, 0]);
    let set = |words: &[&str]| {
        let policy = ["--policy", "fixed-budget", "--budget", "3ms"];
        fenced.elfen(&[&["set"], words, &policy].concat())
    };
    let one = set(&["--service", "another"]);
    assert!(one.status.success(), "{one:?}");
    assert_eq!(budgets(), [0, 3_000_000]);
    let both = set(&[&fenced.daemon.id().to_string()]);
    let printed = String::from_utf8_lossy(&both.stderr);
    assert!(both.status.code() == Some(2) && printed.contains("several batches run"), "{printed}");
    assert_eq!(set(&["--service", "none"]).status.code(), Some(2));
    assert!(set(&["--service", fenced.heavy.name()]).status.success());
    assert_eq!(budgets(), [3_000_000, 3_000_000]);
}

/// Goal: a run without `--lanes` uses the fence of elfend if its user may enter it, and is refused
/// otherwise. A run inside a fence stays there. With `--fence none` or `--lanes` a run has guards
/// of its own, and its program runs as the user that called `sudo`. Method: the first line of dry
/// runs of users, of root, and in the fence; the user id of the program.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_run_uses_the_fence_of_elfend_by_default() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let elfen = elfen.as_str();
    let print_of = |words: &[&str]| run(fenced.command(words[0], &words[1..]).current_dir("/")).1;
    let in_fence = "fence batch on CPUs 1, level fence";
    let by_user = print_of(&[elfen, "run", "--dry-run", "--user", NOBODY, "--", "true"]);
    assert!(by_user.contains(in_fence), "{by_user}");
    let mut sudo = fenced.command(elfen, &["run", "--dry-run", "--", "true"]);
    let by_sudo = sudo.env("SUDO_UID", NOBODY).output().unwrap();
    assert!(String::from_utf8_lossy(&by_sudo.stdout).contains(in_fence), "{by_sudo:?}");

    let own = [&["--fence", "none"][..], &["--lanes", "0:1"]];
    for options in own {
        let words = [&[elfen, "run", "--dry-run", "--user", NOBODY], options, &["--", "true"]];
        let printed = print_of(&words.concat());
        assert!(!printed.contains("level fence"), "{options:?}: {printed}");
    }
    let mut sudo = fenced.command(elfen, &["run", "--lanes", "0:1", "--", "id", "-u"]);
    let by_sudo = sudo.env("SUDO_UID", NOBODY).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&by_sudo.stdout), format!("{NOBODY}\n"), "{by_sudo:?}");

    let gone = sudo.env("SUDO_UID", "987654321").output().unwrap();
    let refused = String::from_utf8_lossy(&gone.stderr);
    assert!(gone.status.code() == Some(2) && refused.contains("or --user root"), "{gone:?}");

    // A run outside of fences that names no lanes would take all of them.
    let nobody = [&["setpriv"], &AS_NOBODY[..], &[elfen, "run"]].concat();
    let refused: [(&[&str], &[&str], &str); 3] = [
        (&[elfen, "run"], &[], "a program that runs as root can leave its fence"),
        (&[elfen, "run", "--user", NOBODY], &["--poll-interval", "1ms"], "guards of its own"),
        (&nobody, &[], "its fences are for root and group elfen; join that group; or name lanes"),
    ];
    for (by, options, why) in refused {
        let words = [by, options, &["--", "true"]].concat();
        let output = fenced.command(words[0], &words[1..]).current_dir("/").output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && printed.contains(why), "{words:?}: {output:?}");
    }

    let script = format!(
        "{elfen} run -- sh -c 'echo it runs; grep {} /proc/self/cgroup'",
        fenced.fence.name()
    );
    let inside = print_of(&[elfen, "run", "--user", NOBODY, "--", "sh", "-c", &script]);
    assert_eq!(inside.matches(in_fence).count(), 2, "{inside}");
    assert!(inside.contains("it runs") && inside.contains(fenced.fence.name()), "{inside}");
}
