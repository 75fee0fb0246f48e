//! What all tasks of the proxy share: what is to be done, what was done, and the two servers, which
//! may be down for a while.

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
use crate::replay::{MIN_GAP, Replays};

/// A server that takes no connection in this time is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Between two attempts to connect to a server that is down.
const RECONNECT_EVERY: Duration = Duration::from_millis(100);
/// For this long after a server came back, its new processes are not taken for another restart.
const NO_NEWS: Duration = Duration::from_secs(5);
/// Replays that a server may fail before it gets no more.
const MAX_FAILED_REPLAYS: u32 = 3;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    pub(crate) listen: SocketAddr,
    /// The first, and its backup.
    pub(crate) servers: [SocketAddr; 2],
    pub(crate) policy: Policy,
    pub(crate) extra_per_million: u64,
    pub(crate) look_every: Duration,
    /// Methods of requests that may be sent twice.
    pub(crate) repeatable: Vec<Method>,
    /// No client waits longer for an answer to begin.
    pub(crate) give_up: Duration,
    pub(crate) limits: Limits,
    /// Recorded requests that a server gets after it was restarted.
    pub(crate) replay: usize,
    /// Clients' own `Forwarded` is passed on.
    pub(crate) trust_forwarded: bool,
}

/// What was done until the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Done {
    #[serde(flatten)]
    pub(crate) decided: elfen_hedge_policy::Counts,
    #[serde(flatten)]
    pub(crate) met: Counts,
}

/// What the policy does not know of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Counts {
    /// Sent to the other server because the first one takes no connections.
    pub(crate) moved: u64,
    /// The client got an error of the proxy's own: no server, or none in time.
    pub(crate) unanswered: u64,
    /// Answers that came second, and went nowhere.
    pub(crate) late: u64,
    /// Recorded requests that were sent to a server after it was restarted.
    pub(crate) replayed: u64,
    /// Requests that no server has seen, because they are not as they have to be.
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

/// What all tasks of the proxy share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) plan: Plan,
    pub(crate) pools: [Arc<Pool>; 2],
    pub(crate) flights: Arc<Flights>,
    pub(crate) replays: Lock<Replays>,
    pub(crate) counts: Lock<Counts>,
    /// Answers that came second and are still read.
    pub(crate) late: Lock<usize>,
    recovery: Lock<[Recovery; 2]>,
}

impl Shared {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            pools: plan.servers.map(|address| Arc::new(Pool::new(address))),
            flights: Arc::new(Flights::new(Hedge::new(plan.policy, plan.extra_per_million))),
            replays: Lock::new(Replays::new(plan.replay)),
            counts: Lock::default(),
            late: Lock::default(),
            recovery: Lock::default(),
            plan,
        }
    }

    pub(crate) fn done(&self) -> Done {
        Done {
            decided: self.flights.tell(|hedge| hedge.counts()),
            met: self.counts.with(|counts| *counts),
        }
    }

    /// Connects to a server at the start: if it is down, that is reported before the first request.
    pub(crate) async fn begin(self: Arc<Self>, server: Server) {
        if let Err(error) = self.connect(server).await {
            self.down(server, &error);
        }
    }

    /// Has one more connection wait for requests.
    async fn connect(&self, server: Server) -> io::Result<()> {
        let pool = &self.pools[server.index()];
        match tokio::time::timeout(CONNECT_TIMEOUT, pool.connect()).await {
            Ok(connected) => connected.map(|connection| pool.keep(connection)),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// A server takes no connections.
    pub(crate) fn down(self: &Arc<Self>, server: Server, error: &io::Error) {
        if is_ours(error) || !self.begin_recovery(server, Duration::ZERO) {
            return;
        }
        let address = self.plan.servers[server.index()];
        to_stderr(&format!("server {address} takes no connections: {error}; waiting for it"));
        self.flights.tell(|hedge| hedge.restarts(server));
        tokio::spawn(Arc::clone(self).recover(server, true));
    }

    /// Other processes serve there than before.
    pub(crate) fn restarted(self: &Arc<Self>, server: Server) {
        if !self.begin_recovery(server, NO_NEWS) {
            return;
        }
        self.flights.tell(|hedge| hedge.restarts(server));
        tokio::spawn(Arc::clone(self).recover(server, false));
    }

    /// Whether a task is to wait for this server: none does, and none ended in the last `quiet`.
    fn begin_recovery(&self, server: Server, quiet: Duration) -> bool {
        self.recovery.with(|recovery| {
            let Recovery { is_running, ended } = &mut recovery[server.index()];
            let begins = !*is_running && ended.is_none_or(|ended| ended.elapsed() >= quiet);
            *is_running |= begins;
            begins
        })
    }

    /// Waits until a server takes connections, and has it warmed.
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
        self.flights.tell(|hedge| hedge.is_warm(server));
    }

    /// Sends recorded requests to a server, one at a time. It rests as long as it has worked:
    /// where it shares CPUs with the other server, half of one is left to that.
    async fn warm(&self, pool: &Arc<Pool>) {
        let (mut failed, mut number) = (0, 0);
        while let Some(request) = self.replays.with(|replays| replays.nth(number)) {
            number += 1;
            self.counts.with(|counts| counts.replayed += 1);
            let began = Instant::now();
            let attempt = Arc::clone(pool).ask(request);
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

/// Whether a connection failed for want of something here, and not at the server.
fn is_ours(error: &io::Error) -> bool {
    use Errno::{EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let error = error.raw_os_error().map(Errno::from_raw);
    error.is_some_and(|error| [EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM].contains(&error))
}
