//! Goal: under `elfen run` a program behaves as without it, in its place, whichever process is
//! killed. Method: real programs, real signals, and a service's page that the test itself writes,
//! so that no privilege is needed; the task map is covered where it can be had.

mod killed;
#[path = "../needs/mod.rs"]
mod needs;
mod pages;
mod set;
mod stage;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::service::Service;
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::Page;

use stage::{
    Running, Serving, exists, kill, parent_of, wait_until, wait_until_gone, without_counters,
};

#[test]
fn output_input_and_status_are_the_programs_own() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut command = serving.elfen(&[], &["sh", "-c", "cat; echo to stderr >&2; exit 42"]);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"some\0bytes\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(output.stdout, b"some\0bytes\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("to stderr\n"));
}

#[test]
fn statuses_are_those_of_a_shell() {
    needs::two_cpus();
    let serving = Serving::start();
    let status = |program: &[&str]| serving.elfen(&[], program).output().unwrap().status;
    assert_eq!(status(&["true"]).code(), Some(0));
    assert_eq!(status(&["/no/such/program"]).code(), Some(127));
    assert_eq!(status(&["/etc/passwd"]).code(), Some(126));
    assert_eq!(status(&["/"]).code(), Some(126));
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGSEGV, libc::SIGRTMIN() + 3] {
        let status = status(&["sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!(status.signal(), Some(signal));
    }
}

#[test]
fn the_batch_is_in_its_place_and_put_back_when_it_leaves() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut running =
        Running::start(&serving, "grep Cpus_allowed_list /proc/self/status; exec sleep 600");
    let mut line = String::new();
    running.output.read_line(&mut line).unwrap();
    assert_eq!(line, "Cpus_allowed_list:\t1\n");
    let pid = i32::try_from(running.batch).unwrap();
    let policy = || {
        // SAFETY: takes a number.
        unsafe { libc::sched_getscheduler(pid) }
    };
    assert_eq!(policy(), libc::SCHED_IDLE);
    // It leaves: every CPU. (Raising its priority as well would need a privilege.)
    let everywhere = [u64::MAX];
    // SAFETY: the kernel reads 8 bytes of `everywhere`.
    let moved = unsafe { libc::syscall(libc::SYS_sched_setaffinity, pid, 8, everywhere.as_ptr()) };
    assert_eq!(moved, 0);
    let allowed = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    wait_until("putting the batch back", || allowed().contains("Cpus_allowed_list:\t1\n"));
    kill(running.batch, libc::SIGKILL);
    assert_eq!(running.end().signal(), Some(libc::SIGKILL));
}

/// What the kernel says of a thread: its name, its niceness, its scheduling class.
fn rank(stat: &str) -> (String, i64, i64) {
    let (name, fields) = (stat.find('(').unwrap() + 1, stat.rfind(')').unwrap());
    let words: Vec<&str> = stat[fields + 2..].split_whitespace().collect();
    (stat[name..fields].to_owned(), words[16].parse().unwrap(), words[38].parse().unwrap())
}

/// Goal: a guard ranks above the batch whatever `elfen run` was started with, and no thread that
/// looks after the batch does so on a request lane. Method: the kernel's own words of every thread
/// of front and keeper.
#[test]
fn guards_are_ordinary_threads_and_keepers_leave_the_request_lane() {
    needs::two_cpus();
    let serving = Serving::start();
    for prefix in [&["nice", "-n", "19"][..], &["chrt", "-i", "0"]] {
        let running = Running::start_by(prefix, &serving.name, "exec sleep 600");
        let mut guards = 0;
        for process in [running.keeper(), running.front.id()] {
            let allowed = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
            assert!(allowed.contains("Cpus_allowed_list:\t1"), "{prefix:?}: {allowed}");
            for thread in fs::read_dir(format!("/proc/{process}/task")).unwrap() {
                let stat = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
                let (name, nice, class) = rank(&stat);
                if name == "elfen-guard" {
                    assert_eq!((nice, class), (0, libc::SCHED_OTHER.into()), "{prefix:?}");
                    guards += 1;
                }
            }
        }
        assert_eq!(guards, 1, "{prefix:?}");
    }
}

