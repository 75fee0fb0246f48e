//! Serving an index over HTTP: the threads, where they run, and how they end.

mod connection;
mod coordinator;
mod metrics;
mod queue;
mod request;
mod response;
mod worker;

use super::index::SearchIndex;
use crate::beside::account::{Accounts, Batches};
use crate::beside::lanes::Lanes;
use crate::beside::{Slowdown, Slowed};
use crate::process::affinity::{PinError, pin};
use crate::process::descriptors::{self, TooMany};
use crate::process::listener;
use coordinator::{Bounds, Coordinator, LISTENER, OUTBOX};
use elfen_rt::service::{ClaimError, Service, Worker as Slot};
use elfen_rt::signal::service::OpenError;
use metrics::Metrics;
use mio::{Interest, Poll, Waker};
use nix::sys::signal::{SigSet, Signal};
use queue::{Page, Queue};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use thiserror::Error;
use worker::{Core, Lane, Outbox};

#[derive(Clone)]
pub(super) struct Serving {
    pub(super) address: SocketAddr,
    /// The CPU of each request lane; one worker each.
    pub(super) lanes: Vec<usize>,
    pub(super) coordinator_cpu: Option<usize>,
    /// The name of the service page; `None` publishes nothing.
    pub(super) page: Option<String>,
    pub(super) queue: usize,
    pub(super) connections: usize,
    pub(super) patience: Duration,
    pub(super) idle: Duration,
    pub(super) drain: Duration,
    /// Asked once by each worker before it serves.
    pub(super) warmup: Vec<String>,
    pub(super) emulated: Option<Emulated>,
}

/// Request lanes that are taken to share cores with their batch lanes.
#[derive(Clone)]
pub(super) struct Emulated {
    pub(super) slowdown: Slowdown,
    pub(super) lanes: Lanes,
    pub(super) accounts: Arc<dyn Accounts + Send + Sync>,
}

impl Emulated {
    fn core(&self, cpu: usize) -> Core {
        let request = u32::try_from(cpu).ok();
        let batch = request.and_then(|request| self.lanes.beside(request)).unwrap_or(&[]);
        Slowed::new(self.slowdown, Batches::new(self.accounts.clone(), batch))
    }
}

impl Serving {
    fn bounds(&self) -> Bounds {
        let Self { connections, patience, idle, drain, .. } = *self;
        Bounds { connections, patience, idle, drain }
    }
}

#[derive(Debug, Error)]
pub(super) enum ServeError {
    #[error("listening at {address}: {error}; choose an address that is free")]
    Listen { address: SocketAddr, error: io::Error },
    #[error("publishing as `{name}`: {error}; choose another --service-name, or --service-name ''")]
    Page { name: String, error: OpenError },
    #[error(
        "publishing lane {lane} as `{name}`: {error}; end it, or choose another --service-name"
    )]
    Claim { name: String, lane: u32, error: ClaimError },
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    TooMany(#[from] TooMany),
    #[error("serving: {0}")]
    Io(#[from] io::Error),
    #[error("some answers were not taken within the time to drain; the clients were cut off")]
    Undrained,
}

/// Serves until asked to end. `ready` hears the address once clients can connect.
pub(super) fn serve(
    index: &SearchIndex,
    serving: &Serving,
    ready: impl FnOnce(SocketAddr) -> io::Result<()>,
) -> Result<(), ServeError> {
    let address = serving.address;
    let listen = |error| ServeError::Listen { address, error };
    descriptors::allow(serving.connections)?;
    let poll = Poll::new()?;
    let mut listener = listener::bind(address).map_err(listen)?;
    let page = serving.page.as_deref().map(|name| open_page(name, serving)).transpose()?;
    let queue = Queue::new(serving.queue, page.clone());
    let metrics = Metrics::new(serving.emulated.as_ref().map(|emulated| emulated.slowdown));
    let outbox = Outbox::new(Waker::new(poll.registry(), OUTBOX)?);
    // Before the workers start: they inherit it, and a signal wakes the coordinator, not them.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.thread_block().map_err(io::Error::from)?;
    thread::scope(|scope| {
        let closing = CloseOnDrop(&queue);
        for (lane, &cpu) in (0..).zip(&serving.lanes) {
            let slot = claim(serving, page.as_ref(), lane, cpu)?;
            let (queue, outbox, metrics) = (&queue, &outbox, &metrics);
            let mut seeker = index.seeker();
            let core = serving.emulated.as_ref().map(|emulated| emulated.core(cpu));
            let (started, start) = mpsc::channel();
            scope.spawn(move || {
                let pinned = pin(cpu);
                let failed = pinned.is_err();
                for query in serving.warmup.iter().filter(|_| !failed) {
                    // Whether a query of the warm-up is good is not asked here.
                    drop(seeker.search(query, 10));
                }
                started.send(pinned).expect("`serve` waits for it");
                if !failed {
                    worker::work(queue, outbox, metrics, &mut seeker, Lane { slot, core });
                }
            });
            start.recv().expect("each worker says whether it started")?;
        }
        signals.thread_unblock().map_err(io::Error::from)?;
        if let Some(cpu) = serving.coordinator_cpu {
            pin(cpu)?;
        }
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        ready(listener.local_addr()?)?;
        let bounds = serving.bounds();
        let drained = Coordinator::new(poll, listener, &queue, &outbox, &metrics, bounds).run()?;
        drop(closing);
        if drained { Ok(()) } else { Err(ServeError::Undrained) }
    })
}

/// Whatever ends the service, its workers must not wait for requests any more.
struct CloseOnDrop<'a, T>(&'a Queue<T>);

impl<T> Drop for CloseOnDrop<'_, T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn open_page(name: &str, serving: &Serving) -> Result<Page, ServeError> {
    let lanes = u32::try_from(serving.lanes.len()).unwrap_or(u32::MAX);
    match Service::open(name, lanes) {
        // The process publishes until it ends.
        Ok(service) => Ok(Page { service: Box::leak(Box::new(service)), lanes }),
        Err(error) => Err(ServeError::Page { name: name.to_owned(), error }),
    }
}

/// The slot of one request lane; nothing if nothing is published.
fn claim(
    serving: &Serving,
    page: Option<&Page>,
    lane: u32,
    cpu: usize,
) -> Result<Option<Slot<'static>>, ServeError> {
    let (Some(page), Some(name)) = (page, &serving.page) else { return Ok(None) };
    let claimed = page.service.claim(lane, u32::try_from(cpu).unwrap_or(u32::MAX));
    let failed = |error| ServeError::Claim { name: name.clone(), lane, error };
    claimed.map(Some).map_err(failed)
}
