//! A request with its account: what became of its time, and who ran beside it.

use std::sync::Arc;

use crate::segment::{Kind, Segment, total};

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explained {
    pub connection: u64,
    pub arrived_ns: u64,
    pub ended_ns: u64,
    /// Whose queue it was in.
    pub server: u32,
    /// What kind of request the service says it is; 0 if it does not say.
    pub class: u64,
    /// How long each of the service's own stages took.
    pub stages: Vec<(u16, u64)>,
    pub segments: Vec<Segment>,
    /// Page faults of the threads that worked for it, while they did; with `full` detail.
    pub faults: u64,
    /// Of its work, what others ran beside on its core.
    pub beside: Vec<Beside>,
}

/// A stretch of a request's work with somebody on another lane of the same core.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Beside {
    pub from_ns: u64,
    pub to_ns: u64,
    /// A batch of `elfen run` by its program's name, anybody else by that of the thread.
    pub name: Arc<str>,
}

impl Beside {
    /// How much of it lies in a span.
    pub fn within(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.to_ns.min(to_ns).saturating_sub(self.from_ns.max(from_ns))
    }
}

impl Explained {
    pub fn latency_ns(&self) -> u64 {
        self.ended_ns - self.arrived_ns
    }

    pub fn work_ns(&self) -> u64 {
        total(self.segments.iter().filter(|s| s.kind == Kind::Work).map(Segment::ns))
    }

    /// For how long each neighbour ran beside it, the most first.
    pub fn neighbours(&self) -> Vec<(&str, u64)> {
        let mut sums: Vec<(&str, u64)> = Vec::new();
        for stretch in &self.beside {
            let ns = stretch.within(0, u64::MAX);
            match sums.iter_mut().find(|(name, _)| *name == &*stretch.name) {
                Some((_, sum)) => *sum = sum.saturating_add(ns),
                None => sums.push((&stretch.name, ns)),
            }
        }
        sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        sums
    }
}
