//! The calls by which a latency-critical service publishes its queue and its running request.
//!
//! Opening and claiming happen once and use system calls; begin, end and the queue length
//! are stores to the slot's own lines, and two readings of the clock. `elfen.h` has the
//! same in C: `elfen_service_*`.
//!
//! ```no_run
//! use elfen_rt::service::Service;
//!
//! let service = Service::open("search", 1).expect("a page for one request lane");
//! let mut worker = service.claim(0, 2).expect("nobody else serves lane 2");
//! service.set_queue_len(0, 3);
//! worker.begin(17);
//! // ... the request's work ...
//! worker.end();
//! ```

use core::fmt;
use core::sync::atomic::Ordering::*;

use crate::clock::monotonic_ns;
use crate::memory::{Access, Memory, MemoryError, SegmentOwner};
use crate::own_thread::{forget_own_thread, own_thread};
use crate::process::{Identity, Liveness, pid_namespace};
use crate::signal::mark::{Mark, Step};
use crate::signal::page::{self, NAME_BYTES, Page, PageError};
use crate::signal::service::{OpenError, ServiceSlot, key_of, page_name};
use crate::signal::snapshot::Word;

/// The page's owner and its group may read it; [`Service::open_with_mode`] can admit others.
pub const DEFAULT_MODE: u16 = 0o640;

/// A service's page, opened for writing.
#[derive(Debug)]
pub struct Service {
    page: Page<ServiceSlot>,
    own: Identity,
}

/// The slot cannot be claimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimError {
    /// The page has no such slot.
    NoSuchSlot { slots: u32 },
    /// That process writes the slot and is alive, as far as can be told. It may be this one.
    Held { pid: i32 },
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchSlot { slots } => {
                write!(f, "the service page has slots 0 to {}", slots - 1)
            }
            Self::Held { pid } => write!(f, "process {pid} writes this slot already"),
        }
    }
}

impl core::error::Error for ClaimError {}

impl Service {
    /// Opens the page of the service `name` with one slot for each of its `lanes` request lanes;
    /// makes it if there is none. It stays when the service ends, so that a restarted service
    /// finds its readers still there.
    pub fn open(name: &str, lanes: u32) -> Result<Self, OpenError> {
        Self::open_with_mode(name, lanes, DEFAULT_MODE)
    }

    /// The same; `mode` are the permission bits of a page that has to be made.
    pub fn open_with_mode(name: &str, lanes: u32, mode: u16) -> Result<Self, OpenError> {
        let name = page_name(name).ok_or(OpenError::Name)?;
        let own = Identity::own().ok_or(OpenError::NoProc)?;
        let page = open_or_make(&name, lanes, mode)?;
        if page.name() != name {
            return Err(OpenError::Taken);
        }
        if page.slot_count() != lanes {
            return Err(OpenError::Slots { found: page.slot_count(), asked: lanes });
        }
        if page.header().pid_namespace.load(Relaxed) != pid_namespace() {
            return Err(OpenError::Namespace);
        }
        Ok(Self { page, own })
    }

    /// Makes the caller the one writer of slot `lane`, which stands for the request lane on `cpu`.
    pub fn claim(&self, lane: u32, cpu: u32) -> Result<Worker<'_>, ClaimError> {
        let no_such = ClaimError::NoSuchSlot { slots: self.page.slot_count() };
        let slot = self.page.slot(lane).ok_or(no_such)?;
        claim_word(&slot.writer, self.own.word(), writer_is_dead).map_err(|holder| {
            ClaimError::Held { pid: Identity::from_word(holder).map_or(0, Identity::pid) }
        })?;
        // A request that a dead predecessor left running is over. Readers that look in between see
        // it run for a moment longer.
        slot.running_request.store(0, Relaxed);
        slot.queue_len.store(0, Relaxed);
        slot.cpu.store(u64::from(cpu), Relaxed);
        // A child that serves after a fork is another thread than its parent was.
        forget_own_thread();
        Ok(Worker { slot })
    }

    /// Says how many requests wait for `lane`. One thread at a time; it need
    /// not be the one that serves.
    #[inline]
    pub fn set_queue_len(&self, lane: u32, waiting: u64) {
        if let Some(slot) = self.page.slot(lane) {
            // Relaxed: a hint about now, nothing is published through it.
            slot.queue_len.store(waiting, Relaxed);
        }
    }

    /// Takes the page's name away: no new reader finds it, and it goes with the last process that
    /// maps it.
    pub fn remove(self) -> Result<(), MemoryError> {
        self.page.memory().remove_name()
    }

    pub fn page(&self) -> &Page<ServiceSlot> {
        &self.page
    }
}

