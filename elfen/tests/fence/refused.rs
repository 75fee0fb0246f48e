//! Tests of settings, machines and users that elfend refuses in one line, without changing
//! anything.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::stage::{AS_NOBODY, ELFEN, ELFEND, Fenced, NOBODY, OwnCgroup, kill, settings};

/// Goal: invalid settings are refused before elfend creates anything, by `elfend check` and at the
/// start. Method: settings with one mistake each.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn invalid_settings_are_refused() {
    let fenced = Fenced::start();
    let (file, other) = (fenced.run_dir().join("other.toml"), fenced.run_dir().join("other"));
    let (file, other_dir) = (file.to_str().unwrap(), other.to_str().unwrap());
    let refuses = |text: &str, words: &[&str], status, why: &str| {
        fs::write(file, text).unwrap();
        let (found, printed) = fenced.run(&[&[ELFEND], words].concat());
        assert!(found == Some(status) && printed.contains(why), "{why}: {found:?} {printed}");
        assert_eq!(printed.lines().count(), 1, "{printed}");
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
        (settings("s", "/"), 2, "the root contains all processes"),
        (settings("s", "system.slice"), 2, "must never be frozen"),
        (settings("s", "a/../b"), 2, "invalid cgroup path"),
        (settings("s", &deep), 2, "do not outrank"),
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
        for words in [&["check", file][..], &["--settings", file, "--run-dir", other_dir]] {
            refuses(&text, words, status, why);
        }
    }
    assert!(!own.0.exists() && !other.exists());
    refuses(&settings("s", "x"), &["--settings", file], 1, "another elfend");
    refuses(&settings("s", "x"), &["--release", "--settings", file], 1, "stop it first");

    own.0.make().unwrap();
    fs::write(file, settings("s", own.name())).unwrap();
    let check =
        |cgroup: &OwnCgroup| format!("{} exec {ELFEND} check {file}", cgroup.enter_script());
    fenced.ends(&["sh", "-c", &check(&own)], 2, "holds elfend");
    let script = format!("{} sh -c \"$0\"; exit $?", own.enter_script());
    let first = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"];
    let check_at_home = check(&fenced.home);
    let words = [&first[..], &[&script, &check_at_home]].concat();
    fenced.ends(&words, 2, "holds the first process");
}

/// Goal: on a machine that cannot have fences, elfend names what is missing. A run without a fence
/// still works and prints its level. Method: mount namespaces without any cgroups, and without
/// cpusets.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_machine_without_cgroups_is_refused() {
    let mut fenced = Fenced::start();
    fenced.end_daemon();
    let cpusets = "/sys/fs/cgroup/cpuset";
    // In version 2, cpusets have no mount of their own. `kernel/vm` tests a kernel without cpusets.
    let apart = Path::new(cpusets).join("cpuset.cpus").exists();
    let machines = [("/sys/fs/cgroup", "cpu"), (cpusets, "cpuset")];
    for (mounted, lacks) in machines.into_iter().take(1 + usize::from(apart)) {
        let bare = |words: &str, status, why: &str| {
            let script = format!("umount -R {mounted} && exec {words}");
            fenced.ends(&["unshare", "--mount", "sh", "-c", &script], status, why);
        };
        let why = format!("no hierarchy here has the {lacks} controller");
        bare(&format!("{ELFEND} check"), 3, &why);
        bare(ELFEND, 3, &why);
        let report = fenced.run_dir().join("report");
        let run = format!(
            "{ELFEN} run --lanes 0:1 --source service --service {} --json-out {} -- sh -c 'exit 7'",
            fenced.heavy.name(),
            report.display()
        );
        bare(&run, 7, "level affinity");
        let report = fs::read_to_string(&report).unwrap();
        assert!(report.contains("\"level\": \"affinity\""), "{report}");
    }
}

/// Goal: commands that a user may not use are refused with the reason. A setuid program does not
/// enter a fence with root's rights. Method: user `nobody`; root without a user for the program;
/// and `elfen` with the setuid bit and owner root, started by user `nobody`.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn users_without_permission_are_refused() {
    let fenced = Fenced::start();
    let elfen = fenced.copy(ELFEN);
    let as_nobody = [&["setpriv"], &AS_NOBODY[..], &[&elfen]].concat();
    let script = format!("{elfen} run --fence batch --user {NOBODY} -- true");
    let in_fence = ["run", "--fence", "batch", "--", "true"];
    let as_root = [ELFEN, "run", "--user", NOBODY, "--fence"];
    let inner = [ELFEN, "run", "--user", "root", "--fence", "batch", "--", "sh", "-c"];
    let cases: [(&[&str], &[&str], i32, &str); 10] = [
        (&as_nobody, &in_fence, 1, "group elfen"),
        (&as_nobody, &["pause"], 1, "run it as root"),
        (&as_nobody, &["resume"], 1, "only root may do that"),
        (&as_nobody, &["status"], 0, ""),
        (&[ELFEN], &in_fence, 2, "can leave its fence"),
        (&as_root, &["other", "--", "true"], 2, "name one of: batch"),
        (&as_root, &["batch", "--lanes", "0:1", "--", "true"], 2, "cannot be used with"),
        (&as_root, &["batch", "--", "sh", "-c", "exit 7"], 7, ""),
        (&as_root, &["batch", "--", "/no/such"], 127, ""),
        // From inside a fence.
        (&inner, &[&script], 1, "is in fence \"batch\" already"),
    ];
    for (by, words, status, why) in cases {
        fenced.ends(&[by, words].concat(), status, why);
    }
    fs::set_permissions(&elfen, fs::Permissions::from_mode(0o4755)).unwrap();
    fenced.ends(&[&as_nobody[..], &in_fence].concat(), 2, "name another user");
    assert_eq!(fenced.fence().processes, 0);
}

/// Goal: elfend requires root, and Ctrl-C ends it without leaving a socket behind. Method: elfend
/// as user `nobody`, and SIGINT to the running daemon.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn elfend_requires_root_and_ends_by_ctrl_c() {
    let mut fenced = Fenced::start();
    let elfend = fenced.copy(ELFEND);
    for words in [&[][..], &["--release"]] {
        let words = [&["setpriv"], &AS_NOBODY[..], &[&elfend], words].concat();
        fenced.ends(&words, 1, "only root");
    }
    kill(fenced.daemon.id(), libc::SIGINT);
    assert!(fenced.daemon.wait().unwrap().success());
    assert!(!fenced.socket().exists());
}
