//! What the keeper tells the front, through a pipe.

use std::io::{self, Read, Write};

/// What the front learns of the batch program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    Started {
        pid: i32,
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
    /// A process of it is in a cgroup that does not rank below its guard's.
    Beside {
        pid: i32,
    },
}

impl Event {
    pub(super) fn write(self, to: &mut impl Write) -> io::Result<()> {
        let (kind, value) = match self {
            Self::Started { pid } => (1, pid),
            Self::Refused { errno } => (2, errno),
            Self::Stopped { signal } => (3, signal),
            Self::Ended { status } => (4, status),
            Self::LostLanes => (5, 0),
            Self::HasLanes => (6, 0),
            Self::Beside { pid } => (7, pid),
        };
        let [kind, value] = [kind, value].map(i32::to_ne_bytes);
        to.write_all(&[kind, value].concat())
    }

    /// The next event; an error when the keeper is gone.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut words = [[0; 4]; 2];
        from.read_exact(words.as_flattened_mut())?;
        let [kind, value] = words.map(i32::from_ne_bytes);
        match kind {
            1 => Ok(Self::Started { pid: value }),
            2 => Ok(Self::Refused { errno: value }),
            3 => Ok(Self::Stopped { signal: value }),
            4 => Ok(Self::Ended { status: value }),
            5 => Ok(Self::LostLanes),
            6 => Ok(Self::HasLanes),
            7 => Ok(Self::Beside { pid: value }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}
