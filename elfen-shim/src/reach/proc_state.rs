//! What a program's first thread does as `/proc` has it: running or ready, asleep, or waiting for a
//! device. It needs no right but that to look at one's own processes, and is coarse: a reading is a
//! system call that takes a lock of the process, so it is made a tenth of a millisecond apart.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A thread's state, and where it is put.
#[derive(Debug)]
pub struct ProcState {
    file: File,
    pub word: &'static AtomicU64,
}

/// Letters of `/proc/PID/stat`, and what they are called here.
const STATES: [(u8, &str); 6] = [
    (b'R', "runs, or waits for a CPU"),
    (b'S', "sleeps"),
    (b'D', "waits for a device"),
    (b'T', "is stopped"),
    (b't', "is stopped by a tracer"),
    (b'Z', "has ended"),
];

impl ProcState {
    pub fn open(process: u32) -> io::Result<Self> {
        let file = File::open(format!("/proc/{process}/task/{process}/stat"))?;
        Ok(Self { file, word: Box::leak(Box::new(AtomicU64::new(0))) })
    }

    pub fn fetch(&self) {
        let mut line = [0; 512];
        let Ok(count) = self.file.read_at(&mut line, 0) else { return };
        let line = &line[..count.min(line.len())];
        // The name may hold parentheses and spaces.
        let Some(end) = line.iter().rposition(|&byte| byte == b')') else { return };
        if let Some(&letter) = line.get(end + 2) {
            self.word.store(letter.into(), Relaxed);
        }
    }

    pub fn names() -> Vec<(u64, String)> {
        STATES.iter().map(|(letter, name)| (u64::from(*letter), (*name).to_owned())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_is_seen_to() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let state = ProcState::open(child.id()).unwrap();
        let asleep = u64::from(b'S');
        while state.word.load(Relaxed) != asleep {
            state.fetch(); // It has to load itself first.
        }
        child.kill().unwrap();
        child.wait().unwrap();
        state.fetch();
        assert_eq!(state.word.load(Relaxed), asleep, "of a thread that is gone, what was last");
        assert!(ProcState::names().iter().any(|(letter, _)| *letter == asleep));
    }
}
