//! Requests to the daemon and its answers, as clients such as `elfen status` and the metrics send
//! and read them.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use elfen_rt::pages;
use elfen_rt::signal::control::{PolicyKind, Settings};
use nix::errno::Errno;
use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, setsockopt, socket,
};
use nix::sys::time::TimeVal;
use serde::{Deserialize, Serialize};

use super::guarantees::{Broken, Guarantee};
use crate::cgroup::CgroupPath;

/// The longest request. The kernel's limit for one message bounds the answers.
pub const LONGEST_REQUEST: usize = 4096;
const LONGEST_ANSWER: usize = 1 << 17;
/// How long a client waits for an answer; the daemon may hang.
const PATIENCE_S: i64 = 5;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Request {
    Status,
    /// Ends a pause: checks the guarantees now, and thaws each fence that is not frozen for another
    /// reason.
    Resume,
    /// Puts the asking process into a fence.
    Enter {
        fence: String,
    },
    /// Gives the asking process the pages of its lanes: [`elfen_rt::pages`].
    Pages,
    /// Gives the asking process the task map, to read which tasks run and to have lanes timed:
    /// [`elfen_rt::pages::request_task_map`].
    Tasks,
    /// Makes the kernel count CPU time on the batch lanes of these (batch, request) pairs. It
    /// counts the time of the asking process's descendants, and of its launcher `front`.
    Count {
        pairs: Vec<(u32, u32)>,
        front: u32,
    },
    /// Requests other settings for the lanes that use this page.
    Set {
        page: String,
        wanted: WantedSettings,
    },
}

/// [`elfen_rt::signal::control::Settings`] in a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WantedSettings {
    pub policy: u64,
    pub budget_ns: u64,
    pub budget_until_ns: u64,
    pub slo_latency_ns: u64,
    pub slo_per_million: u64,
    pub ref_ipc_milli: u64,
}

impl From<&Settings> for WantedSettings {
    fn from(settings: &Settings) -> Self {
        let Settings { policy, budget_ns, budget_until_ns, .. } = *settings;
        let Settings { slo_latency_ns, slo_per_million, ref_ipc_milli, .. } = *settings;
        let policy = policy as u64;
        Self { policy, budget_ns, budget_until_ns, slo_latency_ns, slo_per_million, ref_ipc_milli }
    }
}

impl WantedSettings {
    /// The settings; `None` if this version does not know the policy.
    pub fn settings(self) -> Option<Settings> {
        let Self { budget_ns, budget_until_ns, slo_latency_ns, slo_per_million, .. } = self;
        let policy = PolicyKind::from_word(self.policy)?;
        let ref_ipc_milli = self.ref_ipc_milli;
        Some(Settings {
            policy,
            budget_ns,
            budget_until_ns,
            slo_latency_ns,
            slo_per_million,
            ref_ipc_milli,
        })
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    Status(Status),
    /// The fence that the asking process is in now.
    Entered(FenceStatus),
    /// The message has descriptors attached. `services`: client and daemon see the same System V
    /// segments.
    Pages {
        services: bool,
    },
    /// The message has descriptors attached.
    Tasks,
    /// The number of the claim, and the index of its account on each batch lane; `None` for a lane
    /// whose accounts are all in use.
    Counted {
        claim: u64,
        accounts: Vec<Option<u64>>,
    },
    /// The guard process applies the settings within 0.1 s.
    Set,
    Refused {
        why: String,
        fix: String,
    },
}

/// The daemon's whole state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    /// The guard process; `None` if it does not run.
    pub guard_process: Option<u32>,
    /// How many guard processes have ended.
    pub guard_processes_lost: u64,
    pub home: CgroupPath,
    /// Why all fences are paused, if they are.
    pub paused: Option<String>,
    pub fences: Vec<FenceStatus>,
    /// Services that are confined to their request lanes.
    #[serde(default)]
    pub confined: Vec<ConfinedStatus>,
    /// How long each request lane was busy; empty without a task map.
    #[serde(default)]
    pub requests: Vec<RequestLane>,
    /// Requests of the settings that the daemon cannot fulfil yet, one sentence each.
    pub waiting: Vec<String>,
    /// About the asking process.
    #[serde(default)]
    pub asker: Asker,
}

/// What the daemon knows about the asking process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Asker {
    /// Whether the process may enter a fence by itself, and may get the task map.
    pub may_enter: bool,
    /// The fence that the process is in.
    pub inside: Option<String>,
}