/// Goal: where a guard may not rank that high, nothing is run. Method: a user
/// without rights, at nice 19.
#[test]
#[ignore = "needs root"]
fn a_run_whose_guards_would_be_weak_is_refused() {
    needs::root();
    needs::two_cpus();
    let name = format!("weak-{}", std::process::id());
    let service = Service::open_with_mode(&name, 1, 0o644).unwrap();
    let _worker = service.claim(0, 0).unwrap();
    // Where that user may go; the checkout may lie in another user's home.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("elfen");
    fs::copy(env!("CARGO_BIN_EXE_elfen"), &program).unwrap();
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(&program).args(["run", "--lanes", "0:1"]);
    command.args(["--signal", "service", "--service", &name, "--", "true"]);
    command.env_remove("ELFEN_LANES").uid(65_534).gid(65_534).current_dir("/");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("guards need nice 0"), "{said}");
    assert_eq!(output.status.code(), Some(3), "{said}");
    service.page().memory().remove_name().unwrap();
}

/// Goal: the lane follows the service. Method: the test is the service; the lane's slot
/// says what the guard does.
#[test]
fn the_lane_naps_while_a_request_runs_and_borrows_when_it_ends() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut worker = serving.service().claim(0, 0).unwrap();
    let running = Running::start(&serving, "while :; do :; done");
    let lanes = running.lanes();
    let slot = lanes.slot(0).unwrap();
    let is = |state| slot.state().is_some_and(|(found, _)| found == state);
    for request in 1..=5 {
        wait_until("borrowing", || is(LaneState::Running));
        worker.begin(request);
        wait_until("napping", || is(LaneState::Held));
        worker.end();
    }
    wait_until("borrowing", || is(LaneState::Running));
    assert!(slot.naps.load(Relaxed) >= 5);
    serving.service().set_queue_len(0, 1);
    wait_until("napping for a request that waits", || is(LaneState::Held));
    drop(worker); // the service is gone: nobody works on that queue
    wait_until("borrowing", || is(LaneState::Running));
    kill(running.batch, libc::SIGTERM);
    assert_eq!(running.end().signal(), Some(libc::SIGTERM));
}

/// Goal: a batch can end on a lane whose service never idles. Method: its last words take work;
/// what it took of the request is in its lane's slot.
#[test]
fn a_batch_that_is_told_to_end_gets_the_time_to() {
    needs::two_cpus();
    let serving = Serving::start();
    let script = "trap 'n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; exit 7' TERM; \
                  echo; while :; do :; done";
    let mut running = Running::start(&serving, script);
    running.output.read_line(&mut String::new()).unwrap();
    let mut worker = serving.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("napping", || running.is(LaneState::Held));
    kill(running.front.id(), libc::SIGTERM);
    assert_eq!(running.end().code(), Some(7));
    worker.end();
}

#[test]
fn signals_to_the_front_reach_the_batch() {
    needs::two_cpus();
    let serving = Serving::start();
    let script = "trap 'echo usr1' USR1; trap 'echo term; exit 7' TERM; echo ready; \
                  while :; do sleep 0.02; done";
    let mut running = Running::start(&serving, script);
    let mut line = || {
        let mut line = String::new();
        running.output.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(line(), "ready\n");
    kill(running.front.id(), libc::SIGUSR1);
    assert_eq!(line(), "usr1\n");
    kill(running.front.id(), libc::SIGTERM);
    assert_eq!(line(), "term\n");
    assert_eq!(running.end().code(), Some(7));
}

#[test]
fn a_stopped_batch_is_a_stopped_job() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut running = Running::start(&serving, "kill -STOP $$; echo continued");
    let front = i32::try_from(running.front.id()).unwrap();
    let mut status = 0;
    // SAFETY: `status` is ours; the front is our child.
    let waited = unsafe { libc::waitpid(front, &mut status, libc::WUNTRACED) };
    assert_eq!(waited, front);
    assert!(libc::WIFSTOPPED(status));
    kill(running.front.id(), libc::SIGCONT);
    assert_eq!(running.rest_of_output(), "continued\n");
    assert!(running.end().success());
}

