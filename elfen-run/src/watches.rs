//! What `elfen tailor watch` publishes while it runs: the causes of a service's tail, for `elfen
//! top` and `elfen metrics`.
//!
//! The page is a segment without a name, found in the same way as runs. It disappears with the
//! watch, however that ends, so nothing has to be cleaned up. It has room for a fixed number of
//! causes. A watch that was stopped in the middle of a change is not shown.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::memory::{Access, Memory, MemoryError};
use elfen_rt::process::{Identity, Liveness, pid_namespace};
use elfen_rt::signal::page::{NAME_BYTES, Page, PageError, Slot};
use elfen_rt::signal::snapshot;

use elfen_machine::segment::{segments, text_of};

/// How many causes of a tail are published, the largest ones.
pub const MOST_CAUSES: usize = 16;
const CAUSE_BYTES: usize = 48;
/// More than the header of a page has room for.
const SERVICE_BYTES: usize = 128;

/// The causes of a service's tail, over the last minute.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tail {
    pub requests: u64,
    /// How many requests were slow, and the latency above which they are.
    pub slow: u64,
    pub threshold_ns: u64,
    /// The delay of slow requests, by all causes.
    pub charged_ns: u64,
    /// By size, the largest first.
    pub causes: Vec<Cause>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cause {
    pub name: String,
    /// How much faster the slow requests would have been without it, in sum.
    pub ns: u64,
}

impl Tail {
    /// The share of a cause in the whole delay of slow requests.
    pub fn share(&self, cause: &Cause) -> f64 {
        use elfen_console::duration::number;
        // A page is untrusted input: its sum may be smaller than a cause.
        let all = self.charged_ns.max(cause.ns);
        if all == 0 { 0.0 } else { number(cause.ns) / number(all) }
    }
}

#[repr(C, align(128))]
struct CauseSlot {
    ns: AtomicU64,
    reserved: AtomicU64,
    name: [AtomicU64; CAUSE_BYTES / 8],
    rest: [AtomicU64; 8],
}

#[repr(C, align(128))]
struct TailSlot {
    generation: AtomicU64,
    generation_begun: AtomicU64,
    /// The [`Identity`] of the watch.
    watch: AtomicU64,
    requests: AtomicU64,
    slow: AtomicU64,
    threshold_ns: AtomicU64,
    causes: AtomicU64,
    charged_ns: AtomicU64,
    reserved: [AtomicU64; 8],
    /// Stored before the first tail is published.
    service: [AtomicU64; SERVICE_BYTES / 8],
    of: [CauseSlot; MOST_CAUSES],
}

const _: () = assert!(size_of::<TailSlot>() == 128 * (2 + MOST_CAUSES));

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNTAIL" is used nowhere else.
unsafe impl Slot for TailSlot {
    const MAGIC: [u8; 8] = *b"ELFNTAIL";
    const CHANNEL: &'static str = "tail";
}

/// Stores a text, cut after its last whole character that fits.
fn store(words: &[AtomicU64], text: &str) {
    let cut = text.floor_char_boundary(words.len() * 8);
    let mut bytes = text.as_bytes()[..cut].chunks(8);
    for word in words {
        let mut eight = [0; 8];
        let some = bytes.next().unwrap_or_default();
        eight[..some.len()].copy_from_slice(some);
        // Relaxed: the caller publishes the words as a whole.
        word.store(u64::from_ne_bytes(eight), Relaxed);
    }
}

fn load(words: &[AtomicU64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
    text_of(&bytes)
}

impl TailSlot {
    fn publish(&self, tail: &Tail) {
        snapshot::publish(&self.generation_begun, &self.generation, || {
            // Relaxed: `publish` orders these between the two counters.
            self.requests.store(tail.requests, Relaxed);
            self.slow.store(tail.slow, Relaxed);
            self.threshold_ns.store(tail.threshold_ns, Relaxed);
            self.charged_ns.store(tail.charged_ns, Relaxed);
            self.causes.store(tail.causes.len().min(MOST_CAUSES) as u64, Relaxed);
            for (slot, cause) in self.of.iter().zip(&tail.causes) {
                slot.ns.store(cause.ns, Relaxed);
                store(&slot.name, &cause.name);
            }
        });
    }

    /// `None` if the writer ended in the middle of a change, or has published nothing yet.
    fn tail(&self) -> Option<Tail> {
        let read = || {
            let count = usize::try_from(self.causes.load(Relaxed)).unwrap_or(usize::MAX);
            let cause =
                |slot: &CauseSlot| Cause { name: load(&slot.name), ns: slot.ns.load(Relaxed) };
            let tail = Tail {
                requests: self.requests.load(Relaxed),
                slow: self.slow.load(Relaxed),
                threshold_ns: self.threshold_ns.load(Relaxed),
                charged_ns: self.charged_ns.load(Relaxed),
                causes: self.of.iter().take(count).map(cause).collect(),
            };
            (self.generation.load(Relaxed) > 0).then_some(tail)
        };
        snapshot::read(&self.generation_begun, &self.generation, read).flatten()
    }
}

/// The page of a watch.
#[derive(Debug)]
pub struct Publisher(Page<TailSlot>);

impl std::fmt::Debug for TailSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.tail().fmt(f)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Page(#[from] PageError),
}

impl Publisher {
    pub fn new(service: &str) -> Result<Self, Error> {
        let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<TailSlot>::bytes(1), 0o600)?;
        // From now on the segment goes with this process.
        memory.remove_name()?;
        let mut name = [0; NAME_BYTES];
        let cut = service.floor_char_boundary(NAME_BYTES - 1);
        name[..cut].copy_from_slice(&service.as_bytes()[..cut]);
        let page = Self(Page::format(memory, 1, pid_namespace(), &name)?);
        let own = Identity::own().map_or(0, Identity::word);
        store(&page.slot().service, service);
        page.slot().watch.store(own, Relaxed);
        Ok(page)
    }

    fn slot(&self) -> &TailSlot {
        self.0.slot(0).expect("it was made with one")
    }

    pub fn publish(&self, tail: &Tail) {
        self.slot().publish(tail);
    }
}

