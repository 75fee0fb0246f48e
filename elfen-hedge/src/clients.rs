//! The connections of clients: how many there are, what each is doing, and which are closed because
//! they take too long.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::lock::Lock;

/// Limits of clients, and of how long they may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limits {
    pub(crate) clients: usize,
    /// From the first byte of a head to its last.
    pub(crate) head: Duration,
    /// From the end of the head to the end of the body.
    pub(crate) body: Duration,
    /// Without a request, or without taking any of the answer.
    pub(crate) idle: Duration,
}

#[derive(Debug)]
pub(crate) struct Clients {
    limits: Limits,
    all: Lock<HashMap<u64, Entry>>,
    /// Notified when there may be room: a connection has ended, or waits.
    room: Arc<Notify>,
}

#[derive(Debug)]
struct Entry {
    client: Arc<Client>,
    task: AbortHandle,
}

/// The state of one connection.
#[derive(Debug)]
pub(crate) struct Client {
    state: Lock<State>,
    room: Arc<Notify>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State {
    stage: Stage,
    since: Instant,
    /// Since when the client has not taken any of its answer.
    stuck: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Between two requests.
    Idle,
    /// In the head of a request.
    Head,
    /// From the whole head of a request to the end of its answer.
    Busy,
}

/// A request of a client is in progress while this lives.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Client>);

impl Client {
    fn new(room: Arc<Notify>) -> Arc<Self> {
        let state = State { stage: Stage::Idle, since: Instant::now(), stuck: None };
        Arc::new(Self { state: Lock::new(state), room })
    }

    pub(crate) fn begin(self: &Arc<Self>) -> Busy {
        self.enter(Stage::Busy);
        Busy(Arc::clone(self))
    }

    fn enter(&self, stage: Stage) {
        self.state.with(|state| (state.stage, state.since) = (stage, Instant::now()));
    }

    fn has_read(&self) {
        let is_idle = self.state.with(|state| state.stage == Stage::Idle);
        if is_idle {
            self.enter(Stage::Head);
        }
    }

    fn has_written(&self, is_stuck: bool) {
        self.state.with(|state| {
            state.stuck = is_stuck.then(|| state.stuck.unwrap_or_else(Instant::now));
        });
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.enter(Stage::Idle);
        self.0.room.notify_one();
    }
}

impl State {
    /// Whether it exceeds a limit.
    fn is_overdue(self, limits: Limits, now: Instant) -> bool {
        let exceeds = |since: Instant, limit| now.saturating_duration_since(since) > limit;
        let is_stuck = self.stuck.is_some_and(|since| exceeds(since, limits.idle));
        is_stuck
            || match self.stage {
                Stage::Idle => exceeds(self.since, limits.idle),
                Stage::Head => exceeds(self.since, limits.head),
                // Bodies and servers have limits of their own.
                Stage::Busy => false,
            }
    }

    /// Whether it can be closed without interrupting a request.
    fn is_waiting(self) -> bool {
        self.stage != Stage::Busy && self.stuck.is_none()
    }
}

impl Clients {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, all: Lock::default(), room: Arc::default() })
    }

    /// A new client, to be added together with its task.
    pub(crate) fn client(&self) -> Arc<Client> {
        Client::new(Arc::clone(&self.room))
    }

    pub(crate) fn add(&self, id: u64, client: Arc<Client>, task: AbortHandle) {
        self.all.with(|all| all.insert(id, Entry { client, task }));
    }

    pub(crate) fn remove(&self, id: u64) {
        self.all.with(|all| all.remove(&id));
        self.room.notify_one();
    }

    /// Makes room for one more client: closes the connection that has waited longest, or, if all
    /// have requests in progress, waits until one ends. Returns how many it closed.
    pub(crate) async fn make_room(&self) -> u64 {
        let mut closed = 0;
        while self.all.with(|all| all.len() >= self.limits.clients) {
            if self.close_oldest() {
                closed += 1;
            } else {
                self.room.notified().await;
            }
        }
        closed
    }

    /// Closes the connection that has waited longest, if one waits.
    pub(crate) fn close_oldest(&self) -> bool {
        self.all.with(|all| {
            let waiting = |(id, entry): (&u64, &Entry)| {
                let state = entry.client.state.with(|state| *state);
                state.is_waiting().then_some((state.since, *id))
            };
            let oldest = all.iter().filter_map(waiting).min();
            let entry = oldest.and_then(|(_, id)| all.remove(&id));
            entry.map(|entry| entry.task.abort()).is_some()
        })
    }

    /// Closes the connections that exceed a limit. Returns how many.
    pub(crate) fn close_overdue(&self) -> u64 {
        let now = Instant::now();
        self.all.with(|all| {
            let before = all.len();
            all.retain(|_, entry| {
                let is_overdue =
                    entry.client.state.with(|state| state.is_overdue(self.limits, now));
                if is_overdue {
                    entry.task.abort();
                }
                !is_overdue
            });
            let closed = before - all.len();
            if closed > 0 {
                self.room.notify_one();
            }
            closed as u64
        })
    }

    /// Interval of checking limits.
    pub(crate) fn sweep_interval(&self) -> Duration {
        let shortest = self.limits.head.min(self.limits.idle);
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }
}

/// A client's socket, which notes when bytes arrive and when none leave.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    client: Arc<Client>,
}

impl Stream {
    pub(crate) fn new(socket: TcpStream, client: Arc<Client>) -> Self {
        Self { socket, client }
    }

    pub(crate) fn into_socket(self) -> TcpStream {
        self.socket
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = bytes.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(context, bytes);
        if bytes.filled().len() > before {
            self.client.has_read();
        }
        read
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.client.has_written(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(context, bytes);
        self.client.has_written(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const LIMITS: Limits =
        Limits { clients: 2, head: SECOND, body: SECOND, idle: Duration::from_secs(5) };

    /// Goal: each stage has its own limit, and a request in progress has none here. Method: times
    /// around the limits.
    #[test]
    fn each_stage_has_its_limit() {
        let since = Instant::now();
        let is_overdue = |stage, stuck: Option<u32>, after: u32| {
            let stuck = stuck.map(|at| since + SECOND * at);
            State { stage, since, stuck }.is_overdue(LIMITS, since + SECOND * after)
        };
        assert!(!is_overdue(Stage::Head, None, 1) && is_overdue(Stage::Head, None, 2));
        assert!(!is_overdue(Stage::Idle, None, 5) && is_overdue(Stage::Idle, None, 6));
        assert!(!is_overdue(Stage::Busy, None, 600));
        assert!(!is_overdue(Stage::Busy, Some(10), 15) && is_overdue(Stage::Busy, Some(10), 16));
    }

    /// Goal: stages follow bytes and requests.
    #[test]
    fn stages_follow_each_other() {
        let client = Client::new(Arc::default());
        let stage = || client.state.with(|state| state.stage);
        assert_eq!(stage(), Stage::Idle);
        client.has_read();
        assert_eq!(stage(), Stage::Head);
        let busy = client.begin();
        client.has_read();
        assert_eq!(stage(), Stage::Busy, "bytes of a body, or of the next request");
        client.has_written(true);
        let stuck = client.state.with(|state| state.stuck);
        client.has_written(true);
        assert!(stuck.is_some() && client.state.with(|state| state.stuck) == stuck);
        drop(busy);
        assert!(!client.state.with(|state| state.is_waiting()), "the answer is not sent yet");
        client.has_written(false);
        assert!(client.state.with(|state| state.is_waiting()));
    }
}
