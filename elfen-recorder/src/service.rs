//! The processes behind a port: who has the socket that listens on it, and on which CPUs they may
//! run.

use std::collections::BTreeSet;
use std::fs;

use elfen_kernel::events::Watched;
use elfen_machine::affinity;
use elfen_machine::process::{below, threads_of};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Port(u16),
    /// A process, and its port if it has several.
    Process(u32, Option<u16>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Service {
    pub name: String,
    pub port: u16,
    /// Those that hold the listening socket.
    pub processes: Vec<u32>,
    /// In whose network namespace it listens.
    namespace_of: Option<u32>,
    /// CPUs that share a core: who runs on the others is of interest too.
    pub cores: Vec<Vec<u32>>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NotFound {
    NobodyListens(u16),
    NoProcess(u32),
    ListensNowhere(u32),
    Several(u32, Vec<u16>),
    /// Somebody listens, and whose it is we may not see.
    Hidden(u16),
    /// There is no page of this name.
    NobodyPublishes(String),
    /// There is one, and no process that writes it lives.
    NobodyServes(String),
    /// It is written in another pid namespace.
    OtherNamespace(String),
    /// Its process has a monotonic clock of its own.
    OtherClock(u32),
    /// Why the page can't be read.
    Page(String),
}

/// A socket that listens: its port, and its inode, by which descriptors name it.
type Listening = (u16, u64);

impl Service {
    pub fn find(which: Which) -> Result<Self, NotFound> {
        let (port, namespace_of) = match which {
            Which::Port(port) => (port, None),
            Which::Process(process, port) => (port_of(process, port)?, Some(process)),
        };
        let mut service = Self { port, namespace_of, ..Self::named("", Vec::new()) };
        let inodes = service.inodes();
        if inodes.is_empty() {
            return Err(NotFound::NobodyListens(port));
        }
        service.look(&inodes);
        let first = *service.processes.first().ok_or(NotFound::Hidden(port))?;
        service.name = name_of(first).unwrap_or_else(|| format!("process {first}"));
        Ok(service)
    }

    /// One that says itself what it does: by its name, not by a port.
    pub fn named(name: &str, processes: Vec<u32>) -> Self {
        let name = name.to_owned();
        Self { name, port: 0, processes, namespace_of: None, cores: Vec::new() }
    }

    /// Looks anew who serves: workers come and go. Among all processes only if those known do not
    /// serve any more; a service that is down keeps its last ones.
    pub fn refresh(&mut self) {
        let inodes = self.inodes();
        if inodes.is_empty() {
            return;
        }
        let known = self.processes.iter();
        let below = known.flat_map(|&known| [vec![known], below(known)].concat());
        let serving: BTreeSet<u32> = below.filter(|&process| holds(process, &inodes)).collect();
        match serving.is_empty() {
            true => self.look(&inodes),
            false => self.processes = serving.into_iter().collect(),
        }
    }

    fn inodes(&self) -> BTreeSet<u64> {
        let of_port = |(port, inode): Listening| (port == self.port).then_some(inode);
        listening(self.namespace_of).into_iter().filter_map(of_port).collect()
    }

    fn look(&mut self, inodes: &BTreeSet<u64>) {
        let all = processes().into_iter();
        let mut found: Vec<u32> = all.filter(|&process| holds(process, inodes)).collect();
        found.sort_unstable();
        if !found.is_empty() {
            self.processes = found;
        }
    }

    /// What the kernel is to write down.
    pub fn watched(&self) -> Watched {
        let threads = self.processes.iter().flat_map(|process| threads_of(*process));
        // A thread that is gone by now may run nowhere.
        let mut cpus: BTreeSet<u32> = threads
            .filter_map(|thread| affinity::of(thread).ok())
            .flat_map(|cpus| cpus.iter().collect::<Vec<u32>>())
            .collect();
        let beside = self.cores.iter().filter(|core| core.iter().any(|cpu| cpus.contains(cpu)));
        let beside: Vec<u32> = beside.flatten().copied().collect();
        cpus.extend(beside);
        let (port, processes) = (self.port, self.processes.clone());
        Watched { port, processes, cpus: cpus.into_iter().collect() }
    }
}

fn holds(process: u32, inodes: &BTreeSet<u64>) -> bool {
    !sockets_of(process).is_disjoint(inodes)
}

/// A thread's name, as it is now.
pub fn name_of(thread: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{thread}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

fn port_of(process: u32, asked: Option<u16>) -> Result<u16, NotFound> {
    if fs::metadata(format!("/proc/{process}")).is_err() {
        return Err(NotFound::NoProcess(process));
    }
    let sockets = sockets_of(process);
    let own = |(port, inode): Listening| sockets.contains(&inode).then_some(port);
    let ports: BTreeSet<u16> = listening(Some(process)).into_iter().filter_map(own).collect();
    match (asked, ports.len()) {
        (Some(port), _) if ports.contains(&port) => Ok(port),
        (Some(port), _) => Err(NotFound::NobodyListens(port)),
        (None, 0) => Err(NotFound::ListensNowhere(process)),
        (None, 1) => Ok(ports.into_iter().next().unwrap_or(0)),
        (None, _) => Err(NotFound::Several(process, ports.into_iter().collect())),
    }
}

fn listening(namespace_of: Option<u32>) -> Vec<Listening> {
    let of = namespace_of.map_or("self".to_owned(), |process| process.to_string());
    let tables = ["tcp", "tcp6"].map(|table| {
        // A kernel without IPv6 has no such table, and nobody listens in it.
        fs::read_to_string(format!("/proc/{of}/net/{table}")).unwrap_or_default()
    });
    tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(parse).collect()
}

/// A line of /proc/net/tcp, if its socket listens.
fn parse(line: &str) -> Option<Listening> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, port) = fields.get(1)?.rsplit_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    (*fields.get(3)? == LISTEN).then_some((port, fields.get(9)?.parse().ok()?))
}

fn processes() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
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
        let found = Service::find(Which::Port(port)).unwrap();
        assert_eq!((found.port, found.processes.as_slice()), (port, &[own][..]));
        assert!(found.watched().processes == [own] && !found.watched().cpus.is_empty());
        assert_eq!(Service::find(Which::Process(own, Some(port))).unwrap().port, port);
        let other = TcpListener::bind("[::1]:0").or(TcpListener::bind("127.0.0.1:0")).unwrap();
        let several = Service::find(Which::Process(own, None));
        assert!(matches!(several, Err(NotFound::Several(_, ports)) if ports.len() >= 2));
        drop((listener, other));
        assert_eq!(Service::find(Which::Port(port)), Err(NotFound::NobodyListens(port)));
        assert_eq!(
            Service::find(Which::Process(u32::MAX, None)),
            Err(NotFound::NoProcess(u32::MAX))
        );
    }
}
