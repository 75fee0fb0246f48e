//! Tests of fences that are units of systemd: elfend's requests to systemd, and a systemd that does
//! not answer, refuses, or is missing.
//!
//! The daemon sees a machine whose process 1 has the name systemd. Scripts replace `systemctl` and
//! `busctl`, and files control the scripts. `packaging/test` boots a real systemd.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use elfen_machine::fence::status::FenceStatus;

use super::stage::{ELFEN, Fenced, NOBODY, OwnCgroup, comm, kill, wait_until};

/// The script that replaces `systemctl`. The files `units` and `cgroup.UNIT` contain its answers.
const SYSTEMCTL: &str = "\
PATH=/usr/bin:/bin
cd FOLDER
echo \"$*\" >>requests
mode=$(cat mode)
[ \"$mode\" != hang ] || { echo $$ >hangs; exec sleep 600; }
case $1 in
list-units) cat units ;;
show) for unit; do :; done; cat \"cgroup.$unit\" 2>/dev/null || echo ;;
set-property) [ \"$mode\" != refuse ] || { echo 'refused by a test' >&2; exit 1; } ;;
esac
";
/// Replaces `busctl`, for `.. elfen-PID.scope fail 2 PIDs au 1 PID Slice s SLICE 0`.
const BUSCTL: &str = "\
PATH=/usr/bin:/bin
cd FOLDER
echo \"$*\" >>requests
shift 12
for folder in $(cat \"folders.$4\"); do echo \"$1\" >\"$folder/cgroup.procs\"; done
";

/// Three units, of which two run, and the folder of the scripts that replace systemd.
struct Units {
    fenced: Fenced,
    fences: [OwnCgroup; 3],
    folder: PathBuf,
}

impl Units {
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
        units.list_units(&["x-a.slice", "x-b.slice"]);
        units.set_mode("answer");
        let tried = units.fenced.run(&units.on_systemd("true").each_ref().map(String::as_str));
        assert_eq!(tried.0, Some(0), "needs to mount a file over /proc/1/comm: {}", tried.1);
        units
    }

    /// Runs a shell script on a machine that appears to run systemd.
    fn on_systemd(&self, script: &str) -> [String; 5] {
        let folder = self.folder.display();
        let script = format!(
            "mount -t tmpfs none /run && mkdir -p /run/systemd/system && \
             mount --bind '{folder}/comm' /proc/1/comm && {script}"
        );
        ["unshare", "--mount", "sh", "-c", &script].map(str::to_owned)
    }

    fn list_units(&self, units: &[&str]) {
        let line = |unit: &&str| format!("{unit} loaded active active of a test\n");
        fs::write(self.folder.join("units"), units.iter().map(line).collect::<String>()).unwrap();
    }

    fn set_mode(&self, mode: &str) {
        fs::write(self.folder.join("mode"), mode).unwrap();
    }

    fn requests(&self) -> String {
        fs::read_to_string(self.folder.join("requests")).unwrap_or_default()
    }

    /// Starts a daemon with a fence of this unit or pattern. It finds the commands of systemd in
    /// the folder `commands`.
    fn hold(&mut self, unit: &str, commands: &str) {
        self.start_daemon(&self.settings_of(unit), commands);
    }

    fn settings_of(&self, unit: &str) -> String {
        let usual = self.fenced.settings_by_tasks();
        let cgroup = format!("cgroup = \"{}\"", self.fenced.fence.name());
        usual.replacen(&cgroup, &format!("unit = \"{unit}\""), 1)
    }

    /// Starts a daemon with these settings.
    fn start_daemon(&mut self, text: &str, commands: &str) {
        fs::write(self.fenced.settings_file(), text).unwrap();
        let folder = self.folder.join(commands);
        let by = self.on_systemd(&format!("PATH='{}' exec /bin/sh \"$@\"", folder.display()));
        self.fenced.restart_by(&by.each_ref().map(String::as_str));
    }

    fn running(&self) -> Vec<FenceStatus> {
        let fences = self.fenced.status().fences.into_iter();
        fences.filter(|fence| fence.frozen.is_none()).collect()
    }

    fn wait_for_line(&self, why: &str) {
        wait_until(why, || self.fenced.status().waiting.iter().any(|line| line.contains(why)));
    }
}

/// Goal: a pattern makes fences of all matching units, including later ones. systemd sets their
/// properties and moves processes into them. elfend waits for a unit that does not run, and reports
/// that. Method: two units, a third that starts later, and one that is missing.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn a_pattern_makes_fences_of_all_its_units() {
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
        let request =
            format!("-- {unit} CPUWeight=idle AllowedCPUs=1 AllowedMemoryNodes={memory}\n");
        assert!(units.requests().contains(&request), "{}", units.requests());
    }
    let by = ["run", "--fence", "batch:x-b.slice", "--user", NOBODY, "--", "cat"];
    let by = [&[ELFEN], &by[..], &["/proc/self/cgroup"]].concat();
    units.fenced.ends(&by, 0, units.fences[1].name());
    assert!(units.requests().contains("StartTransientUnit"), "{}", units.requests());
    units.list_units(&["x-a.slice", "x-b.slice", "x-later.slice"]);
    wait_until("the third", || units.running().len() == 3);

    units.fenced.end_daemon();
    units.hold("missing.slice", "bin");
    units.wait_for_line("unit missing.slice does not run");
    assert!(units.running().is_empty());
    units.fenced.ends(&[ELFEN, "status", "--healthy"], 1, "");
    units.fenced.ends(&[ELFEN, "metrics", "--once"], 0, "elfen_fences_waiting 1");
}

