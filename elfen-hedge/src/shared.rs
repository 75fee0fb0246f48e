//! State that all tasks of the proxy share: settings, counts, and the state of the two servers,
//! which may be down for a while.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elfen_console::failure::to_stderr;
use nix::errno::Errno;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::flights::Flights;
use crate::policy::{self, Hedge, Server};
use crate::replay::{MIN_GAP, RecordedRequests};
use crate::settings::Settings;
use crate::upstream::{Upstream, read_to_end};

/// A server that accepts no connection within this time counts as down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval between attempts to connect to a server that is down.
const RECONNECT_EVERY: Duration = Duration::from_millis(100);
/// For this long after a server's recovery, its new processes do not count as another restart.
const NO_NEWS: Duration = Duration::from_secs(5);
/// After this number of failed recorded requests, a server gets no more of them.
const MAX_FAILED_REPLAYS: u32 = 3;

/// The final report of the proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Done {
    #[serde(flatten)]
    pub(crate) policy: policy::Counts,
    #[serde(flatten)]
    pub(crate) proxy: Counts,
}

/// Counts of the proxy. The policy has its own counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Counts {
    /// Requests sent to the other server because the first one accepts no connections.
    pub(crate) moved: u64,
    /// Requests whose client got an error from the proxy, because no server answered, or none in
    /// time.
    pub(crate) unanswered: u64,
    /// Second answers, which no client received.
    pub(crate) late: u64,
    /// Recorded requests that were sent to a server after a restart.
    pub(crate) replayed: u64,
    /// Invalid requests, which no server received.
    pub(crate) refused: u64,
    /// Connections closed because the client took too long.
    pub(crate) timed_out: u64,
    /// Waiting connections closed to make room for others.
    pub(crate) evicted: u64,
}

/// The recovery of one server: whether a task waits for the server, and when the last task ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Recovery {
    is_running: bool,
    ended: Option<Instant>,
}

/// The maximum number of second answers that the proxy waits for. A server that stands still may
/// owe many.
const MAX_LATE: usize = 1024;

/// State that all tasks of the proxy share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) upstream: Upstream,
    pub(crate) flights: Arc<Flights>,
    pub(crate) replays: Mutex<RecordedRequests>,
    pub(crate) counts: Mutex<Counts>,
    /// Permits to read second answers.
    pub(crate) late: Arc<Semaphore>,
    recovery: Mutex<[Recovery; 2]>,
}

impl Shared {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            upstream: Upstream::new(),
            flights: Arc::new(Flights::new(Hedge::new(settings.policy, settings.max_extra))),
            replays: Mutex::new(RecordedRequests::new(settings.replay)),
            counts: Mutex::default(),
            late: Arc::new(Semaphore::new(MAX_LATE)),
            recovery: Mutex::default(),
            settings,
        }
    }

    pub(crate) fn address(&self, server: Server) -> SocketAddr {
        self.settings.address(server)
    }

    pub(crate) fn done(&self) -> Done {
        let policy = self.flights.with_policy(|hedge| hedge.counts());
        Done { policy, proxy: *self.counts.lock() }
    }

    /// Connects to a server at the start, so that a server that is down is reported before the
    /// first request.
    pub(crate) async fn begin(self: Arc<Self>, server: Server) {
        if let Err(error) = self.connect(server).await {
            self.down(server, &error);
        }
    }

    /// Tests whether a server accepts connections.
    async fn connect(&self, server: Server) -> io::Result<()> {
        let connected = TcpStream::connect(self.address(server));
        tokio::time::timeout(CONNECT_TIMEOUT, connected).await??;
        Ok(())
    }

    /// Handles a server that accepts no connections.
    pub(crate) fn down(self: &Arc<Self>, server: Server, error: &io::Error) {
        if is_ours(error) || !self.begin_recovery(server, Duration::ZERO) {
            return;
        }
        let address = self.address(server);
        to_stderr(&format!("server {address} takes no connections: {error}; waiting for it"));
        self.flights.with_policy(|hedge| hedge.set_cold(server));
        tokio::spawn(Arc::clone(self).recover(server, true));
    }

    /// Handles a server whose processes were replaced.
    pub(crate) fn restarted(self: &Arc<Self>, server: Server) {
        if !self.begin_recovery(server, NO_NEWS) {
            return;
        }
        self.flights.with_policy(|hedge| hedge.set_cold(server));
        tokio::spawn(Arc::clone(self).recover(server, false));
    }

    /// Starts a recovery of this server. Returns false if a task already waits for the server, or
    /// if one ended within the last `quiet`.
    fn begin_recovery(&self, server: Server, quiet: Duration) -> bool {
        let Recovery { is_running, ended } = &mut self.recovery.lock()[server.index()];
        let begins = !*is_running && ended.is_none_or(|ended| ended.elapsed() >= quiet);
        *is_running |= begins;
        begins
    }

    /// Waits until a server accepts connections, and then warms it.
    async fn recover(self: Arc<Self>, server: Server, was_down: bool) {
        loop {
            tokio::time::sleep(RECONNECT_EVERY).await;
            if self.connect(server).await.is_ok() {
                break;
            }
        }
        if was_down {
            to_stderr(&format!("server {} takes connections", self.address(server)));
        }
        self.warm(server).await;
        self.recovery.lock()[server.index()] =
            Recovery { is_running: false, ended: Some(Instant::now()) };
        self.flights.with_policy(|hedge| hedge.set_warm(server));
    }

    /// Sends recorded requests to a server, one at a time. It pauses after each for as long as that
    /// request took. So if both servers share CPUs, the other server keeps half of a CPU.
    async fn warm(&self, server: Server) {
        let mut failed = 0;
        let mut number = 0;
        loop {
            let Some(request) = self.replays.lock().nth(number) else { return };
            number += 1;
            self.counts.lock().replayed += 1;
            let began = Instant::now();
            let attempt = self.upstream.clone().send(self.address(server), request);
            let read = tokio::time::timeout(self.settings.give_up, read_to_end(attempt)).await;
            failed += u32::from(read != Ok(true));
            if failed == MAX_FAILED_REPLAYS {
                return;
            }
            tokio::time::sleep(began.elapsed().max(MIN_GAP)).await;
        }
    }
}

/// Whether a connection failed because this process lacks resources, and not because of the server.
fn is_ours(error: &io::Error) -> bool {
    use Errno::{EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let error = error.raw_os_error().map(Errno::from_raw);
    error.is_some_and(|error| [EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM].contains(&error))
}
