//! Marks: the steps of each request of a service and their times, in a ring for each request lane.
//! `elfen tailor` reads them.
//!
//! A mark is four words. The last word is stored last and holds the lap of the ring, as with the
//! kernel's [`events`](super::event). The serving thread writes marks and never waits. A reader
//! that is more than a lap late learns how many marks it missed.
//!
//! The functions are generic over the word, so that the model checker runs this same code on its
//! own atomics.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::event::{Words, high, lap, lap_of};
use super::snapshot::Word;

/// Marks in a ring, a power of two.
pub const MARKS: usize = 4096;

/// The ring of one request lane.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Marks {
    /// How many marks were ever written.
    head: AtomicU64,
    /// The class of the running request, a number of the service's choice; 0 for none.
    class: AtomicU64,
    reserved: [AtomicU64; 14],
    ring: [[AtomicU64; 4]; MARKS],
}

const _: () = assert!(size_of::<Marks>() == 128 + 32 * MARKS);
const _: () = assert!(offset_of!(Marks, class) == 8);
const _: () = assert!(offset_of!(Marks, ring) == 128);
const _: () = assert!(MARKS.is_power_of_two());

/// One step of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    pub at_ns: u64,
    /// The thread's id in the service's pid namespace.
    pub thread: u32,
    pub request: u64,
    pub step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The request starts. It has waited since it arrived.
    Begin { arrived_ns: u64 },
    /// The request enters this stage, a number of the service's choice.
    Stage(u16),
    End {
        /// The request's class; 0 if the service does not publish one.
        class: u64,
    },
}

const BEGIN: u64 = 1;
const STAGE: u64 = 2;
const END: u64 = 3;

impl Mark {
    /// `None` for a step that this version does not know.
    pub fn decode(words: &Words) -> Option<Self> {
        let [at_ns, request, value, word] = *words;
        let step = match word >> 8 & 0xff {
            BEGIN => Step::Begin { arrived_ns: value },
            STAGE => Step::Stage(u16::try_from(value).ok()?),
            END => Step::End { class: value },
            _ => return None,
        };
        Some(Self { at_ns, thread: high(word), request, step })
    }

    /// The words of a mark in lap 1, for tests of readers.
    pub fn encode(&self) -> Words {
        let (kind, value) = self.step.words();
        [self.at_ns, self.request, value, u64::from(self.thread) << 32 | 1 << 16 | kind << 8]
    }
}

impl Step {
    fn words(self) -> (u64, u64) {
        match self {
            Self::Begin { arrived_ns } => (BEGIN, arrived_ns),
            Self::Stage(stage) => (STAGE, u64::from(stage)),
            Self::End { class } => (END, class),
        }
    }
}

impl Marks {
    /// Writes a mark. The caller is the lane's only writer.
    #[inline]
    pub(crate) fn write(&self, mark: &Mark) {
        write(&self.head, &self.ring, mark);
    }

    #[inline]
    pub(crate) fn set_class(&self, class: u64) {
        // Relaxed: only the writer itself reads the class.
        self.class.store(class, Relaxed);
    }

    #[inline]
    pub(crate) fn class(&self) -> u64 {
        self.class.load(Relaxed)
    }

    /// A cursor for a reader of all marks from now on.
    pub fn cursor(&self) -> Cursor {
        // Acquire: as in `take`.
        Cursor { next: self.head.load(Acquire) }
    }

    /// Passes the marks since the last call to `each`. Returns how many marks were overwritten
    /// before they could be read.
    pub fn take(&self, cursor: &mut Cursor, each: impl FnMut(Words)) -> u64 {
        take(&self.head, &self.ring, cursor, each)
    }
}

/// A reader's position.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cursor {
    next: u64,
}

#[inline]
fn write<W: Word>(head: &W, ring: &[[W; 4]], mark: &Mark) {
    // Relaxed: only the caller writes the head.
    let index = head.load(Relaxed);
    let count = ring.len() as u64;
    #[expect(clippy::cast_possible_truncation, reason = "less than the ring's length")]
    let Some([at_ns, request, value, word]) = ring.get((index & (count - 1)) as usize) else {
        return;
    };
    // Release fence: a reader that sees one of the words below also sees this 0, or a later value;
    // pairs with the acquire fence in `attempt`.
    word.store(0, Relaxed);
    W::fence(Release);
    let (kind, of_step) = mark.step.words();
    at_ns.store(mark.at_ns, Relaxed);
    request.store(mark.request, Relaxed);
    value.store(of_step, Relaxed);
    let lap = u64::from(lap_of(index, count));
    // Release: a reader that sees this word sees the words above; pairs with the acquire load in
    // `attempt`.
    word.store(u64::from(mark.thread) << 32 | lap << 16 | kind << 8, Release);
    // Release: a reader that sees this count sees the mark, or a mark that overwrote it; pairs with
    // the acquire load in `take`.
    head.store(index.wrapping_add(1), Release);
}

fn take<W: Word>(
    head: &W,
    ring: &[[W; 4]],
    cursor: &mut Cursor,
    mut each: impl FnMut(Words),
) -> u64 {
    // Acquire: pairs with the last store in `write`.
    let head = head.load(Acquire);
    let count = ring.len() as u64;
    // A head that goes back belongs to another page, or was not written by a service. The reader
    // continues from there.
    let behind = head.saturating_sub(cursor.next);
    let mut lost = behind.saturating_sub(count);
    for index in head - behind.min(count)..head {
        #[expect(clippy::cast_possible_truncation, reason = "less than the ring's length")]
        let place = ring.get((index & (count - 1)) as usize);
        match place.and_then(|place| attempt(place, lap_of(index, count))) {
            Some(words) => each(words),
            None => lost += 1,
        }
    }
    cursor.next = head;
    lost
}

