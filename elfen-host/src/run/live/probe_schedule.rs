//! When a guard rehearses, and what it makes of the answers: no clock, no memory of others.

use std::time::Duration;

/// A drill is answered within this time, or not at all.
pub(super) const DRILL: Duration = Duration::from_micros(50);
/// While there is nothing to learn.
const RARELY_NS: u64 = 50_000_000;
/// Drills of which the share of misses is taken.
const RECENT: u32 = 200;
/// More misses than one in this many, and there is something to learn.
const LEARNED: u32 = 100;
/// So many answers in a row, and the batch does again what was learned: after a miss it may have
/// come to a part of its program where it never was beside a request.
const IN_A_ROW: u32 = 20;
/// After more drills in a row that showed nothing, the batch sleeps.
const VOID_MAX: u32 = 3;
/// A timer takes a sixth of a drill from the batch in a virtual machine, so what can't be learned
/// is not asked for all the time: so many drills in all, and so many more for each place.
const IN_ALL: u32 = 2000;
const PER_PLACE: u32 = 40;
/// Who meets few requests has little use for what is learned: so many for each.
const PER_REQUEST: u32 = 20;
/// And so many for each that is asked while there is nothing to learn: a program that has used up
/// its drills where nothing came of them comes to other parts, too.
const PER_RARE: u32 = 5;

/// The drills of one lane.
#[derive(Debug)]
pub(super) struct Drills {
    next_ns: u64,
    /// How many may follow each other at each look.
    credit: u32,
    /// How many more there may be, once there are requests for them.
    reserve: u32,
    asked: u32,
    missed: u32,
    answered_in_a_row: u32,
    /// Drills in a row that showed nothing.
    void: u32,
}

impl Drills {
    pub(super) fn new() -> Self {
        let (next_ns, credit, reserve) = (0, 0, IN_ALL);
        let (asked, missed, answered_in_a_row, void) = (0, 0, 0, 0);
        Self { next_ns, credit, reserve, asked, missed, answered_in_a_row, void }
    }

    /// A request came by.
    pub(super) fn met(&mut self) {
        let more = self.reserve.min(PER_REQUEST);
        if self.credit == 0 && more > 0 && !self.has_learned() {
            self.next_ns = 0;
        }
        self.reserve -= more;
        self.credit += more;
    }

    /// The batch went on next to a request: worth asking at once.
    pub(super) fn was_beside(&mut self) {
        self.answered_in_a_row = 0;
        if self.credit > 0 {
            self.next_ns = 0;
        }
    }

    /// Whether to ask now.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns
    }

    /// A drill has been answered, or missed.
    pub(super) fn judged(&mut self, missed: bool, now_ns: u64) {
        if self.asked == RECENT {
            // The older half counts half.
            (self.asked, self.missed) = (RECENT / 2, self.missed / 2);
        }
        if self.has_learned() || self.credit == 0 {
            self.reserve = (self.reserve + PER_RARE).min(IN_ALL);
        }
        self.asked += 1;
        self.void = 0;
        self.missed += u32::from(missed);
        self.answered_in_a_row = if missed { 0 } else { self.answered_in_a_row + 1 };
        self.credit = self.credit.saturating_sub(1);
        let learns = !self.has_learned() && self.credit > 0;
        self.next_ns = if learns { now_ns } else { now_ns + RARELY_NS };
    }

    /// A drill showed nothing: the batch did not run, as the planner did, or as it sleeps.
    pub(super) fn void(&mut self, now_ns: u64) {
        self.void = self.void.saturating_add(1);
        self.next_ns = if self.void > VOID_MAX { now_ns + RARELY_NS / 10 } else { now_ns };
    }

    /// A place was written, or a process met: there may be more to learn.
    pub(super) fn changed(&mut self) {
        self.reserve = (self.reserve + PER_PLACE).min(IN_ALL);
    }

    fn has_learned(&self) -> bool {
        let is_rare = self.asked >= RECENT / 2 && self.missed * LEARNED <= self.asked;
        is_rare && self.answered_in_a_row >= IN_A_ROW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK_NS: u64 = 500_000;
    const LOOKS: u64 = 1_000_000_000 / LOOK_NS;

    /// How many of the looks of a second are drills, if every `nth` is missed and a request comes
    /// after every tenth look; from `drills` on.
    fn in_a_second(drills: &mut Drills, from_ns: u64, nth: u64) -> u64 {
        let mut asked = 0;
        for (look, now_ns) in (0..LOOKS).map(|look| (look, from_ns + look * LOOK_NS)) {
            if look % 10 == 0 {
                drills.met();
            }
            if drills.is_due(now_ns) {
                asked += 1;
                drills.judged(nth != 0 && asked % nth == 0, now_ns);
            }
        }
        asked
    }

    #[test]
    fn drills_become_rare_where_all_are_answered() {
        let mut drills = Drills::new();
        let first = in_a_second(&mut drills, 0, 0);
        assert!((100..140).contains(&first), "{first}: a hundred, then twenty a second");
        assert_eq!(in_a_second(&mut drills, 1_000_000_000, 0), 20);
    }

    #[test]
    fn misses_are_drilled_at_every_look_until_nothing_comes_of_it() {
        let mut drills = Drills::new();
        assert_eq!(in_a_second(&mut drills, 0, 2), 2000);
        let used_up = in_a_second(&mut drills, 1_000_000_000, 2);
        assert!(used_up <= 130, "{used_up}: twenty a second, and what each of them earns");
        drills.changed();
        let more = in_a_second(&mut drills, 2_000_000_000, 2);
        assert!((140..=180).contains(&more), "{more}: and what a place earns");
    }

    #[test]
    fn a_batch_that_comes_to_another_part_of_its_program_is_asked_at_once() {
        let mut drills = Drills::new();
        in_a_second(&mut drills, 0, 0);
        let now_ns = 1_000_000_000;
        let learned = drills.next_ns;
        drills.was_beside();
        for _ in 0..IN_A_ROW {
            assert!(drills.is_due(now_ns), "at every look: next {learned} before");
            drills.judged(false, now_ns);
        }
        assert!(!drills.is_due(now_ns), "it is where it was before");
        drills.judged(true, now_ns + RARELY_NS);
        assert!(drills.is_due(now_ns + RARELY_NS), "a drill finds it as a request does");
    }

    #[test]
    fn who_meets_few_requests_is_asked_seldom() {
        let mut drills = Drills::new();
        drills.met();
        let missed = |drills: &mut Drills, from_ns| {
            let looks = (0..LOOKS).map(|look| from_ns + look * LOOK_NS);
            let due = looks.filter(|&now_ns| {
                let is_due = drills.is_due(now_ns);
                if is_due {
                    drills.judged(true, now_ns);
                }
                is_due
            });
            due.count()
        };
        let first = missed(&mut drills, 0);
        assert!((39..=41).contains(&first), "{first}: those of a request, then twenty a second");
        drills.met();
        let more = missed(&mut drills, 1_000_000_000);
        assert!((39..=41).contains(&more), "{more}");
    }

    #[test]
    fn a_batch_that_sleeps_is_asked_now_and_then() {
        let mut drills = Drills::new();
        for _ in 0..VOID_MAX {
            drills.void(1_000_000);
            assert!(drills.is_due(1_500_000), "the planner may have run");
        }
        drills.void(1_000_000);
        assert!(!drills.is_due(2_000_000));
        assert!(drills.is_due(6_000_000));
    }
}
