//! Records a service under load while faults are injected. Also measures the time that the
//! hypervisor steals during the recording.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use elfen_kernel::events::{Detail, Error};
use elfen_rt::signal::event::EventKind;
use elfen_tailor::recorder::{POLL_INTERVAL, Recorder};
use elfen_tailor::service::{Service, ServiceSelector};
use elfen_tailor::trace::Trace;
use serde::Serialize;

use super::service::TestService;

#[derive(Debug)]
pub enum CheckError {
    Events(Error),
    /// The process may use only one CPU. The service and its injectors need one each.
    OneCpu,
    Io(io::Error),
}

impl From<io::Error> for CheckError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The result of a recording.
pub(super) struct Recording<T> {
    pub(super) trace: Trace,
    pub(super) stolen: Stolen,
    /// What `act` returned.
    pub(super) done: T,
}

/// Records a service under load until `act` returns.
pub(super) fn record_while<T: Send>(
    service: &mut TestService,
    detail: Detail,
    load: Load,
    act: impl FnOnce(&mut TestService) -> io::Result<T> + Send,
) -> Result<Recording<T>, CheckError> {
    let (port, cpu) = (service.port, service.cpu);
    let target = Service::find(ServiceSelector::Port(port))
        .map_err(|_| io::Error::other("the test service ended"))?;
    let mut recorder = Recorder::attach(target, detail, 65_536).map_err(CheckError::Events)?;
    let mut trace = Trace::new(recorder.head(detail));
    recorder.refresh(&mut trace)?;
    let stolen_ns = by_kernel_ns(cpu);
    let ends = AtomicBool::new(false);
    let streams = load.connect(port)?;
    let done = thread::scope(|scope| {
        let begin = Instant::now();
        let ends = &ends;
        let send = |(number, stream)| scope.spawn(move || load.send(number, stream, begin, ends));
        let clients: Vec<_> = (0..).zip(streams).map(send).collect();
        let injector = scope.spawn(|| {
            let done = act(service);
            ends.store(true, Relaxed);
            done
        });
        while !injector.is_finished() {
            thread::sleep(POLL_INTERVAL);
            recorder.poll(&mut trace)?;
        }
        let done = injector.join().map_err(|_| io::Error::other("the injector failed"))??;
        for client in clients {
            client.join().map_err(|_| io::Error::other("a client failed"))??;
        }
        Ok::<T, CheckError>(done)
    })?;
    recorder.poll(&mut trace)?;
    recorder.refresh(&mut trace)?;
    let stolen = Stolen::since(stolen_ns, cpu, &trace);
    Ok(Recording { trace, stolen, done })
}

/// The work of a request, in microseconds.
pub(super) const WORK_US: u64 = 200;
/// The work of one request in sixteen, with an uneven load.
const MUCH_WORK_US: u64 = 2_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    requests_a_second: u32,
    clients: u32,
    work_us: fn(u32) -> u64,
}

impl Load {
    /// Returns a load of equal requests, so that every difference between them was injected.
    pub(super) fn even(requests_a_second: u32) -> Self {
        Self { requests_a_second, clients: 8, work_us: |_| WORK_US }
    }

    /// Returns a load whose tail does not only come from faults. Some requests have ten times the
    /// work of the others. This is more than what other users of the machine cost one request in a
    /// hundred.
    ///
    /// The load has many clients, so that few of them still wait for an answer when their next
    /// request is due. Otherwise, a pause would delay later requests too.
    pub(super) fn uneven(requests_a_second: u32) -> Self {
        let work_us = |at: u32| match at.wrapping_mul(0x9e37_79b9) >> 28 {
            0 => MUCH_WORK_US,
            _ => WORK_US,
        };
        Self { requests_a_second, clients: 64, work_us }
    }

