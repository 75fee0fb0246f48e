//! Finds the names of the service's functions in which a clock found its threads. Symbols of large
//! files take long to read, so another thread reads them.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use elfen_instrument::remote::{Mapping, mappings};
use elfen_instrument::symbols::FunctionTable;

use crate::trace::CodeName;

/// A limit on addresses, of which a name is looked up for each.
const ADDRESSES_MAX: usize = 1 << 16;
/// How long the names that are looked up at the end are waited for.
const LAST_WITHIN: Duration = Duration::from_secs(10);
/// Code outside of files.
const GENERATED: &str = "[generated code]";

#[derive(Debug, Default)]
pub(crate) struct CodeNames {
    /// By process and address: all, and the ones that were not looked up yet.
    seen: BTreeSet<(u32, u64)>,
    new: BTreeSet<(u32, u64)>,
    /// `None` until the first name is needed.
    reader: Option<Reader>,
    /// How many questions have no answer yet.
    asked: usize,
}

#[derive(Debug)]
struct Reader {
    questions: Sender<BTreeSet<(u32, u64)>>,
    answers: Receiver<Vec<CodeName>>,
}

impl CodeNames {
    pub(crate) fn note(&mut self, process: u32, address: u64) {
        let place = (process, address);
        if self.seen.len() < ADDRESSES_MAX && self.seen.insert(place) {
            self.new.insert(place);
        }
    }

    /// Has the new addresses looked up.
    pub(crate) fn ask(&mut self) {
        if self.new.is_empty() {
            return;
        }
        let reader = self.reader.get_or_insert_with(Reader::start);
        if reader.questions.send(std::mem::take(&mut self.new)).is_ok() {
            self.asked += 1;
        }
    }

    /// The names that were found since the last call.
    pub(crate) fn take_new(&mut self) -> Vec<CodeName> {
        let Some(reader) = &self.reader else { return Vec::new() };
        let answers: Vec<Vec<CodeName>> = reader.answers.try_iter().collect();
        self.asked -= answers.len();
        answers.into_iter().flatten().collect()
    }

    /// All names that are left. Waits for them.
    pub(crate) fn take_last(&mut self) -> Vec<CodeName> {
        self.ask();
        let mut found = self.take_new();
        let Some(reader) = &self.reader else { return found };
        let until = Instant::now() + LAST_WITHIN;
        while self.asked > 0 {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(answer) = reader.answers.recv_timeout(left) else { break };
            self.asked -= 1;
            found.extend(answer);
        }
        found
    }
}

impl Reader {
    /// Starts the thread, which ends with this value.
    fn start() -> Self {
        let (questions, asked) = channel::<BTreeSet<(u32, u64)>>();
        let (answer, answers) = channel();
        thread::spawn(move || {
            let mut tables = Tables::default();
            for places in asked {
                if answer.send(tables.names(&places)).is_err() {
                    break;
                }
            }
        });
        Self { questions, answers }
    }
}

/// The symbols of files, by device and inode.
#[derive(Debug, Default)]
struct Tables(HashMap<(String, u64), Option<FunctionTable>>);

impl Tables {
    fn names(&mut self, places: &BTreeSet<(u32, u64)>) -> Vec<CodeName> {
        let mut found = Vec::new();
        let mut of: (u32, Vec<Mapping>) = (0, Vec::new());
        for &(process, address) in places {
            if of.0 != process {
                // A process that has ended has no mappings, and its addresses no names.
                of = (process, mappings(process).unwrap_or_default());
            }
            let mapping = of.1.iter().find(|one| one.range.contains(&address));
            let name = mapping.map(|mapping| self.name(process, mapping, address));
            found.extend(name.map(|name| CodeName { process, address, name }));
        }
        found
    }

    fn name(&mut self, process: u32, mapping: &Mapping, address: u64) -> String {
        let Some(file) = &mapping.file else {
            let is_named = mapping.name.starts_with('[');
            return if is_named { mapping.name.clone() } else { GENERATED.to_owned() };
        };
        let table = self.0.entry(file.clone()).or_insert_with(|| {
            // The process may be in a container.
            FunctionTable::read(&PathBuf::from(format!("/proc/{process}/root{}", mapping.name)))
        });
        let offset = mapping.offset + (address - mapping.range.start);
        let function = table.as_ref().and_then(|table| table.at(table.address_of(offset)?));
        let file = mapping.name.rsplit('/').next().unwrap_or_default();
        match function {
            Some(function) if function.symbol.is_empty() => format!("{file}+{}", function.name),
            Some(function) => function.name.clone(),
            None => file.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: addresses have the names of their functions; what is no code of a file is described.
    /// Method: this process: a function, its stack, and an address of nothing.
    #[test]
    fn addresses_of_a_process_have_names() {
        let process = std::process::id();
        let here = addresses_of_a_process_have_names as fn() as usize as u64 + 1;
        let on_stack = &raw const process as u64;
        let mut names = CodeNames::default();
        assert_eq!(names.take_last(), []);
        for address in [here, on_stack, 1] {
            names.note(process, address);
            names.note(process, address);
        }
        let found = names.take_last();
        let name = |address| found.iter().find(|one| one.address == address).map(|one| &*one.name);
        assert!(name(here).unwrap().ends_with("addresses_of_a_process_have_names"), "{found:?}");
        // Of a thread other than the first, the stack has no name.
        assert!([GENERATED, "[stack]"].contains(&name(on_stack).unwrap()), "{found:?}");
        assert_eq!(name(1), None);
        names.note(process, here);
        assert_eq!(names.take_last(), [], "each is reported once");
    }
}
