//! The connections of clients: their number, what each is doing, and which of them exceed a time
//! limit and are closed.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::settings::Settings;

#[derive(Debug, Default)]
pub(crate) struct Clients {
    all: Mutex<HashMap<u64, (Arc<Client>, AbortHandle)>>,
    /// Notified when there may be room, because a connection has ended or waits for its client.
    room: Arc<Notify>,
}

/// The state of one connection.
#[derive(Debug)]
pub(crate) struct Client {
    state: Mutex<State>,
    room: Arc<Notify>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    stage: Stage,
    since: Instant,
    /// When the client stopped accepting its answer, if it has.
    stuck: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Between two requests.
    Idle,
    /// While the head of a request arrives.
    Head,
    /// From the complete head of a request to the end of its answer.
    Busy,
}

/// Marks the client's request as in progress until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Client>);

impl Client {
    pub(crate) fn begin(self: &Arc<Self>) -> Busy {
        self.enter(Stage::Busy);
        Busy(Arc::clone(self))
    }

    fn enter(&self, stage: Stage) {
        let mut state = self.state.lock();
        state.stage = stage;
        state.since = Instant::now();
    }

    fn has_written(&self, is_stuck: bool) {
        let stuck = &mut self.state.lock().stuck;
        *stuck = is_stuck.then(|| stuck.unwrap_or_else(Instant::now));
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.enter(Stage::Idle);
        self.0.room.notify_one();
    }
}

impl State {
    /// Whether the connection exceeds a time limit.
    fn is_overdue(self, settings: &Settings) -> bool {
        let limit = match self.stage {
            Stage::Idle => settings.idle_timeout,
            Stage::Head => settings.head_timeout,
            // Bodies and servers have their own limits.
            Stage::Busy => Duration::MAX,
        };
        let is_stuck = self.stuck.is_some_and(|since| since.elapsed() > settings.idle_timeout);
        is_stuck || self.since.elapsed() > limit
    }
}

impl Clients {
    /// The interval between checks of the limits.
    pub(crate) fn sweep_interval(settings: &Settings) -> Duration {
        let shortest = settings.head_timeout.min(settings.idle_timeout);
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }

    /// Creates a client, to be added together with its task.
    pub(crate) fn client(&self) -> Arc<Client> {
        let state = State { stage: Stage::Idle, since: Instant::now(), stuck: None };
        Arc::new(Client { state: Mutex::new(state), room: Arc::clone(&self.room) })
    }

    pub(crate) fn add(&self, id: u64, client: Arc<Client>, task: AbortHandle) {
        self.all.lock().insert(id, (client, task));
    }

    pub(crate) fn remove(&self, id: u64) {
        self.all.lock().remove(&id);
        self.room.notify_one();
    }

    /// Makes room for one more client. Closes the connection that has waited longest. If all have
    /// requests in progress, waits until one ends. Returns the number of closed connections.
    pub(crate) async fn make_room(&self, max_clients: usize) -> u64 {
        let mut closed = 0;
        while self.all.lock().len() >= max_clients {
            if self.close_oldest() {
                closed += 1;
            } else {
                self.room.notified().await;
            }
        }
        closed
    }

    /// Closes the connection that has waited longest. Returns false if none waits.
    pub(crate) fn close_oldest(&self) -> bool {
        let mut all = self.all.lock();
        let waiting = |(id, (client, _)): (&u64, &(Arc<Client>, AbortHandle))| {
            let state = *client.state.lock();
            let is_waiting = state.stage != Stage::Busy && state.stuck.is_none();
            is_waiting.then_some((state.since, *id))
        };
        let oldest = all.iter().filter_map(waiting).min();
        let removed = oldest.and_then(|(_, id)| all.remove(&id));
        removed.map(|(_, task)| task.abort()).is_some()
    }

    /// Closes the connections that exceed a limit. Returns their number.
    pub(crate) fn close_overdue(&self, settings: &Settings) -> u64 {
        let is_overdue = |_: &u64, (client, task): &mut (Arc<Client>, AbortHandle)| {
            let is_overdue = client.state.lock().is_overdue(settings);
            if is_overdue {
                task.abort();
            }
            is_overdue
        };
        let closed = self.all.lock().extract_if(is_overdue).count() as u64;
        if closed > 0 {
            self.room.notify_one();
        }
        closed
    }
}

/// A client's socket. It records when bytes arrive and when the client accepts none.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) socket: TcpStream,
    pub(crate) client: Arc<Client>,
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = bytes.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(context, bytes);
        let is_idle = self.client.state.lock().stage == Stage::Idle;
        if is_idle && bytes.filled().len() > before {
            self.client.enter(Stage::Head);
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