#[test]
fn the_batch_goes_on_when_the_front_is_killed() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut running = Running::start(&serving, "sleep 0.3; echo done");
    let keeper = running.keeper();
    running.front.kill().unwrap();
    running.front.wait().unwrap();
    assert_eq!(running.rest_of_output(), "done\n");
    wait_until("the keeper's end", || !exists(keeper));
    wait_until_gone(running.inheritance[1].parse().unwrap());
}

#[test]
fn the_lane_is_guarded_whoever_is_killed() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut worker = serving.service().claim(0, 0).unwrap();
    let script = "while [ ! -e \"$GO\" ]; do sleep 0.02; done; exit 5";
    let go = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("go-{}", serving.name));
    let running = Running::start(&serving, &format!("GO={}; {script}", go.display()));
    let (keeper, front) = (running.keeper(), running.front.id());
    let spare = parent_of(keeper);
    assert_eq!(parent_of(spare), front);
    kill(keeper, libc::SIGKILL);
    wait_until("the spare takes over", || parent_of(running.batch) == spare);
    kill(spare, libc::SIGKILL);
    wait_until("the front takes over", || parent_of(running.batch) == front);
    // The lane is guarded again: it still follows the service.
    let lanes = running.lanes();
    let is = |state| lanes.slot(0).unwrap().state().is_some_and(|(found, _)| found == state);
    worker.begin(1);
    wait_until("napping", || is(LaneState::Held));
    worker.end();
    wait_until("borrowing", || is(LaneState::Running));
    fs::write(&go, "").unwrap();
    assert_eq!(running.end().code(), Some(5));
    fs::remove_file(go).unwrap();
}

/// Goal: what a program leaves behind is guarded until it ends, which who tells the keeper to end
/// has it do. Method: a process in a session of its own; either is told.
#[test]
fn who_the_batch_leaves_behind_stays_guarded_and_then_nothing_is_left() {
    needs::two_cpus();
    let serving = Serving::start();
    for (tells_keeper, signal) in [(false, libc::SIGKILL), (true, libc::SIGTERM)] {
        let script = "setsid sleep 600 >/dev/null 2>&1 & echo $!";
        let mut running = Running::start(&serving, script);
        let left: u32 = running.rest_of_output().trim().parse().unwrap();
        assert!(running.end().success(), "the front ends with its program");
        let keeper = parent_of(left);
        assert_eq!(fs::read_to_string(format!("/proc/{keeper}/comm")).unwrap(), "elfen\n");
        kill(if tells_keeper { keeper } else { left }, signal);
        wait_until("the keeper's end", || !exists(keeper));
        assert!(!exists(left));
    }
}

/// Forks, threads, exec chains, closed descriptors: the same output as without.
#[test]
fn programs_that_do_everything_give_the_same_output() {
    needs::two_cpus();
    let serving = Serving::start();
    let _worker = serving.service().claim(0, 0).unwrap();
    let scripts = [
        "i=0; while [ $i -lt 200 ]; do \
         (exit $((i % 7))) & wait $!; s=$((s + $?)); i=$((i + 1)); done; echo $s",
        "exec sh -c 'exec sh -c \"exec sh -c \\\"echo deep; exit 9\\\"\"'",
        "exec 900>&- 901>&- 902>&-; echo $(echo closed | tr a-z A-Z)",
        "seq 1 20000 | sort -n | md5sum",
        "trap '' INT TERM HUP USR1; sh -c 'kill -TERM $PPID; echo $?'",
    ];
    for script in scripts {
        let with = serving.elfen(&[], &["sh", "-c", script]).output().unwrap();
        let without = Command::new("sh").args(["-c", script]).output().unwrap();
        assert_eq!(with.stdout, without.stdout, "{script}");
        assert_eq!(with.status, without.status, "{script}");
    }
}

