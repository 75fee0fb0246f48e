//! Events from the supervisor to the launcher, over a socket that no batch process has.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{OwnedFd, RawFd};

use elfen_rt::process::Identity;

use elfen_machine::pidfd::PidFd;

/// What happened to the batch program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The process that is about to become the program sends this itself, because the supervisor
    /// that starts it may be killed first. `None` where `/proc` does not show the identity.
    Started {
        batch: Option<Identity>,
    },
    /// The program could not be started, with this errno.
    Refused {
        errno: i32,
    },
    Stopped {
        signal: i32,
    },
    /// Its status as waitpid(2) returns it.
    Ended {
        status: i32,
    },
    /// The last batch lane went offline, and the batch was stopped.
    LostLanes,
    /// A batch lane is online again, and the batch goes on.
    HasLanes,
    /// This process supervises the batch from now on.
    Supervised {
        by: u32,
    },
    /// A batch process is in a cgroup that does not rank below its guard's.
    Unranked {
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
            Self::Unranked { pid } => (7, number(pid)),
            Self::Supervised { by } => (8, u64::from(by)),
        };
        u128::to_ne_bytes(u128::from(kind) | u128::from(value) << 64)
    }

    pub(super) fn write(self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.bytes())
    }

    /// Writes the event between fork and exec, without SIGPIPE if the launcher is gone.
    pub(super) fn send(self, socket: RawFd) {
        let bytes = self.bytes();
        // SAFETY: the kernel reads `bytes`, which live until it returns.
        unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    }

    /// Reads the next event. An error means that the supervisor is gone.
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
            7 => Ok(Self::Unranked { pid: value }),
            8 => Ok(Self::Supervised { by: value.cast_unsigned() }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// The supervisor's end of the connection to the launcher.
#[derive(Debug)]
pub(super) struct LauncherLink {
    pub(super) socket: File,
    /// Where the batch sends its identity to the spare, too.
    pub(super) spare: Option<OwnedFd>,
    pub(super) pid: u32,
    /// `None` if the launcher ended before it could be opened.
    pub(super) process: Option<PidFd>,
}

impl LauncherLink {
    pub(super) fn is_gone(&self) -> bool {
        self.process.as_ref().is_none_or(PidFd::has_ended)
    }

    /// A launcher that was killed receives nothing; the batch goes on.
    pub(super) fn report(&mut self, event: Event) {
        let _heard = event.write(&mut self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_events_are_read_back() {
        let events = [
            Event::Started { batch: Identity::own() },
            Event::Started { batch: None },
            Event::Refused { errno: 2 },
            Event::Stopped { signal: 19 },
            Event::Ended { status: -1 },
            Event::LostLanes,
            Event::HasLanes,
            Event::Unranked { pid: 7 },
            Event::Supervised { by: 8 },
        ];
        let mut all = Vec::new();
        events.iter().for_each(|event| event.write(&mut all).unwrap());
        let mut from = all.as_slice();
        events.iter().for_each(|event| assert_eq!(Event::read(&mut from).unwrap(), *event));
        assert!(Event::read(&mut from).is_err());
    }
}