    fn connect(self, port: u16) -> io::Result<Vec<TcpStream>> {
        let client = |_| {
            let stream = TcpStream::connect(("127.0.0.1", port))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(Duration::from_secs(60)))?;
            Ok(stream)
        };
        (0..self.clients).map(client).collect()
    }

    /// Runs one client. It sends at fixed times, or immediately after the previous answer if the
    /// answer comes later.
    fn send(
        self,
        number: u32,
        mut stream: TcpStream,
        begin: Instant,
        ends: &AtomicBool,
    ) -> io::Result<()> {
        let Self { requests_a_second, clients, work_us } = self;
        let every = Duration::from_secs(1) * clients / requests_a_second.max(1);
        let mut next = begin + every * number / clients;
        let mut numbers = (number..).step_by(clients as usize);
        while !ends.load(Relaxed) {
            thread::sleep(next.saturating_duration_since(Instant::now()));
            next = (next + every).max(Instant::now());
            let work_us = numbers.next().map_or(WORK_US, work_us);
            stream.write_all(format!("{work_us}\n").as_bytes())?;
            stream.read_exact(&mut [0; 5])?;
        }
        Ok(())
    }
}

const TICK_NS: u64 = 10_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Stolen {
    pub by_events_ns: u64,
    pub by_kernel_ns: u64,
}

impl Stolen {
    /// Returns the stolen time since the kernel's count was `before_ns`.
    fn since(before_ns: u64, cpu: u32, trace: &Trace) -> Self {
        let events = trace.events.get(cpu as usize).map_or(&[][..], Vec::as_slice);
        let mut seen = events.iter().filter_map(|event| match event.kind {
            EventKind::Switch(switch) => Some(switch.stolen_ns),
            _ => None,
        });
        let first_ns = seen.next().unwrap_or(0);
        let by_events_ns = seen.next_back().unwrap_or(first_ns).saturating_sub(first_ns);
        Self { by_events_ns, by_kernel_ns: by_kernel_ns(cpu).saturating_sub(before_ns) }
    }

    /// Whether both counts agree within two of the kernel's ticks.
    pub fn agrees(self) -> bool {
        self.by_events_ns.abs_diff(self.by_kernel_ns) <= 2 * TICK_NS
    }

    pub(super) fn add(&mut self, other: Self) {
        self.by_events_ns += other.by_events_ns;
        self.by_kernel_ns += other.by_kernel_ns;
    }
}

/// Returns the kernel's count of stolen time for this CPU.
fn by_kernel_ns(cpu: u32) -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().find(|line| line.split(' ').next() == Some(&format!("cpu{cpu}")));
    line.and_then(ticks).map_or(0, |ticks| ticks * TICK_NS)
}

/// Parses the ticks of stolen time from a line like `cpu0 user nice system idle iowait irq softirq
/// steal ..`.
fn ticks(line: &str) -> Option<u64> {
    line.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::event::{Event, Switch};
    use elfen_tailor::trace::Header;

    #[test]
    fn one_request_in_sixteen_is_much_work() {
        let Load { work_us, .. } = Load::uneven(400);
        let much = |from: u32| (from..from + 1_600).filter(|at| work_us(*at) > WORK_US).count();
        assert!([0, 1_000, 77_777].map(much).iter().all(|much| (98..=102).contains(much)));
        assert_eq!((Load::even(400).work_us)(0), WORK_US);
    }

    #[test]
    fn stolen_time_is_counted_from_the_first_switch_to_the_last() {
        let mut trace = Trace::new(Header { cpus: 1, ..Header::default() });
        for stolen_ns in [7_000, 7_000, 90_000] {
            let switch = Switch {
                previous: 1,
                process: 1,
                preempted: true,
                iowait: false,
                state: 0,
                call: None,
                stolen_ns,
            };
            let kind = EventKind::Switch(switch);
            trace.events[0].push(Event { at_ns: stolen_ns, thread: 2, kind });
        }
        assert_eq!(Stolen::since(0, 0, &trace).by_events_ns, 83_000);
        assert_eq!(Stolen::since(u64::MAX, 9, &trace), Stolen::default());
        let stolen = |by_events_ns, by_kernel_ns| Stolen { by_events_ns, by_kernel_ns };
        assert!(stolen(35_000_000, 50_000_000).agrees() && stolen(70_000_000, 50_000_000).agrees());
        assert!(!stolen(29_000_000, 50_000_000).agrees());
        assert_eq!(ticks("cpu0 1 2 3 4 5 6 7 88 9 10"), Some(88));
        assert_eq!(ticks("cpu0 1 2"), None);
    }
}
