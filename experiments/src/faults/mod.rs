//! Tests whether the explanation can be trusted on this machine. Injectors put known faults into a
//! service of our own under load; the time charged is compared with the injectors' own clocks.

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

use elfen_kernel::events::Detail;
use elfen_machine::affinity;

use client::InjectorClient;
use flood::Flood;
use inject::{Hog, Injection, Stop};
use jvm::Java;
use load::{Load, WORK_US};
use page_out::PageOut;
use recording::{Recording, Subject, record_while};
use score::{Injections, score};
use server::ServiceProcess;

pub use recording::CheckError;
pub use score::{CheckReport, InjectedCause, Mismatch, Score};
pub use steal::Stolen;

/// How a check runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub kinds: Vec<InjectedCause>,
    /// For each kind.
    pub injections: u32,
    pub requests_a_second: u32,
    pub last: Duration,
    pub every: Duration,
}

/// Clients of a burst.
const BURST_CLIENTS: usize = 60;
/// How many classes a new service in Java loads; that takes some tens of milliseconds.
const CLASSES: u32 = 150;
/// Time until the load is steady, and the trace has ordinary requests.
const SETTLED: Duration = Duration::from_millis(500);
/// Time until all affected requests are answered.
const ANSWERED: Duration = Duration::from_millis(200);

/// Picks the CPU of the services. From now on only they and their hogs run there.
fn reserve_cpu() -> Result<u32, CheckError> {
    let cpus: Vec<u32> = affinity::allowed()?.iter().collect();
    let [cpu, other, ..] = cpus[..] else { return Err(CheckError::OneCpu) };
    affinity::pin(other)?;
    Ok(cpu)
}

