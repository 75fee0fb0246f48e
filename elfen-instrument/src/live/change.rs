//! What is to be written into a process, and what has to hold when it is.

use std::ops::Range;
use std::sync::Arc;

use super::status::Status;
use crate::remote::Memory;

/// Bytes to be written while no thread of the process runs: all of them, or none from the first on
/// that is not as expected.
#[derive(Debug)]
pub struct Change {
    pub process: u32,
    /// The place that this is about.
    pub site: u64,
    /// The Java method that gets a check.
    pub method: Option<String>,
    pub(super) memory: Arc<Memory>,
    pub(super) writes: Vec<Write>,
    /// Where no thread may stand as it is written: behind the first of several instructions.
    pub(super) inside: Option<Range<u64>>,
}

#[derive(Debug)]
pub(super) struct Write {
    pub(super) at: u64,
    /// Nothing for memory that is ours.
    pub(super) expected: Option<Vec<u8>>,
    pub(super) bytes: Vec<u8>,
}

impl Change {
    /// Whether it matters where the process's threads stand.
    pub fn takes_several(&self) -> bool {
        self.inside.is_some()
    }

    /// Whether its process has one thread, which stands where it may, and no signal handler, whose
    /// frame could hide where that is. `stood`: who had the lane until now, if that was in its own
    /// code. Nothing of the batch may run from before that is known until all is written.
    pub fn is_clear(&self, stopped_at: Option<(u32, u64)>) -> bool {
        let Some(inside) = &self.inside else { return true };
        let is_outside = |(thread, ip)| thread == self.process && !inside.contains(&ip);
        let status = Status::of(self.process);
        stopped_at.is_some_and(is_outside)
            && status.is_some_and(|status| status.threads == 1 && !status.catches)
    }

    /// Says whether all was written.
    pub fn apply(&self) -> bool {
        self.writes.iter().all(|write| match &write.expected {
            Some(expected) => {
                self.memory.replace(write.at, expected, &write.bytes).is_ok_and(|done| done)
            }
            None => self.memory.write(write.at, &write.bytes).is_ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write as _};
    use std::process::{Child, Command, Stdio};

    struct Waits(Child);

    impl Drop for Waits {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// A process that waits, once it runs what it is to run.
    fn waits(words: &[&str]) -> Waits {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut waits = Waits(command.spawn().unwrap());
        waits.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        waits.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        waits
    }

    fn change(process: u32, inside: Option<Range<u64>>) -> Change {
        let memory = Arc::new(Memory::open(process).unwrap());
        Change { process, site: 0x1000, method: None, memory, writes: Vec::new(), inside }
    }

    /// Goal: several instructions are replaced while nobody can be among them. Method: each reason
    /// why somebody could, alone.
    #[test]
    fn nobody_stands_inside_of_several_instructions() {
        let plain = waits(&["cat"]);
        let id = plain.0.id();
        let several = change(id, Some(0x1001..0x1007));
        for (stopped_at, is_clear) in [
            (Some((id, 0x1000)), true),
            (Some((id, 0x1007)), true),
            (Some((id, 0x1001)), false),
            (Some((id, 0x1006)), false),
            (Some((id + 1, 0x1000)), false),
            (None, false),
        ] {
            assert_eq!(several.is_clear(stopped_at), is_clear, "{stopped_at:x?}");
        }
        assert!(change(id, None).is_clear(None), "one instruction has no inside");
        let catches = waits(&["sh", "-c", "trap : USR1; echo; read one; read other"]);
        let id = catches.0.id();
        assert!(!change(id, Some(0x1001..0x1007)).is_clear(Some((id, 0x1000))), "a handler");
        // The threads of this test.
        let own = std::process::id();
        let other = std::thread::spawn(std::thread::park);
        assert!(!change(own, Some(0x1001..0x1007)).is_clear(Some((own, 0x1000))), "two threads");
        other.thread().unpark();
        other.join().unwrap();
    }
}
