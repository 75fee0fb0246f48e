//! Serves an index over HTTP: starts the threads, pins them, and ends them.

mod answer;
mod coordinator;
mod metrics;
mod queue;
mod worker;

use super::index::SearchIndex;
use crate::beside::kernel::{Batches, Kernel};
use crate::beside::{Lanes, Slowdown, Slowed};
use crate::process::{allow_connections, bind, pin};
pub(super) use coordinator::Bounds;
use coordinator::Coordinator;
use elfen_console::failure::{Failure, Status};
use elfen_rt::service::{Service, Worker as Slot};
use metrics::Metrics;
use queue::{Page, Queue};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread;
use tokio::net::TcpListener;
use worker::{Core, Lane};

#[derive(Clone)]
pub(super) struct Serving {
    pub(super) address: SocketAddr,
    /// The CPUs of the request lanes. Each has one worker.
    pub(super) lanes: Vec<usize>,
    pub(super) coordinator_cpu: Option<usize>,
    /// The name of the service page. If it is `None`, nothing is published.
    pub(super) page: Option<String>,
    pub(super) queue: usize,
    pub(super) bounds: Bounds,
    /// Queries that each worker runs once before it serves.
    pub(super) warmup: Vec<String>,
    pub(super) emulated: Option<Emulated>,
}

/// Request lanes that share emulated cores with batch lanes.
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

/// Serves until SIGTERM or SIGINT. `ready` receives the address once clients can connect.
pub(super) fn serve(
    index: &SearchIndex,
    serving: &Serving,
    ready: impl FnOnce(SocketAddr) -> io::Result<()>,
) -> Result<(), Failure> {
    allow_connections(serving.bounds.connections)?;
    let listener = bind(serving.address).map_err(|error| {
        let (what, fix) = (format!("listening at {}", serving.address), "choose a free address");
        Failure::new(Status::Failed, what, error, fix)
    })?;
    let page = serving.page.as_deref().map(|name| open_page(name, serving)).transpose()?;
    let queue = Arc::new(Queue::new(serving.queue, page.clone()));
    let slowdown = serving.emulated.as_ref().map(|emulated| emulated.slowdown);
    let metrics = Arc::new(Metrics::new(slowdown));
    thread::scope(|scope| {
        // When this function returns, on any path, the workers must stop waiting for requests.
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
                    // Invalid queries in the warm-up are ignored.
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
        let served = || -> io::Result<bool> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener)?;
                ready(listener.local_addr()?)?;
                Ok(Arc::new(coordinator).run(listener).await)
            })
        };
        let failed = |error| Failure::new(Status::Failed, "serving", error, "see `ulimit -n`");
        if served().map_err(failed)? {
            return Ok(());
        }
        let why = "some answers were not taken in time, and the clients were cut off";
        Err(Failure::new(Status::Failed, "draining", why, "use a longer --drain"))
    })
}

struct CloseOnDrop<'a, T>(&'a Queue<T>);

impl<T> Drop for CloseOnDrop<'_, T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn unpublished(what: String, why: impl fmt::Display) -> Failure {
    let fix = "end the other service, choose another --service-name, or --service-name ''";
    Failure::new(Status::Failed, what, why, fix)
}

fn open_page(name: &str, serving: &Serving) -> Result<Page, Failure> {
    let lanes = u32::try_from(serving.lanes.len()).unwrap_or(u32::MAX);
    match Service::open(name, lanes) {
        // The service is leaked because it publishes until the process ends.
        Ok(service) => Ok(Page { service: Box::leak(Box::new(service)), lanes }),
        Err(error) => Err(unpublished(format!("publishing as `{name}`"), error)),
    }
}

/// Claims the slot of one request lane; `None` if nothing is published.
fn claim(
    serving: &Serving,
    page: Option<&Page>,
    lane: u32,
    cpu: usize,
) -> Result<Option<Slot<'static>>, Failure> {
    let (Some(page), Some(name)) = (page, &serving.page) else { return Ok(None) };
    let claimed = page.service.claim(lane, u32::try_from(cpu).unwrap_or(u32::MAX));
    let what = || format!("publishing lane {lane} as `{name}`");
    claimed.map(Some).map_err(|error| unpublished(what(), error))
}
