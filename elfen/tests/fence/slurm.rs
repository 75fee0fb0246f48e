//! Jobs of Slurm in a fence: a cluster of one node, in a folder of its own.
//!
//! Under systemd, slurmd puts its jobs into a scope that is the fence. Here is none, so the daemon
//! of each job's steps enters the fence by itself, as the guide has it for such machines. What only
//! a machine with systemd and cgroups of version 2 shows, is said there.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::fence::status::Frozen;

use super::needs;
use super::preload;
use super::stage::{
    Fenced, NOBODY, Own, comm, idle_share, kill, require_fences, share, wait_until,
};
use super::stops::rounds;

const PACKAGED_LIBRARY: &str = "/usr/lib/elfen/libelfen_preload.so";

/// A cluster whose only node is this machine.
struct Cluster {
    folder: PathBuf,
    cgroup: Own,
    munged: Child,
    controller: Child,
    node: Child,
}

fn packaged(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging/slurm").join(file)
}

/// What the guide has after these words of it, up to the end of the block.
fn of_the_guide(after: &str) -> String {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/guide.md");
    let guide = fs::read_to_string(guide).unwrap();
    let (_, rest) = guide.split_once(after).unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

fn script(file: &Path, text: &str) {
    fs::write(file, format!("#!/bin/sh\n{text}")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

/// The packaged lines, but for what takes systemd, with what a cluster needs besides.
fn configuration(folder: &Path, node: &str) -> String {
    let lines = fs::read_to_string(packaged("slurm.conf")).unwrap();
    let [health, prolog] = ["health", "prolog"].map(|name| folder.join(name));
    let other = [
        ("proctrack/cgroup", "proctrack/linuxproc"),
        ("task/cgroup", "task/none"),
        ("/usr/lib/elfen/slurm-health", health.to_str().unwrap()),
        ("/usr/lib/elfen/slurm-task-prolog", prolog.to_str().unwrap()),
        ("HealthCheckInterval=30", "HealthCheckInterval=1"),
    ];
    let lines = other.into_iter().fold(lines, |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    });
    let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let [control, daemon] = ports.map(|port| port.local_addr().unwrap().port());
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let (name, at) = (name.trim(), folder.display());
    format!(
        "ClusterName=test\nSlurmctldHost={name}(127.0.0.1)\nSlurmUser=root\n\
         SlurmctldPort={control}\nSlurmdPort={daemon}\nAuthInfo=socket={at}/munge\n\
         StateSaveLocation={at}/state\nSlurmdSpoolDir={at}/spool\nMpiDefault=none\n\
         SlurmctldPidFile={at}/slurmctld.pid\nSlurmdPidFile={at}/slurmd.pid\n\
         {} NodeAddr=127.0.0.1 NodeHostname={name}\n{lines}",
        node.trim()
    )
}

impl Cluster {
    fn start(fenced: &Fenced) -> Self {
        let folder = fenced.run_dir().join("slurm");
        for inside in ["state", "spool", "out"] {
            fs::create_dir_all(folder.join(inside)).unwrap();
        }
        fs::set_permissions(folder.join("out"), fs::Permissions::from_mode(0o1777)).unwrap();
        let elfen = Path::new(env!("CARGO_BIN_EXE_elfen"));
        let line = fenced.elfen(&["lanes", "--slurm", "--lanes", "0:1"]);
        let line = String::from_utf8(line.stdout).unwrap();
        fs::write(folder.join("slurm.conf"), configuration(&folder, &line)).unwrap();
        let ours = format!(
            "export ELFEN_RUN_DIR={} SLURM_CONF={}/slurm.conf PATH={}:$PATH\n",
            fenced.run_dir().display(),
            folder.display(),
            elfen.parent().unwrap().display()
        );
        let count = format!("echo >>{}/checks\n", folder.display());
        let health = format!("{ours}{count}exec {}\n", packaged("slurm-health").display());
        script(&folder.join("health"), &health);
        // Where this machine has what the package would install.
        let prolog = fs::read_to_string(packaged("slurm-task-prolog")).unwrap();
        let socket = fenced.run_dir().join("elfend.sock").display().to_string();
        let library = preload::library().join("libelfen_preload.so").display().to_string();
        let here = [("/run/elfen/elfend.sock", &socket), (PACKAGED_LIBRARY, &library)];
        let prolog = here.into_iter().fold(prolog, |text, (from, to)| {
            assert!(text.contains(from), "{from}");
            text.replace(from, to)
        });
        script(&folder.join("prolog"), &prolog);
        let steps = of_the_guide("$ cat /usr/local/lib/elfen-steps\n#!/bin/sh\n");
        let steps = steps.replacen("--fence slurm", "--fence batch", 1);
        script(&folder.join("steps"), &format!("{ours}{steps}"));
        let key: Vec<u8> = (0..=255).collect();
        fs::write(folder.join("key"), key).unwrap();
        fs::set_permissions(folder.join("key"), fs::Permissions::from_mode(0o400)).unwrap();
        let cgroup = fenced.heavy.child("slurm");
        cgroup.0.make().unwrap();
        let at = folder.display();
        let files = ["key-file=key", "socket=munge", "pid-file=pid", "seed-file=seed"]
            .map(|file| format!("--{}", file.replace('=', &format!("={at}/"))));
        let log = format!("--log-file={at}/munged.log");
        let munged = spawn(&folder, &cgroup, "munged", &[&["-F", &log][..], &refs(&files)]);
        wait_until("munge's socket", || folder.join("munge").exists());
        let controller = spawn(&folder, &cgroup, "slurmctld", &[&["-D"]]);
        let node = Self::node(&folder, &cgroup);
        Self { folder, cgroup, munged, controller, node }
    }

    fn node(folder: &Path, cgroup: &Own) -> Child {
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let name = name.trim().split('.').next().unwrap().to_owned();
        let steps = folder.join("steps").display().to_string();
        spawn(folder, cgroup, "slurmd", &[&["-D", "-N", &name, "-d", &steps]])
    }

    fn restart_node(&mut self) {
        kill(self.node.id(), libc::SIGTERM);
        self.node.wait().unwrap();
        self.node = Self::node(&self.folder, &self.cgroup);
    }

    fn slurm(&self, words: &[&str]) -> Output {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("SLURM_CONF", self.folder.join("slurm.conf"));
        command.stdin(Stdio::null()).current_dir("/").output().unwrap()
    }

    fn says(&self, words: &[&str]) -> String {
        let output = self.slurm(words);
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap().trim().to_owned()
    }

    /// A job of an ordinary user's; its number.
    fn submit(&self, text: &str) -> String {
        let words = ["--parsable", "-p", "borrow", "-C", "elfen", "-o", "%j", "--wrap", text];
        self.asked_by_nobody(&["sbatch"], &words)
    }

    /// From the folder of what jobs write.
    fn asked_by_nobody(&self, sbatch: &[&str], words: &[&str]) -> String {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
        command.args(sbatch).args(words).env("SLURM_CONF", self.folder.join("slurm.conf"));
        command.stdin(Stdio::null()).current_dir(self.folder.join("out"));
        let output = command.output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let job = said.trim().trim_start_matches("Submitted batch job ").to_owned();
        assert!(job.parse::<u32>().is_ok(), "{job}");
        job
    }

    fn checks(&self) -> usize {
        fs::read_to_string(self.folder.join("checks")).map_or(0, |text| text.lines().count())
    }

    fn state(&self, job: &str) -> String {
        let said = self.says(&["scontrol", "--oneliner", "show", "job", job]);
        let state = said.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
        state.unwrap_or(&said).to_owned()
    }

    /// What Slurm calls the node's state.
    fn condition(&self) -> String {
        self.says(&["sinfo", "--noheader", "-o", "%T %E"])
    }

    fn wait_for(&self, what: &str, done: impl Fn(&Self) -> bool) {
        wait_until(what, || {
            let done = done(self);
            if !done {
                std::thread::sleep(Duration::from_millis(100));
            }
            done
        });
    }
}

fn refs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

fn spawn(folder: &Path, cgroup: &Own, program: &str, words: &[&[&str]]) -> Child {
    let mut log = fs::File::options();
    let log = log.create(true).append(true).open(folder.join(format!("{program}.out"))).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{} exec \"$0\" \"$@\"", cgroup.enter_script())]);
    command.arg(needs::find(program).unwrap()).args(words.concat());
    command.env("SLURM_CONF", folder.join("slurm.conf")).stdin(Stdio::null());
    command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in [&mut self.node, &mut self.controller, &mut self.munged] {
            kill(child.id(), libc::SIGTERM);
            child.wait().ok();
        }
    }
}

