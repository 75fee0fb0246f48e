//! Can the account be trusted here? A service of our own under load is hurt in known ways, and what
//! its requests are charged is held against the injectors' own clocks.

mod ask;
pub mod flood;
pub mod inject;
mod jvm;
mod score;
pub mod server;
mod steal;
pub mod storage;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_host::affinity;
use elfen_kernel::events::{Detail, Error};
use elfen_rt::signal::event::Words;
use elfen_tailor::tale::{Function, Gap, Lent, Named, Tale};

use crate::recorder::{LOOK_EVERY, Recorder, Sink};
use crate::service::{Service, Which};
use ask::Asker;
use flood::Flood;
use inject::{Hog, Injured, Stop};
use jvm::Java;
use score::{Injuries, score};
use server::Served;
use storage::PageOut;

pub use score::{Checked, Kind, Missed, Score};
pub use steal::Stolen;

/// How a check is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub kinds: Vec<Kind>,
    /// Of each kind.
    pub injections: u32,
    pub requests_a_second: u32,
    pub last: Duration,
    pub every: Duration,
}

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

const CLIENTS: usize = 8;
/// Who ask at once.
const CROWD: usize = 60;
/// Work of a request, in microseconds.
const WORK_US: u64 = 200;
/// The load is what it will be, and the account has a middle.
const SETTLED: Duration = Duration::from_millis(500);
/// Whoever was hurt has his answer.
const OVER: Duration = Duration::from_millis(200);

struct Kept(Tale);

impl Sink for Kept {
    fn events(&mut self, cpu: u32, events: &[Words]) -> io::Result<()> {
        self.0.add(cpu, events);
        Ok(())
    }

    fn gap(&mut self, gap: Gap) -> io::Result<()> {
        self.0.gaps.push(gap);
        Ok(())
    }

    fn marks(&mut self, lane: u32, marks: &[Words]) -> io::Result<()> {
        self.0.mark(lane, marks);
        Ok(())
    }

    fn functions(&mut self, found: Vec<Function>) -> io::Result<()> {
        self.0.learn(found);
        Ok(())
    }

    fn batches(&mut self, lent: Vec<Lent>) -> io::Result<()> {
        self.0.lend(lent);
        Ok(())
    }

    fn names(&mut self, names: Vec<Named>, processes: &[u32]) -> io::Result<()> {
        self.0.name(names, processes);
        Ok(())
    }
}

/// Runs services, hurts them, and scores the account.
pub fn check(plan: &Plan) -> Result<Checked, Failed> {
    let cpus: Vec<u32> = affinity::allowed()?.iter().collect();
    let [cpu, other, ..] = cpus[..] else { return Err(Failed::OneCpu) };
    let mut all = Checked {
        requests: 0,
        complete: 0,
        lost_events: 0,
        scores: Vec::new(),
        left_out: Vec::new(),
        stolen: Stolen::default(),
        holds: true,
    };
    let of = |wanted: &dyn Fn(Kind) -> bool| -> Vec<Kind> {
        plan.kinds.iter().copied().filter(|kind| wanted(*kind)).collect()
    };
    // Packets are seen in full detail alone, in which each request has some; and who is above all
    // others shares its CPU with no rival.
    let apart = [Kind::Softirq, Kind::Rival, Kind::Gc];
    let hurts = [
        (of(&|kind| !apart.contains(&kind)), Detail::Sched, false),
        (of(&|kind| kind == Kind::Rival), Detail::Sched, true),
        (of(&|kind| kind == Kind::Softirq), Detail::Full, false),
    ];
    // Everything but the services and their hogs stays off the services' CPU.
    affinity::pin(other)?;
    for (kinds, detail, ordinary) in hurts.into_iter().filter(|(kinds, ..)| !kinds.is_empty()) {
        let (times, served) = (Plan { kinds, ..plan.clone() }, Served::start(cpu, ordinary)?);
        let port = served.port;
        let hurt = move |served: &mut Served| hurt(&times, served, port, cpu);
        all.add(recorded((served, port, cpu), detail, plan, hurt)?);
    }
    if plan.kinds.contains(&Kind::Gc) {
        match Java::start(cpu) {
            Ok(java) => {
                let (port, times) = (java.port, plan.clone());
                let hurt = move |java: &mut Java| collect(&times, java, port);
                all.add(recorded((java, port, cpu), Detail::Sched, plan, hurt)?);
            }
            Err(error) => all.left_out.push(format!("gc: starting java: {error}")),
        }
    }
    // Nothing that was held is nothing that holds.
    all.holds &= !all.scores.is_empty();
    Ok(all)
}