impl Status {
    pub fn is_healthy(&self) -> bool {
        self.paused.is_none()
            && self.waiting.is_empty()
            && self.fences.iter().all(|fence| fence.frozen.is_none())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FenceStatus {
    pub name: String,
    pub path: CgroupPath,
    /// The lanes, in the syntax of `--lanes`.
    pub lanes: String,
    pub processes: u64,
    /// Why the fence is frozen; `None` if it is not.
    pub frozen: Option<Frozen>,
    pub broken: Vec<Broken>,
    pub repaired: Vec<Repaired>,
    /// CPU times since the daemon began; empty if the kernel does not count the time of cgroups.
    #[serde(default)]
    pub accounts: Vec<LaneAccount>,
}

/// The CPU time of a fence on one batch lane.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneAccount {
    pub lane: u32,
    pub request: u32,
    /// The fence's time while the request lane was idle, and while it was busy.
    pub borrowed_ns: u64,
    pub overlapped_ns: u64,
}

/// How long a request lane has been busy while the daemon watched it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RequestLane {
    pub lane: u32,
    pub busy_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConfinedStatus {
    pub service: String,
    pub path: CgroupPath,
    /// The CPUs, in the syntax of `taskset`.
    pub cpus: String,
    /// How often the daemon restored the CPUs after another program had changed them.
    pub repaired: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Repaired {
    #[serde(rename = "guarantee")]
    pub guarantee: Guarantee,
    pub times: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Frozen {
    Paused(String),
    Unguarded,
    /// The guard process exists, but sends no heartbeat.
    Hung,
    NoLane,
    Broken,
    Unreadable(String),
    /// Another program froze the fence, and the daemon does not thaw it.
    ByOthers,
}

impl Frozen {
    /// All values of [`Self::name`].
    pub const NAMES: [&str; 7] =
        ["paused", "unguarded", "hung", "no-lane", "broken", "unreadable", "by-others"];

    /// The value of the metrics' label.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Paused(_) => "paused",
            Self::Unguarded => "unguarded",
            Self::Hung => "hung",
            Self::NoLane => "no-lane",
            Self::Broken => "broken",
            Self::Unreadable(_) => "unreadable",
            Self::ByOthers => "by-others",
        }
    }
}

impl FenceStatus {
    /// The fence's borrowed and overlapped time, summed over its lanes.
    pub fn ran_ns(&self) -> Option<(u64, u64)> {
        let accounts = self.accounts.iter().map(|one| (one.borrowed_ns, one.overlapped_ns));
        accounts.reduce(|sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Why the fence is frozen, in words; `None` if it is not.
    pub fn why(&self) -> Option<String> {
        Some(match self.frozen.as_ref()? {
            Frozen::Paused(why) if why.is_empty() => "paused".to_owned(),
            Frozen::Paused(why) => format!("paused: {why}"),
            Frozen::Unguarded => "no guards run on its lanes".to_owned(),
            Frozen::Hung => "the process of its guards has been stuck for 3 s".to_owned(),
            Frozen::NoLane => "none of its batch lanes is online".to_owned(),
            Frozen::Unreadable(why) => why.clone(),
            Frozen::ByOthers => "another program froze it; `elfen resume` thaws it".to_owned(),
            Frozen::Broken => {
                let broken = self.broken.iter();
                let all =
                    broken.map(|broken| format!("{}: {}", broken.guarantee.name(), broken.why));
                all.collect::<Vec<_>>().join("; ")
            }
        })
    }
}

/// Sends a request to the daemon at a socket. An error of kind `NotFound` or `ConnectionRefused`
/// means that no daemon runs.
pub fn ask(socket: &Path, request: &Request) -> io::Result<Answer> {
    let answer = match exchange(socket, &serde_json::to_vec(request)?) {
        // The kernel's error for a timeout is EAGAIN, "try again".
        Err(Errno::EAGAIN) => {
            let why = format!("it has not answered within {PATIENCE_S} s");
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        answer => answer?,
    };
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&answer)?)
}

/// Sends one message and receives one.
fn exchange(path: &Path, request: &[u8]) -> nix::Result<Vec<u8>> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let connection = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    let patience = TimeVal::new(PATIENCE_S, 0);
    setsockopt(&connection, ReceiveTimeout, &patience)?;
    setsockopt(&connection, SendTimeout, &patience)?;
    let daemon = connection.as_raw_fd();
    connect(daemon, &UnixAddr::new(path)?)?;
    send(daemon, request, MsgFlags::MSG_NOSIGNAL)?;
    let mut answer = vec![0; LONGEST_ANSWER];
    let length = recv(daemon, &mut answer, MsgFlags::empty())?;
    answer.truncate(length);
    Ok(answer)
}

/// A path as a socket address.
pub fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    pages::socket_address(path.as_os_str().as_bytes())
        .ok_or_else(|| io::ErrorKind::InvalidFilename.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the daemon's JSON has the constant bytes that programs in fences use, which have no
    /// JSON parser. Method: compare what each of them writes.
    #[test]
    fn page_requests_have_one_form() {
        assert_eq!(serde_json::to_vec(&Request::Pages).unwrap(), pages::REQUEST);
        let answer = |services| serde_json::to_vec(&Answer::Pages { services }).unwrap();
        assert_eq!([answer(false), answer(true)], pages::ANSWERS.map(<[u8]>::to_vec));
        assert_eq!(serde_json::to_vec(&Request::Tasks).unwrap(), pages::TASKS_REQUEST);
        assert_eq!(serde_json::to_vec(&Answer::Tasks).unwrap(), pages::TASKS_ANSWER);
    }

    /// Goal: a message preserves every setting, and an unknown policy is rejected. Method: convert
    /// settings into a message and back.
    #[test]
    fn settings_survive_a_message() {
        let settings = Settings {
            policy: PolicyKind::SloBudget,
            budget_ns: 1,
            budget_until_ns: 2,
            slo_latency_ns: 3,
            slo_per_million: 4,
            ref_ipc_milli: 5,
        };
        let wanted = WantedSettings::from(&settings);
        assert_eq!(wanted.settings(), Some(settings));
        assert_eq!(WantedSettings { policy: 77, ..wanted }.settings(), None);
    }
}
