//! Serving an index over HTTP: the threads, where they run, and how they end.

mod coordinator;
mod http1;
mod metrics;
mod queue;
mod worker;

use super::index::SearchIndex;
use crate::beside::kernel::{Batches, Kernel};
use crate::beside::{Lanes, Slowdown, Slowed};
use crate::process::{PinError, TooMany, allow_connections, bind, pin};
pub(super) use coordinator::Bounds;
use coordinator::Coordinator;
use elfen_rt::service::{ClaimError, Service, Worker as Slot};
use elfen_rt::signal::service::OpenError;
use metrics::Metrics;
use queue::{Page, Queue};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread;
use thiserror::Error;
use tokio::net::TcpListener;
use worker::{Core, Lane};

#[derive(Clone)]
pub(super) struct Serving {
    pub(super) address: SocketAddr,
    /// The CPU of each request lane; one worker each.
    pub(super) lanes: Vec<usize>,
    pub(super) coordinator_cpu: Option<usize>,
    /// The name of the service page; `None` publishes nothing.
    pub(super) page: Option<String>,
    pub(super) queue: usize,
    pub(super) bounds: Bounds,
    /// Asked once by each worker before it serves.
    pub(super) warmup: Vec<String>,
    pub(super) emulated: Option<Emulated>,
}

/// Request lanes that are taken to share cores with their batch lanes.
#[derive(Clone)]
pub(super) struct Emulated {
    pub(super) slowdown: Slowdown,
    pub(super) lanes: Lanes,
    pub(super) kernel: Arc<Kernel>,
}

impl Emulated {
    fn core(&self, cpu: usize) -> Core {
        let batch = u32::try_from(cpu).map(|request| self.lanes.batches_of(request));
        Slowed::new(self.slowdown, Batches::new(self.kernel.clone(), &batch.unwrap_or_default()))
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
    allow_connections(serving.bounds.connections)?;
    let listener = bind(address).map_err(listen)?;
    let page = serving.page.as_deref().map(|name| open_page(name, serving)).transpose()?;
    let queue = Arc::new(Queue::new(serving.queue, page.clone()));
    let slowdown = serving.emulated.as_ref().map(|emulated| emulated.slowdown);
    let metrics = Arc::new(Metrics::new(slowdown));
    thread::scope(|scope| {
        // Whatever ends the service, its workers must not wait for requests any more.
        let _closing = CloseOnDrop(&queue);
        for (lane, &cpu) in (0..).zip(&serving.lanes) {
            let slot = claim(serving, page.as_ref(), lane, cpu)?;
            let (queue, metrics) = (&queue, &metrics);
            let mut seeker = index.seeker();
            let core = serving.emulated.as_ref().map(|emulated| emulated.core(cpu));
            let (started, start) = mpsc::channel();
            scope.spawn(move || {
                let pinned = pin(cpu);
                let failed = pinned.is_err();
                for query in serving.warmup.iter().filter(|_| !failed) {
                    // Whether a query of the warm-up is good is not asked here.
                    drop(seeker.search(query, 10, None));
                }
                started.send(pinned).expect("`serve` waits for it");
                if !failed {
                    worker::work(queue, metrics, &mut seeker, Lane { slot, core });
                }
            });
            start.recv().expect("each worker says whether it started")?;
        }
        if let Some(cpu) = serving.coordinator_cpu {
            pin(cpu)?;
        }
        let coordinator = Coordinator {
            queue: Arc::clone(&queue),
            metrics: Arc::clone(&metrics),
            bounds: serving.bounds,
            last_request: AtomicU64::new(0),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let drained = runtime.block_on(async {
            let listener = TcpListener::from_std(listener)?;
            ready(listener.local_addr()?)?;
            io::Result::Ok(Arc::new(coordinator).run(listener).await)
        })?;
        if drained { Ok(()) } else { Err(ServeError::Undrained) }
    })
}

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
