//! Can the account be trusted here? A service of our own under load is hurt in known ways, and what
//! its requests are charged is held against the injectors' own clocks.

mod ask;
pub mod flood;
pub mod inject;
mod jvm;
pub mod server;
pub mod storage;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use elfen_host::affinity;
use elfen_kernel::events::{Detail, Error};
use elfen_rt::signal::event::Words;
use elfen_tailor::account::{Account, charges};
use elfen_tailor::explained::Explained;
use elfen_tailor::replay::quantile;
use elfen_tailor::segment::is_of;
use elfen_tailor::tale::{Function, Gap, Lent, Named, Tale};
use serde::Serialize;

use crate::recorder::{LOOK_EVERY, Recorder, Sink};
use crate::service::{Service, Which};
use ask::Asker;
use flood::Flood;
use inject::{HOG, Hog, Injured, Stop};
use jvm::Java;
use server::{HOLDER, Served};
use storage::PageOut;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Stop,
    Hog,
    Lock,
    Long,
    Io,
    Burst,
    Nagle,
    Softirq,
    Gc,
}

impl Kind {
    pub const ALL: [Self; 9] = [
        Self::Stop,
        Self::Hog,
        Self::Lock,
        Self::Long,
        Self::Io,
        Self::Burst,
        Self::Nagle,
        Self::Softirq,
        Self::Gc,
    ];
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Hog => "hog",
            Self::Lock => "lock",
            Self::Long => "long",
            Self::Io => "io",
            Self::Burst => "burst",
            Self::Nagle => "nagle",
            Self::Softirq => "softirq",
            Self::Gc => "gc",
        }
    }

    /// What the account calls it.
    fn cause(self) -> String {
        match self {
            Self::Stop => "stopped".to_owned(),
            Self::Hog => format!("preempted:{HOG}"),
            Self::Lock => format!("lock:{HOLDER}"),
            Self::Long => "work".to_owned(),
            Self::Io => "io:page-fault".to_owned(),
            Self::Burst => "queue".to_owned(),
            Self::Nagle => "tcp-out".to_owned(),
            Self::Softirq => "softirq:NET_RX".to_owned(),
            Self::Gc => "gc".to_owned(),
        }
    }
}

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

