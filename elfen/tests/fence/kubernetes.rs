//! The cgroups of a kubelet, made by hand: its tier of BestEffort pods, elfend in it, and somebody
//! who writes what a kubelet writes. No kubelet runs.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::SPIN;
use super::stage::{
    Fenced, Own, borrows, comm, kill, ran_ns, require_fences, settings, share, wait_until,
};

const TIER: &str = "kubepods/besteffort";
/// As often as it writes the weight of its tier.
const STARTS: usize = 1_000;

/// A pod of the tier that was there before, with its container on a pool of CPUs that the fence
/// does not have; and elfend's cgroup beside it in the tier.
fn kubepods(heavy: &Own) -> (Own, Own) {
    let [pod, container, home] = ["pod1", "pod1/c", "elfend"].map(|name| in_tier(heavy, name));
    container.0.make().unwrap();
    container.0.keep_to(&"0".parse().unwrap()).unwrap();
    // It goes with its pod.
    std::mem::forget(container);
    home.0.make().unwrap();
    (home, pod)
}

fn in_tier(heavy: &Own, name: &str) -> Own {
    heavy.child(&format!("{TIER}/{name}"))
}

/// All pods of the tier are fences.
fn settings_of_pods(heavy: &Own) -> String {
    settings(heavy.name(), &format!("{}/{TIER}/pod*", heavy.name()))
}

fn container(cgroup: &Own) -> Child {
    let script = format!("{} exec sh -c '{SPIN}'", cgroup.enter_script());
    Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap()
}

/// What a kubelet does to its tier at each start, and each minute: with the cgroupfs driver it
/// writes the least weight that there is.
fn kubelet_starts(tier: &Own) -> std::io::Result<()> {
    for folder in tier.0.folders() {
        for (file, least) in [("cpu.shares", "2"), ("cpu.weight", "1")] {
            if folder.join(file).exists() {
                fs::write(folder.join(file), least)?;
            }
        }
    }
    Ok(())
}

/// Goal: elfend in a cgroup that does not outrank the pods is refused, with both names, and so is a
/// tier as a fence, with the reason. Method: its own check, from beside the tier; and the settings
/// of the manifest.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn guards_stand_among_the_pods() {
    require_fences();
    let fenced = Fenced::start_in(kubepods);
    fenced.wait_until_it_runs();
    let tier = fenced.heavy.child(TIER);
    let beside = fenced.heavy.child("system");
    beside.0.make().unwrap();
    let check = fenced.command(env!("CARGO_BIN_EXE_elfend"), &["--check"]);
    fs::write(fenced.settings_file(), settings_of_pods(&fenced.heavy)).unwrap();
    let said = fenced.says_in(&beside, &check);
    assert!(said.contains(&format!("from {}, where elfend is", beside.0.path)), "{said}");
    assert!(said.contains(&format!("start elfend in {}", tier.0.path)), "{said}");
    let said = fenced.says_in(&fenced.home, &check);
    assert!(said.starts_with("guards at home in "), "{said}");

    fs::write(fenced.settings_file(), settings(fenced.heavy.name(), tier.name())).unwrap();
    let said = fenced.says_in(&fenced.home, &check);
    assert!(said.contains("does not start") && said.contains("fence its pods"), "{said}");
    // It was made by those of its parts.
    std::mem::forget(tier);

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let manifest = fs::read_to_string(root.join("packaging/kubernetes/elfend.yaml")).unwrap();
    assert!(manifest.starts_with("# Untested on a kubelet"));
    let (_, text) = manifest.split_once("elfend.toml: |\n").unwrap();
    let lines = text.lines().take_while(|line| line.starts_with("    ")).map(str::trim);
    let text = lines.collect::<Vec<_>>().join("\n");
    let theirs = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod*.slice";
    assert!(text.contains(theirs));
    let ours = format!("{}/{TIER}/pod*", fenced.heavy.name());
    fs::write(fenced.settings_file(), text.replace(theirs, &ours)).unwrap();
    let said = fenced.says_in(&fenced.home, &check);
    assert!(said.contains("fence \"besteffort\"") && said.contains("on CPUs 16,17"), "{said}");
    fs::write(fenced.settings_file(), settings_of_pods(&fenced.heavy)).unwrap();
}

/// Goal: a kubelet starts beside fenced pods, and pods come, are fenced, and go. Method: a hand
/// that writes the weight of the tier as often as a kubelet in its life, and what the kernel says
/// of the pods' processes.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn pods_are_fenced_and_a_kubelet_starts() {
    require_fences();
    let fenced = Fenced::start_in(kubepods);
    fenced.wait_until_it_runs();
    let tier = fenced.heavy.child(TIER);
    fenced.reload(&settings_of_pods(&fenced.heavy));
    let names = || {
        let all = fenced.status().fences.into_iter().filter(|fence| fence.frozen.is_none());
        all.map(|fence| fence.name).collect::<Vec<_>>()
    };
    wait_until("a fence of the pod", || names() == ["batch:pod1"]);
    let second = in_tier(&fenced.heavy, "pod2");
    second.0.make().unwrap();
    // Version 1 refuses it, version 2 does not heed it.
    let _refused = second.0.keep_to(&"0".parse().unwrap());
    let mut pods = [container(&fenced.fence), container(&second)];
    wait_until("a fence of the new one", || names() == ["batch:pod1", "batch:pod2"]);
    for pod in &pods {
        wait_until("its start", || comm(pod.id()) == "sh" && ran_ns(pod.id()) > 10_000_000);
        let status = fs::read_to_string(format!("/proc/{}/status", pod.id())).unwrap();
        assert!(status.contains("Cpus_allowed_list:\t1\n"), "{status}");
    }
    for start in 0..STARTS {
        kubelet_starts(&tier).unwrap_or_else(|error| panic!("start {start}: {error}"));
    }
    assert_eq!(names(), ["batch:pod1", "batch:pod2"], "{}", fenced.said());
    let repaired = fenced.status().fences.into_iter().flat_map(|fence| fence.repaired);
    println!("{STARTS} starts of a kubelet, repaired since: {:?}", repaired.collect::<Vec<_>>());

    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("a guard", || fenced.guard().is_some());
    let mut busy = [0; 3].map(|_: u64| share(pods[0].id(), fenced.guard().unwrap()));
    busy.sort_unstable();
    println!("a pod of the tier: {} per mille of the held lane", busy[1]);
    worker.end();
    drop(worker);
    borrows(pods[0].id());
    assert!(busy[1] <= 30, "{busy:?}");

    kill(pods[1].id(), libc::SIGKILL);
    pods[1].wait().unwrap();
    drop(second);
    wait_until("letting it go", || names() == ["batch:pod1"]);
    kill(pods[0].id(), libc::SIGKILL);
    pods[0].wait().unwrap();
    std::mem::forget(tier);
}
