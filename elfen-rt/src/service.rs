//! The calls by which a latency-critical service publishes its queue and its running request.
//!
//! Opening and claiming happen once and use system calls. Begin, end and the queue length cost
//! stores to the slot's own lines; begin and end also read the clock. `elfen.h` has the same in C:
//! `elfen_service_*`.
//!
//! ```no_run
//! use elfen_rt::service::Service;
//!
//! let service = Service::open("search", 1).expect("a page for one request lane");
//! let mut worker = service.claim(0, 2).expect("no other process serves lane 2");
//! service.set_queue_len(0, 3);
//! worker.begin(17);
//! // ... the request's work ...
//! worker.end();
//! ```

use core::fmt;
use core::sync::atomic::Ordering::*;

use crate::clock::monotonic_ns;
use crate::memory::{Access, Memory, MemoryError, SegmentOwner};
use crate::process::{Identity, Liveness, forget_own_thread, own_thread, pid_namespace};
use crate::signal::mark::{Mark, Step};
use crate::signal::page::{self, NAME_BYTES, Page, PageError};
use crate::signal::service::{OpenError, ServiceSlot, key_of, page_name};
use crate::signal::snapshot::Word;

/// The page's owner and its group may read it. [`Service::open_with_mode`] can allow other users.
pub const DEFAULT_MODE: u16 = 0o640;

/// A service's page, opened for writing.
#[derive(Debug)]
pub struct Service {
    page: Page<ServiceSlot>,
    own: Identity,
}

/// Why a slot cannot be claimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimError {
    /// The page has no such slot.
    NoSuchSlot { slots: u32 },
    /// Process `pid` writes the slot and is alive, or cannot be found dead. It may be this process.
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
    /// Opens the page of the service `name` with one slot for each of its `lanes` request lanes, or
    /// makes the page if there is none. The page stays when the service ends, so that the readers
    /// see a restarted service again.
    pub fn open(name: &str, lanes: u32) -> Result<Self, OpenError> {
        Self::open_with_mode(name, lanes, DEFAULT_MODE)
    }

    /// Like [`Service::open`]. `mode` holds the permission bits of a page that has to be made.
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

    /// Makes the caller the only writer of slot `lane`, and assigns the slot to the request lane on
    /// `cpu`.
    pub fn claim(&self, lane: u32, cpu: u32) -> Result<Worker<'_>, ClaimError> {
        let no_such = ClaimError::NoSuchSlot { slots: self.page.slot_count() };
        let slot = self.page.slot(lane).ok_or(no_such)?;
        claim_word(&slot.writer, self.own.word(), writer_is_dead).map_err(|holder| {
            ClaimError::Held { pid: Identity::from_word(holder).map_or(0, Identity::pid) }
        })?;
        // A request that a dead predecessor left running is over. Until these stores, readers still
        // see it run.
        slot.running_request.store(0, Relaxed);
        slot.queue_len.store(0, Relaxed);
        slot.cpu.store(u64::from(cpu), Relaxed);
        // A child that serves after a fork has another thread id than its parent.
        forget_own_thread();
        Ok(Worker { slot })
    }

    /// Publishes how many requests wait for `lane`. One thread at a time may call this; it need not
    /// be the thread that serves.
    #[inline]
    pub fn set_queue_len(&self, lane: u32, waiting: u64) {
        if let Some(slot) = self.page.slot(lane) {
            // Relaxed: the value is a hint about this moment, and nothing is published through it.
            slot.queue_len.store(waiting, Relaxed);
        }
    }

    /// Removes the page's name: no new reader finds the page, and it ends with its last mapping.
    pub fn remove(self) -> Result<(), MemoryError> {
        self.page.memory().remove_name()
    }

    pub fn page(&self) -> &Page<ServiceSlot> {
        &self.page
    }
}

/// The only writer of a slot. Dropping it frees the slot.
#[derive(Debug)]
pub struct Worker<'a> {
    slot: &'a ServiceSlot,
}

impl Worker<'_> {
    /// Begins a request that did not wait. The service chooses the ids; 0, which would mean none,
    /// is published as `u64::MAX`.
    #[inline]
    pub fn begin(&mut self, request: u64) {
        let now_ns = monotonic_ns();
        self.publish(request, now_ns, now_ns);
    }

    /// Begins a request that arrived at `arrived_ns` of CLOCK_MONOTONIC. Its latency counts from
    /// its arrival.
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
        store_request(&self.slot.running_request, &self.slot.request_started_ns, request, now_ns);
    }

    /// Ends the running request and records its latency. Does nothing without a running request.
    #[inline]
    pub fn end(&mut self) {
        let request = self.slot.running_request.load(Relaxed);
        if request == 0 {
            return;
        }
        let arrived_ns = self.slot.request_arrived_ns.load(Relaxed);
        // Release: orders the end after the start, for readers that see both.
        self.slot.running_request.store(0, Release);
        let finished = self.slot.finished_requests.load(Relaxed);
        // Release: a reader that sees this count sees that the request is over; pairs with the
        // acquire in `lane::sample`.
        self.slot.finished_requests.store(finished.wrapping_add(1), Release);
        let now_ns = monotonic_ns();
        self.slot.latency.record(now_ns.saturating_sub(arrived_ns));
        self.mark(now_ns, request, Step::End { class: self.slot.marks.class() });
    }

    /// Enters a stage of the running request, with a number of the service's choice. `elfen tailor`
    /// reports how long each stage took. Does nothing without a running request.
    #[inline]
    pub fn stage(&mut self, stage: u16) {
        let request = self.slot.running_request.load(Relaxed);
        if request != 0 {
            self.mark(monotonic_ns(), request, Step::Stage(stage));
        }
    }

    /// Sets the class of the running request: a route, or a hash of its query. `elfen tailor`
    /// compares the request with others of its class. The class holds until the next request
    /// begins.
    #[inline]
    pub fn class(&mut self, class: u64) {
        self.slot.marks.set_class(class);
    }

    #[inline]
    fn mark(&self, at_ns: u64, request: u64, step: Step) {
        self.slot.marks.write(&Mark { at_ns, thread: own_thread(), request, step });
    }

    /// Publishes the serving thread's instructions and cycles so far, from counters of the service.
    /// `dynamic-budget` uses them on machines where Elfen has no counters. The service should call
    /// this every few milliseconds while requests run.
    #[inline]
    pub fn count(&mut self, instructions: u64, cycles: u64) {
        self.slot.instructions.store(instructions, Relaxed);
        self.slot.counted_at_ns.store(monotonic_ns(), Relaxed);
        // Release: a reader that acquires these cycles sees their instructions, or later ones.
        self.slot.cycles.store(cycles, Release);
    }
}

