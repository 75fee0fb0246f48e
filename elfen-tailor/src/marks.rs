//! Reads what a service reports about its requests: the marks on its page.

use std::fs;

use elfen_rt::memory::MemoryError;
use elfen_rt::process::Liveness;
use elfen_rt::signal::event::Words;
use elfen_rt::signal::mark::Cursor;
use elfen_rt::signal::service::{OpenError, ServiceReader, Writer};

use crate::service::NotFound;

/// The page of a service, and how far its marks have been read.
#[derive(Debug)]
pub struct MarkedService {
    pub name: String,
    page: ServiceReader,
    cursors: Vec<Cursor>,
}

impl MarkedService {
    /// Finds the service that publishes under this name, whatever user owns the page. This is safe:
    /// its content causes no action, and the kernel decides which users may read it.
    pub fn find(name: &str) -> Result<Self, NotFound> {
        let opened = match ServiceReader::open(name) {
            Err(OpenError::Foreign(user)) => ServiceReader::open_of(name, Some(user)),
            opened => opened,
        };
        let page = opened.map_err(|error| match error {
            OpenError::Memory(MemoryError::Absent) => NotFound::NotPublished(name.to_owned()),
            error => NotFound::Page(error.to_string()),
        })?;
        let slots = (0..page.lanes()).filter_map(|lane| page.slot(lane));
        let cursors = slots.map(|slot| slot.marks.cursor()).collect();
        let found = Self { name: name.to_owned(), page, cursors };
        match found.writers().as_slice() {
            [] => Err(NotFound::NoWriter(name.to_owned())),
            [None, ..] => Err(NotFound::OtherNamespace(name.to_owned())),
            [Some(process), ..] if has_other_clock(*process) => Err(NotFound::OtherClock(*process)),
            _ => Ok(found),
        }
    }

    /// The processes that publish on the page, in ascending order.
    pub fn processes(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.writers().into_iter().flatten().collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The process id of each living writer; `None` for a writer in another pid namespace.
    fn writers(&self) -> Vec<Option<u32>> {
        let writer = |lane| match self.page.writer(lane) {
            Writer::None | Writer::Process(_, Liveness::Dead) => None,
            Writer::Process(of, Liveness::Alive) => Some(Some(of.pid().unsigned_abs())),
            Writer::Process(_, Liveness::Unknown) => Some(None),
        };
        (0..self.page.lanes()).filter_map(writer).collect()
    }

    pub fn lanes(&self) -> u32 {
        self.page.lanes()
    }

    /// Takes the marks of a lane since the last call. Returns how many marks were overwritten
    /// before they could be read.
    pub fn take(&mut self, lane: u32, into: &mut Vec<Words>) -> u64 {
        let cursor = self.cursors.get_mut(lane as usize);
        let (Some(slot), Some(cursor)) = (self.page.slot(lane), cursor) else { return 0 };
        slot.marks.take(cursor, |words| into.push(words))
    }
}

/// Whether a process has a monotonic clock of its own, so that its times differ from ours.
fn has_other_clock(process: u32) -> bool {
    // A kernel without time namespaces has one clock for all processes.
    let offsets = fs::read_to_string(format!("/proc/{process}/timens_offsets"));
    offsets.is_ok_and(|text| is_offset(&text))
}

fn is_offset(text: &str) -> bool {
    let line = text.lines().find_map(|line| line.strip_prefix("monotonic"));
    line.is_some_and(|offset| offset.split_whitespace().any(|number| number != "0"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::service::Service;
    use elfen_rt::signal::mark::{Mark, Step};

    /// Goal: marks are read from the moment at which the service is found, each once. A service
    /// without a living writer is not found. Method: a service of the test's own.
    #[test]
    fn marks_of_a_service_are_read_from_now_on() {
        let name = format!("marks-{}", std::process::id());
        let nobody = MarkedService::find(&name).unwrap_err();
        assert_eq!(nobody, NotFound::NotPublished(name.clone()));
        let service = Service::open(&name, 2).unwrap();
        assert_eq!(MarkedService::find(&name).unwrap_err(), NotFound::NoWriter(name.clone()));
        let mut worker = service.claim(1, 0).unwrap();
        worker.begin(1);
        let mut found = MarkedService::find(&name).unwrap();
        assert_eq!((found.processes(), found.lanes()), (vec![std::process::id()], 2));
        worker.end();
        worker.begin_arrived(2, 5);
        let mut words = Vec::new();
        assert_eq!((found.take(1, &mut words), found.take(0, &mut words)), (0, 0));
        let steps: Vec<(u64, Step)> = words
            .drain(..)
            .filter_map(|words| Mark::decode(&words).map(|mark| (mark.request, mark.step)))
            .collect();
        assert_eq!(steps, [(1, Step::End { class: 0 }), (2, Step::Begin { arrived_ns: 5 })]);
        assert_eq!((found.take(1, &mut words), words.len()), (0, 0));
        drop(worker);
        assert!(found.processes().is_empty());
        service.remove().unwrap();
    }

    #[test]
    fn offsets_of_another_clock_are_noticed() {
        assert!(!is_offset("monotonic           0         0\nboottime            0         0\n"));
        assert!(is_offset("monotonic      -86400         0\nboottime            0         0\n"));
        assert!(!is_offset("boottime 7 0\n") && !has_other_clock(std::process::id()));
    }
}
