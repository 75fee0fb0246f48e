//! Tests whether Tailor's explanations are right on this machine. Injectors put known faults into a
//! test service under load. The time that Tailor charges to each fault is compared with the
//! injectors' own clocks.
//!
//! | file | what it has |
//! | --- | --- |
//! | this one | the table of faults, and the check |
//! | `injectors` | faults in any process |
//! | `client` | requests that are faults |
//! | `service`, `server` | the services, and the program that most of them run |
//! | `recording` | records a service under load |
//! | `score` | compares charged time with injected time |
//! | `whatif` | compares predictions without a cause with recordings without it |

mod client;
pub mod injectors;
mod recording;
mod score;
pub mod server;
mod service;
pub mod whatif;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use elfen_kernel::events::Detail;
use elfen_machine::affinity;
use elfen_tailor::segment::{BURST, LONG};

use client::InjectorClient;
use injectors::{Flood, Hog, Injection, PageOut, Stop};
use recording::{Load, WORK_US, record_while};
use score::{Injected, score};
use service::{ServiceKind, TestService};

pub use recording::{CheckError, Stolen};
pub use score::{CheckReport, Mismatch, Score};

/// Puts a fault of a length into a service, and returns when the fault had an effect.
type Injector = Box<dyn FnMut(&mut TestService, Duration) -> io::Result<Vec<Injection>>>;

/// A fault that is injected into a test service.
#[derive(Debug)]
pub struct Fault {
    pub name: &'static str,
    /// The cause to which the explanation has to charge the fault.
    cause: &'static str,
    /// The cause that a prediction without the fault removes.
    removed: &'static str,
    service: ServiceKind,
    start: fn(&TestService) -> io::Result<Injector>,
}

impl Fault {
    /// Whether the p99 without this fault can be predicted. This is done only for faults of the
    /// real-time service.
    pub fn is_predictable(&self) -> bool {
        self.service == ServiceKind::Realtime
    }

    const fn new(
        name: &'static str,
        cause: &'static str,
        service: ServiceKind,
        start: fn(&TestService) -> io::Result<Injector>,
    ) -> Self {
        Self { name, cause, removed: cause, service, start }
    }
}

/// All faults, in the order in which they are injected.
pub static FAULTS: [Fault; 11] = [
    Fault::new("stop", "stopped", ServiceKind::Realtime, |service| {
        let stop = Stop::new(service.id())?;
        Ok(Box::new(move |_, length| stop.inject(length)))
    }),
    Fault::new("hog", "preempted:elfen-hog", ServiceKind::Realtime, |_| {
        Ok(Box::new(|service, length| Hog::new(service.cpu).inject(length)))
    }),
    Fault::new("rival", "preempted:elfen-rival", ServiceKind::Ordinary, |_| {
        Ok(Box::new(|service, length| Hog::rival(service.cpu).inject(length)))
    }),
    Fault::new("lock", "lock:elfen-holder", ServiceKind::Realtime, |_| {
        Ok(Box::new(|service, length| Ok(vec![service.hold_lock(length)?])))
    }),
    Fault {
        removed: LONG,
        ..Fault::new("long", "work", ServiceKind::Realtime, |service| {
            let mut client = InjectorClient::connect(service.port)?;
            Ok(Box::new(move |_, length| Ok(vec![client.long(length)?])))
        })
    },
    Fault::new("io", "io:page-fault", ServiceKind::Realtime, |service| {
        let page_out = PageOut::new(service.id())?;
        let mut client = InjectorClient::connect(service.port)?;
        Ok(Box::new(move |_, _| {
            page_out.inject()?;
            Ok(vec![client.read()?])
        }))
    }),
    Fault {
        removed: BURST,
        ..Fault::new("burst", "queue", ServiceKind::Realtime, |service| {
            let clients = (0..BURST_CLIENTS).map(|_| InjectorClient::connect(service.port));
            let mut clients = clients.collect::<io::Result<Vec<_>>>()?;
            Ok(Box::new(move |_, _| client::send_burst(&mut clients, WORK_US)))
        })
    },
    Fault::new("nagle", "tcp-out", ServiceKind::Realtime, |_| {
        // Each fault needs a new connection. Once a client has answered immediately, TCP does not
        // delay packets on its connection any more.
        Ok(Box::new(|service, _| Ok(vec![InjectorClient::connect(service.port)?.pieces()?])))
    }),
    Fault::new("softirq", "softirq:NET_RX", ServiceKind::WithPackets, |service| {
        let mut client = InjectorClient::connect(service.port)?;
        Ok(Box::new(move |service, length| {
            Ok(vec![flood_while(service.cpu, || client.spin(length))?])
        }))
    }),
    Fault::new("gc", "gc", ServiceKind::Java, |service| {
        let mut client = InjectorClient::connect(service.port)?;
        let mut other = InjectorClient::connect(service.port)?;
        Ok(Box::new(move |service, length| {
            collect_garbage(&mut client, &mut other, length)?;
            // The JVM's log has the collections after this time.
            std::thread::sleep(LOGGED);
            Ok(service.collections())
        }))
    }),
    Fault::new("fresh", "classload", ServiceKind::FreshJava, |service| {
        let mut client = InjectorClient::connect(service.port)?;
        Ok(Box::new(move |_, _| Ok(vec![client.load(CLASSES)?])))
    }),
];