/// Runs services, injects faults, and scores the explanation.
pub fn check(plan: &Plan) -> Result<CheckReport, CheckError> {
    let cpu = reserve_cpu()?;
    let mut all = CheckReport::default();
    let of = |wanted: &dyn Fn(InjectedCause) -> bool| -> Vec<InjectedCause> {
        plan.kinds.iter().copied().filter(|kind| wanted(*kind)).collect()
    };
    // Packets show only in full detail, in which each request has some. A service at a real-time
    // priority shares its CPU with no rival.
    let runs = [
        (of(&|kind| kind.works_on_any_service()), Detail::Sched, false),
        (of(&|kind| kind == InjectedCause::Rival), Detail::Sched, true),
        (of(&|kind| kind == InjectedCause::Softirq), Detail::Full, false),
    ];
    for (kinds, detail, ordinary) in runs.into_iter().filter(|(kinds, ..)| !kinds.is_empty()) {
        let service = ServiceProcess::start(cpu, ordinary, 1)?;
        let times = Plan { kinds, ..plan.clone() };
        let port = service.port;
        let act = move |service: &mut ServiceProcess| inject_all(&times, service, port, cpu);
        all.add(score_recording(Subject { service, port, cpu }, detail, plan, act)?);
    }
    for kind in of(&|kind| matches!(kind, InjectedCause::Gc | InjectedCause::Fresh)) {
        // A service is new only for a single request.
        let (machines, injections) = match kind {
            InjectedCause::Fresh => (plan.injections, 1),
            _ => (1, plan.injections),
        };
        let times = Plan { injections, ..plan.clone() };
        for _ in 0..machines {
            match Java::start(cpu, kind == InjectedCause::Fresh) {
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

/// Records a service under load without faults: returns the time stolen meanwhile.
pub fn stolen(time: Duration, requests_a_second: u32) -> Result<Stolen, CheckError> {
    let cpu = reserve_cpu()?;
    let service = ServiceProcess::start(cpu, false, 1)?;
    let port = service.port;
    let wait = move |_: &mut ServiceProcess| {
        std::thread::sleep(time);
        Ok(())
    };
    let subject = Subject { service, port, cpu };
    Ok(record_while(subject, Detail::Sched, Load::even(requests_a_second), wait)?.stolen)
}

/// Records a service with faults, and scores the explanation.
fn score_recording<S: Send + 'static>(
    subject: Subject<S>,
    detail: Detail,
    plan: &Plan,
    act: impl FnOnce(&mut S) -> io::Result<Injections> + Send + 'static,
) -> Result<CheckReport, CheckError> {
    let Recording { trace, stolen, done, .. } =
        record_while(subject, detail, Load::even(plan.requests_a_second), act)?;
    Ok(CheckReport { stolen, ..score(&trace, &done, plan.injections as usize) })
}

fn in_java(
    java: Java,
    cpu: u32,
    kind: InjectedCause,
    plan: &Plan,
) -> Result<CheckReport, CheckError> {
    let port = java.port;
    let times = plan.clone();
    let act = move |java: &mut Java| match kind {
        InjectedCause::Fresh => load_classes(port),
        _ => collect_garbage(&times, java, port),
    };
    score_recording(Subject { service: java, port, cpu }, Detail::Sched, plan, act)
}

/// Sends a new service in Java a request that loads classes for the first time.
fn load_classes(port: u16) -> io::Result<Injections> {
    let mut client = InjectorClient::connect(port)?;
    std::thread::sleep(SETTLED);
    let loaded = client.load(CLASSES)?;
    std::thread::sleep(ANSWERED);
    Ok([(InjectedCause::Fresh, vec![loaded])].into())
}

/// Has a service in Java collect its heap while it works for a request.
fn collect_garbage(plan: &Plan, java: &mut Java, port: u16) -> io::Result<Injections> {
    let mut client = InjectorClient::connect(port)?;
    let mut other = InjectorClient::connect(port)?;
    std::thread::sleep(SETTLED);
    for _ in 0..plan.injections {
        std::thread::sleep(plan.every.saturating_sub(plan.last));
        std::thread::scope(|scope| {
            let spinning = scope.spawn(|| client.spin(plan.last));
            std::thread::sleep(plan.last / 5);
            other.collect()?;
            spinning.join().map_err(|_| io::Error::other("a client failed"))?
        })?;
    }
    std::thread::sleep(ANSWERED);
    Ok([(InjectedCause::Gc, java.collections())].into())
}

fn inject_all(
    plan: &Plan,
    service: &mut ServiceProcess,
    port: u16,
    cpu: u32,
) -> io::Result<Injections> {
    let stop = Stop::new(service.id())?;
    let page_out = PageOut::new(service.id())?;
    let mut client = InjectorClient::connect(port)?;
    let mut crowd = Vec::new();
    if plan.kinds.contains(&InjectedCause::Burst) {
        crowd =
            (0..BURST_CLIENTS).map(|_| InjectorClient::connect(port)).collect::<io::Result<_>>()?;
    }
    let mut all = Injections::new();
    std::thread::sleep(SETTLED);
    for _ in 0..plan.injections {
        for &kind in &plan.kinds {
            std::thread::sleep(plan.every.saturating_sub(plan.last));
            let injections = match kind {
                InjectedCause::Stop => vec![stop.inject(plan.last)?],
                InjectedCause::Hog => Hog::new(cpu).inject(plan.last)?,
                InjectedCause::Rival => Hog::rival(cpu).inject(plan.last)?,
                InjectedCause::Lock => vec![service.hold_lock(plan.last)?],
                InjectedCause::Long => vec![client.long(plan.last)?],
                InjectedCause::Io => {
                    page_out.inject()?;
                    vec![client.read()?]
                }
                InjectedCause::Burst => client::send_burst(&mut crowd, WORK_US)?,
                InjectedCause::Softirq => vec![flood_while(cpu, || client.spin(plan.last))?],
                // These have services of their own.
                InjectedCause::Gc | InjectedCause::Fresh => Vec::new(),
                // A new connection each time: once a client has answered at once, TCP does not
                // delay on its connection any more.
                InjectedCause::Nagle => vec![InjectorClient::connect(port)?.pieces()?],
            };
            all.entry(kind).or_default().extend(injections);
        }
    }
    std::thread::sleep(ANSWERED);
    Ok(all)
}

/// Floods a CPU with packets while `ask` sends a request.
fn flood_while(cpu: u32, ask: impl FnOnce() -> io::Result<Injection>) -> io::Result<Injection> {
    let flood = Flood::new(cpu)?;
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flooding = scope.spawn(|| flood.send_until(&ends));
        let sent = ask();
        ends.store(true, Relaxed);
        flooding.join().map_err(|_| io::Error::other("the flood failed"))??;
        sent
    })
}
