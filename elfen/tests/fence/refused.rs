//! Settings, machines and users that elfend refuses. Each refusal is one line, and changes nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::stage::{AS_NOBODY, Fenced, NOBODY, OwnCgroup, kill, require_fences, run, settings};

/// Goal: invalid settings are refused before elfend makes anything, by `elfend check` and at start.
/// Method: settings with one mistake each.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn invalid_settings_are_refused() {
    require_fences();
    let fenced = Fenced::start();
    let (file, other) = (fenced.run_dir().join("other.toml"), fenced.run_dir().join("other"));
    let elfend = |text: &str, words: &[&str]| {
        fs::write(&file, text).unwrap();
        let mut command = fenced.command(env!("CARGO_BIN_EXE_elfend"), words);
        let output = command.arg("--settings").arg(&file).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(printed.lines().count() <= 1 && !printed.contains("panicked"), "{printed}");
        (output.status.code(), printed)
    };
    let own = OwnCgroup::new("refused");
    let deep = format!("{}/b/c", own.name());
    let in_unit =
        |unit: &str| settings("s", "x").replace("cgroup = \"x\"", &format!("unit = \"{unit}\""));
    let fence = |cgroup: &str| {
        format!("{}[[fence]]\nname = \"b\"\ncgroup = \"{cgroup}\"\n", settings("s", "a/x"))
    };
    let another = |lanes: &str| {
        let service = format!("[[service]]\nname = \"t\"\nlanes = \"{lanes}\"\n[[fence]]");
        settings("s", "x").replace("[[fence]]", &service)
    };
    let cases = [
        (settings("s", "/"), 2, "the root holds everything"),
        (settings("s", "system.slice"), 2, "must never be frozen"),
        (settings("s", "a/../b"), 2, "invalid cgroup path"),
        (settings("s", &deep), 2, "guards do not outrank"),
        (fence("a/x/y"), 2, "one is inside of the other"),
        (fence("b/x"), 2, "no cgroup outranks both /b/x and /a/x"),
        (another("0:3"), 2, "CPU 0 is named twice"),
        (another("1:2"), 2, "CPU 1 is named twice"),
        (settings("s", "x").replace("0:1", ""), 2, "the list of pairs is empty"),
        (settings("s", "x").replace("lanes", "lane"), 2, "unknown field"),
        (in_unit("a\\nb.slice"), 2, "invalid unit name"),
        (in_unit("elfen.slice"), 3, "requires systemd"),
    ];
    for (text, status, why) in cases {
        if why == "requires systemd" && elfen_machine::systemd::is_running() {
            continue;
        }
        for words in [&["check"][..], &["--run-dir", other.to_str().unwrap()]] {
            let (found, printed) = elfend(&text, words);
            assert!(found == Some(status) && printed.contains(why), "{why}: {found:?} {printed}");
        }
    }
    assert!(!own.0.exists() && !other.exists());
    own.0.make().unwrap();
    fs::write(&file, settings("s", own.name())).unwrap();
    let check = |by: &[&str], script: &str, words: &[&str]| {
        let mut command = fenced.command(by[0], &[&by[1..], &["sh", "-c", script], words].concat());
        let output = command.env("ELFEN_SETTINGS", &file).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), printed)
    };
    let check_in = |home: &OwnCgroup| {
        format!("{} exec {} check", home.enter_script(), env!("CARGO_BIN_EXE_elfend"))
    };
    let (status, printed) = check(&["env"], &check_in(&own), &[]);
    assert!(status == Some(2) && printed.contains("holds elfend"), "{printed}");
    let first = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let script = format!("{} sh -c \"$0\"; exit $?", own.enter_script());
    let (status, printed) = check(&first, &script, &[&check_in(&fenced.home)]);
    assert!(status == Some(2) && printed.contains("holds the first process"), "{printed}");

    let (status, printed) = elfend(&settings("s", "x"), &[]);
    assert!(status == Some(1) && printed.contains("another elfend"), "{printed}");
    let (status, printed) = elfend(&settings("s", "x"), &["--release"]);
    assert!(status == Some(1) && printed.contains("stop it first"), "{printed}");
}