/// The one writer of a slot. Dropping it frees the slot.
#[derive(Debug)]
pub struct Worker<'a> {
    slot: &'a ServiceSlot,
}

impl Worker<'_> {
    /// A request that did not wait starts now. Ids are the service's own; 0, which means none,
    /// is published as `u64::MAX`.
    #[inline]
    pub fn begin(&mut self, request: u64) {
        let now_ns = monotonic_ns();
        self.publish(request, now_ns, now_ns);
    }

    /// A request that arrived at `arrived_ns` of CLOCK_MONOTONIC starts now; its
    /// latency counts from its arrival.
    #[inline]
    pub fn begin_arrived(&mut self, request: u64, arrived_ns: u64) {
        self.publish(request, arrived_ns, monotonic_ns());
    }

    #[inline]
    fn publish(&mut self, request: u64, arrived_ns: u64, now_ns: u64) {
        self.slot.request_arrived_ns.store(arrived_ns, Relaxed);
        let request = if request == 0 { u64::MAX } else { request };
        self.slot.marks.set_class(0);
        self.mark(now_ns, request, Step::Begin { arrived_ns });
        show(&self.slot.running_request, &self.slot.request_started_ns, request, now_ns);
    }

    /// The running request ends now and its latency is recorded. Without one, nothing happens.
    #[inline]
    pub fn end(&mut self) {
        let request = self.slot.running_request.load(Relaxed);
        if request == 0 {
            return;
        }
        let arrived_ns = self.slot.request_arrived_ns.load(Relaxed);
        // Release: orders the end after the start, for readers that see them both.
        self.slot.running_request.store(0, Release);
        let finished = self.slot.finished_requests.load(Relaxed);
        // Release: who sees this count sees that the request is over.
        self.slot.finished_requests.store(finished.wrapping_add(1), Release);
        let now_ns = monotonic_ns();
        self.slot.latency.record(now_ns.saturating_sub(arrived_ns));
        self.mark(now_ns, request, Step::End { class: self.slot.marks.class() });
    }

    /// The running request goes on to a stage of its work, in the service's own numbers: `elfen
    /// tailor` tells how long each took. Without one, nothing happens.
    #[inline]
    pub fn stage(&mut self, stage: u16) {
        let request = self.slot.running_request.load(Relaxed);
        if request != 0 {
            self.mark(monotonic_ns(), request, Step::Stage(stage));
        }
    }

    /// What kind of request the running one is, a route or a hash of its query: `elfen tailor`
    /// holds its work against that of others of its kind. Until the next one begins.
    #[inline]
    pub fn class(&mut self, class: u64) {
        self.slot.marks.set_class(class);
    }

    #[inline]
    fn mark(&self, at_ns: u64, request: u64, step: Step) {
        self.slot.marks.write(&Mark { at_ns, thread: own_thread(), request, step });
    }

    /// How many instructions the serving thread has executed so far, in how many cycles, from any
    /// counters the service has. `dynamic-budget` goes by it on machines that show Elfen none. To
    /// be called while requests run, every few milliseconds.
    #[inline]
    pub fn count(&mut self, instructions: u64, cycles: u64) {
        self.slot.instructions.store(instructions, Relaxed);
        self.slot.counted_at_ns.store(monotonic_ns(), Relaxed);
        // Release: a reader that acquires these cycles sees their instructions, or later ones.
        self.slot.cycles.store(cycles, Release);
    }
}

/// The writer's half of a request and its start.
#[inline]
fn show<W: Word>(running: &W, started: &W, request: u64, now_ns: u64) {
    started.store(now_ns, Relaxed);
    // Release: orders the start before the request; pairs with the acquire in `shown`.
    running.store(request, Release);
}

/// The reader's half: the request that runs, and a start that is its own or a later one's.
#[inline]
pub(crate) fn shown<W: Word>(running: &W, started: &W) -> (u64, u64) {
    // Acquire: pairs with the release in `show`.
    let request = running.load(Acquire);
    (request, started.load(Relaxed))
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.slot.running_request.store(0, Relaxed);
        self.slot.queue_len.store(0, Relaxed);
        // Release: the process that claims the slot next comes after our last store.
        self.slot.writer.store(0, Release);
    }
}

fn writer_is_dead(word: u64) -> bool {
    Identity::from_word(word).is_none_or(|identity| identity.liveness() == Liveness::Dead)
}

/// Puts `own` into a word that is 0 or names a dead process; otherwise returns the holder.
fn claim_word<W: Word>(word: &W, own: u64, is_dead: impl Fn(u64) -> bool) -> Result<(), u64> {
    let mut holder = word.load(Acquire);
    loop {
        if holder != 0 && !is_dead(holder) {
            return Err(holder);
        }
        // Of two claimants that saw the same dead holder, one gets the word and the other sees a
        // living one.
        match word.compare_exchange(holder, own) {
            Ok(_) => return Ok(()),
            Err(current) => holder = current,
        }
    }
}

