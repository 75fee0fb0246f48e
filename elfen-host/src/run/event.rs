//! What the keeper tells the front, through a socket that no batch has.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{OwnedFd, RawFd};

use elfen_rt::process::Identity;

use crate::pidfd::PidFd;

/// What the front learns of the batch program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The process that is about to become the program sends this itself: the keeper, which starts
    /// it, may be killed before it can. `None` where `/proc` does not show it.
    Started {
        batch: Option<Identity>,
    },
    /// It could not be started, with this errno.
    Refused {
        errno: i32,
    },
    Stopped {
        signal: i32,
    },
    /// Its status as waitpid(2) has it.
    Ended {
        status: i32,
    },
    /// The last of its lanes went offline, and it was stopped; one is back, and it goes on.
    LostLanes,
    HasLanes,
    /// The process that looks after the batch from now on.
    Kept {
        by: u32,
    },
    /// A process of it is in a cgroup that does not rank below its guard's.
    Beside {
        pid: i32,
    },
}

const BYTES: usize = 16;

impl Event {
    fn bytes(self) -> [u8; BYTES] {
        let number = |value: i32| u64::from(value.cast_unsigned());
        let (kind, value): (u64, u64) = match self {
            Self::Started { batch } => (1, batch.map_or(0, Identity::word)),
            Self::Refused { errno } => (2, number(errno)),
            Self::Stopped { signal } => (3, number(signal)),
            Self::Ended { status } => (4, number(status)),
            Self::LostLanes => (5, 0),
            Self::HasLanes => (6, 0),
            Self::Beside { pid } => (7, number(pid)),
            Self::Kept { by } => (8, u64::from(by)),
        };
        u128::to_ne_bytes(u128::from(kind) | u128::from(value) << 64)
    }

    pub(super) fn write(self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.bytes())
    }

    /// The same between fork and exec, and without a SIGPIPE if the front is gone.
    pub(super) fn send(self, socket: RawFd) {
        let bytes = self.bytes();
        // SAFETY: the kernel reads `bytes`, which live until it returns.
        unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    }

    /// The next event; an error when the keeper is gone.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; BYTES];
        from.read_exact(&mut bytes)?;
        let words = u128::from_ne_bytes(bytes);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of the words")]
        let (kind, word) = (words as u64, (words >> 64) as u64);
        #[expect(clippy::cast_possible_truncation, reason = "as `bytes` has put it there")]
        let value = (word as u32).cast_signed();
        match kind {
            1 => Ok(Self::Started { batch: Identity::from_word(word) }),
            2 => Ok(Self::Refused { errno: value }),
            3 => Ok(Self::Stopped { signal: value }),
            4 => Ok(Self::Ended { status: value }),
            5 => Ok(Self::LostLanes),
            6 => Ok(Self::HasLanes),
            7 => Ok(Self::Beside { pid: value }),
            8 => Ok(Self::Kept { by: value.cast_unsigned() }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// The front as its keeper has it.
#[derive(Debug)]
pub(super) struct ToFront {
    pub(super) socket: File,
    /// Where the batch names itself to the spare too.
    pub(super) spare: Option<OwnedFd>,
    pub(super) pid: u32,
    /// `None` if it had ended before it could be opened.
    pub(super) process: Option<PidFd>,
}

impl ToFront {
    pub(super) fn is_gone(&self) -> bool {
        self.process.as_ref().is_none_or(PidFd::has_ended)
    }

    /// A front that was killed hears nothing; the batch goes on.
    pub(super) fn tell(&mut self, event: Event) {
        let _heard = event.write(&mut self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let events = [
            Event::Started { batch: Identity::own() },
            Event::Started { batch: None },
            Event::Refused { errno: 2 },
            Event::Stopped { signal: 19 },
            Event::Ended { status: -1 },
            Event::LostLanes,
            Event::HasLanes,
            Event::Beside { pid: 7 },
            Event::Kept { by: 8 },
        ];
        let mut all = Vec::new();
        events.iter().for_each(|event| event.write(&mut all).unwrap());
        let mut from = all.as_slice();
        events.iter().for_each(|event| assert_eq!(Event::read(&mut from).unwrap(), *event));
        assert!(Event::read(&mut from).is_err());
    }
}