#[test]
fn a_report_has_the_keys_that_scripts_rely_on() {
    needs::two_cpus();
    let serving = Serving::start();
    let _worker = serving.service().claim(0, 0).unwrap();
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.json", serving.name));
    let file_name = file.to_str().unwrap();
    let options = ["--policy", "fixed-budget", "--budget", "2ms", "--report", file_name];
    let status = serving.elfen(&options, &["sh", "-c", "sleep 0.05; exit 3"]).status().unwrap();
    assert_eq!(status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    for key in ["wall_ns", "napped_ns", "naps"] {
        assert!(report[key].is_u64(), "{key}: {report}");
    }
    // On the page alone the kernel keeps no account of these, and null says so.
    for key in ["borrowed_ns", "overlapped_ns"] {
        assert!(report.get(key).is_some_and(|value| value.is_null()), "{key}: {report}");
    }
    for key in ["reaction_ns", "wake_ns"] {
        for figure in ["median", "p99", "max", "n"] {
            assert!(report[key].get(figure).is_some(), "{key}.{figure}: {report}");
        }
    }
    assert_eq!(report["policy"], "fixed-budget");
    assert_eq!(report["budget_ns"], 2_000_000);
    assert_eq!((&report["lanes"], &report["exit_status"]), (&"0:1".into(), &3.into()));
    assert_eq!((&report["signal"], &report["inject"]), (&"service alone".into(), &"guard".into()));
    fs::remove_file(file).unwrap();
}

#[test]
fn a_running_batch_is_listed_and_can_be_given_another_policy() {
    needs::two_cpus();
    let serving = Serving::start();
    let _worker = serving.service().claim(0, 0).unwrap();
    let running = Running::start(&serving, "exec sleep 600");
    let batch = running.batch;
    let pid = batch.to_string();
    let elfen = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_elfen")).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let listed = || {
        let (_, text) = elfen(&["status", "--json"]);
        let mut status: serde_json::Value = serde_json::from_str(&text).unwrap();
        let batches = status["batches"].as_array_mut().unwrap();
        let ours = batches.iter().position(|listed| listed["pid"] == batch);
        ours.map(|ours| batches.swap_remove(ours))
    };
    let before = listed().expect("it is listed");
    assert_eq!((&before["policy"], &before["program"]), (&"borrow-idle".into(), &"sh".into()));
    let fixed = ["set", &pid, "--policy", "fixed-budget", "--budget", "3ms"];
    assert_eq!(elfen(&fixed), (Some(0), format!("process {pid}: fixed-budget of 3.00 ms\n")));
    let after = listed().expect("it is listed still");
    assert_eq!(after["policy"], "fixed-budget");
    assert_eq!(after["budget_ns"], 3_000_000);
    assert!(elfen(&["top", "--once"]).1.contains(&pid));
    assert_eq!(elfen(&["set", "1", "--policy", "borrow-idle"]).0, Some(2));
    kill(batch, libc::SIGKILL);
    assert_eq!(running.end().signal(), Some(libc::SIGKILL));
    wait_until("the end of the listing", || listed().is_none());
}

