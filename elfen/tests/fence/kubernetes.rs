//! Tests with the cgroups of a kubelet, which the test creates: the tier of BestEffort pods, with
//! elfend inside. The test also makes the kubelet's writes; no kubelet runs.

use std::fs;
use std::path::Path;

use super::SPIN;
use super::stage::{
    ELFEND, Fenced, OwnCgroup, comm, ran_ns, settings, wait_until, wait_until_borrowing,
};

const TIER: &str = "kubepods/besteffort";
/// How often a kubelet writes the weight of its tier.
const STARTS: usize = 1_000;

/// Creates an older pod of the tier, whose container is on CPUs that the fence does not have.
/// Creates elfend's cgroup next to the pod. Returns elfend's cgroup and the pod.
fn kubepods(heavy: &OwnCgroup) -> (OwnCgroup, OwnCgroup) {
    let [pod, container, home] = ["pod1", "pod1/c", "elfend"].map(|name| in_tier(heavy, name));
    container.0.make().unwrap();
    container.0.keep_to(&"0".parse().unwrap()).unwrap();
    // The cgroup is removed together with its pod.
    std::mem::forget(container);
    home.0.make().unwrap();
    (home, pod)
}

fn in_tier(heavy: &OwnCgroup, name: &str) -> OwnCgroup {
    heavy.child(&format!("{TIER}/{name}"))
}

/// Settings that make all pods of the tier fences.
fn settings_of_pods(heavy: &OwnCgroup) -> String {
    settings(heavy.name(), &format!("{}/{TIER}/pod*", heavy.name()))
}

/// Writes what a kubelet with the cgroupfs driver writes at each start and each minute: the least
/// weight for its tier.
fn write_tier_weight(tier: &OwnCgroup) -> std::io::Result<()> {
    for folder in tier.0.folders() {
        for (file, least) in [("cpu.shares", "2"), ("cpu.weight", "1")] {
            if folder.join(file).exists() {
                fs::write(folder.join(file), least)?;
            }
        }
    }
    Ok(())
}

/// Goal: elfend is refused in a cgroup that does not outrank the pods, with both paths. The whole
/// tier is refused as a fence, with the reason. The settings of the manifest are valid. Method:
/// `elfend check`, from next to the tier and from inside.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn elfend_must_run_among_the_pods() {
    let fenced = Fenced::start_in(kubepods);
    fenced.wait_until_running();
    let tier = fenced.heavy.child(TIER);
    let outside = fenced.heavy.child("system");
    outside.0.make().unwrap();
    fs::write(fenced.settings_file(), settings_of_pods(&fenced.heavy)).unwrap();
    let printed = fenced.check_in(&outside);
    assert!(
        printed.contains(&format!("guards in {}, the cgroup of elfend", outside.0.path)),
        "{printed}"
    );
    assert!(printed.contains(&format!("start elfend in {}", tier.0.path)), "{printed}");
    let printed = fenced.check();
    assert!(printed.starts_with("guards run in cgroup "), "{printed}");

    fs::write(fenced.settings_file(), settings(fenced.heavy.name(), tier.name())).unwrap();
    let printed = fenced.check();
    assert!(printed.contains("does not start") && printed.contains("fence its pods"), "{printed}");
    // The children created this cgroup, and remove it.
    std::mem::forget(tier);

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let manifest = fs::read_to_string(root.join("packaging/kubernetes/elfend.yaml")).unwrap();
    assert!(manifest.starts_with("# Untested on a kubelet"));
    let (_, text) = manifest.split_once("elfend.toml: |\n").unwrap();
    let lines = text.lines().take_while(|line| line.starts_with("    ")).map(str::trim);
    let text = lines.collect::<Vec<_>>().join("\n");
    let packaged = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod*.slice";
    assert!(text.contains(packaged));
    let ours = format!("{}/{TIER}/pod*", fenced.heavy.name());
    fs::write(fenced.settings_file(), text.replace(packaged, &ours)).unwrap();
    let printed = fenced.check();
    assert!(
        printed.contains("fence \"besteffort\"") && printed.contains("on CPUs 16,17"),
        "{printed}"
    );
    fs::write(fenced.settings_file(), settings_of_pods(&fenced.heavy)).unwrap();
}

/// Goal: in a container, elfend moves itself to where it outranks the pods. An invalid path is a
/// wrong argument. Method: a daemon that starts next to the tier, with `--cgroup`.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn elfend_moves_itself_among_the_pods() {
    let mut fenced = Fenced::start_in(kubepods);
    fenced.end_daemon();
    let outside = fenced.heavy.child("system");
    outside.0.make().unwrap();
    let name = fenced.home.name();
    let script = format!("{} exec \"$@\" --cgroup {name}", outside.enter_script());
    fenced.restart_by(&["sh", "-c", &script, "sh"]);
    fenced.wait_until_running();
    assert!(fenced.home.0.holds(fenced.daemon.id()).unwrap());
    fenced.ends(&[ELFEND, "--cgroup", "a/../b"], 2, "name it from the root");
}

/// Goal: a kubelet can start next to fenced pods. New pods become fences, and fences of pods that
/// end are forgotten. Method: the test writes the tier's weight as often as a kubelet, and the
/// kernel reports the pods' CPUs and run times.
#[test]
#[ignore = "needs root, two idle CPUs and cgroups"]
fn pods_are_fenced_next_to_a_kubelet() {
    let fenced = Fenced::start_in(kubepods);
    fenced.wait_until_running();
    let tier = fenced.heavy.child(TIER);
    fenced.reload(&settings_of_pods(&fenced.heavy));
    let names = || {
        let all = fenced.status().fences.into_iter().filter(|fence| fence.frozen.is_none());
        all.map(|fence| fence.name).collect::<Vec<_>>()
    };
    wait_until("a fence of the pod", || names() == ["batch:pod1"]);
    let second = in_tier(&fenced.heavy, "pod2");
    second.0.make().unwrap();
    // Version 1 refuses this write, version 2 ignores it.
    let _refused = second.0.keep_to(&"0".parse().unwrap());
    let pods = [&fenced.fence, &second].map(|pod| pod.start(&["sh", "-c", SPIN]));
    wait_until("a fence of the new pod", || names() == ["batch:pod1", "batch:pod2"]);
    for pod in &pods {
        wait_until("its start", || comm(pod.id()) == "sh" && ran_ns(pod.id()) > 10_000_000);
        let status = fs::read_to_string(format!("/proc/{}/status", pod.id())).unwrap();
        assert!(status.contains("Cpus_allowed_list:\t1\n"), "{status}");
    }
    for start in 0..STARTS {
        write_tier_weight(&tier).unwrap_or_else(|error| panic!("start {start}: {error}"));
    }
    assert_eq!(names(), ["batch:pod1", "batch:pod2"], "{}", fenced.log());
    let repaired = fenced.status().fences.into_iter().flat_map(|fence| fence.repaired);
    println!("{STARTS} starts of a kubelet, repaired since: {:?}", repaired.collect::<Vec<_>>());

    let worker = fenced.begin_request();
    let busy = fenced.held_share(pods[0].id());
    println!("a pod of the tier: {busy} per mille of the held lane");
    drop(worker);
    wait_until_borrowing(pods[0].id());
    assert!(busy <= 30, "{busy}");

    let [first_pod, second_pod] = pods;
    drop((second_pod, second));
    wait_until("the end of its fence", || names() == ["batch:pod1"]);
    drop(first_pod);
    std::mem::forget(tier);
}