/// A job that spins until it is told to end, on its lane.
struct Spinning {
    job: String,
    process: u32,
}

impl Spinning {
    fn start(cluster: &Cluster, fenced: &Fenced) -> Self {
        fs::remove_file(cluster.folder.join("out/end")).ok();
        let spin = "i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done";
        let job = cluster.submit(&format!(
            "grep Cpus_allowed_list /proc/self/status; echo $ELFEN_SOCKET; \
             grep -c -m 1 libelfen_preload /proc/self/maps; while [ ! -e end ]; do {spin}; done"
        ));
        cluster.wait_for("a job", |cluster| {
            let state = cluster.state(&job);
            assert!(["PENDING", "RUNNING"].contains(&&*state), "{state}");
            state == "RUNNING"
        });
        let mut inside = None;
        wait_until("its process", || {
            let all = fenced.fence.0.processes().unwrap();
            inside = all.into_iter().find(|process| comm(*process) == "slurm_script");
            inside.is_some()
        });
        Self { job, process: inside.unwrap() }
    }

    /// Idle, held and idle again; this happens while the lane is held.
    fn is_fenced(&self, fenced: &Fenced, meanwhile: impl FnOnce()) {
        let first = idle_share(self.process);
        let mut worker = fenced.service().claim(0, 0).unwrap();
        worker.begin(1);
        wait_until("a guard", || fenced.guard().is_some());
        let mut busy = [0; 3].map(|_: u64| share(self.process, fenced.guard().unwrap()));
        busy.sort_unstable();
        meanwhile();
        worker.end();
        let (job, again) = (&self.job, idle_share(self.process));
        println!(
            "job {job} of Slurm: {first} per mille idle, {} busy, {again} idle again",
            busy[1]
        );
        assert!(busy[1] <= 30, "{busy:?}");
    }