/// Goal: if two units overlap, one becomes a fence and the other waits, with the reason. Method: a
/// unit that also matches another fence's pattern, and a unit inside another unit.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn of_overlapping_units_one_is_a_fence() {
    let mut units = Units::start();
    let inner = units.fences[0].child("inner");
    inner.0.make().unwrap();
    fs::write(units.folder.join("cgroup.x-c.slice"), format!("{}\n", inner.0.path)).unwrap();
    let others =
        ["a", "c"].map(|name| format!("\"\n[[fence]]\nname = \"{name}\"\nunit = \"x-{name}.slice"));
    units.hold(&format!("x-*.slice{}", others.concat()), "bin");
    units.wait_for_line("is fence \"batch:x-a.slice\" already");
    units.wait_for_line("one is inside of the other");
    wait_until("both", || units.running().len() == 2);
    assert_eq!(units.fenced.status().fences.len(), 2);
    assert!(!inner.0.rank().unwrap().idle, "its files are as they were");
}

/// Goal: while nothing changes, elfend sends systemd no requests, neither for a fence nor for a
/// confined service. It sends them again if a unit's cgroup was removed and created again. Method:
/// the requests during three checks, in which the test freezes and thaws the fence. Then the
/// requests after the test has replaced the cgroup.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn unchanged_units_cause_no_requests() {
    let mut units = Units::start();
    let kept = "lanes = \"0:1\"\nunit = \"x-b.slice\"\nconfine = true";
    units.start_daemon(&units.settings_of("x-a.slice").replacen("lanes = \"0:1\"", kept, 1), "bin");
    wait_until("holding it", || units.running().len() == 1);
    wait_until("keeping the other", || !units.fenced.status().confined.is_empty());
    let requests = units.requests();
    for _ in 0..3 {
        units.fences[0].0.freezer().freeze().unwrap();
        wait_until("a check", || units.running().is_empty());
        units.fences[0].0.freezer().thaw().unwrap();
        wait_until("the next check", || units.running().len() == 1);
    }
    assert_eq!(units.requests(), requests);
    units.fences[0].0.remove().unwrap();
    wait_until("losing it", || units.fenced.status().fences.is_empty());
    units.fences[0].0.make().unwrap();
    wait_until("holding it again", || units.running().len() == 1);
    assert_ne!(units.requests(), requests);
}

/// Goal: a fence stays guarded whatever systemd does. If systemd refuses, elfend writes the
/// cgroup's files itself and reports that. If systemd hangs, fences stay guarded and the daemon
/// answers; if the guards die meanwhile, the fence is frozen. If the commands are missing, elfend
/// reports that. Method: a systemd that refuses, one that hangs, and none.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn fences_hold_without_help_of_systemd() {
    let mut units = Units::start();
    units.set_mode("refuse");
    units.hold("x-a.slice", "bin");
    wait_until("holding it", || units.running().len() == 1);
    assert!(units.fences[0].0.rank().unwrap().idle);
    let printed = units.fenced.log();
    assert!(printed.contains("refused by a test; writing the cgroup's files instead"), "{printed}");

    let (keeper, freezer) =
        (units.fenced.status().guard_process.unwrap(), units.fences[0].0.freezer());
    let hangs = || fs::read_to_string(units.folder.join("hangs")).unwrap_or_default();
    let asleep = || hangs().trim().parse().is_ok_and(|process| comm(process) == "sleep");
    units.set_mode("hang");
    units.fences[0].0.set_idle(false).unwrap();
    wait_until("the daemon's question", asleep);
    kill(keeper, libc::SIGKILL);
    wait_until("being frozen", || freezer.is_requested().unwrap());
    assert!(asleep(), "while the daemon waits for its answer");
    let given_up = || units.fenced.log().contains("systemd has not answered within 5 s");
    wait_until("giving up", given_up);
    wait_until("other guards", || units.running().len() == 1);
    assert!(units.fences[0].0.rank().unwrap().idle);
    assert_eq!(units.fenced.daemon.try_wait().unwrap(), None);

    units.fenced.end_daemon();
    units.hold("x-a.slice", "no-such-folder");
    units.wait_for_line("cannot be started");
    assert!(
        units.fences[0].0.freezer().is_requested().unwrap(),
        "a fence without guards is frozen"
    );
}
