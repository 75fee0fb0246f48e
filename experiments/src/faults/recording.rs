//! Records a service under load while faults are injected.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use elfen_kernel::events::{Detail, Error};
use elfen_rt::signal::event::Words;
use elfen_tailor::trace::{BatchThread, Gap, KernelFunction, ThreadName, Trace};

use super::load::Load;
use super::steal::{self, Stolen};
use elfen_tailor::recorder::{POLL_INTERVAL, Recorder, Sink};
use elfen_tailor::service::{Service, ServiceSelector};

#[derive(Debug)]
pub enum CheckError {
    Events(Error),
    /// The service and its injectors need a CPU each.
    OneCpu,
    Io(io::Error),
}

impl From<io::Error> for CheckError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A service, its port, and the CPU that it runs on.
#[derive(Debug)]
pub(super) struct Subject<S> {
    pub(super) service: S,
    pub(super) port: u16,
    pub(super) cpu: u32,
}

/// The result of a recording, and the service, which continues.
pub(super) struct Recording<S, T> {
    pub(super) trace: Trace,
    pub(super) stolen: Stolen,
    /// What `act` returned.
    pub(super) done: T,
    pub(super) subject: Subject<S>,
}

struct MemorySink(Trace);

impl Sink for MemorySink {
    fn events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()> {
        self.0.add_events(cpu, events);
        Ok(())
    }

    fn gap(&mut self, gap: Gap) -> io::Result<()> {
        self.0.gaps.push(gap);
        Ok(())
    }

    fn marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()> {
        self.0.add_marks(lane, marks);
        Ok(())
    }

    fn functions(&mut self, found: Vec<KernelFunction>) -> io::Result<()> {
        self.0.add_functions(found);
        Ok(())
    }

    fn batches(&mut self, threads: Vec<BatchThread>) -> io::Result<()> {
        self.0.add_batch_threads(threads);
        Ok(())
    }

    fn names(&mut self, names: Vec<ThreadName>, processes: &[u32]) -> io::Result<()> {
        self.0.add_names(names, processes);
        Ok(())
    }
}

/// Records a service under load until `act` returns.
pub(super) fn record_while<S: Send + 'static, T: Send + 'static>(
    subject: Subject<S>,
    detail: Detail,
    load: Load,
    act: impl FnOnce(&mut S) -> io::Result<T> + Send + 'static,
) -> Result<Recording<S, T>, CheckError> {
    let Subject { mut service, port, cpu } = subject;
    let target = Service::find(ServiceSelector::Port(port))
        .map_err(|_| io::Error::other("the service that was started does not listen any more"))?;
    let mut recorder = Recorder::attach(target, detail, 65_536).map_err(CheckError::Events)?;
    let mut sink = MemorySink(Trace::new(recorder.head(detail)));
    recorder.refresh(&mut sink)?;
    let stolen_ns = steal::by_kernel_ns(cpu);
    let ends = Arc::new(AtomicBool::new(false));
    let clients = load.start(port, &ends)?;
    let over = Arc::clone(&ends);
    let injector = std::thread::spawn(move || {
        let done = act(&mut service);
        over.store(true, Relaxed);
        (done, service)
    });
    while !ends.load(Relaxed) {
        std::thread::sleep(POLL_INTERVAL);
        recorder.poll(&mut sink)?;
    }
    let (done, service) = injector.join().map_err(|_| io::Error::other("the injector failed"))?;
    let done = done?;
    for client in clients {
        client.join().map_err(|_| io::Error::other("a client failed"))??;
    }
    recorder.poll(&mut sink)?;
    recorder.refresh(&mut sink)?;
    let stolen = Stolen::since(stolen_ns, cpu, &sink.0);
    Ok(Recording { trace: sink.0, stolen, done, subject: Subject { service, port, cpu } })
}
