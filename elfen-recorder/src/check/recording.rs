//! A service under load, recorded while something is done to it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use elfen_kernel::events::{Detail, Error};
use elfen_rt::signal::event::Words;
use elfen_tailor::trace::{BatchThread, Gap, KernelFunction, ThreadName, Trace};

use super::load::Load;
use super::steal::{self, Stolen};
use crate::recorder::{LOOK_EVERY, Recorder, Sink};
use crate::service::{Service, Which};

#[derive(Debug)]
pub enum Failed {
    Events(Error),
    /// The service and its injectors need a CPU each.
    OneCpu,
    Io(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What is recorded: a service, where it listens, and the CPU that it runs on.
#[derive(Debug)]
pub(super) struct Subject<S> {
    pub(super) served: S,
    pub(super) port: u16,
    pub(super) cpu: u32,
}

/// What became of it, and the service, which goes on.
pub(super) struct Recorded<S, T> {
    pub(super) trace: Trace,
    pub(super) stolen: Stolen,
    /// What whoever did something to it says.
    pub(super) done: T,
    pub(super) subject: Subject<S>,
}

struct Kept(Trace);

impl Sink for Kept {
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

    fn batches(&mut self, lent: Vec<BatchThread>) -> io::Result<()> {
        self.0.add_batch_threads(lent);
        Ok(())
    }

    fn names(&mut self, names: Vec<ThreadName>, processes: &[u32]) -> io::Result<()> {
        self.0.add_names(names, processes);
        Ok(())
    }
}

/// Records a service under load, until what is done to it is done.
pub(super) fn recorded<S: Send + 'static, T: Send + 'static>(
    subject: Subject<S>,
    detail: Detail,
    asks: Load,
    act: impl FnOnce(&mut S) -> io::Result<T> + Send + 'static,
) -> Result<Recorded<S, T>, Failed> {
    let Subject { mut served, port, cpu } = subject;
    let service = Service::find(Which::Port(port))
        .map_err(|_| io::Error::other("the service that was started listens no more"))?;
    let mut recorder = Recorder::attach(service, detail, 65_536).map_err(Failed::Events)?;
    let mut kept = Kept(Trace::new(recorder.head(detail)));
    recorder.refresh(&mut kept)?;
    let stolen_ns = steal::by_kernel_ns(cpu);
    let ends = Arc::new(AtomicBool::new(false));
    let (load, over) = (asks.begin(port, &ends)?, Arc::clone(&ends));
    let acting = std::thread::spawn(move || {
        let done = act(&mut served);
        over.store(true, Relaxed);
        (done, served)
    });
    while !ends.load(Relaxed) {
        std::thread::sleep(LOOK_EVERY);
        recorder.look(&mut kept)?;
    }
    let (done, served) = acting.join().map_err(|_| io::Error::other("the injector failed"))?;
    let done = done?;
    for client in load {
        client.join().map_err(|_| io::Error::other("a client failed"))??;
    }
    recorder.look(&mut kept)?;
    recorder.refresh(&mut kept)?;
    let stolen = Stolen::since(stolen_ns, cpu, &kept.0);
    Ok(Recorded { trace: kept.0, stolen, done, subject: Subject { served, port, cpu } })
}
