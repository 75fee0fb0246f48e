//! The cgroups of a kubelet, made by hand: its tiers, a pod of elfend's beside them, and somebody
//! who writes what a kubelet writes. No kubelet runs.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_host::fence::promises::Promise;

use super::SPIN;
use super::stage::{
    Fenced, Own, borrows, comm, kill, or_skip, ran_ns, settings, share, wait_until,
};

/// What a container gets whose CPU is requested by thousandths.
const WEIGHT_OF_A_CPU: u64 = 39;

/// A pod of the fenced tier that was there before, with its container on a pool of CPUs that the
/// fence does not have; and elfend's pod beside the tiers.
fn kubepods(heavy: &Own) -> (Own, Own) {
    let [tier, container, home] = ["besteffort", "besteffort/pod1", "pod-elfend"]
        .map(|name| heavy.child(&format!("kubepods/{name}")));
    container.0.make().unwrap();
    container.0.keep_to(&"0".parse().unwrap()).unwrap();
    // It goes with its tier.
    std::mem::forget(container);
    home.0.make().unwrap();
    home.set_weight(WEIGHT_OF_A_CPU);
    (home, tier)
}

fn container(cgroup: &Own) -> Child {
    let script = format!("{} exec sh -c '{SPIN}'", cgroup.enter_script());
    Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap()
}

/// Goal: elfend in a cgroup that does not outrank the tier is refused, with both names. Method: its
/// own check, from beside the pods; and the settings of the manifest.
#[test]
fn guards_stand_among_the_pods() {
    if !or_skip("guards_stand_among_the_pods") {
        return;
    }
    let fenced = Fenced::start_in(kubepods);
    fenced.wait_until_it_runs();
    let beside = fenced.heavy.child("system");
    beside.0.make().unwrap();
    let check = fenced.command(env!("CARGO_BIN_EXE_elfend"), &["--check"]);
    let said = fenced.says_in(&beside, &check);
    assert!(said.contains(&format!("from {}, where elfend is", beside.0.path)), "{said}");
    assert!(said.contains(&format!("start elfend in {}", fenced.fence.0.parent().path)), "{said}");
    let said = fenced.says_in(&fenced.home, &check);
    assert!(said.starts_with("guards at home in "), "{said}");

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let manifest = fs::read_to_string(root.join("packaging/kubernetes/elfend.yaml")).unwrap();
    assert!(manifest.starts_with("# Untested on a kubelet"));
    let (_, text) = manifest.split_once("elfend.toml: |\n").unwrap();
    let lines = text.lines().take_while(|line| line.starts_with("    ")).map(str::trim);
    let text = lines.collect::<Vec<_>>().join("\n");
    assert!(text.contains("kubepods.slice/kubepods-besteffort.slice"));
    let tier = fenced.fence.name();
    let text = text.replace("kubepods.slice/kubepods-besteffort.slice", tier);
    fs::write(fenced.settings_file(), text).unwrap();
    let said = fenced.says_in(&fenced.home, &check);
    assert!(said.contains("fence \"besteffort\"") && said.contains("on CPUs 16,17"), "{said}");
    fs::write(fenced.settings_file(), settings(fenced.heavy.name(), tier)).unwrap();
}

/// Goal: a tier stays fenced although a kubelet sets its weight again and again, and a container
/// stays on the batch lanes although its own CPUs are others. Method: a hand that writes both, and
/// what the scheduler says of the container's process.
#[test]
fn a_tier_stays_fenced_under_a_kubelet() {
    if !or_skip("a_tier_stays_fenced_under_a_kubelet") {
        return;
    }
    let fenced = Fenced::start_in(kubepods);
    fenced.wait_until_it_runs();
    let tier = &fenced.fence;
    let [first, second] = ["pod1", "pod2"].map(|name| tier.child(name));
    let mut old = container(&first);
    second.0.make().unwrap();
    // Version 1 refuses it, version 2 does not heed it.
    let _refused = second.0.keep_to(&"0".parse().unwrap());
    let mut new = container(&second);
    for pod in [&old, &new] {
        wait_until("its start", || comm(pod.id()) == "sh" && ran_ns(pod.id()) > 10_000_000);
        let status = fs::read_to_string(format!("/proc/{}/status", pod.id())).unwrap();
        assert!(status.contains("Cpus_allowed_list:\t1\n"), "{status}");
    }
    kill(old.id(), libc::SIGKILL);
    old.wait().unwrap();

    let times = || {
        let repaired = fenced.fence().repaired;
        repaired.iter().find(|one| one.promise == Promise::Rank).map_or(0, |one| one.times)
    };
    let before = times();
    let mut longest = Duration::ZERO;
    for round in 1..=5 {
        tier.0.set_idle(false).unwrap();
        tier.set_weight(1);
        let began = Instant::now();
        wait_until("being repaired", || tier.0.rank().unwrap().idle);
        longest = longest.max(began.elapsed());
        wait_until("counting it", || times() == before + round);
    }
    println!("a tier that a kubelet made heavy was idle again after {longest:?} at the latest");
    let mut worker = fenced.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("a guard", || fenced.guard().is_some());
    let mut busy = [0; 3].map(|_: u64| share(new.id(), fenced.guard().unwrap()));
    busy.sort_unstable();
    println!("a container of the tier: {} per mille of the held lane", busy[1]);
    worker.end();
    borrows(new.id());
    kill(new.id(), libc::SIGKILL);
    new.wait().unwrap();
    assert!(busy[1] <= 30, "{busy:?}");
}
