//! Goal: under `elfen run`, a program behaves as without it and stays on its lane, whichever
//! process is killed. Method: real programs, real signals, and a service's page that the test
//! writes, so that no privileges are needed.

mod killed;
#[path = "../needs/mod.rs"]
mod needs;
#[path = "../process/mod.rs"]
mod process;
mod stage;

use std::fs;
use std::io::{BufRead, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::Identity;
use elfen_rt::service::Service;
use elfen_rt::signal::control::ControlSlot;
use elfen_rt::signal::lane::LaneState;
use elfen_rt::signal::page::Page;

use process::{KilledOnDrop, wait_until};
use stage::{Running, Serving, exists, kill, parent_of, wait_until_gone, without_counters};

/// A program that ends when its input ends.
const READS: &str = "echo $$ $ELFEN_RUN; read line; exit 3";

#[test]
fn output_input_and_status_are_those_of_the_program() {
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
fn the_batch_stays_on_its_lane_at_its_rank() {
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
    // The batch allows itself all CPUs. (Raising its priority, too, would need a privilege.)
    let everywhere = [u64::MAX];
    // SAFETY: the kernel reads 8 bytes of `everywhere`.
    let moved = unsafe { libc::syscall(libc::SYS_sched_setaffinity, pid, 8, everywhere.as_ptr()) };
    assert_eq!(moved, 0);
    let allowed = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    wait_until("putting the batch back", || allowed().contains("Cpus_allowed_list:\t1\n"));
    kill(running.batch, libc::SIGKILL);
    assert_eq!(running.end().signal(), Some(libc::SIGKILL));
}

/// Name, nice value and scheduling class in a `stat` file of the kernel.
fn parse_rank(stat: &str) -> (String, i64, i64) {
    let (name, fields) = (stat.find('(').unwrap() + 1, stat.rfind(')').unwrap());
    let words: Vec<&str> = stat[fields + 2..].split_whitespace().collect();
    (stat[name..fields].to_owned(), words[16].parse().unwrap(), words[38].parse().unwrap())
}

/// Goal: guards rank above the batch, whatever the rank of `elfen run` at its start. No thread of
/// launcher and supervisor runs on a request lane. Method: the kernel's files of all their threads.
#[test]
fn guards_are_ordinary_threads_and_supervisors_leave_the_request_lane() {
    let serving = Serving::start();
    for prefix in [&["nice", "-n", "19"][..], &["chrt", "-i", "0"]] {
        let running = Running::start_by(prefix, &serving.name, "exec sleep 600");
        let mut guards = 0;
        for process in [running.supervisor(), running.launcher.id()] {
            let allowed = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
            assert!(allowed.contains("Cpus_allowed_list:\t1"), "{prefix:?}: {allowed}");
            for thread in fs::read_dir(format!("/proc/{process}/task")).unwrap() {
                let stat = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
                let (name, nice, class) = parse_rank(&stat);
                if name == "elfen-guard" {
                    assert_eq!((nice, class), (0, libc::SCHED_OTHER.into()), "{prefix:?}");
                    guards += 1;
                }
            }
        }
        assert_eq!(guards, 1, "{prefix:?}");
    }
}

/// Goal: a run whose guards would not rank above its batch is refused. Method: a user without
/// privileges, at nice 19.
#[test]
#[ignore = "needs root"]
fn a_run_whose_guards_would_be_weak_is_refused() {
    needs::root();
    needs::two_cpus();
    let name = format!("weak-{}", std::process::id());
    let service = Service::open_with_mode(&name, 1, 0o644).unwrap();
    let _worker = service.claim(0, 0).unwrap();
    // A folder that this user can read. The checkout may be in another user's home.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("elfen");
    // The copy is made by `cp`. If this process wrote the file, a child that another test forks
    // meanwhile would keep it open for writing, and exec would fail.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_elfen")).arg(&program).status();
    assert!(copied.unwrap().success());
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(&program).args(["run", "--lanes", "0:1"]);
    command.args(["--source", "service", "--service", &name, "--", "true"]);
    command.env_remove("ELFEN_LANES").uid(65_534).gid(65_534).current_dir("/");
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(printed.contains("guards need nice 0"), "{printed}");
    assert_eq!(output.status.code(), Some(3), "{printed}");
    service.page().memory().remove_name().unwrap();
}

/// Goal: the lane follows the service. Method: the test is the service, and reads the guard's state
/// in the lane's slot.
#[test]
fn the_lane_naps_while_a_request_runs_and_borrows_when_it_ends() {
    let serving = Serving::start();
    let mut worker = serving.service().claim(0, 0).unwrap();
    let running = Running::start(&serving, "while :; do :; done");
    let lanes = running.lanes();
    let slot = lanes.slot(0).unwrap();
    let is = |state| running.is(state);
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
    drop(worker); // Without its worker, the service no longer keeps the lane busy.
    wait_until("borrowing", || is(LaneState::Running));
    kill(running.batch, libc::SIGTERM);
    assert_eq!(running.end().signal(), Some(libc::SIGTERM));
}

/// Goal: a batch can handle SIGTERM on a lane whose service never idles. Method: a handler that
/// needs CPU time.
#[test]
fn a_batch_gets_time_to_handle_sigterm() {
    let serving = Serving::start();
    let script = "trap 'n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; exit 7' TERM; \
                  echo; while :; do :; done";
    let mut running = Running::start(&serving, script);
    running.output.read_line(&mut String::new()).unwrap();
    let mut worker = serving.service().claim(0, 0).unwrap();
    worker.begin(1);
    wait_until("napping", || running.is(LaneState::Held));
    kill(running.launcher.id(), libc::SIGTERM);
    assert_eq!(running.end().code(), Some(7));
    worker.end();
}

#[test]
fn signals_to_the_launcher_reach_the_batch() {
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
    kill(running.launcher.id(), libc::SIGUSR1);
    assert_eq!(line(), "usr1\n");
    kill(running.launcher.id(), libc::SIGTERM);
    assert_eq!(line(), "term\n");
    assert_eq!(running.end().code(), Some(7));
}

#[test]
fn a_stopped_batch_is_a_stopped_job() {
    let serving = Serving::start();
    let mut running = Running::start(&serving, "kill -STOP $$; echo continued");
    let launcher = i32::try_from(running.launcher.id()).unwrap();
    let mut status = 0;
    // SAFETY: waitpid writes `status` of this frame; the launcher is our child.
    let waited = unsafe { libc::waitpid(launcher, &mut status, libc::WUNTRACED) };
    assert_eq!(waited, launcher);
    assert!(libc::WIFSTOPPED(status));
    kill(running.launcher.id(), libc::SIGCONT);
    assert_eq!(running.rest_of_output(), "continued\n");
    assert!(running.end().success());
}

#[test]
fn the_batch_continues_when_the_launcher_is_killed() {
    let serving = Serving::start();
    let mut running = Running::start(&serving, "sleep 0.3; echo done");
    let supervisor = running.supervisor();
    running.launcher.kill().unwrap();
    running.launcher.wait().unwrap();
    assert_eq!(running.rest_of_output(), "done\n");
    wait_until("the supervisor's end", || !exists(supervisor));
    wait_until_gone(running.inheritance[1].parse().unwrap());
}

#[test]
fn the_lane_stays_guarded_when_supervisors_are_killed() {
    let serving = Serving::start();
    let mut worker = serving.service().claim(0, 0).unwrap();
    let script = "while [ ! -e \"$GO\" ]; do sleep 0.02; done; exit 5";
    let go = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("go-{}", serving.name));
    let running = Running::start(&serving, &format!("GO={}; {script}", go.display()));
    running.kill_supervisors();
    // The new guard follows the service, too.
    worker.begin(1);
    wait_until("napping", || running.is(LaneState::Held));
    worker.end();
    wait_until("borrowing", || running.is(LaneState::Running));
    fs::write(&go, "").unwrap();
    assert_eq!(running.end().code(), Some(5));
    fs::remove_file(go).unwrap();
}

/// Goal: a batch cannot redirect signals by writing another process's id into its page. Method: the
/// page names a process of the test before the launcher passes on its first signal. The same again
/// after both supervisors were killed, when only the launcher knows the batch.
#[test]
fn a_process_that_a_batch_writes_into_its_page_gets_no_signal() {
    for kills_supervisor in [false, true] {
        let serving = Serving::start();
        let mut running = Running::start(&serving, "exec sleep 600");
        let mut decoy = KilledOnDrop(Command::new("sleep").arg("600").spawn().unwrap());
        let id = running.inheritance[2].parse().unwrap();
        let control: Page<ControlSlot> =
            Page::open(Memory::attach_id(id, Access::Write).unwrap()).unwrap();
        let other = Identity::of(decoy.id().cast_signed()).unwrap();
        control.slot(0).unwrap().batch.store(other.word(), Relaxed);
        if kills_supervisor {
            running.kill_supervisors();
        }
        kill(running.launcher.id(), libc::SIGTERM);
        assert_eq!(running.launcher.wait().unwrap().signal(), Some(libc::SIGTERM));
        assert_eq!(decoy.try_wait().unwrap(), None, "the decoy got no signal");
    }
}

/// Goal: a process that the program leaves behind stays guarded until it ends. SIGTERM to the
/// supervisor ends the process. Method: a process in a new session, and a signal to it or to the
/// supervisor.
#[test]
fn processes_that_the_batch_leaves_behind_stay_guarded() {
    let serving = Serving::start();
    for (to_supervisor, signal) in [(false, libc::SIGKILL), (true, libc::SIGTERM)] {
        let script = "setsid sleep 600 >/dev/null 2>&1 & echo $!";
        let mut running = Running::start(&serving, script);
        let left: u32 = running.rest_of_output().trim().parse().unwrap();
        assert!(running.end().success(), "the launcher ends with its program");
        let supervisor = parent_of(left);
        assert_eq!(fs::read_to_string(format!("/proc/{supervisor}/comm")).unwrap(), "elfen\n");
        kill(if to_supervisor { supervisor } else { left }, signal);
        wait_until("the supervisor's end", || !exists(supervisor));
        assert!(!exists(left));
    }
}

/// Goal: programs have the same output with and without `elfen run`. Method: forks, pipelines,
/// chains of exec, closed descriptors, ignored signals.
#[test]
fn programs_have_the_same_output() {
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
fn a_running_batch_is_listed_and_can_be_given_another_policy() {
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

fn read_report(file: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(file).unwrap()).expect("a report")
}

/// Goal: the report has the keys that scripts rely on. It names the policy and the budget at the
/// end, and says whether `elfen set` changed them. Method: a run in which the policy changes, and a
/// run without a change.
#[test]
fn the_report_names_the_policy_at_the_end() {
    let serving = Serving::start();
    let _worker = serving.service().claim(0, 0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report");
    for set in [&[][..], &["--policy", "refresh-budget", "--budget", "3ms"]] {
        let options = ["--policy", "fixed-budget", "--budget", "2ms", "--json-out"];
        let options = [&options[..], &[file.to_str().unwrap()]].concat();
        let running = Running::of(serving.elfen(&options, &["sh", "-c", READS]));
        if !set.is_empty() {
            let mut elfen = Command::new(env!("CARGO_BIN_EXE_elfen"));
            let output =
                elfen.args(["set", &running.batch.to_string()]).args(set).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        assert_eq!(running.end().code(), Some(3));
        let report = read_report(&file);
        let says = [&report["policy"], &report["budget_ns"], &report["policy_was_set"]];
        let expected = if set.is_empty() {
            serde_json::json!(["fixed-budget", 2_000_000, false])
        } else {
            serde_json::json!(["refresh-budget", 3_000_000, true])
        };
        assert_eq!(serde_json::json!(says), expected, "{report}");
        for key in ["wall_ns", "napped_ns", "naps"] {
            assert!(report[key].is_u64(), "{key}: {report}");
        }
        // Without the task map, the kernel does not count these times, so they are null.
        for key in ["borrowed_ns", "overlapped_ns"] {
            assert!(report.get(key).is_some_and(|value| value.is_null()), "{key}: {report}");
        }
        for key in ["reaction_ns", "wake_ns"] {
            for figure in ["median", "p99", "max", "n"] {
                assert!(report[key].get(figure).is_some(), "{key}.{figure}: {report}");
            }
        }
        let says = [&report["lanes"], &report["exit_status"], &report["source"], &report["checks"]];
        let expected = serde_json::json!(["0:1", 3, "service alone", "guard"]);
        assert_eq!(serde_json::json!(says), expected, "{report}");
    }
}

/// Goal: dynamic-budget uses the current IPC that the service publishes. Method: a service that
/// counts instructions and cycles, and whose requests slow down. The lane page contains the IPC
/// that checks use.
#[test]
fn dynamic_budget_uses_published_counters() {
    let serving = Serving::start();
    let mut worker = serving.service().claim(0, 0).unwrap();
    let policy = ["--policy", "dynamic-budget", "--budget", "1ms", "--ref-ipc", "1.0"];
    let with_counters = serving.elfen(&policy, &["true"]).output().unwrap();
    let printed = String::from_utf8_lossy(&with_counters.stderr);
    match with_counters.status.code() {
        Some(0) => assert!(printed.contains("ipc hardware"), "{printed}"),
        status => assert_eq!(status, Some(3), "{printed}"),
    }
    // From here on, the command cannot use the counters of this machine, if it has any.
    let elfen =
        |options: &[&str], program: &[&str]| without_counters(serving.elfen(options, program));
    let refused = elfen(&policy, &["true"]).output().unwrap();
    let printed = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(3), "{printed}");
    assert!(printed.contains("the service publishes none; let the service publish"), "{printed}");
    worker.count(1, 1);
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let mut options = policy.to_vec();
    options.extend(["--json-out", report.to_str().unwrap()]);
    let running = Running::of(elfen(&options, &["sh", "-c", READS]));
    let lanes = running.lanes();
    let lane = lanes.slot(0).unwrap();
    let mut counted = (1, 1);
    let page = serving.service().page().slot(0).unwrap();
    let started_ns = || page.request_started_ns.load(Relaxed);
    let ipc = || lane.inputs.ipc_milli(started_ns(), monotonic_ns());
    for (request, ipc_milli) in [(1, 900), (2, 250)] {
        worker.begin(request);
        assert_eq!(ipc(), None, "an IPC of the last request is not that of this request");
        wait_until("a new IPC", || {
            counted = (counted.0 + 100_000 * ipc_milli / 1000, counted.1 + 100_000);
            worker.count(counted.0, counted.1);
            ipc() == Some(ipc_milli)
        });
        worker.end();
    }
    wait_until("the end of an old IPC", || ipc().is_none());
    running.end();
    let report = read_report(&report);
    assert_eq!((&report["policy"], &report["ipc"]), (&"dynamic-budget".into(), &"service".into()));
}

#[test]
fn invalid_arguments_start_nothing() {
    let cases: [(&[&str], i32, &str); 11] = [
        (
            &["--lanes", "0:1", "--checks", "fentry", "--", "/bin/true"],
            3,
            "it was not built for it: -pg -mfentry; use --checks guard",
        ),
        (&["--lanes", "0:1", "--checks", "cyg", "--", "/etc/passwd"], 3, "not an executable file"),
        (&["--nap", "sleep", "--", "true"], 2, "invalid value 'sleep'"),
        (&["--policy", "never", "--", "true"], 2, "invalid value 'never'"),
        (&["--budget", "2ms", "--", "true"], 2, "it does not use --budget"),
        (&["--policy", "fixed-budget", "--budget", "-5", "--", "true"], 2, "a duration is a whole"),
        (&["--policy", "slo-budget", "--slo", "p99=0", "--", "true"], 2, "an SLO is a percentile"),
        (&["--service-user", "nobody-is-called-so", "--", "true"], 2, "it does not exist"),
        (&["--lanes", "0:0", "--", "true"], 2, "CPU 0 is named twice"),
        (&["--poll-interval", "0ms", "--lanes", "0:1", "--", "true"], 2, "would never sleep"),
        (&["--lanes", "0:1"], 2, "required arguments were not provided"),
    ];
    for (arguments, status, says) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
        let output = command.arg("run").args(arguments).env_remove("ELFEN_LANES").output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {printed}");
        assert!(printed.contains(says), "{arguments:?}: {printed}");
        assert!(printed.lines().last().unwrap().starts_with("elfen: "), "{printed}");
    }
}