/// Reads a mark, if it is still the mark of this lap.
fn attempt<W: Word>(place: &[W; 4], expected: u16) -> Option<Words> {
    let [at_ns, request, value, word] = place;
    let last = word.load(Acquire);
    let words = [at_ns.load(Relaxed), request.load(Relaxed), value.load(Relaxed), last];
    // Acquire fence: orders the words before the second load of the last word; pairs with the
    // release fence in `write`.
    W::fence(Acquire);
    (last != 0 && word.load(Relaxed) == last && lap(&words) == expected).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::vec::Vec;

    const fn mark(number: u64) -> Mark {
        let step = Step::Begin { arrived_ns: number };
        Mark { at_ns: number, thread: 7, request: number, step }
    }

    #[test]
    fn marks_survive_encoding_and_decoding() {
        for step in [Step::Begin { arrived_ns: 9 }, Step::Stage(u16::MAX), Step::End { class: 1 }] {
            let mark = Mark { at_ns: 1 << 60, thread: 4_000_000_000, request: u64::MAX, step };
            assert_eq!(Mark::decode(&mark.encode()), Some(mark));
        }
        assert_eq!(Mark::decode(&[1, 2, 3, 0xff00]), None);
        assert_eq!(Mark::decode(&[1, 2, 1 << 16, STAGE << 8]), None, "no stage has this number");
    }

    type Ring = [[AtomicU64; 4]; 4];

    fn taken(head: &AtomicU64, ring: &Ring, cursor: &mut Cursor) -> (Vec<u64>, u64) {
        let mut marks = Vec::new();
        let lost = take(head, ring, cursor, |words| marks.push(Mark::decode(&words).unwrap()));
        assert!(marks.iter().all(|one| *one == mark(one.request)));
        (marks.iter().map(|mark| mark.request).collect(), lost)
    }

    #[test]
    fn a_late_reader_learns_how_many_marks_it_missed() {
        let (head, ring) = (AtomicU64::new(0), Ring::default());
        let mut cursor = Cursor { next: 0 };
        assert_eq!(taken(&head, &ring, &mut cursor), (Vec::new(), 0));
        (1..=3).for_each(|number| write(&head, &ring, &mark(number)));
        assert_eq!(taken(&head, &ring, &mut cursor), ([1, 2, 3].to_vec(), 0));
        (4..=9).for_each(|number| write(&head, &ring, &mark(number)));
        assert_eq!(taken(&head, &ring, &mut cursor), ([6, 7, 8, 9].to_vec(), 2));
        // A writer died in the middle of a mark: the next writer overwrites that mark.
        ring[1][3].store(0, Relaxed);
        write(&head, &ring, &mark(10));
        assert_eq!(taken(&head, &ring, &mut cursor), ([10].to_vec(), 0));
    }

    /// Goal: a reader survives arbitrary contents of a page. Method: counts that jump, go back and
    /// overflow.
    #[test]
    fn invalid_counts_are_survived() {
        let (head, ring) = (AtomicU64::new(u64::MAX), Ring::default());
        let mut cursor = Cursor { next: 3 };
        assert_eq!(taken(&head, &ring, &mut cursor), (Vec::new(), u64::MAX - 3));
        head.store(2, Relaxed);
        assert_eq!(taken(&head, &ring, &mut cursor), (Vec::new(), 0));
        write(&head, &ring, &mark(3));
        assert_eq!(taken(&head, &ring, &mut cursor), ([3].to_vec(), 0));
    }

    /// Goal: a mark is read whole or counted as lost. Method: every interleaving of a writer with a
    /// reader, in a ring of one mark.
    #[test]
    fn a_mark_is_read_whole_or_counted_as_lost() {
        use loom::sync::atomic::AtomicU64 as Loom;
        loom::model(|| {
            let word = || Loom::new(0);
            let ring = Arc::new((word(), [[word(), word(), word(), word()]]));
            let writer = {
                let ring = ring.clone();
                loom::thread::spawn(move || {
                    write(&ring.0, &ring.1, &mark(1));
                    write(&ring.0, &ring.1, &mark(2));
                })
            };
            let (mut cursor, mut seen) = (Cursor { next: 0 }, 0);
            let mut look = |cursor: &mut Cursor| {
                let lost = take(&ring.0, &ring.1, cursor, |words| {
                    let found = Mark::decode(&words).unwrap();
                    assert_eq!(found, mark(found.request), "whole");
                    seen += 1;
                });
                seen += lost;
            };
            look(&mut cursor);
            writer.join().unwrap();
            look(&mut cursor);
            assert_eq!(seen, 2, "each is read or lost");
        });
    }

    /// The model can fail: if the last word is not cleared first, a reader sees half a mark.
    #[test]
    #[should_panic(expected = "half a mark")]
    fn the_model_finds_a_mark_that_is_overwritten_while_it_is_read() {
        use loom::sync::atomic::AtomicU64 as Loom;
        loom::model(|| {
            let word = || Loom::new(0);
            let place = Arc::new([word(), word(), word(), word()]);
            let [at_ns, request, value, last] = &*place;
            for word in [at_ns, request, value] {
                word.store(1, Relaxed);
            }
            last.store(1 << 16 | BEGIN << 8, Relaxed);
            let writer = {
                let place = place.clone();
                loom::thread::spawn(move || {
                    for word in &place[..3] {
                        word.store(2, Relaxed);
                    }
                    place[3].store(2 << 16 | BEGIN << 8, Release);
                })
            };
            if let Some(words) = attempt(&place, 1) {
                assert!(words[..3] == [1, 1, 1], "half a mark");
            }
            writer.join().unwrap();
        });
    }
}
