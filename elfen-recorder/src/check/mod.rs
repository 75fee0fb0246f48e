//! Can the account be trusted here? A service of our own under load is hurt in known ways, and what
//! its requests are charged is held against the injectors' own clocks.

mod client;
pub mod flood;
pub mod inject;
mod jvm;
mod load;
pub mod page_out;
mod recording;
mod score;
pub mod server;
mod steal;
pub mod whatif;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use elfen_host::affinity;
use elfen_kernel::events::Detail;

use client::Asker;
use flood::Flood;
use inject::{Hog, Injured, Stop};
use jvm::Java;
use load::{Load, WORK_US};
use page_out::PageOut;
use recording::{Recorded, Subject, recorded};
use score::{Injuries, score};
use server::Served;

pub use recording::Failed;
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

/// Who ask at once.
const CROWD: usize = 60;
/// That a new service in Java has to load, some tens of milliseconds' worth.
const CLASSES: u32 = 150;
/// The load is what it will be, and the account has a middle.
const SETTLED: Duration = Duration::from_millis(500);
/// Whoever was hurt has his answer.
const OVER: Duration = Duration::from_millis(200);

/// The services' CPU; everything but them and their hogs stays off it from now on.
fn stage() -> Result<u32, Failed> {
    let cpus: Vec<u32> = affinity::allowed()?.iter().collect();
    let [cpu, other, ..] = cpus[..] else { return Err(Failed::OneCpu) };
    affinity::pin(other)?;
    Ok(cpu)
}

/// Runs services, hurts them, and scores the account.
pub fn check(plan: &Plan) -> Result<Checked, Failed> {
    let cpu = stage()?;
    let mut all = Checked::default();
    let of = |wanted: &dyn Fn(Kind) -> bool| -> Vec<Kind> {
        plan.kinds.iter().copied().filter(|kind| wanted(*kind)).collect()
    };
    // Packets are seen in full detail alone, in which each request has some; and who is above all
    // others shares its CPU with no rival.
    let hurts = [
        (of(&|kind| kind.is_of_any()), Detail::Sched, false),
        (of(&|kind| kind == Kind::Rival), Detail::Sched, true),
        (of(&|kind| kind == Kind::Softirq), Detail::Full, false),
    ];
    for (kinds, detail, ordinary) in hurts.into_iter().filter(|(kinds, ..)| !kinds.is_empty()) {
        let served = Served::start(cpu, ordinary, 1)?;
        let (times, port) = (Plan { kinds, ..plan.clone() }, served.port);
        let hurt = move |served: &mut Served| hurt(&times, served, port, cpu);
        all.add(scored(Subject { served, port, cpu }, detail, plan, hurt)?);
    }
    for kind in of(&|kind| matches!(kind, Kind::Gc | Kind::Fresh)) {
        // One that is new is so for a single request.
        let (machines, injections) = match kind {
            Kind::Fresh => (plan.injections, 1),
            _ => (1, plan.injections),
        };
        let times = Plan { injections, ..plan.clone() };
        for _ in 0..machines {
            match Java::start(cpu, kind == Kind::Fresh) {
                Ok(java) => all.add(in_java(java, cpu, kind, &times)?),
                Err(error) => {
                    all.left_out.push(format!("{}: starting java: {error}", kind.name()));
                    break;
                }
            }
        }
    }
    all.judge();
    Ok(all)
}

/// Records a service under load for a while, and nothing else: what was stolen meanwhile.
pub fn stolen(time: Duration, requests_a_second: u32) -> Result<Stolen, Failed> {
    let cpu = stage()?;
    let served = Served::start(cpu, false, 1)?;
    let port = served.port;
    let waits = move |_: &mut Served| {
        std::thread::sleep(time);
        Ok(())
    };
    let subject = Subject { served, port, cpu };
    Ok(recorded(subject, Detail::Sched, Load::even(requests_a_second), waits)?.stolen)
}

/// Records a service while it is hurt, and scores its account.
fn scored<S: Send + 'static>(
    subject: Subject<S>,
    detail: Detail,
    plan: &Plan,
    hurt: impl FnOnce(&mut S) -> io::Result<Injuries> + Send + 'static,
) -> Result<Checked, Failed> {
    let Recorded { trace, stolen, done, .. } =
        recorded(subject, detail, Load::even(plan.requests_a_second), hurt)?;
    Ok(Checked { stolen, ..score(&trace, &done, plan.injections as usize) })
}

fn in_java(java: Java, cpu: u32, kind: Kind, plan: &Plan) -> Result<Checked, Failed> {
    let (port, times) = (java.port, plan.clone());
    let hurt = move |java: &mut Java| match kind {
        Kind::Fresh => begin(port),
        _ => collect(&times, java, port),
    };
    scored(Subject { served: java, port, cpu }, Detail::Sched, plan, hurt)
}

/// Asks a service in Java that has just begun for what takes classes that nobody has asked for.
fn begin(port: u16) -> io::Result<Injuries> {
    let mut asker = Asker::connect(port)?;
    std::thread::sleep(SETTLED);
    let loaded = asker.load(CLASSES)?;
    std::thread::sleep(OVER);
    Ok([(Kind::Fresh, vec![loaded])].into())
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
                Kind::Burst => client::at_once(&mut crowd, WORK_US)?,
                Kind::Softirq => vec![spread(cpu, || asker.spin(plan.last))?],
                // Another service's.
                Kind::Gc | Kind::Fresh => Vec::new(),
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
