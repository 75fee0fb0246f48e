//! Reads what the JVMs of a service report about themselves, from the first available source.
//!
//! | source | what it reports | what it requires |
//! | --- | --- | --- |
//! | probes | collections, halts with operations, classes | library with probes, rights to attach |
//! | counters | collections | the JVM's user, or root; its shared memory |
//! | names | the threads that halted, collected or compiled | nothing |
//!
//! No code is put into the JVM.

mod counters;
mod probes;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use elfen_kernel::events::{Events, ProbePoint};
use elfen_rt::signal::event::{Event, Words};

use counters::Counters;

const LIBRARY: &str = "/libjvm.so";

/// The source that a JVM is read from.
#[derive(Debug)]
enum JvmSource {
    Probes,
    Counters(Box<Counters>),
    Names,
}

#[derive(Debug)]
pub struct Jvms {
    /// The source of each process; `None` for a process without a JVM.
    all: BTreeMap<u32, Option<JvmSource>>,
    found: Vec<Event>,
}

impl Jvms {
    pub fn none() -> Self {
        Self { all: BTreeMap::new(), found: Vec::new() }
    }

    /// Looks for JVMs among the processes. Returns, for each new JVM, a text that names its source.
    pub fn refresh(&mut self, processes: &[u32], mut events: Option<&mut Events>) -> Vec<String> {
        self.all.retain(|process, _| processes.contains(process));
        let mut texts = Vec::new();
        for &process in processes {
            // A process may load a JVM later, so processes without a JVM are examined again.
            if matches!(self.all.get(&process), Some(Some(_))) {
                continue;
            }
            let source = library_of(process).map(|library| {
                let (source, text) = choose_source(process, &library, events.as_deref_mut());
                texts.push(text);
                source
            });
            self.all.insert(process, source);
        }
        texts
    }

    pub fn any(&self) -> bool {
        self.all.values().any(Option::is_some)
    }

    /// Adds the events from counters. Probes write their events into the rings themselves.
    pub fn poll(&mut self, into: &mut Vec<Words>) {
        for source in self.all.values_mut().flatten() {
            if let JvmSource::Counters(counters) = source {
                counters.poll(&mut self.found);
            }
        }
        into.extend(self.found.drain(..).map(|event| event.encode()));
    }
}

/// The library and the probes of a process's JVM; `None` without a JVM.
pub fn probes_of(process: u32) -> Option<(PathBuf, Vec<ProbePoint>)> {
    let library = library_of(process)?;
    // A library that cannot be read counts as one without probes.
    let sites = probes::probe_sites(&library).unwrap_or_default();
    Some((library, sites))
}

/// The JVM library that a process has mapped, as a path that we can open; `None` without a JVM.
fn library_of(process: u32) -> Option<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    let inside = maps.lines().find(|line| line.ends_with(LIBRARY))?;
    let inside = &inside[inside.find('/')?..];
    // The process may have another root folder.
    Some(Path::new("/proc").join(process.to_string()).join("root").join(inside.strip_prefix('/')?))
}

fn choose_source(process: u32, library: &Path, events: Option<&mut Events>) -> (JvmSource, String) {
    let by_probes = || -> Result<(), String> {
        let events = events.ok_or("there are no kernel events")?;
        let sites = probes::probe_sites(library).map_err(|error| error.to_string())?;
        if sites.is_empty() {
            return Err("it was built without probes".to_owned());
        }
        events.probe(process, library, &sites).map_err(|error| error.to_string())
    };
    let no_probes = match by_probes() {
        Ok(()) => return (JvmSource::Probes, format!("process {process} is a JVM: by its probes")),
        Err(why) => why,
    };
    let is = format!("process {process} is a JVM");
    match Counters::open(process) {
        Ok(counters) => {
            let text = format!("{is}: by its counters, as it has no usable probes ({no_probes})");
            (JvmSource::Counters(Box::new(counters)), text)
        }
        Err(no_counters) => {
            let text = format!(
                "{is}: by the names of its threads; no probes ({no_probes}), no counters \
                 ({no_counters})"
            );
            (JvmSource::Names, text)
        }
    }
}