/// Goal: on a machine that cannot hold fences, elfend names what is missing, and a run without a
/// fence still works and prints its level. Method: mount namespaces without any cgroups, and
/// without cpusets.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_machine_without_cgroups_is_refused() {
    require_fences();
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let cpusets = "/sys/fs/cgroup/cpuset";
    // In version 2 cpusets have no mount of their own; `kernel/vm` tests a kernel without them.
    let apart = Path::new(cpusets).join("cpuset.cpus").exists();
    let machines = [("/sys/fs/cgroup", "cpu"), (cpusets, "cpuset")];
    for (mounted, lacks) in machines.into_iter().take(1 + usize::from(apart)) {
        let bare = |words: &str| {
            let script = format!("umount -R {mounted} && exec {words}");
            run(&mut fenced.command("unshare", &["--mount", "sh", "-c", &script]))
        };
        let why = format!("no hierarchy here has the {lacks} controller");
        for option in ["check", ""] {
            let (status, printed) = bare(&format!("{} {option}", env!("CARGO_BIN_EXE_elfend")));
            assert!(status == Some(3) && printed.contains(&why), "{status:?} {printed}");
        }
        let report = fenced.run_dir().join("report");
        let run = format!(
            "{} run --lanes 0:1 --source service --service {} --json-out {} -- sh -c 'exit 7'",
            env!("CARGO_BIN_EXE_elfen"),
            fenced.heavy.name(),
            report.display()
        );
        let (status, printed) = bare(&run);
        assert!(status == Some(7) && printed.contains("level affinity"), "{status:?} {printed}");
        let report = fs::read_to_string(&report).unwrap();
        assert!(report.contains("\"level\": \"affinity\""), "{report}");
    }
}

/// Goal: a setuid program does not enter a fence with the rights of root. Method: `elfen` with the
/// setuid bit and owner root, started by nobody.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_setuid_program_enters_no_fence() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    fs::set_permissions(&elfen, fs::Permissions::from_mode(0o4755)).unwrap();
    let mut command = fenced.command("setpriv", &AS_NOBODY);
    let output =
        command.arg(&elfen).args(["run", "--fence", "batch", "--", "true"]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && printed.contains("name another user"), "{printed}");
    assert_eq!(fenced.fence().processes, 0);
}

/// Goal: commands that a user may not give are refused with the reason. Method: nobody, and root
/// without a user for the program.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn users_without_permission_are_refused() {
    require_fences();
    let fenced = Fenced::start();
    fenced.wait_until_running();
    let elfen = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfen")));
    let nobody = AS_NOBODY;
    let run_as_nobody = |words: &[&str]| {
        let mut command = fenced.command("setpriv", &nobody);
        let output = command.arg(&elfen).args(words).current_dir("/").output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, printed) = run_as_nobody(&["run", "--fence", "batch", "--", "true"]);
    assert!(status == Some(1) && printed.contains("group elfen"), "{printed}");
    let (status, printed) = run_as_nobody(&["pause"]);
    assert!(status == Some(1) && printed.contains("run it as root"), "{printed}");
    let (status, printed) = run_as_nobody(&["resume"]);
    assert!(status == Some(1) && printed.contains("only root may do that"), "{printed}");
    let (status, printed) = run_as_nobody(&["status"]);
    assert_eq!(status, Some(0), "{printed}");

    let run_as_root = |words: &[&str]| {
        let output = fenced.elfen(words);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, printed) = run_as_root(&["run", "--fence", "batch", "--", "true"]);
    assert!(status == Some(2) && printed.contains("can leave its fence"), "{printed}");
    let user = ["run", "--user", NOBODY, "--fence"];
    let (status, printed) = run_as_root(&[&user[..], &["other", "--", "true"]].concat());
    assert!(status == Some(2) && printed.contains("name one of: batch"), "{printed}");
    let lanes = ["batch", "--lanes", "0:1", "--", "true"];
    let (status, printed) = run_as_root(&[&user[..], &lanes].concat());
    assert!(status == Some(2) && printed.contains("cannot be used with"), "{printed}");
    let (status, _) = run_as_root(&[&user[..], &["batch", "--", "sh", "-c", "exit 7"]].concat());
    assert_eq!(status, Some(7), "the exit status of the program");
    let (status, _) = run_as_root(&[&user[..], &["batch", "--", "/no/such"]].concat());
    assert_eq!(status, Some(127));
    // From inside a fence.
    let script = format!("{elfen} run --fence batch --user {NOBODY} -- true");
    let inner = [&["run", "--user", "root", "--fence", "batch", "--", "sh", "-c"], &[&*script][..]];
    let (status, printed) = run_as_root(&inner.concat());
    assert!(status == Some(1) && printed.contains("is in fence \"batch\" already"), "{printed}");
}

/// Goal: elfend requires root, and ends by Ctrl-C without a socket left behind. Method: elfend as
/// nobody, and SIGINT to the running daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn elfend_requires_root_and_ends_by_ctrl_c() {
    require_fences();
    let mut fenced = Fenced::start();
    let elfend = fenced.copy(Path::new(env!("CARGO_BIN_EXE_elfend")));
    for words in [&[][..], &["--release"]] {
        let mut command = Command::new("setpriv");
        command.args(AS_NOBODY).arg(&elfend);
        let file = fenced.run_dir().parent().unwrap().join("elfend.toml");
        let output = command.args(words).env("ELFEN_SETTINGS", file).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && printed.contains("only root"), "{printed}");
    }
    kill(fenced.daemon.id(), libc::SIGINT);
    assert!(fenced.daemon.wait().unwrap().success());
    assert!(!fenced.run_dir().join("elfend.sock").exists());
}
