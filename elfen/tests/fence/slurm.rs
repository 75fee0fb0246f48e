//! Tests of Slurm jobs in a fence, with a cluster of one node in a folder of the test.
//!
//! Under systemd, slurmd puts its jobs into a scope that is the fence. This test runs without
//! systemd. So each job's step daemon enters the fence itself, as the guide describes for such
//! machines. `packaging/vm` tests Slurm with systemd and cgroups version 2.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use elfen_machine::fence::status::Frozen;

use super::needs;
use super::preload;
use super::stage::{AS_NOBODY, ELFEN, Fenced, OwnCgroup, comm, idle_share, kill, wait_until};

const PACKAGED_LIBRARY: &str = "/usr/lib/elfen/libelfen_preload.so";

/// A cluster whose only node is this machine.
struct Cluster {
    folder: PathBuf,
    cgroup: OwnCgroup,
    munged: Child,
    controller: Child,
    node: Child,
}

fn packaged(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging/slurm").join(file)
}

/// The text of the guide to Slurm that follows these words, up to the end of its block.
fn guide_text(after: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let guide = root.join("docs/guides/slurm.md");
    let guide = fs::read_to_string(guide).unwrap();
    let (_, rest) = guide.split_once(after).unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

fn write_script(file: &Path, text: &str) {
    fs::write(file, format!("#!/bin/sh\n{text}")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

/// The packaged slurm.conf without the parts that require systemd, with the other lines that a
/// cluster needs.
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
        // Only stdout, because Slurm would reject the warnings.
        let line = fenced.command(&[ELFEN, "lanes", "--slurm", "--lanes", "0:1"]).output();
        let line = String::from_utf8(line.unwrap().stdout).unwrap();
        fs::write(folder.join("slurm.conf"), configuration(&folder, &line)).unwrap();
        let ours = format!(
            "export ELFEN_RUN_DIR={} SLURM_CONF={}/slurm.conf PATH={}:$PATH\n",
            fenced.run_dir().display(),
            folder.display(),
            Path::new(ELFEN).parent().unwrap().display()
        );
        let count = format!("echo >>{}/checks\n", folder.display());
        let health = format!("{ours}{count}exec {}\n", packaged("slurm-health").display());
        write_script(&folder.join("health"), &health);
        // Replaces the paths of the installed package by the paths of this build.
        let prolog = fs::read_to_string(packaged("slurm-task-prolog")).unwrap();
        let socket = fenced.socket().display().to_string();
        let library = preload::library().join("libelfen_preload.so").display().to_string();
        let here = [("/run/elfen/elfend.sock", &socket), (PACKAGED_LIBRARY, &library)];
        let prolog = here.into_iter().fold(prolog, |text, (from, to)| {
            assert!(text.contains(from), "{from}");
            text.replace(from, to)
        });
        write_script(&folder.join("prolog"), &prolog);
        let steps = guide_text("$ cat /usr/local/lib/elfen-steps\n#!/bin/sh\n");
        let steps = steps.replacen("--fence slurm", "--fence batch", 1);
        write_script(&folder.join("steps"), &format!("{ours}{steps}"));
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

    fn node(folder: &Path, cgroup: &OwnCgroup) -> Child {
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

    fn output_of(&self, words: &[&str]) -> String {
        let output = self.slurm(words);
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap().trim().to_owned()
    }

    /// Submits a job of an ordinary user. Returns the job's number.
    fn submit(&self, text: &str) -> String {
        let words = ["--parsable", "-p", "borrow", "-C", "elfen", "-o", "%j", "--wrap", text];
        self.submit_as_nobody(&["sbatch"], &words)
    }

    /// Submits a job from the folder for the output of jobs.
    fn submit_as_nobody(&self, sbatch: &[&str], words: &[&str]) -> String {
        let mut command = Command::new("setpriv");
        command.args(AS_NOBODY);
        command.args(sbatch).args(words).env("SLURM_CONF", self.folder.join("slurm.conf"));
        command.stdin(Stdio::null()).current_dir(self.folder.join("out"));
        let output = command.output().unwrap();
        let printed = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let job = printed.trim().trim_start_matches("Submitted batch job ").to_owned();
        assert!(job.parse::<u32>().is_ok(), "{job}");
        job
    }

    fn checks(&self) -> usize {
        fs::read_to_string(self.folder.join("checks")).map_or(0, |text| text.lines().count())
    }

    fn state(&self, job: &str) -> String {
        let printed = self.output_of(&["scontrol", "--oneliner", "show", "job", job]);
        let state = printed.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
        state.unwrap_or(&printed).to_owned()
    }

    /// The state of the node, and its reason.
    fn node_state(&self) -> String {
        self.output_of(&["sinfo", "--noheader", "-o", "%T %E"])
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

fn spawn(folder: &Path, cgroup: &OwnCgroup, program: &str, words: &[&[&str]]) -> Child {
    let mut log = fs::File::options();
    let log = log.create(true).append(true).open(folder.join(format!("{program}.out"))).unwrap();
    let program = needs::find(program).unwrap();
    let mut command = cgroup.command(&[&[program.to_str().unwrap()], &words.concat()[..]].concat());
    command.env("SLURM_CONF", folder.join("slurm.conf"));
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

/// A job that spins on its lane until a certain file exists.
struct SpinningJob {
    job: String,
    process: u32,
}

impl SpinningJob {
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

    /// Asserts that the job gets almost nothing of its lane while the lane is occupied. Runs
    /// `meanwhile` during that time.
    fn assert_fenced(&self, fenced: &Fenced, meanwhile: impl FnOnce()) {
        let first = idle_share(self.process);
        let worker = fenced.begin_request();
        let busy = fenced.held_share(self.process);
        meanwhile();
        drop(worker);
        let (job, again) = (&self.job, idle_share(self.process));
        println!("job {job} of Slurm: {first} per mille idle, {busy} busy, {again} idle again");
        assert!(busy <= 30, "{busy}");
    }

    fn end(self, cluster: &Cluster, fenced: &Fenced) {
        fs::write(cluster.folder.join("out/end"), "").unwrap();
        cluster.wait_for("its end", |cluster| cluster.state(&self.job) == "COMPLETED");
        let out = fs::read_to_string(cluster.folder.join("out").join(&self.job)).unwrap();
        let socket = fenced.socket().display().to_string();
        assert_eq!(out, format!("Cpus_allowed_list:\t1\n{socket}\n1\n"));
    }
}

/// Asserts that slurmd answers one request per second, and prints the longest answer time.
fn assert_slurmd_answers(cluster: &Cluster, seconds: usize) {
    let mut longest = Duration::ZERO;
    for _ in 0..seconds {
        let began = Instant::now();
        let printed = cluster.output_of(&["scontrol", "show", "slurmd"]);
        longest = longest.max(began.elapsed());
        assert!(printed.contains("Slurmd PID"), "{printed}");
        std::thread::sleep(Duration::from_secs(1).saturating_sub(began.elapsed()));
    }
    assert!(cluster.node_state().starts_with("allocated"), "{}", cluster.node_state());
    println!("with the lane held for {seconds} s, slurmd answered within {longest:?}");
}

/// Goal: jobs of an unmodified Slurm borrow while the request lane idles and get almost nothing of
/// an occupied lane. They end regularly, also after a restart of slurmd, and slurmd answers
/// meanwhile. A node without a working fence accepts no jobs. Method: slurmctld, slurmd and munge;
/// jobs of an ordinary user, one of them from the guide; and the scheduler's account of the jobs.
#[test]
#[ignore = "needs root, two idle CPUs, cgroups and Slurm"]
fn jobs_of_slurm_are_fenced() {
    const SLURM: [&str; 7] =
        ["munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "scontrol", "make"];
    needs::programs(&SLURM);
    let fenced = Fenced::start();
    let mut cluster = Cluster::start(&fenced);
    cluster.wait_for("a node", |cluster| cluster.node_state().starts_with("idle"));
    let first = SpinningJob::start(&cluster, &fenced);
    first.assert_fenced(&fenced, || cluster.restart_node());
    first.end(&cluster, &fenced);
    let held = std::env::var("FENCE_ROUNDS").map_or(3, |seconds| seconds.parse().unwrap());
    let second = SpinningJob::start(&cluster, &fenced);
    second.assert_fenced(&fenced, || assert_slurmd_answers(&cluster, held));
    second.end(&cluster, &fenced);

    fenced.home.set_weight(1);
    wait_until("the freeze", || fenced.fence().frozen == Some(Frozen::Broken));
    let before = cluster.checks();
    cluster.wait_for("a drained node", |cluster| cluster.node_state().starts_with("drained"));
    println!("a node was drained within {} health checks", cluster.checks() - before);
    let why = cluster.node_state();
    assert!(why.contains("elfen: fence batch") && why.contains("has weight"), "{why}");
    fs::write(cluster.folder.join("out/Makefile"), "all:\n\t@echo made\n").unwrap();
    let sbatch = guide_text("submit to the partition:\n\n   ```console\n   $ ");
    let third = cluster.submit_as_nobody(&["sh", "-c", sbatch.lines().next().unwrap()], &[]);
    fenced.home.set_weight(100);
    cluster.wait_for("a node that is back", |cluster| cluster.state(&third) == "COMPLETED");
    let out = cluster.folder.join(format!("out/slurm-{third}.out"));
    assert_eq!(fs::read_to_string(out).unwrap(), "Cpus_allowed_list:\t1\nmade\n");
    // A node that an operator has drained stays drained.
    let name = cluster.output_of(&["sinfo", "--noheader", "-o", "%n"]);
    let node = format!("NodeName={name}");
    cluster.output_of(&["scontrol", "update", &node, "State=DRAIN", "Reason=disk"]);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(cluster.node_state(), "drained disk");
}
