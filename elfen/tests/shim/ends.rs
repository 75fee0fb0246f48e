//! Goal: a run ends soon after SIGTERM or SIGINT in every phase, and after the time of `-d`. Long
//! periods and large memory do not delay it. Method: the real command, which gets signals at
//! various moments. All timeouts are generous, and a run that does not end fails the test.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::alone::command_with_its_library;
use crate::needs;
use crate::stage::{has_observer, kill, shim, status_line, until};

/// After this time, a run counts as hanging.
const LIMIT: Duration = Duration::from_secs(30);

/// A run in its own process group, which ends with the test.
struct Run(Child);

impl Run {
    fn start(words: &[&str]) -> Self {
        let mut command = command_with_its_library();
        command.arg("shim").args(words).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn status(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            match self.0.try_wait().unwrap() {
                Some(status) => return status,
                None => assert!(began.elapsed() < LIMIT, "it does not end"),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the run's end. Returns its status, and all that it printed.
    fn end(mut self) -> (ExitStatus, String) {
        let status = self.status();
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status, said)
    }

    fn wait_until_it_observes(&self) {
        until("its observer", || has_observer(self.0.id()));
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // The group includes the observed program.
        // SAFETY: kill takes numbers. The child has not been waited for, or its group no longer
        // exists.
        unsafe { libc::kill(-self.0.id().cast_signed(), libc::SIGKILL) };
        drop(self.0.wait());
    }
}

#[test]
fn long_periods_end_with_the_program_the_time_and_a_signal() {
    needs::two_cpus();
    for period in ["10ms", "1s", "3600s"] {
        let (status, said) = Run::start(&["--period", period, "--", "true"]).end();
        assert!(status.success(), "{period}: {said}");
        let words = ["--all", "--period", period, "-d", "100ms"];
        let (status, said) = Run::start(&words).end();
        assert!(status.success() && said.contains("samples"), "{period}: {said}");
        for signal in [libc::SIGTERM, libc::SIGINT] {
            let run = Run::start(&["--all", "--period", period]);
            run.wait_until_it_observes();
            kill(run.0.id(), signal);
            let (status, said) = run.end();
            assert_eq!(status.code(), Some(128 + signal), "{period}: {said}");
            assert!(said.contains("samples"), "{period}: {said}");
        }
    }
}

/// Goal: a run ends and writes its recording even if its program ignores the signal.
#[test]
fn a_run_ends_though_its_program_does_not() {
    needs::two_cpus();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.shim");
    let ignores = ["sh", "-c", "trap '' TERM; while :; do :; done"];
    for words in [&["--period", "1us"][..], &["-d", "20ms"]] {
        fs::write(&file, "").unwrap();
        let own = ["-o", file.to_str().unwrap(), "--"];
        let mut run = Run::start(&[words, &own, &ignores].concat());
        run.wait_until_it_observes();
        thread::sleep(Duration::from_millis(100));
        kill(run.0.id(), libc::SIGTERM);
        assert_eq!(run.status().code(), Some(128 + libc::SIGTERM));
        let shown = shim(&["show", file.to_str().unwrap()]);
        assert!(shown.status.success(), "{shown:?}");
    }
}

/// Goal: a large --memory delays neither start nor end, and more than the available memory is
/// refused.
#[test]
fn large_memory_is_had_as_it_is_needed() {
    needs::two_cpus();
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let available: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    let half = format!("{}KB", available / 2);
    let run = Run::start(&["--all", "--memory", &half, "--period", "1ms"]);
    run.wait_until_it_observes();
    let resident = status_line(run.0.id(), "VmRSS:").unwrap();
    let resident: u64 = resident.trim_end_matches(" kB").parse().unwrap();
    assert!(resident < available / 4 + (256 << 10), "{resident} of {available} KiB");
    kill(run.0.id(), libc::SIGTERM);
    let (status, said) = run.end();
    assert_eq!(status.code(), Some(128 + libc::SIGTERM), "{said}");
    if available < 64 << 20 {
        let (status, said) = Run::start(&["--all", "--memory", "64GB"]).end();
        assert!(status.code() == Some(1) && said.contains("available"), "{said}");
    }
}
