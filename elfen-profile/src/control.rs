//! A recording that runs: other commands ask what it costs, and change its settings.
//!
//! It listens on a socket in the abstract namespace, named after the process that it watches. Only
//! its own user and root are answered. What a client sends is checked as an argument is.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use serde::{Deserialize, Serialize};

use crate::profile::Source;

const NAME: &str = "elfen-profile-";
/// A client that sends nothing for so long is not waited for.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long a client waits: a shadow may run meanwhile. A list of recordings leaves such ones out.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
const LISTED_WITHIN: Duration = Duration::from_millis(200);
/// Clients that are answered at a time, and the bytes that each may send.
const CLIENTS_MAX: usize = 4;
const REQUEST_BYTES_MAX: u64 = 4096;

/// What can be changed while a recording runs. What is absent stays as it is.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Settings {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cost: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) edges: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) load: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sample: Option<u64>,
}

impl Settings {
    /// Whether each of them is one that an argument could have.
    fn are_valid(&self) -> bool {
        self.cost.is_none_or(|cost| (0.0001..=0.5).contains(&cost))
            && self.edges.is_none_or(|edges| (1..=EDGES_MAX).contains(&edges))
            && self.load.is_none_or(|load| (0.01..=2.0).contains(&load))
            && self.sample.is_none_or(|sample| (10_000..=1_000_000_000).contains(&sample))
    }
}

pub(crate) const EDGES_MAX: u32 = elfen_stream::layout::EVENTS_MAX.unsigned_abs() - 1;

/// What a recording says of itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Recording {
    /// The process that it watches, and that of the recording itself.
    pub process: u32,
    pub recorder: u32,
    pub by: Source,
    /// Bursts or shadows so far.
    pub bursts: u64,
    /// What they have cost the program, and a CPU, in percent.
    pub cost_percent: f64,
    pub own_percent: f64,
    /// What they may cost the program, in percent.
    pub may_cost_percent: f64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("no recording of `elfen profile record` watches it")]
    Nothing,
    #[error("the recording belongs to another user")]
    Forbidden,
    #[error("the recording does not answer: {0}")]
    Silent(io::Error),
}

/// The listening end, in the recording.
#[derive(Debug)]
pub(crate) struct Control {
    /// `None` if another recording watches the same process.
    listener: Option<UnixListener>,
}

fn address(process: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{NAME}{process}"))
}

/// The user of the process at the other end.
fn user_of(stream: &UnixStream) -> Option<u32> {
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.uid())
}

fn own_user() -> u32 {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() }
}

impl Control {
    /// Listens for a recording that watches a process.
    pub(crate) fn of(process: u32) -> Self {
        let listener = address(process).and_then(|address| UnixListener::bind_addr(&address));
        let listener = listener.ok().filter(|listener| listener.set_nonblocking(true).is_ok());
        Self { listener }
    }

    /// Answers the clients that wait. Returns the settings that they have asked for.
    pub(crate) fn serve(&self, state: impl Fn() -> Recording) -> Vec<Settings> {
        let Some(listener) = &self.listener else { return Vec::new() };
        let mut asked = Vec::new();
        for _ in 0..CLIENTS_MAX {
            let Ok((stream, _)) = listener.accept() else { break };
            let is_allowed = user_of(&stream).is_some_and(|user| user == 0 || user == own_user());
            if is_allowed && let Ok(settings) = answer(&stream, &state) {
                asked.extend(Some(settings).filter(|settings| *settings != Settings::default()));
            }
        }
        asked
    }
}

fn answer(stream: &UnixStream, state: impl Fn() -> Recording) -> io::Result<Settings> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(REQUEST_BYTES_MAX)).read_line(&mut line)?;
    let settings: Settings = serde_json::from_str(&line)?;
    if !settings.are_valid() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut state = state();
    if let Some(cost) = settings.cost {
        state.may_cost_percent = cost * 100.0;
    }
    let mut text = serde_json::to_vec(&state)?;
    text.push(b'\n');
    (&*stream).write_all(&text)?;
    Ok(settings)
}

/// Changes settings of the recording that watches a process, and returns what it says of itself.
pub(crate) fn ask(process: u32, settings: &Settings) -> Result<Recording, ControlError> {
    ask_within(process, settings, ANSWER_WITHIN)
}

fn ask_within(
    process: u32,
    settings: &Settings,
    within: Duration,
) -> Result<Recording, ControlError> {
    let stream = address(process).and_then(|address| UnixStream::connect_addr(&address));
    let stream = stream.map_err(|_| ControlError::Nothing)?;
    // Another user may have taken the name.
    let user = user_of(&stream);
    if own_user() != 0 && user != Some(own_user()) {
        return Err(ControlError::Forbidden);
    }
    talk(&stream, settings, within).map_err(ControlError::Silent)
}

fn talk(stream: &UnixStream, settings: &Settings, within: Duration) -> io::Result<Recording> {
    stream.set_read_timeout(Some(within))?;
    stream.set_write_timeout(Some(within))?;
    let mut text = serde_json::to_vec(settings)?;
    text.push(b'\n');
    (&*stream).write_all(&text)?;
    let mut line = String::new();
    BufReader::new(stream.take(REQUEST_BYTES_MAX)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// What all recordings that this user may ask say of themselves.
pub fn recordings() -> Vec<Recording> {
    let text = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let names = text.lines().filter_map(|line| line.split_whitespace().next_back());
    let mut processes: Vec<u32> =
        names.filter_map(|name| name.strip_prefix('@')?.strip_prefix(NAME)?.parse().ok()).collect();
    processes.sort_unstable();
    processes.dedup();
    let state = |process| ask_within(process, &Settings::default(), LISTED_WITHIN).ok();
    processes.into_iter().filter_map(state).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> Recording {
        Recording {
            process: 1,
            recorder: 2,
            by: Source::Bursts,
            bursts: 3,
            cost_percent: 0.5,
            own_percent: 1.5,
            may_cost_percent: 1.0,
        }
    }

    /// Goal: a client gets the state and changes settings; wrong ones change nothing. Method: both
    /// ends, with a process id that no process has.
    #[test]
    fn settings_are_changed_and_the_state_is_told() {
        const NO_PROCESS: u32 = u32::MAX - 7;
        assert!(matches!(ask(NO_PROCESS, &Settings::default()), Err(ControlError::Nothing)));
        let control = Control::of(NO_PROCESS);
        let asked = |settings: Settings| {
            let client = std::thread::spawn(move || ask(NO_PROCESS, &settings));
            let mut got = Vec::new();
            while !client.is_finished() {
                got.extend(control.serve(state));
            }
            (client.join().unwrap(), got)
        };
        let (told, got) = asked(Settings::default());
        assert_eq!((told.unwrap(), got.len()), (state(), 0));
        let wanted = Settings { cost: Some(0.02), edges: Some(500), ..Settings::default() };
        let (told, got) = asked(wanted);
        assert!((told.unwrap().may_cost_percent - 2.0).abs() < 1e-9);
        assert_eq!(got, [wanted]);
        for wrong in [
            Settings { cost: Some(0.9), ..Settings::default() },
            Settings { edges: Some(EDGES_MAX + 1), ..Settings::default() },
            Settings { load: Some(3.0), ..Settings::default() },
            Settings { sample: Some(1), ..Settings::default() },
        ] {
            let (told, got) = asked(wrong);
            assert!(told.is_err() && got.is_empty(), "{wrong:?}");
        }
        // A second recording of the same process has no socket, and goes on without.
        assert!(Control::of(NO_PROCESS).serve(state).is_empty());
    }
}
