//! Whether the lanes of tests are idle now and then. Work on CPU 0 that never ends is a request
//! without an end, and such work on CPU 1 leaves a batch at SCHED_IDLE three parts in a thousand.
//! Tests in which a batch has work to finish are skipped there, and say so.

use std::fs;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The CPU of the lanes on which others leave nothing for so long.
pub(crate) fn taken_by_others() -> Option<usize> {
    const PATIENCE: Duration = Duration::from_secs(20);
    static TAKEN: OnceLock<Option<usize>> = OnceLock::new();
    *TAKEN.get_or_init(|| [0, 1].into_iter().find(|&cpu| !idles_within(cpu, PATIENCE)))
}

/// Whether a CPU idles for a tenth of a fifth of a second, at some time within a limit.
fn idles_within(cpu: usize, limit: Duration) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < limit {
        let before = idle_ticks(cpu);
        sleep(Duration::from_millis(200));
        if idle_ticks(cpu) - before >= 2 {
            return true;
        }
    }
    false
}

fn idle_ticks(cpu: usize) -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let line = stat.lines().find(|line| line.starts_with(&format!("cpu{cpu} ")));
    line.unwrap().split_whitespace().nth(4).unwrap().parse().unwrap()
}
