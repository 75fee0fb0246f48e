//! Fences that are units of systemd's: what it is asked, and what becomes of a fence when it does
//! not answer, refuses, or is not there.
//!
//! The daemon sees a machine whose first process is called systemd, and a `systemctl` and `busctl`
//! that do what a file says. With the real one, `packaging/test` has a booted root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use elfen_machine::fence::status::FenceStatus;

use super::stage::{Fenced, NOBODY, Own, comm, kill, require_fences, wait_until};

/// Made of what follows, with what it says about them.
const SYSTEMCTL: &str = "\
PATH=/usr/bin:/bin
cd FOLDER
echo \"$*\" >>asked
mode=$(cat mode)
[ \"$mode\" != hang ] || { echo $$ >hangs; exec sleep 600; }
case $1 in
list-units) cat units ;;
show) for unit; do :; done; cat \"cgroup.$unit\" 2>/dev/null || echo ;;
set-property) [ \"$mode\" != refuse ] || { echo 'refused by a test' >&2; exit 1; } ;;
esac
";
/// `.. elfen-PID.scope fail 2 PIDs au 1 PID Slice s SLICE 0`
const BUSCTL: &str = "\
PATH=/usr/bin:/bin
cd FOLDER
echo \"$*\" >>asked
shift 12
for folder in $(cat \"folders.$4\"); do echo \"$1\" >\"$folder/cgroup.procs\"; done
";

/// Units in the place of a fence, of which two run, and the folder of what their systemd does.
struct Units {
    fenced: Fenced,
    fences: [Own; 3],
    folder: PathBuf,
}

impl Units {
    /// `None` where no file can be mounted over what `/proc` says of the first process.
    fn start() -> Self {
        let mut fenced = Fenced::start();
        fenced.end_daemon();
        let folder = fenced.run_dir().join("systemd");
        fs::create_dir(&folder).unwrap();
        let fences = ["a", "b", "later"].map(|name| fenced.heavy.child(name));
        for (fence, unit) in fences.iter().zip(["x-a.slice", "x-b.slice", "x-later.slice"]) {
            fence.0.make().unwrap();
            let path = format!("{}\n", fence.0.path);
            fs::write(folder.join(format!("cgroup.{unit}")), path).unwrap();
            let folders = fence.0.folders().into_iter();
            let folders: Vec<_> = folders.map(|folder| folder.display().to_string()).collect();
            fs::write(folder.join(format!("folders.{unit}")), folders.join("\n")).unwrap();
        }
        fs::write(folder.join("comm"), "systemd\n").unwrap();
        for (name, text) in [("systemctl", SYSTEMCTL), ("busctl", BUSCTL)] {
            let text = text.replace("FOLDER", &folder.display().to_string());
            fs::create_dir_all(folder.join("bin")).unwrap();
            let program = folder.join("bin").join(name);
            fs::write(&program, format!("#!/bin/sh\n{text}")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let units = Self { fenced, fences, folder };
        units.lists(&["x-a.slice", "x-b.slice"]);
        units.does("answer");
        let tried = units.booted("true").status().unwrap();
        assert!(tried.success(), "needs to mount a file over /proc/1/comm");
        units
    }

    /// What a shell does on a machine that systemd runs.
    fn booted(&self, script: &str) -> Command {
        let folder = self.folder.display();
        let script = format!(
            "mount -t tmpfs none /run && mkdir -p /run/systemd/system && \
             mount --bind '{folder}/comm' /proc/1/comm && {script}"
        );
        let mut command = self.fenced.command("unshare", &["--mount", "sh", "-c"]);
        command.arg(script);
        command
    }

    fn lists(&self, units: &[&str]) {
        let line = |unit: &&str| format!("{unit} loaded active active of a test\n");
        fs::write(self.folder.join("units"), units.iter().map(line).collect::<String>()).unwrap();
    }

    fn does(&self, mode: &str) {
        fs::write(self.folder.join("mode"), mode).unwrap();
    }

    fn asked(&self) -> String {
        fs::read_to_string(self.folder.join("asked")).unwrap_or_default()
    }

    /// A daemon that holds this unit, or pattern, and finds systemd's commands in this folder.
    fn hold(&mut self, unit: &str, commands: &str) {
        self.hold_by(&self.settings_of(unit), commands);
    }

    fn settings_of(&self, unit: &str) -> String {
        let usual = self.fenced.settings_by_tasks();
        let cgroup = format!("cgroup = \"{}\"", self.fenced.fence.name());
        usual.replacen(&cgroup, &format!("unit = \"{unit}\""), 1)
    }

    /// The same by these settings.
    fn hold_by(&mut self, text: &str, commands: &str) {
        fs::write(self.fenced.settings_file(), text).unwrap();
        let script = self.fenced.daemon_command();
        let script = script.get_args().nth(1).unwrap().to_owned();
        let folder = self.folder.join(commands);
        let mut command =
            self.booted(&format!("PATH='{}' exec /bin/sh -c \"$0\"", folder.display()));
        let log = fs::File::options().append(true).open(self.fenced.log_file()).unwrap();
        self.fenced.daemon = command.arg(script).stderr(log).spawn().unwrap();
        self.fenced.wait_for_socket();
    }

    fn running(&self) -> Vec<FenceStatus> {
        let fences = self.fenced.status().fences.into_iter();
        fences.filter(|fence| fence.frozen.is_none()).collect()
    }

    fn waits_for(&self, why: &str) {
        wait_until(why, || self.fenced.status().waiting.iter().any(|line| line.contains(why)));
    }
}

/// Goal: a pattern is all units that it matches, also one that comes later; each is kept by
/// systemd, and takes processes by it; one that does not run is waited for, aloud. Method: two
/// units, a third, and one that is not there.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_pattern_is_all_of_its_units() {
    require_fences();
    let mut units = Units::start();
    units.hold("x-*.slice", "bin");
    wait_until("both", || units.running().len() == 2);
    let mut names: Vec<String> = units.running().into_iter().map(|fence| fence.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["batch:x-a.slice", "batch:x-b.slice"]);
    for (fence, unit) in units.fences.iter().zip(["x-a.slice", "x-b.slice"]) {
        assert!(fence.0.rank().unwrap().idle);
        assert_eq!(fence.0.effective_cpus().unwrap().to_string(), "1");
        let memory = fence.0.effective_memory().unwrap();
        let told = format!("-- {unit} CPUWeight=idle AllowedCPUs=1 AllowedMemoryNodes={memory}\n");
        assert!(units.asked().contains(&told), "{}", units.asked());
    }
    let by = ["run", "--fence", "batch:x-b.slice", "--user", NOBODY, "--", "cat"];
    let inside = units.fenced.elfen(&[&by[..], &["/proc/self/cgroup"]].concat());
    let said = String::from_utf8_lossy(&inside.stdout).into_owned();
    assert!(said.contains(units.fences[1].name()), "{inside:?}: {}", units.asked());
    assert!(units.asked().contains("StartTransientUnit"), "{}", units.asked());
    units.lists(&["x-a.slice", "x-b.slice", "x-later.slice"]);
    wait_until("the third", || units.running().len() == 3);

    units.fenced.end_daemon();
    units.hold("missing.slice", "bin");
    units.waits_for("unit missing.slice does not run");
    assert!(units.running().is_empty());
    assert_eq!(units.fenced.elfen(&["status", "--healthy"]).status.code(), Some(1));
    let metrics = units.fenced.elfen(&["metrics", "--once"]);
    let metrics = String::from_utf8(metrics.stdout).unwrap();
    assert!(metrics.contains("elfen_fences_waiting 1"), "{metrics}");
}

/// Goal: units that lie in one another are one fence, and the other waits, aloud. Method: a unit
/// that a pattern of another fence has already, and one that systemd has inside of it.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn units_in_one_another_are_one_fence() {
    require_fences();
    let mut units = Units::start();
    let inner = units.fences[0].child("inner");
    inner.0.make().unwrap();
    fs::write(units.folder.join("cgroup.x-c.slice"), format!("{}\n", inner.0.path)).unwrap();
    let others =
        ["a", "c"].map(|name| format!("\"\n[[fence]]\nname = \"{name}\"\nunit = \"x-{name}.slice"));
    units.hold(&format!("x-*.slice{}", others.concat()), "bin");
    units.waits_for("is fence \"batch:x-a.slice\" already");
    units.waits_for("one is inside of the other");
    wait_until("both", || units.running().len() == 2);
    assert_eq!(units.fenced.status().fences.len(), 2);
    assert!(!inner.0.rank().unwrap().idle, "its files are as they were");
}

/// Goal: systemd is asked nothing where nothing changed, of a fence as of a service that is kept to
/// its lanes, and again when a unit's cgroup was gone. Method: what it is asked over three looks,
/// which see that somebody froze the fence and let it go, and after its cgroup was made anew.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn what_is_known_is_not_asked() {
    require_fences();
    let mut units = Units::start();
    let kept = "lanes = \"0:1\"\nunit = \"x-b.slice\"\nconfine = true";
    units.hold_by(&units.settings_of("x-a.slice").replacen("lanes = \"0:1\"", kept, 1), "bin");
    wait_until("holding it", || units.running().len() == 1);
    wait_until("keeping the other", || !units.fenced.status().confined.is_empty());
    let asked = units.asked();
    for _ in 0..3 {
        units.fences[0].0.freezer().freeze().unwrap();
        wait_until("a look", || units.running().is_empty());
        units.fences[0].0.freezer().thaw().unwrap();
        wait_until("the next", || units.running().len() == 1);
    }
    assert_eq!(units.asked(), asked);
    units.fences[0].0.remove().unwrap();
    wait_until("losing it", || units.fenced.status().fences.is_empty());
    units.fences[0].0.make().unwrap();
    wait_until("holding it again", || units.running().len() == 1);
    assert_ne!(units.asked(), asked);
}

/// Goal: a fence is held whatever systemd does: refused, its files are written, and that is said;
/// without an answer, what is held stays held, and the daemon answers; guards that end while it is
/// waited for leave nothing that runs; without the command, it says so. Method: a systemd that
/// refuses, one that hangs, and none.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_systemd_that_does_not_help() {
    require_fences();
    let mut units = Units::start();
    units.does("refuse");
    units.hold("x-a.slice", "bin");
    wait_until("holding it", || units.running().len() == 1);
    assert!(units.fences[0].0.rank().unwrap().idle);
    let said = units.fenced.said();
    assert!(said.contains("refused by a test; writing the cgroup's files instead"), "{said}");

    let (keeper, freezer) = (units.fenced.status().keeper.unwrap(), units.fences[0].0.freezer());
    let hangs = || fs::read_to_string(units.folder.join("hangs")).unwrap_or_default();
    let asleep = || hangs().trim().parse().is_ok_and(|process| comm(process) == "sleep");
    units.does("hang");
    units.fences[0].0.set_idle(false).unwrap();
    wait_until("the daemon's question", asleep);
    kill(keeper, libc::SIGKILL);
    wait_until("being frozen", || freezer.is_requested().unwrap());
    assert!(asleep(), "while the daemon waits for its answer");
    let given_up = || units.fenced.said().contains("systemd has not answered within 5 s");
    wait_until("giving up", given_up);
    wait_until("other guards", || units.running().len() == 1);
    assert!(units.fences[0].0.rank().unwrap().idle);
    assert_eq!(units.fenced.daemon.try_wait().unwrap(), None);

    units.fenced.end_daemon();
    units.hold("x-a.slice", "no-such-folder");
    units.waits_for("cannot be started");
    assert!(units.fences[0].0.freezer().is_requested().unwrap(), "nobody guards it");
}
