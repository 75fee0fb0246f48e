//! Programs with checks of their own in a fence: elfend hands them what they check by, wherever
//! they are, and nobody else.

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
use super::stage::{Fenced, NOBODY, comm, kill, ran_ns, require_fences, share, wait_until};

pub(crate) const PROGRAM: &str = "checked";
const LIBRARY: &str = "libelfen_preload.so";

/// The program, the preload library, and the file in which the program writes down the time: for
/// every user.
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

    pub(crate) fn goes_on(&self) {
        let before = self.last_ns();
        wait_until("the program gets on", || self.last_ns() > before);
    }

    /// Started by these words.
    fn start(&self, fenced: &Fenced, words: &[&str]) -> Child {
        let mut command = fenced.command(words[0], &words[1..]);
        command.arg(self.file(PROGRAM)).arg(self.last_file()).current_dir("/");
        command.env("LD_PRELOAD", self.file(LIBRARY)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        wait_until("the program", || comm(child.id()) == PROGRAM);
        child
    }

    fn in_fence(&self, fenced: &Fenced) -> Child {
        self.in_fence_by(fenced, &[])
    }

    /// Started in the fence by these words.
    fn in_fence_by(&self, fenced: &Fenced, words: &[&str]) -> Child {
        let elfen = env!("CARGO_BIN_EXE_elfen");
        let run = [elfen, "run", "--fence", "batch", "--user", NOBODY, "--"];
        self.start(fenced, &[&run, words].concat())
    }
}

fn end(mut child: Child) {
    kill(child.id(), libc::SIGKILL);
    child.wait().unwrap();
}

/// What elfend hands out, as root gets it.
pub(crate) fn handed(fenced: &Fenced) -> Pages {
    let socket = fenced.run_dir().join("elfend.sock");
    let answer = pages::request_pages(socket.as_os_str().as_bytes(), Access::Read).unwrap();
    answer.pages.into_iter().flatten().next().unwrap()
}

/// Whether a process has come for its pages.
pub(crate) fn is_checked(pages: &Pages) -> bool {
    pages.lanes.slot(0).unwrap().check_nap.load(Relaxed) != 0
}

pub(crate) fn naps(pages: &Pages) -> bool {
    let state = pages.lanes.slot(0).unwrap().state();
    state.is_some_and(|(state, _)| state == LaneState::Napping)
}

/// The program runs on its lane, and does nothing, though no guard holds the lane: they stand still
/// meanwhile, for less than would be noticed.
pub(crate) fn stands_by_itself(fenced: &Fenced, program: u32, checked: &Checked) {
    let keeper = fenced.status().keeper.unwrap();
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

/// Goal: a program with checks naps in them, needs no guard for that, and is given pages after a
/// restart of elfend too; who is outside is given nothing. Method: a request on the service's page,
/// guards that stand still, and the same program outside of the fence.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_with_checks_is_given_its_pages() {
    require_fences();
    let checked = Checked::build();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let pages = handed(&fenced);
    let socket = fenced.run_dir().join("elfend.sock");
    let variable = format!("ELFEN_SOCKET={}", socket.display());
    let nobody = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
    let outside = [&nobody[..], &["env", &variable]].concat();
    let outside = checked.start(&fenced, &outside);
    checked.goes_on();
    assert!(!is_checked(&pages), "nobody outside is given pages");
    end(outside);

    let inside = checked.in_fence(&fenced);
    checked.goes_on();
    assert!(is_checked(&pages));
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("a nap", || naps(&pages));
    stands_by_itself(&fenced, inside.id(), &checked);
    worker.end();
    drop(worker);
    checked.goes_on();

    fenced.end_daemon();
    fenced.restart();
    fenced.wait_until_it_runs();
    checked.goes_on();
    end(inside);
    let pages = handed(&fenced);
    assert!(!is_checked(&pages), "they are others");
    let again = checked.in_fence(&fenced);
    checked.goes_on();
    assert!(is_checked(&pages));
    end(again);
}

/// Goal: a program whose library finds no elfend runs as without it, and its guard holds the lane
/// all the same. Method: a socket that is not there, beside a request; and no daemon any more.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_program_that_finds_no_elfend_runs_unchecked() {
    require_fences();
    let checked = Checked::build();
    let mut fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let pages = handed(&fenced);
    let nowhere = "ELFEN_SOCKET=/nonexistent/elfend.sock";
    let program = checked.in_fence_by(&fenced, &["env", nowhere]);
    checked.goes_on();
    assert!(!is_checked(&pages));
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("a guard", || fenced.guard().is_some());
    let mut busy = [0; 3].map(|_: u64| share(program.id(), fenced.guard().unwrap()));
    busy.sort_unstable();
    worker.end();
    drop(worker);
    end(program);
    assert!(busy[1] <= 30, "{busy:?}");

    fenced.end_daemon();
    let released = fenced.command(env!("CARGO_BIN_EXE_elfend"), &["--release"]).output().unwrap();
    assert!(released.status.success(), "{released:?}");
    let socket = format!("ELFEN_SOCKET={}", fenced.run_dir().join("elfend.sock").display());
    let program = checked.start(&fenced, &["env", &socket]);
    checked.goes_on();
    end(program);
}

