//! One change to the memory of a process, and the conditions under which it may be written.

use std::ops::Range;
use std::sync::Arc;

use crate::process::Status;
use crate::remote::Memory;

/// Bytes to write while no thread of the process runs. Writing stops at the first range that does
/// not hold the expected bytes.
#[derive(Debug)]
pub struct Change {
    pub process: u32,
    /// Address of the patch site.
    pub site: u64,
    /// Name of the Java method that is patched.
    pub method: Option<String>,
    pub(super) memory: Arc<Memory>,
    pub(super) writes: Vec<Write>,
    /// Where no thread may stand during the write: after the first of several instructions.
    pub(super) inside: Option<Range<u64>>,
}

#[derive(Debug)]
pub(super) struct Write {
    pub(super) at: u64,
    /// `None` for memory that belongs to us.
    pub(super) expected: Option<Vec<u8>>,
    pub(super) bytes: Vec<u8>,
}

impl Change {
    /// Whether the change replaces several instructions, so that the position of threads matters.
    pub fn takes_several(&self) -> bool {
        self.inside.is_some()
    }

    /// Whether no thread can stand among the replaced instructions. That requires one thread,
    /// outside of them, and no signal handler, whose frame could hide a position.
    ///
    /// `stopped_at` is the thread that ran on the lane last, and its address if it was in its own
    /// code. The batch must not run from before that sample until the change is written.
    pub fn is_clear(&self, stopped_at: Option<(u32, u64)>) -> bool {
        let Some(inside) = &self.inside else { return true };
        let is_outside = |(thread, ip)| thread == self.process && !inside.contains(&ip);
        let status = Status::of(self.process);
        stopped_at.is_some_and(is_outside)
            && status.is_some_and(|status| status.threads == 1 && !status.catches)
    }

    /// Writes the change. Returns whether all of it was written.
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

    struct WaitingChild(Child);

    impl Drop for WaitingChild {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// Starts a process and waits until it runs; it then waits for input.
    fn start_waiting(words: &[&str]) -> WaitingChild {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = WaitingChild(command.spawn().unwrap());
        child.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        child.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    }

    fn change(process: u32, inside: Option<Range<u64>>) -> Change {
        let memory = Arc::new(Memory::open(process).unwrap());
        Change { process, site: 0x1000, method: None, memory, writes: Vec::new(), inside }
    }

    /// Goal: several instructions are replaced only while no thread can stand among them. Method:
    /// each condition that allows a thread there, alone.
    #[test]
    fn no_thread_stands_inside_several_instructions() {
        let plain = start_waiting(&["cat"]);
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
        let catches = start_waiting(&["sh", "-c", "trap : USR1; echo; read one; read other"]);
        let id = catches.0.id();
        assert!(!change(id, Some(0x1001..0x1007)).is_clear(Some((id, 0x1000))), "a handler");
        // This test process has several threads.
        let own = std::process::id();
        let other = std::thread::spawn(std::thread::park);
        assert!(!change(own, Some(0x1001..0x1007)).is_clear(Some((own, 0x1000))), "two threads");
        other.thread().unpark();
        other.join().unwrap();
    }
}