/// The writer's half: publishes a request and its start.
#[inline]
fn store_request<W: Word>(running: &W, started: &W, request: u64, now_ns: u64) {
    started.store(now_ns, Relaxed);
    // Release: orders the start before the request; pairs with the acquire in `load_request`.
    running.store(request, Release);
}

/// The reader's half: the running request, and the start of that request or of a later one.
#[inline]
pub(crate) fn load_request<W: Word>(running: &W, started: &W) -> (u64, u64) {
    // Acquire: pairs with the release in `store_request`.
    let request = running.load(Acquire);
    (request, started.load(Relaxed))
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.slot.running_request.store(0, Relaxed);
        self.slot.queue_len.store(0, Relaxed);
        // Release: orders our last stores before the next process's claim; pairs with the exchange
        // in `claim_word`.
        self.slot.writer.store(0, Release);
    }
}

fn writer_is_dead(word: u64) -> bool {
    Identity::from_word(word).is_none_or(|identity| identity.liveness() == Liveness::Dead)
}

/// Puts `own` into a word that is 0 or names a dead process. Otherwise returns the holder.
fn claim_word<W: Word>(word: &W, own: u64, is_dead: impl Fn(u64) -> bool) -> Result<(), u64> {
    let mut holder = word.load(Acquire);
    loop {
        if holder != 0 && !is_dead(holder) {
            return Err(holder);
        }
        // Of two claimants that saw the same dead holder, one gets the word, and the other sees a
        // living holder.
        match word.compare_exchange(holder, own) {
            Ok(_) => return Ok(()),
            Err(current) => holder = current,
        }
    }
}

/// How often to try while another process makes the page, with a millisecond between tries.
const TRIES: u32 = 100;
const PAUSE_NS: i64 = 1_000_000;
/// The tries that are left for making the page again, if its maker died.
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
            // Absent: another process removed the new segment before this process mapped it.
            Err(MemoryError::Exists | MemoryError::Absent) => {}
            Err(error) => return Err(OpenError::Memory(error)),
        }
        match open_existing(name, left) {
            Ok(page) => return Ok(page),
            Err(error) if is_transient(error) => last = error,
            Err(error) => return Err(error),
        }
        pause();
    }
    Err(last)
}

/// Opens a page that another process made, or removes the name of an unusable one.
///
/// A page that is invalid and has no other mapping was left by another version. A page that is
/// still unfinished after nearly all tries was left by a maker that died. In both cases the name is
/// removed, and the next round makes a new page. A living maker finishes its page long before that,
/// so its name is never removed.
fn open_existing(name: &[u8; NAME_BYTES], tries_left: u32) -> Result<Page<ServiceSlot>, OpenError> {
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
fn is_transient(error: OpenError) -> bool {
    matches!(
        error,
        OpenError::Memory(MemoryError::Absent) | OpenError::Page(PageError::Unfinished { .. })
    )
}

fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: PAUSE_NS };
    // SAFETY: `time` is a local timespec, and the kernel writes no remaining time to a null
    // pointer.
    unsafe { libc::nanosleep(&time, core::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Goal: of two processes that claim a dead holder's slot, exactly one gets it. Method: every
    /// interleaving of the two claims.
    #[test]
    fn one_of_two_claims_wins() {
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

    /// Goal: a reader that sees a request sees its start or the start of a later request, and never
    /// an earlier start. Method: every interleaving of a worker that begins two requests with a
    /// reader.
    #[test]
    fn a_request_is_seen_with_its_start() {
        loom::model(|| {
            let word = || loom::sync::atomic::AtomicU64::new(0);
            let slot = Arc::new((word(), word()));
            let worker = {
                let slot = slot.clone();
                loom::thread::spawn(move || {
                    store_request(&slot.0, &slot.1, 1, 10);
                    store_request(&slot.0, &slot.1, 2, 20);
                })
            };
            let (request, started_ns) = load_request(&slot.0, &slot.1);
            assert!(started_ns >= request * 10, "{request} started at {started_ns}");
            worker.join().unwrap();
            assert_eq!(load_request(&slot.0, &slot.1), (2, 20));
        });
    }
}