/// The parameters of a check.
#[derive(Clone, Debug)]
pub struct Plan {
    pub faults: Vec<&'static Fault>,
    /// The number of injections of each fault.
    pub runs: u32,
    pub requests_a_second: u32,
}

/// How long a fault lasts, and the time from the start of one fault to the start of the next.
const LENGTH: Duration = Duration::from_millis(15);
const EVERY: Duration = Duration::from_millis(150);
/// The number of clients that send a burst.
const BURST_CLIENTS: usize = 60;
/// The number of classes that a new service in Java loads, which takes some tens of milliseconds.
const CLASSES: u32 = 150;
/// The time after which the JVM's log has a collection.
const LOGGED: Duration = Duration::from_millis(50);
/// The time after which the load is steady and the trace has ordinary requests.
const SETTLED: Duration = Duration::from_millis(500);
/// The time after which all affected requests are answered.
const ANSWERED: Duration = Duration::from_millis(200);

/// Returns the CPU for the services, and moves this thread to another CPU. From now on, only the
/// services and their hogs run on the returned CPU.
fn reserve_cpu() -> Result<u32, CheckError> {
    let cpus: Vec<u32> = affinity::allowed()?.iter().collect();
    let [cpu, other, ..] = cpus[..] else { return Err(CheckError::OneCpu) };
    affinity::pin(other)?;
    Ok(cpu)
}

/// Runs the services, injects the faults, and scores the explanations.
pub fn check(plan: &Plan) -> Result<CheckReport, CheckError> {
    let cpu = reserve_cpu()?;
    let mut all = CheckReport::default();
    for kind in ServiceKind::ALL {
        let faults = plan.faults.iter().copied().filter(|fault| fault.service == kind);
        let faults: Vec<&'static Fault> = faults.collect();
        let (services, runs) = match kind {
            _ if faults.is_empty() => (0, 0),
            ServiceKind::FreshJava => (plan.runs, 1),
            _ => (1, plan.runs),
        };
        let plan = Plan { faults, runs, ..plan.clone() };
        for _ in 0..services {
            let mut service = match TestService::start(kind, cpu, 1) {
                Err(error) if kind.is_java() => {
                    let why = |fault: &&Fault| format!("{}: starting java: {error}", fault.name);
                    all.left_out.extend(plan.faults.iter().map(why));
                    break;
                }
                started => started?,
            };
            let act = |service: &mut TestService| plan.inject_all(service);
            let load = Load::even(plan.requests_a_second);
            let recorded = record_while(&mut service, kind.detail(), load, act)?;
            let scored = score(&recorded.trace, &recorded.done, runs as usize);
            all.add(CheckReport { stolen: recorded.stolen, ..scored });
        }
    }
    all.judge();
    Ok(all)
}

/// Records a service under load without faults, and returns the time that the hypervisor stole from
/// it.
pub fn stolen(time: Duration, requests_a_second: u32) -> Result<Stolen, CheckError> {
    let mut service = TestService::start(ServiceKind::Realtime, reserve_cpu()?, 1)?;
    let wait = |_: &mut TestService| {
        std::thread::sleep(time);
        Ok(())
    };
    Ok(record_while(&mut service, Detail::Sched, Load::even(requests_a_second), wait)?.stolen)
}

impl Plan {
    /// Injects the faults in turn, each as often as planned.
    fn inject_all(&self, service: &mut TestService) -> io::Result<Vec<Injected>> {
        let mut injectors = Vec::new();
        let mut all = Vec::<Injected>::new();
        for &fault in &self.faults {
            injectors.push((fault.start)(service)?);
            all.push((fault.name, fault.cause, Vec::new()));
        }
        std::thread::sleep(SETTLED);
        for _ in 0..self.runs {
            for (inject, (_, _, injections)) in injectors.iter_mut().zip(&mut all) {
                std::thread::sleep(EVERY.saturating_sub(LENGTH));
                injections.extend(inject(service, LENGTH)?);
            }
        }
        std::thread::sleep(ANSWERED);
        Ok(all)
    }
}

/// Makes a service in Java collect its heap while it works on a request.
fn collect_garbage(
    client: &mut InjectorClient,
    other: &mut InjectorClient,
    length: Duration,
) -> io::Result<()> {
    std::thread::scope(|scope| {
        let spinning = scope.spawn(|| client.spin(length));
        std::thread::sleep(length / 5);
        other.collect()?;
        spinning.join().map_err(|_| io::Error::other("a client failed"))?.map(drop)
    })
}

/// Floods a CPU with packets while `ask` sends a request.
fn flood_while(cpu: u32, ask: impl FnOnce() -> io::Result<Injection>) -> io::Result<Injection> {
    let flood = Flood::new(cpu)?;
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Relaxed is enough: the flag is only polled, and no data is published through it.
        let flooding = scope.spawn(|| flood.send_while(|| !ends.load(Relaxed)));
        let sent = ask();
        ends.store(true, Relaxed);
        flooding.join().map_err(|_| io::Error::other("the sender of datagrams failed"))??;
        sent
    })
}