/// Goal: settings of elfend's lanes can be changed while it runs, by root alone. Method: `elfen
/// set`, and what its pages say.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn root_changes_the_settings_of_lent_lanes() {
    require_fences();
    let fenced = Fenced::start();
    let pages = handed(&fenced);
    let settings = || pages.control.slot(0).unwrap().settings().map(|(_, settings)| settings);
    let pid = fenced.daemon.id().to_string();
    let listed = String::from_utf8(fenced.elfen(&["status"]).stdout).unwrap();
    assert!(listed.contains(&pid) && listed.contains("borrow-idle"), "{listed}");
    let set = fenced.elfen(&["set", &pid, "--policy", "fixed-budget", "--budget", "3ms"]);
    assert!(set.status.success(), "{set:?}");
    assert_eq!(settings().unwrap().budget_ns, 3_000_000);
    let said = fenced.elfen(&["top", "--once"]);
    assert!(String::from_utf8_lossy(&said.stdout).contains("fixed-budget"), "{said:?}");
}

/// Goal: each service's lanes have settings of their own. Method: two services, of which one has
/// not come yet; those of one are set, by its name, and no other's.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn settings_are_each_services_own() {
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
    let beside = set(&["--service", "another"]);
    assert!(beside.status.success(), "{beside:?}");
    assert_eq!(budgets(), [0, 3_000_000]);
    let both = set(&[&fenced.daemon.id().to_string()]);
    let said = String::from_utf8_lossy(&both.stderr);
    assert!(both.status.code() == Some(2) && said.contains("several batches run"), "{said}");
    assert_eq!(set(&["--service", "none"]).status.code(), Some(2));
    assert!(set(&["--service", fenced.heavy.name()]).status.success());
    assert_eq!(budgets(), [3_000_000, 3_000_000]);
}

/// Goal: a run that names no lanes is elfend's, for who may use its fence, and refused to others;
/// from inside of a fence it stays there; with `none` or lanes it has guards of its own, and a
/// program of who asked `sudo`. Method: the first line of runs that are dry, of users, of root, and
/// of a program in the fence; who the program is.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_run_is_elfends_where_it_may_be() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let elfen = elfen.as_str();
    let said = |words: &[&str]| {
        let output = fenced.command(words[0], &words[1..]).current_dir("/").output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&said).into_owned()
    };
    let in_fence = "fence batch on CPUs 1, level fence";
    let by_user = said(&[elfen, "run", "--dry-run", "--user", NOBODY, "--", "true"]);
    assert!(by_user.contains(in_fence), "{by_user}");
    let mut sudo = fenced.command(elfen, &["run", "--dry-run", "--", "true"]);
    let by_sudo = sudo.env("SUDO_UID", NOBODY).output().unwrap();
    assert!(String::from_utf8_lossy(&by_sudo.stdout).contains(in_fence), "{by_sudo:?}");

    let own = [&["--fence", "none"][..], &["--lanes", "0:1"]];
    for options in own {
        let words = [&[elfen, "run", "--dry-run", "--user", NOBODY], options, &["--", "true"]];
        let said = said(&words.concat());
        assert!(!said.contains("level fence"), "{options:?}: {said}");
    }
    let mut sudo = fenced.command(elfen, &["run", "--lanes", "0:1", "--", "id", "-u"]);
    let by_sudo = sudo.env("SUDO_UID", NOBODY).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&by_sudo.stdout), format!("{NOBODY}\n"), "{by_sudo:?}");

    let gone = sudo.env("SUDO_UID", "987654321").output().unwrap();
    let refused = String::from_utf8_lossy(&gone.stderr);
    assert!(gone.status.code() == Some(2) && refused.contains("or --user root"), "{gone:?}");

    // Who is in no fence and names no lanes would take all of them.
    let nobody = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", elfen, "run"];
    let refused: [(&[&str], &[&str], &str); 3] = [
        (&[elfen, "run"], &[], "a program that runs as root can leave its fence"),
        (&[elfen, "run", "--user", NOBODY], &["--poll-interval", "1ms"], "guards of its own"),
        (&nobody, &[], "its fences are for root and group elfen; join that group; or name lanes"),
    ];
    for (by, options, why) in refused {
        let words = [by, options, &["--", "true"]].concat();
        let output = fenced.command(words[0], &words[1..]).current_dir("/").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{words:?}: {output:?}");
    }

    let script = format!(
        "{elfen} run -- sh -c 'echo it runs; grep {} /proc/self/cgroup'",
        fenced.fence.name()
    );
    let inside = said(&[elfen, "run", "--user", NOBODY, "--", "sh", "-c", &script]);
    assert_eq!(inside.matches(in_fence).count(), 2, "{inside}");
    assert!(inside.contains("it runs") && inside.contains(fenced.fence.name()), "{inside}");
}
