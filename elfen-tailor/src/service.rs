//! Finds the processes that hold the listening socket of a port, and the CPUs that they may run on.

use std::collections::BTreeSet;
use std::fs;

use elfen_kernel::events::Watched;
use elfen_machine::affinity;
use elfen_machine::process::{below, name_of, numbers_in, threads_of};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceSelector {
    Port(u16),
    /// A process, and a port if the process listens on several.
    Process(u32, Option<u16>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Service {
    pub name: String,
    pub port: u16,
    /// The processes that hold the listening socket.
    pub processes: Vec<u32>,
    /// A process in the network namespace of the port; `None` if it is our own namespace.
    namespace_of: Option<u32>,
    /// The CPUs of each shared core. Events are also recorded on the other CPUs of the service's
    /// cores.
    pub cores: Vec<Vec<u32>>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NotFound {
    NothingListens(u16),
    NoProcess(u32),
    NoPort(u32),
    SeveralPorts(u32, Vec<u16>),
    /// A process listens on the port, but this user may not see which process.
    Hidden(u16),
    /// No page has this name.
    NotPublished(String),
    /// The page exists, but no living process writes it.
    NoWriter(String),
    /// A process in another pid namespace writes the page.
    OtherNamespace(String),
    /// This process writes the page and has a monotonic clock of its own.
    OtherClock(u32),
    /// The page cannot be read, for this reason.
    Page(String),
}

/// A listening socket: its port and its inode. Descriptors name a socket by its inode.
type Listening = (u16, u64);

impl Service {
    pub fn find(selector: ServiceSelector) -> Result<Self, NotFound> {
        let (port, namespace_of) = match selector {
            ServiceSelector::Port(port) => (port, None),
            ServiceSelector::Process(process, port) => (port_of(process, port)?, Some(process)),
        };
        let mut service = Self { port, namespace_of, ..Self::named("", Vec::new()) };
        let inodes = service.inodes();
        if inodes.is_empty() {
            return Err(NotFound::NothingListens(port));
        }
        service.find_processes(&inodes);
        let first = *service.processes.first().ok_or(NotFound::Hidden(port))?;
        service.name = name_of(first).unwrap_or_else(|| format!("process {first}"));
        Ok(service)
    }

    /// A service that reports its requests itself. It is found by name instead of port.
    pub fn named(name: &str, processes: Vec<u32>) -> Self {
        let name = name.to_owned();
        Self { name, port: 0, processes, namespace_of: None, cores: Vec::new() }
    }

    /// Finds the service's processes again, because workers start and end. Searches all processes
    /// only if no known process, and no child of one, holds the socket any more. If the service is
    /// down, its last processes are kept.
    pub fn refresh(&mut self) {
        let inodes = self.inodes();
        if inodes.is_empty() {
            return;
        }
        let known = self.processes.iter();
        let below = known.flat_map(|&known| [vec![known], below(known)].concat());
        let serving: BTreeSet<u32> =
            below.filter(|&process| holds_socket(process, &inodes)).collect();
        if serving.is_empty() {
            self.find_processes(&inodes);
        } else {
            self.processes = serving.into_iter().collect();
        }
    }

    fn inodes(&self) -> BTreeSet<u64> {
        let of_port = |(port, inode): Listening| (port == self.port).then_some(inode);
        listening(self.namespace_of).into_iter().filter_map(of_port).collect()
    }

    fn find_processes(&mut self, inodes: &BTreeSet<u64>) {
        let all = numbers_in("/proc").into_iter();
        let mut found: Vec<u32> = all.filter(|&process| holds_socket(process, inodes)).collect();
        found.sort_unstable();
        if !found.is_empty() {
            self.processes = found;
        }
    }

    /// The processes and CPUs that the kernel must record.
    pub fn watched(&self) -> Watched {
        let threads = self.processes.iter().flat_map(|process| threads_of(*process));
        // A thread that has ended meanwhile has no CPUs.
        let mut cpus: BTreeSet<u32> = threads
            .filter_map(|thread| affinity::of(thread).ok())
            .flat_map(|cpus| cpus.iter().collect::<Vec<u32>>())
            .collect();
        let siblings = self.cores.iter().filter(|core| core.iter().any(|cpu| cpus.contains(cpu)));
        let siblings: Vec<u32> = siblings.flatten().copied().collect();
        cpus.extend(siblings);
        let port = self.port;
        let processes = self.processes.clone();
        Watched { port, processes, cpus: cpus.into_iter().collect() }
    }
}

fn holds_socket(process: u32, inodes: &BTreeSet<u64>) -> bool {
    !sockets_of(process).is_disjoint(inodes)
}

fn port_of(process: u32, requested: Option<u16>) -> Result<u16, NotFound> {
    if fs::metadata(format!("/proc/{process}")).is_err() {
        return Err(NotFound::NoProcess(process));
    }
    let sockets = sockets_of(process);
    let own = |(port, inode): Listening| sockets.contains(&inode).then_some(port);
    let ports: BTreeSet<u16> = listening(Some(process)).into_iter().filter_map(own).collect();
    match (requested, ports.len()) {
        (Some(port), _) if ports.contains(&port) => Ok(port),
        (Some(port), _) => Err(NotFound::NothingListens(port)),
        (None, 0) => Err(NotFound::NoPort(process)),
        (None, 1) => Ok(ports.into_iter().next().unwrap_or(0)),
        (None, _) => Err(NotFound::SeveralPorts(process, ports.into_iter().collect())),
    }
}

fn listening(namespace_of: Option<u32>) -> Vec<Listening> {
    let of = namespace_of.map_or("self".to_owned(), |process| process.to_string());
    let tables = ["tcp", "tcp6"].map(|table| {
        // A kernel without IPv6 does not have the second table.
        fs::read_to_string(format!("/proc/{of}/net/{table}")).unwrap_or_default()
    });
    tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(parse).collect()
}

/// Parses a line of /proc/net/tcp. Returns `None` if the socket does not listen.
fn parse(line: &str) -> Option<Listening> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, port) = fields.get(1)?.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    (*fields.get(3)? == LISTEN).then_some((port, fields.get(9)?.parse().ok()?))
}

fn sockets_of(process: u32) -> BTreeSet<u64> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fd")) else { return BTreeSet::new() };
    let inode = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    entries.flatten().filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_listener_is_found_by_its_port_and_by_its_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let own = std::process::id();
        let found = Service::find(ServiceSelector::Port(port)).unwrap();
        assert_eq!((found.port, found.processes.as_slice()), (port, &[own][..]));
        assert!(found.watched().processes == [own] && !found.watched().cpus.is_empty());
        assert_eq!(Service::find(ServiceSelector::Process(own, Some(port))).unwrap().port, port);
        let other = TcpListener::bind("[::1]:0").or(TcpListener::bind("127.0.0.1:0")).unwrap();
        let several = Service::find(ServiceSelector::Process(own, None));
        assert!(matches!(several, Err(NotFound::SeveralPorts(_, ports)) if ports.len() >= 2));
        drop((listener, other));
        assert_eq!(Service::find(ServiceSelector::Port(port)), Err(NotFound::NothingListens(port)));
        assert_eq!(
            Service::find(ServiceSelector::Process(u32::MAX, None)),
            Err(NotFound::NoProcess(u32::MAX))
        );
    }
}