/// Records a service under load while it is hurt, and scores its account.
fn recorded<S: Send + 'static>(
    (mut served, port, cpu): (S, u16, u32),
    detail: Detail,
    plan: &Plan,
    hurt: impl FnOnce(&mut S) -> io::Result<Injuries> + Send + 'static,
) -> Result<Checked, Failed> {
    let service = Service::find(Which::Port(port))
        .map_err(|_| io::Error::other("the service that was started listens no more"))?;
    let mut recorder = Recorder::attach(service, detail, 65_536).map_err(Failed::Events)?;
    let mut kept = Kept(Tale::begin(recorder.head(detail)));
    recorder.refresh(&mut kept)?;
    let stolen_ns = steal::by_kernel_ns(cpu);
    let ends = Arc::new(AtomicBool::new(false));
    let (load, over) = (load(port, plan.requests_a_second, &ends)?, Arc::clone(&ends));
    let hurting = std::thread::spawn(move || {
        let injured = hurt(&mut served);
        over.store(true, Relaxed);
        (injured, served)
    });
    while !ends.load(Relaxed) {
        std::thread::sleep(LOOK_EVERY);
        recorder.look(&mut kept)?;
    }
    let joined = hurting.join().map_err(|_| io::Error::other("the injector failed"))?;
    let (injured, _served) = joined;
    let injured = injured?;
    for client in load {
        client.join().map_err(|_| io::Error::other("a client failed"))??;
    }
    recorder.look(&mut kept)?;
    recorder.refresh(&mut kept)?;
    let stolen = Stolen::since(stolen_ns, cpu, &kept.0);
    Ok(Checked { stolen, ..score(&kept.0, &injured, plan.injections as usize) })
}

/// Has a service in Java collect its heap while it works for a request.
fn collect(plan: &Plan, java: &mut Java, port: u16) -> io::Result<Injuries> {
    let (mut asker, mut other) = (Asker::connect(port)?, Asker::connect(port)?);
    std::thread::sleep(SETTLED);
    for _ in 0..plan.injections {
        std::thread::sleep(plan.every.saturating_sub(plan.last));
        std::thread::scope(|scope| {
            let spins = scope.spawn(|| asker.spin(plan.last));
            std::thread::sleep(plan.last / 5);
            other.collect()?;
            spins.join().map_err(|_| io::Error::other("a client failed"))?
        })?;
    }
    std::thread::sleep(OVER);
    Ok([(Kind::Gc, java.collections())].into())
}

fn hurt(plan: &Plan, served: &mut Served, port: u16, cpu: u32) -> io::Result<Injuries> {
    let (stop, page_out) = (Stop::new(served.id())?, PageOut::new(served.id())?);
    let mut asker = Asker::connect(port)?;
    let mut crowd = Vec::new();
    if plan.kinds.contains(&Kind::Burst) {
        crowd = (0..CROWD).map(|_| Asker::connect(port)).collect::<io::Result<_>>()?;
    }
    let mut all = Injuries::new();
    std::thread::sleep(SETTLED);
    for _ in 0..plan.injections {
        for &kind in &plan.kinds {
            std::thread::sleep(plan.every.saturating_sub(plan.last));
            let injured = match kind {
                Kind::Stop => vec![stop.hurt(plan.last)?],
                Kind::Hog => Hog::new(cpu).hurt(plan.last)?,
                Kind::Rival => Hog::rival(cpu).hurt(plan.last)?,
                Kind::Lock => vec![served.hold_lock(plan.last)?],
                Kind::Long => vec![asker.long(plan.last)?],
                Kind::Io => {
                    page_out.hurt()?;
                    vec![asker.read()?]
                }
                Kind::Burst => ask::at_once(&mut crowd, WORK_US)?,
                Kind::Softirq => vec![spread(cpu, || asker.spin(plan.last))?],
                // Another service's.
                Kind::Gc => Vec::new(),
                // Who has asked before is a client that answers at once, of which TCP waits for
                // no more.
                Kind::Nagle => vec![Asker::connect(port)?.pieces()?],
            };
            all.entry(kind).or_default().extend(injured);
        }
    }
    std::thread::sleep(OVER);
    Ok(all)
}

/// Has the kernel work on a CPU while something is asked there.
fn spread(cpu: u32, ask: impl FnOnce() -> io::Result<Injured>) -> io::Result<Injured> {
    let (flood, ends) = (Flood::new(cpu)?, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let spreads = scope.spawn(|| flood.spread(&ends));
        let asked = ask();
        ends.store(true, Relaxed);
        spreads.join().map_err(|_| io::Error::other("the flood failed"))??;
        asked
    })
}

type Client = std::thread::JoinHandle<io::Result<()>>;

/// Clients that each ask at fixed times, whatever becomes of their last request.
fn load(port: u16, rate: u32, ends: &Arc<AtomicBool>) -> io::Result<Vec<Client>> {
    let every = Duration::from_secs(1) * u32::try_from(CLIENTS).unwrap_or(1) / rate.max(1);
    let client = |number: usize| {
        let ends = Arc::clone(ends);
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let shift = every * u32::try_from(number).unwrap_or(0) / 8;
        Ok(std::thread::spawn(move || {
            let mut next = Instant::now() + shift;
            while !ends.load(Relaxed) {
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
                next = (next + every).max(Instant::now());
                stream.write_all(format!("{WORK_US}\n").as_bytes())?;
                let mut answer = [0; 5];
                stream.read_exact(&mut answer)?;
            }
            Ok(())
        }))
    };
    (0..CLIENTS).map(client).collect()
}