/// How long to wait for another process that is making the page: 100 times a millisecond.
const TRIES: u32 = 100;
const PAUSE_NS: i64 = 1_000_000;
/// Kept for making the page anew.
const LAST_TRIES: u32 = 5;

fn open_or_make(
    name: &[u8; NAME_BYTES],
    lanes: u32,
    mode: u16,
) -> Result<Page<ServiceSlot>, OpenError> {
    page::check_slot_count::<ServiceSlot>(lanes)?;
    let mut last = OpenError::Memory(MemoryError::Absent);
    for left in (0..TRIES).rev() {
        match Memory::create_segment(key_of(name), Page::<ServiceSlot>::bytes(lanes), mode) {
            Ok(memory) => return Ok(Page::format(memory, lanes, pid_namespace(), name)?),
            // Absent: another process removed our segment before we had mapped it.
            Err(MemoryError::Exists | MemoryError::Absent) => {}
            Err(error) => return Err(OpenError::Memory(error)),
        }
        match join(name, left) {
            Ok(page) => return Ok(page),
            Err(error) if passes(error) => last = error,
            Err(error) => return Err(error),
        }
        pause();
    }
    Err(last)
}

/// Opens a page that another process made. One that has no other mapping and cannot be used was
/// left by a version of ours, or, if it is still unfinished after nearly all tries, by a maker that
/// died half-way: its name is removed, and the next round makes a new one. A maker that lives has
/// its page finished long before, so its name is never taken from it.
fn join(name: &[u8; NAME_BYTES], tries_left: u32) -> Result<Page<ServiceSlot>, OpenError> {
    let memory = Memory::attach_segment(key_of(name), Access::Write).map_err(OpenError::Memory)?;
    let owner = memory.owner();
    let Err(error) = page::check_memory::<ServiceSlot>(&memory) else {
        let trusted = owner.is_some_and(SegmentOwner::is_ours_or_roots);
        return if trusted {
            Ok(Page::open(memory)?)
        } else {
            Err(OpenError::Foreign(owner.map_or(0, |o| o.uid)))
        };
    };
    let unfinished = matches!(error, PageError::Unfinished { .. });
    let alone = owner.is_some_and(|owner| owner.attached == 1);
    if alone && (!unfinished || tries_left == LAST_TRIES) && memory.remove_name().is_ok() {
        return Err(OpenError::Memory(MemoryError::Absent));
    }
    Err(OpenError::Page(error))
}

/// Whether the next round may go better: the page is being made, or is gone.
fn passes(error: OpenError) -> bool {
    matches!(
        error,
        OpenError::Memory(MemoryError::Absent) | OpenError::Page(PageError::Unfinished { .. })
    )
}

fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: PAUSE_NS };
    // SAFETY: `time` is a live timespec of ours; the rest of an interrupted sleep is not asked for.
    unsafe { libc::nanosleep(&time, core::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Of two claimants that find a dead holder's slot at the same moment exactly one gets it, in
    /// every interleaving.
    #[test]
    fn one_claim_wins() {
        const DEAD: u64 = 9;
        loom::model(|| {
            let word = Arc::new(loom::sync::atomic::AtomicU64::new(DEAD));
            let other = {
                let word = word.clone();
                loom::thread::spawn(move || claim_word(&*word, 1, |holder| holder == DEAD))
            };
            let first = claim_word(&*word, 2, |holder| holder == DEAD);
            let second = other.join().unwrap();
            assert!(matches!((first, second), (Ok(()), Err(2)) | (Err(1), Ok(()))));
        });
    }

    /// Goal: who sees a request sees its start, or that of a later request, and never an earlier
    /// one's. Method: every interleaving of a worker that begins two requests with a reader.
    #[test]
    fn a_request_is_seen_with_its_start() {
        loom::model(|| {
            let word = || loom::sync::atomic::AtomicU64::new(0);
            let slot = Arc::new((word(), word()));
            let worker = {
                let slot = slot.clone();
                loom::thread::spawn(move || {
                    show(&slot.0, &slot.1, 1, 10);
                    show(&slot.0, &slot.1, 2, 20);
                })
            };
            let (request, started_ns) = shown(&slot.0, &slot.1);
            assert!(started_ns >= request * 10, "{request} started at {started_ns}");
            worker.join().unwrap();
            assert_eq!(shown(&slot.0, &slot.1), (2, 20));
        });
    }
}