/// The tails that are watched on this machine and visible to this user, by service. Of two watches
/// of a service, the one with more requests.
pub fn watches() -> io::Result<BTreeMap<String, Tail>> {
    let bytes = Page::<TailSlot>::bytes(1);
    let mut found: BTreeMap<String, Tail> = BTreeMap::new();
    for segment in segments()?.into_iter().filter(|segment| segment.bytes == bytes) {
        let Some((service, tail)) = open(segment.id) else { continue };
        let known = found.entry(service).or_default();
        if tail.requests >= known.requests {
            *known = tail;
        }
    }
    Ok(found)
}

fn open(id: i32) -> Option<(String, Tail)> {
    let page: Page<TailSlot> = Page::open(Memory::attach_id(id, Access::Read).ok()?).ok()?;
    let slot = page.slot(0)?;
    let watch = Identity::from_word(slot.watch.load(Relaxed))?;
    if watch.liveness() == Liveness::Dead {
        return None;
    }
    // Acquire, in `tail`: the service's name was stored before the first tail was published.
    let tail = slot.tail()?;
    Some((load(&slot.service), tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(name: &str, ns: u64) -> Cause {
        Cause { name: name.to_owned(), ns }
    }

    /// Goal: a published tail is found, whole, exactly as long as its watch lives. Method: two
    /// watches of this process.
    #[test]
    fn a_tail_is_visible_as_long_as_its_watch() {
        let service = format!("tail-{}", std::process::id());
        let seen = || watches().unwrap().remove(&service);
        let publisher = Publisher::new(&service).unwrap();
        assert_eq!(seen(), None, "nothing is published yet");
        let causes = vec![cause("stopped", 300), cause("preempted:a\u{1b}[31m", 100)];
        let mut tail = Tail { requests: 900, slow: 9, threshold_ns: 5, charged_ns: 800, causes };
        publisher.publish(&tail);
        tail.causes[1].name = "preempted:a\u{fffd}[31m".to_owned();
        assert_eq!(seen().as_ref(), Some(&tail), "without control characters");
        assert!((tail.share(&tail.causes[0]) - 0.375).abs() < 1e-9, "of the whole delay");
        let other = Publisher::new(&service).unwrap();
        other.publish(&Tail { requests: 901, ..Tail::default() });
        assert_eq!(seen().unwrap().requests, 901, "the watch with more requests");
        drop(other);
        // More causes than there is room for: the largest, and names cut after a whole character.
        let long = format!("io:{}", "\u{e4}".repeat(60));
        tail.causes = (0..40).map(|n| cause(&long, n)).collect();
        publisher.publish(&tail);
        let published = seen().unwrap();
        assert_eq!((published.causes.len(), published.causes[15].ns), (MOST_CAUSES, 15));
        assert!(
            published.causes[0].name.len() <= CAUSE_BYTES
                && long.starts_with(&published.causes[0].name)
        );
        // A page whose writer died in the middle of a change is ignored.
        publisher.slot().generation_begun.store(99, Relaxed);
        assert_eq!(seen(), None);
        drop(publisher);
        assert_eq!(seen(), None);
    }

    /// Goal: services are distinguished by their whole names. Method: two that differ at the end.
    #[test]
    fn long_names_with_the_same_beginning_are_distinguished() {
        let name = |port| format!("{}-{}:{port}", "a-long-name".repeat(5), std::process::id());
        let [one, other] = [80, 81].map(|port| Publisher::new(&name(port)).unwrap());
        one.publish(&Tail { requests: 1, ..Tail::default() });
        other.publish(&Tail { requests: 2, ..Tail::default() });
        let seen = watches().unwrap();
        assert_eq!([80, 81].map(|port| seen[&name(port)].requests), [1, 2]);
    }
}
