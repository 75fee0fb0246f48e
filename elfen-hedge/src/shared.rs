//! State that all tasks of the proxy share: settings, counts, and the two servers, which may be
//! down for a while.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elfen_console::failure::to_stderr;
use elfen_hedge_policy::{Hedge, Policy, Server};
use hyper::Method;
use nix::errno::Errno;
use serde::Serialize;

use crate::clients::Limits;
use crate::flights::Flights;
use crate::lock::Lock;
use crate::pool::{Lost, Pool};
use crate::replay::{MIN_GAP, RecordedRequests};

/// A server that does not accept a connection in this time is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of attempts to connect to a server that is down.
const RECONNECT_EVERY: Duration = Duration::from_millis(100);
/// For this long after a server came back, new processes of it do not count as another restart.
const NO_NEWS: Duration = Duration::from_secs(5);
/// How many recorded requests a server may fail before it gets no more.
const MAX_FAILED_REPLAYS: u32 = 3;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    pub(crate) listen: SocketAddr,
    /// The first server, and its backup.
    pub(crate) servers: [SocketAddr; 2],
    pub(crate) policy: Policy,
    pub(crate) extra_per_million: u64,
    pub(crate) poll_interval: Duration,
    /// Methods of requests that may be sent twice.
    pub(crate) repeatable: Vec<Method>,
    /// How long a client waits for the beginning of an answer.
    pub(crate) give_up: Duration,
    pub(crate) limits: Limits,
    /// How many recorded requests a server gets after a restart.
    pub(crate) replay: usize,
    /// Whether clients' own `Forwarded` is passed on.
    pub(crate) trust_forwarded: bool,
}

/// What the proxy did until its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Done {
    #[serde(flatten)]
    pub(crate) policy: elfen_hedge_policy::Counts,
    #[serde(flatten)]
    pub(crate) proxy: Counts,
}

/// Counts of the proxy; the policy has its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Counts {
    /// Sent to the other server because the first one accepts no connections.
    pub(crate) moved: u64,
    /// The client got an error from the proxy itself: no server answered, or none in time.
    pub(crate) unanswered: u64,
    /// Second answers, which no client got.
    pub(crate) late: u64,
    /// Recorded requests that were sent to a server after a restart.
    pub(crate) replayed: u64,
    /// Invalid requests, which no server got.
    pub(crate) refused: u64,
    /// Connections closed because the client took too long.
    pub(crate) timed_out: u64,
    /// Waiting connections closed to make room for others.
    pub(crate) evicted: u64,
}

/// Whether a task waits for a server to come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Recovery {
    is_running: bool,
    ended: Option<Instant>,
}

/// State that all tasks of the proxy share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) plan: Plan,
    pub(crate) pools: [Arc<Pool>; 2],
    pub(crate) flights: Arc<Flights>,
    pub(crate) replays: Lock<RecordedRequests>,
    pub(crate) counts: Lock<Counts>,
    /// How many second answers are still being read.
    pub(crate) late: Lock<usize>,
    recovery: Lock<[Recovery; 2]>,
}

impl Shared {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            pools: plan.servers.map(|address| Arc::new(Pool::new(address))),
            flights: Arc::new(Flights::new(Hedge::new(plan.policy, plan.extra_per_million))),
            replays: Lock::new(RecordedRequests::new(plan.replay)),
            counts: Lock::default(),
            late: Lock::default(),
            recovery: Lock::default(),
            plan,
        }
    }

    pub(crate) fn done(&self) -> Done {
        Done {
            policy: self.flights.with_policy(|hedge| hedge.counts()),
            proxy: self.counts.with(|counts| *counts),
        }
    }

    /// Connects to a server at the start. If it is down, that is reported before the first request.
    pub(crate) async fn begin(self: Arc<Self>, server: Server) {
        if let Err(error) = self.connect(server).await {
            self.down(server, &error);
        }
    }

    /// Adds a connection that waits for requests.
    async fn connect(&self, server: Server) -> io::Result<()> {
        let pool = &self.pools[server.index()];
        match tokio::time::timeout(CONNECT_TIMEOUT, pool.connect()).await {
            Ok(connected) => connected.map(|connection| pool.keep(connection)),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Handles a server that accepts no connections.
    pub(crate) fn down(self: &Arc<Self>, server: Server, error: &io::Error) {
        if is_ours(error) || !self.begin_recovery(server, Duration::ZERO) {
            return;
        }
        let address = self.plan.servers[server.index()];
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

    /// Whether a task shall wait for this server: no task does, and none ended in the last `quiet`.
    fn begin_recovery(&self, server: Server, quiet: Duration) -> bool {
        self.recovery.with(|recovery| {
            let Recovery { is_running, ended } = &mut recovery[server.index()];
            let begins = !*is_running && ended.is_none_or(|ended| ended.elapsed() >= quiet);
            *is_running |= begins;
            begins
        })
    }

    /// Waits until a server accepts connections, and warms it.
    async fn recover(self: Arc<Self>, server: Server, was_down: bool) {
        loop {
            tokio::time::sleep(RECONNECT_EVERY).await;
            if self.connect(server).await.is_ok() {
                break;
            }
        }
        if was_down {
            to_stderr(&format!("server {} takes connections", self.plan.servers[server.index()]));
        }
        self.warm(&self.pools[server.index()]).await;
        self.recovery.with(|recovery| {
            recovery[server.index()] = Recovery { is_running: false, ended: Some(Instant::now()) };
        });
        self.flights.with_policy(|hedge| hedge.set_warm(server));
    }

    /// Sends recorded requests to a server, one at a time. It pauses after each for as long as that
    /// took: if both servers share CPUs, the other server keeps half of one.
    async fn warm(&self, pool: &Arc<Pool>) {
        let mut failed = 0;
        let mut number = 0;
        while let Some(request) = self.replays.with(|replays| replays.nth(number)) {
            number += 1;
            self.counts.with(|counts| counts.replayed += 1);
            let began = Instant::now();
            let attempt = Arc::clone(pool).send(request);
            let read = async { Ok::<bool, Lost>(attempt.await?.read_to_end().await) };
            let read = tokio::time::timeout(self.plan.give_up, read).await;
            failed += u32::from(!matches!(read, Ok(Ok(true))));
            if failed == MAX_FAILED_REPLAYS {
                return;
            }
            tokio::time::sleep(began.elapsed().max(MIN_GAP)).await;
        }
    }
}

/// Whether a connection failed for lack of resources of this process, and not at the server.
fn is_ours(error: &io::Error) -> bool {
    use Errno::{EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let error = error.raw_os_error().map(Errno::from_raw);
    error.is_some_and(|error| [EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM].contains(&error))
}