/// How one cause fared.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Score {
    pub cause: Kind,
    pub injections: usize,
    /// Requests that it overlapped for at least a millisecond.
    pub touched: usize,
    /// Of those, charged the overlap, within 10 % or 0.3 ms.
    pub within: usize,
    /// Of those where it was more than half of the excess, that had it named first.
    pub dominant: usize,
    pub named: usize,
    pub injected_ns: u64,
    pub charged_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Checked {
    pub requests: usize,
    pub complete: usize,
    pub lost_events: u64,
    pub scores: Vec<Score>,
    /// Causes that could not be made here, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    pub holds: bool,
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

const LEAST_NS: u64 = 1_000_000;
const TOLERANCE_NS: u64 = 300_000;
const CLIENTS: usize = 8;
/// Who ask at once.
const CROWD: usize = 60;
/// Work of a request, in microseconds.
const WORK_US: u64 = 200;

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
        holds: true,
    };
    let of = |wanted: &dyn Fn(Kind) -> bool| -> Vec<Kind> {
        plan.kinds.iter().copied().filter(|kind| wanted(*kind)).collect()
    };
    // Packets are seen in full detail alone, in which each request has some.
    let hurts = [
        (of(&|kind| !matches!(kind, Kind::Softirq | Kind::Gc)), Detail::Sched),
        (of(&|kind| kind == Kind::Softirq), Detail::Full),
    ];
    // Everything but the services and their hog stays off the services' CPU.
    affinity::pin(other)?;
    for (kinds, detail) in hurts.into_iter().filter(|(kinds, _)| !kinds.is_empty()) {
        let (plan, served) = (Plan { kinds, ..plan.clone() }, Served::start(cpu)?);
        let (port, rate) = (served.port, plan.requests_a_second);
        let hurt = move |served: &mut Served| hurt(&plan, served, port, cpu);
        all.add(recorded((served, port), detail, rate, hurt)?);
    }
    if plan.kinds.contains(&Kind::Gc) {
        match Java::start(cpu) {
            Ok(java) => {
                let (port, times) = (java.port, plan.clone());
                let hurt = move |_: &mut Java| collect(&times, port);
                // What comes while it collects is worked for right after, on the same CPU: with few
                // of these, what a request is kept from is the collection.
                let rate = plan.requests_a_second / 10;
                all.add(recorded((java, port), Detail::Sched, rate, hurt)?);
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
    (mut served, port): (S, u16),
    detail: Detail,
    rate: u32,
    hurt: impl FnOnce(&mut S) -> io::Result<Injuries> + Send + 'static,
) -> Result<Checked, Failed> {
    let service = Service::find(Which::Port(port))
        .map_err(|_| io::Error::other("the service that was started listens no more"))?;
    let mut recorder = Recorder::attach(service, detail, 65_536).map_err(Failed::Events)?;
    let mut kept = Kept(Tale::begin(recorder.head(detail)));
    recorder.refresh(&mut kept)?;
    let ends = Arc::new(AtomicBool::new(false));
    let (load, over) = (load(port, rate, &ends)?, Arc::clone(&ends));
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
    Ok(score(&kept.0, &injured))
}

/// Has a service in Java collect its heap while it works for a request.
fn collect(plan: &Plan, port: u16) -> io::Result<Injuries> {
    let (mut asker, mut other) = (Asker::connect(port)?, Asker::connect(port)?);
    std::thread::sleep(Duration::from_millis(500));
    let mut all = Vec::new();
    for _ in 0..plan.injections {
        std::thread::sleep(plan.every.saturating_sub(plan.last));
        let held = std::thread::scope(|scope| {
            let spins = scope.spawn(|| asker.spin(plan.last));
            std::thread::sleep(plan.last / 5);
            other.collect()?;
            spins.join().map_err(|_| io::Error::other("a client failed"))?
        });
        all.push(held?);
    }
    std::thread::sleep(Duration::from_millis(200));
    Ok([(Kind::Gc, all)].into())
}

impl Checked {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.complete += other.complete;
        self.lost_events += other.lost_events;
        self.scores.extend(other.scores);
        self.holds &= other.holds;
    }
}

type Injuries = BTreeMap<Kind, Vec<Injured>>;

fn hurt(plan: &Plan, served: &mut Served, port: u16, cpu: u32) -> io::Result<Injuries> {
    let (stop, page_out) = (Stop::new(served.id())?, PageOut::new(served.id())?);
    let mut asker = Asker::connect(port)?;
    let mut crowd = Vec::new();
    if plan.kinds.contains(&Kind::Burst) {
        crowd = (0..CROWD).map(|_| Asker::connect(port)).collect::<io::Result<_>>()?;
    }
    let mut all = Injuries::new();
    // The load settles, and the account has a middle.
    std::thread::sleep(Duration::from_millis(500));
    for _ in 0..plan.injections {
        for &kind in &plan.kinds {
            std::thread::sleep(plan.every.saturating_sub(plan.last));
            let injured = match kind {
                Kind::Stop => vec![stop.hurt(plan.last)?],
                Kind::Hog => vec![Hog::new(cpu).hurt(plan.last)?],
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
    std::thread::sleep(Duration::from_millis(200));
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

fn score(tale: &Tale, injured: &Injuries) -> Checked {
    let account = Account::of(tale);
    let mut latencies: Vec<u64> = account.explained.iter().map(Explained::latency_ns).collect();
    latencies.sort_unstable();
    let median_ns = quantile(&latencies, 500_000);
    let scores: Vec<Score> =
        injured.iter().map(|(&kind, of)| score_of((kind, of), tale, &account, median_ns)).collect();
    let is_held = |score: &Score| {
        let most = |part: usize, of: usize| part * 100 >= of * 95;
        score.touched > 0 && most(score.within, score.touched) && most(score.named, score.dominant)
    };
    Checked {
        requests: account.explained.len() + account.incomplete.len(),
        complete: account.explained.len(),
        lost_events: tale.gaps.iter().map(|gap| gap.count).sum(),
        holds: scores.iter().all(is_held),
        left_out: Vec::new(),
        scores,
    }
}

fn score_of(
    (kind, injured): (Kind, &[Injured]),
    tale: &Tale,
    account: &Account,
    median_ns: u64,
) -> Score {
    let wanted = kind.cause();
    let mut score = Score {
        cause: kind,
        injections: injured.len(),
        touched: 0,
        within: 0,
        dominant: 0,
        named: 0,
        injected_ns: 0,
        charged_ns: 0,
    };
    for one in &account.explained {
        let truth_ns: u64 = injured.iter().map(|hurt| truth(kind, hurt, one)).sum();
        if truth_ns < LEAST_NS {
            continue;
        }
        let charges = charges(one, tale);
        // What has several names, as a file that is waited for in several functions, is one cause.
        let (own, others): (Vec<_>, Vec<_>) =
            charges.iter().partition(|(name, _)| is_of(name, &wanted));
        let charged_ns: u64 = own.iter().map(|(_, ns)| *ns).sum();
        score.touched += 1;
        score.injected_ns += truth_ns;
        score.charged_ns += charged_ns;
        let tolerance_ns = TOLERANCE_NS.max(truth_ns / 10);
        score.within += usize::from(charged_ns.abs_diff(truth_ns) <= tolerance_ns);
        let excess_ns = one.latency_ns().saturating_sub(median_ns);
        if truth_ns * 2 > excess_ns {
            score.dominant += 1;
            let is_first = charged_ns > 0 && others.iter().all(|(_, ns)| *ns <= charged_ns);
            score.named += usize::from(is_first);
        }
    }
    score
}

/// But for what the account may be off by as well: half of that.
fn had_its_cpu(hog: &Injured) -> bool {
    let all_ns = hog.to_ns - hog.from_ns;
    hog.effective_ns + TOLERANCE_NS.max(all_ns / 20) >= all_ns
}

/// How much an injection had of a request.
fn truth(kind: Kind, hurt: &Injured, one: &Explained) -> u64 {
    if let Some(connection) = hurt.connection {
        // The request itself, which its client saw come and go; those behind it only queue.
        let is_it = one.connection == connection
            && hurt.from_ns <= one.arrived_ns
            && one.arrived_ns < hurt.to_ns;
        return if is_it { hurt.effective_ns } else { 0 };
    }
    // A hog that was displaced had its CPU for a part of the time only.
    if kind == Kind::Hog && !had_its_cpu(hurt) {
        return 0;
    }
    one.ended_ns.min(hurt.to_ns).saturating_sub(one.arrived_ns.max(hurt.from_ns))
}