/// Goal: dynamic-budget goes by the IPC that the service publishes, and by that of now. Method: a
/// service that counts, and whose requests slow down; the lane page shows what checks go by.
#[test]
fn dynamic_budget_goes_by_published_counters() {
    needs::two_cpus();
    let serving = Serving::start();
    let mut worker = serving.service().claim(0, 0).unwrap();
    let policy = ["--policy", "dynamic-budget", "--budget", "1ms", "--ref-ipc", "1.0"];
    let with_what_is_here = serving.elfen(&policy, &["true"]).output().unwrap();
    let said = String::from_utf8_lossy(&with_what_is_here.stderr);
    match with_what_is_here.status.code() {
        Some(0) => assert!(said.contains("ipc hardware"), "{said}"),
        status => assert_eq!(status, Some(3), "{said}"),
    }
    // From here on without the machine's own counters, if it has any.
    let elfen =
        |options: &[&str], program: &[&str]| without_counters(serving.elfen(options, program));
    let refused = elfen(&policy, &["true"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("the service publishes none; have the service publish"), "{said}");
    worker.count(1, 1);
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let mut options = policy.to_vec();
    options.extend(["--report", report.to_str().unwrap()]);
    let script = "echo $$ $ELFEN_RUN; read line";
    let mut command = elfen(&options, &["sh", "-c", script]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut front = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(front.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let id = line.split_whitespace().nth(2).unwrap().parse().unwrap();
    let lanes: Page<LaneSlot> = Page::open(Memory::attach_id(id, Access::Read).unwrap()).unwrap();
    let lane = lanes.slot(0).unwrap();
    let mut counted = (1, 1);
    let page = serving.service().page().slot(0).unwrap();
    let started_ns = || page.request_started_ns.load(Relaxed);
    let ipc = || lane.inputs.ipc_milli(started_ns(), monotonic_ns());
    for (request, ipc_milli) in [(1, 900), (2, 250)] {
        worker.begin(request);
        assert_eq!(ipc(), None, "what was measured in the request before is not this one's");
        wait_until("a new IPC", || {
            counted = (counted.0 + 100_000 * ipc_milli / 1000, counted.1 + 100_000);
            worker.count(counted.0, counted.1);
            ipc() == Some(ipc_milli)
        });
        worker.end();
    }
    wait_until("an old IPC counts no longer", || ipc().is_none());
    drop(front.stdin.take());
    front.wait().unwrap();
    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(&report).unwrap()).expect("a report");
    assert_eq!((&report["policy"], &report["ipc"]), (&"dynamic-budget".into(), &"service".into()));
}

#[test]
fn wrong_arguments_start_nothing() {
    let cases: [(&[&str], i32, &str); 11] = [
        (
            &["--lanes", "0:1", "--inject", "fentry", "--", "/bin/true"],
            3,
            "it was not built for it: -pg -mfentry; use --inject guard",
        ),
        (&["--lanes", "0:1", "--inject", "cyg", "--", "/etc/passwd"], 3, "no file that can be"),
        (&["--nap", "sleep", "--", "true"], 2, "invalid value 'sleep'"),
        (&["--policy", "never", "--", "true"], 2, "invalid value 'never'"),
        (&["--budget", "2ms", "--", "true"], 2, "it does not use --budget"),
        (&["--policy", "fixed-budget", "--budget", "-5", "--", "true"], 2, "a duration is a whole"),
        (&["--policy", "slo-budget", "--slo", "p99=0", "--", "true"], 2, "an SLO is a percentile"),
        (&["--service-user", "nobody-is-called-so", "--", "true"], 2, "there is none"),
        (&["--lanes", "0:0", "--", "true"], 2, "CPU 0 is named twice"),
        (&["--look-every", "0ms", "--lanes", "0:1", "--", "true"], 2, "would never sleep"),
        (&["--lanes", "0:1"], 2, "required arguments were not provided"),
    ];
    for (arguments, status, says) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
        let output = command.arg("run").args(arguments).env_remove("ELFEN_LANES").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {said}");
        assert!(said.contains(says), "{arguments:?}: {said}");
        assert!(said.lines().last().unwrap().starts_with("elfen: "), "{said}");
    }
}