    fn end(self, cluster: &Cluster, fenced: &Fenced) {
        fs::write(cluster.folder.join("out/end"), "").unwrap();
        cluster.wait_for("its end", |cluster| cluster.state(&self.job) == "COMPLETED");
        let out = fs::read_to_string(cluster.folder.join("out").join(&self.job)).unwrap();
        let socket = fenced.run_dir().join("elfend.sock").display().to_string();
        assert_eq!(out, format!("Cpus_allowed_list:\t1\n{socket}\n1\n"));
    }
}

/// What slurmd says to who asks each second, and how long it took at the most.
fn answers(cluster: &Cluster, seconds: usize) {
    let mut longest = Duration::ZERO;
    for _ in 0..seconds {
        let began = Instant::now();
        let said = cluster.says(&["scontrol", "show", "slurmd"]);
        longest = longest.max(began.elapsed());
        assert!(said.contains("Slurmd PID"), "{said}");
        std::thread::sleep(Duration::from_secs(1).saturating_sub(began.elapsed()));
    }
    assert!(cluster.condition().starts_with("allocated"), "{}", cluster.condition());
    println!("with the lane held for {seconds} s, slurmd answered within {longest:?}");
}

/// Goal: an unmodified Slurm's job borrows while the request lane idles, gets next to nothing of a
/// held lane, ends as it should, also when its slurmd was started anew, and so does the next one;
/// slurmd itself answers all the while, and a node whose fence does not hold takes no more. Method:
/// slurmctld, slurmd and munge, jobs of an ordinary user's, one of them as the guide has it, and
/// what the scheduler says of them.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups and Slurm"]
fn jobs_of_slurms_are_fenced() {
    require_fences();
    const SLURM: [&str; 7] =
        ["munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "scontrol", "make"];
    needs::programs(&SLURM);
    let fenced = Fenced::start();
    fenced.wait_until_it_runs();
    let mut cluster = Cluster::start(&fenced);
    cluster.wait_for("a node", |cluster| cluster.condition().starts_with("idle"));
    let first = Spinning::start(&cluster, &fenced);
    first.is_fenced(&fenced, || cluster.restart_node());
    first.end(&cluster, &fenced);
    let second = Spinning::start(&cluster, &fenced);
    second.is_fenced(&fenced, || answers(&cluster, rounds(3)));
    second.end(&cluster, &fenced);

    fenced.home.set_weight(1);
    wait_until("finding it", || fenced.fence().frozen == Some(Frozen::Broken));
    let before = cluster.checks();
    cluster.wait_for("a drained node", |cluster| cluster.condition().starts_with("drained"));
    println!("a node was drained within {} health checks", cluster.checks() - before);
    let why = cluster.condition();
    assert!(why.contains("elfen: fence batch") && why.contains("has weight"), "{why}");
    fs::write(cluster.folder.join("out/Makefile"), "all:\n\t@echo made\n").unwrap();
    let sbatch = of_the_guide("submit to the partition:\n\n   ```console\n   $ ");
    let third = cluster.asked_by_nobody(&["sh", "-c", sbatch.lines().next().unwrap()], &[]);
    fenced.home.set_weight(100);
    cluster.wait_for("a node that is back", |cluster| cluster.state(&third) == "COMPLETED");
    let out = cluster.folder.join(format!("out/slurm-{third}.out"));
    assert_eq!(fs::read_to_string(out).unwrap(), "Cpus_allowed_list:\t1\nmade\n");
    // What an operator drained stays so.
    let name = cluster.says(&["sinfo", "--noheader", "-o", "%n"]);
    let node = format!("NodeName={name}");
    cluster.says(&["scontrol", "update", &node, "State=DRAIN", "Reason=disk"]);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(cluster.condition(), "drained disk");
}
