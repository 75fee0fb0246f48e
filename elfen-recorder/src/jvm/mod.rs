//! A JVM among the processes of a service: what it says of itself, in the way that it allows.
//!
//! | way | what it tells | what it takes |
//! | --- | --- | --- |
//! | probes | collections, halts and their operations, classes | probes, and our rights |
//! | counters | collections | the JVM's user, or root; its shared memory |
//! | names | who halted, collected or compiled, by what its threads are called | nothing |
//!
//! Nothing is put into the JVM.

mod counters;
mod probes;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use elfen_kernel::events::{Events, ProbePoint};
use elfen_rt::signal::event::{Event, Words};

use counters::Counters;

const LIBRARY: &str = "/libjvm.so";

/// How a JVM tells what it does.
#[derive(Debug)]
enum Way {
    Probes,
    Counters(Box<Counters>),
    Names,
}

#[derive(Debug)]
pub struct Jvms {
    /// By process; `None` of one that is no JVM.
    all: BTreeMap<u32, Option<Way>>,
    found: Vec<Event>,
}

/// A JVM that was found, in words.
pub type Told = String;

impl Jvms {
    pub fn none() -> Self {
        Self { all: BTreeMap::new(), found: Vec::new() }
    }

    /// Looks for JVMs among the processes, and says of each new one how it is listened to.
    pub fn refresh(&mut self, processes: &[u32], mut events: Option<&mut Events>) -> Vec<Told> {
        self.all.retain(|process, _| processes.contains(process));
        let mut told = Vec::new();
        for &process in processes {
            // A process may become a JVM: who was none is looked at again.
            if matches!(self.all.get(&process), Some(Some(_))) {
                continue;
            }
            let way = library_of(process).map(|library| {
                let (way, text) = listen(process, &library, events.as_deref_mut());
                told.push(text);
                way
            });
            self.all.insert(process, way);
        }
        told
    }

    pub fn any(&self) -> bool {
        self.all.values().any(Option::is_some)
    }

    /// Takes what counters tell; probes write their events themselves.
    pub fn look(&mut self, into: &mut Vec<Words>) {
        for way in self.all.values_mut().flatten() {
            if let Way::Counters(counters) = way {
                counters.look(&mut self.found);
            }
        }
        into.extend(self.found.drain(..).map(|event| event.encode()));
    }
}

/// The probes of a process's JVM; `None` if it is no JVM.
pub fn probes_of(process: u32) -> Option<(PathBuf, Vec<ProbePoint>)> {
    let library = library_of(process)?;
    // One that can't be read has none for us.
    let places = probes::places(&library).unwrap_or_default();
    Some((library, places))
}

/// The JVM that a process has mapped, as a path that we can open; `None` if it is no JVM.
fn library_of(process: u32) -> Option<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    let inside = maps.lines().find(|line| line.ends_with(LIBRARY))?;
    let inside = &inside[inside.find('/')?..];
    // It may have another root.
    Some(Path::new("/proc").join(process.to_string()).join("root").join(inside.strip_prefix('/')?))
}

fn listen(process: u32, library: &Path, events: Option<&mut Events>) -> (Way, Told) {
    let by_probes = || -> Result<(), String> {
        let events = events.ok_or("the kernel shows nothing")?;
        let places = probes::places(library).map_err(|error| error.to_string())?;
        if places.is_empty() {
            return Err("it was built without probes".to_owned());
        }
        events.probe(process, library, &places).map_err(|error| error.to_string())
    };
    let no_probes = match by_probes() {
        Ok(()) => return (Way::Probes, format!("process {process} is a JVM: by its probes")),
        Err(why) => why,
    };
    let is = format!("process {process} is a JVM");
    match Counters::open(process) {
        Ok(counters) => {
            let text = format!("{is}: by its counters, as it has no probes for us ({no_probes})");
            (Way::Counters(Box::new(counters)), text)
        }
        Err(no_counters) => {
            let text = format!(
                "{is}: by the names of its threads; no probes ({no_probes}), no counters \
                 ({no_counters})"
            );
            (Way::Names, text)
        }
    }
}
