//! When a guard probes for checks, and what it learns from the answers. Without clock or I/O.

use std::time::Duration;

/// A batch with a check answers a probe within this time.
pub(super) const PROBE_TIME: Duration = Duration::from_micros(50);
/// The time between probes while there is nothing to learn.
const RARELY_NS: u64 = 50_000_000;
/// The number of probes over which the share of misses is taken.
const RECENT: u32 = 200;
/// There is something to learn if more than one probe in this many is missed.
const MISSED_ONE_IN: u32 = 100;
/// After this many answers in a row the batch runs known code again. After a miss it may have
/// entered a part of its program in which it had never run next to a request.
const IN_A_ROW: u32 = 20;
/// After more than this many inconclusive probes in a row, the batch counts as asleep.
const VOID_MAX: u32 = 3;
/// A probe's timer can cost the batch a sixth of the probe in a virtual machine. Probes whose
/// misses lead to nothing must end: this many in all, and `PER_SITE` more for each patch site.
const RESERVE_MAX: u32 = 2000;
const PER_SITE: u32 = 40;
/// The probes that each request allows. A batch next to few requests gains little from checks.
const PER_REQUEST: u32 = 20;
/// What each probe adds to the reserve while there is nothing to learn. A program that has used up
/// its probes without success enters other parts, too.
const PER_RARE: u32 = 5;

/// The probe schedule of one lane.
#[derive(Debug)]
pub(super) struct ProbeSchedule {
    next_ns: u64,
    /// How many probes may follow each other, one at each poll.
    credit: u32,
    /// How many more probes future requests can allow.
    reserve: u32,
    probes: u32,
    missed: u32,
    answered_in_a_row: u32,
    /// The number of inconclusive probes in a row.
    void: u32,
}

impl ProbeSchedule {
    pub(super) fn new() -> Self {
        Self {
            next_ns: 0,
            credit: 0,
            reserve: RESERVE_MAX,
            probes: 0,
            missed: 0,
            answered_in_a_row: 0,
            void: 0,
        }
    }

    /// To be called at each request.
    pub(super) fn note_request(&mut self) {
        let more = self.reserve.min(PER_REQUEST);
        if self.credit == 0 && more > 0 && !self.has_learned() {
            self.next_ns = 0;
        }
        self.reserve -= more;
        self.credit += more;
    }

    /// The batch ran on next to a request, so it is worth a probe at once.
    pub(super) fn note_overlap(&mut self) {
        self.answered_in_a_row = 0;
        if self.credit > 0 {
            self.next_ns = 0;
        }
    }

    /// Whether it is time for a probe.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns
    }

    /// A probe was answered or missed.
    pub(super) fn record(&mut self, missed: bool, now_ns: u64) {
        if self.probes == RECENT {
            // The older half counts half.
            self.probes = RECENT / 2;
            self.missed /= 2;
        }
        if self.has_learned() || self.credit == 0 {
            self.reserve = (self.reserve + PER_RARE).min(RESERVE_MAX);
        }
        self.probes += 1;
        self.void = 0;
        self.missed += u32::from(missed);
        self.answered_in_a_row = if missed { 0 } else { self.answered_in_a_row + 1 };
        self.credit = self.credit.saturating_sub(1);
        let learns = !self.has_learned() && self.credit > 0;
        self.next_ns = if learns { now_ns } else { now_ns + RARELY_NS };
    }

    /// A probe was inconclusive: the batch did not run, because the planner ran or the batch slept.
    pub(super) fn record_void(&mut self, now_ns: u64) {
        self.void = self.void.saturating_add(1);
        self.next_ns = if self.void > VOID_MAX { now_ns + RARELY_NS / 10 } else { now_ns };
    }

    /// A patch site was written, or a process is new: there may be more to learn.
    pub(super) fn note_change(&mut self) {
        self.reserve = (self.reserve + PER_SITE).min(RESERVE_MAX);
    }

    fn has_learned(&self) -> bool {
        let is_rare = self.probes >= RECENT / 2 && self.missed * MISSED_ONE_IN <= self.probes;
        is_rare && self.answered_in_a_row >= IN_A_ROW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL_NS: u64 = 500_000;
    const POLLS: u64 = 1_000_000_000 / POLL_NS;

    /// How many polls of a second are probes, if every `nth` probe is missed and a request comes
    /// with every tenth poll.
    fn in_a_second(schedule: &mut ProbeSchedule, from_ns: u64, nth: u64) -> u64 {
        let mut probes = 0;
        for (poll, now_ns) in (0..POLLS).map(|poll| (poll, from_ns + poll * POLL_NS)) {
            if poll % 10 == 0 {
                schedule.note_request();
            }
            if schedule.is_due(now_ns) {
                probes += 1;
                schedule.record(nth != 0 && probes % nth == 0, now_ns);
            }
        }
        probes
    }

    #[test]
    fn probes_become_rare_where_all_are_answered() {
        let mut schedule = ProbeSchedule::new();
        let first = in_a_second(&mut schedule, 0, 0);
        assert!((100..140).contains(&first), "{first}: a hundred, then twenty a second");
        assert_eq!(in_a_second(&mut schedule, 1_000_000_000, 0), 20);
    }

    #[test]
    fn missed_probes_repeat_at_every_poll_until_they_are_used_up() {
        let mut schedule = ProbeSchedule::new();
        assert_eq!(in_a_second(&mut schedule, 0, 2), 2000);
        let used_up = in_a_second(&mut schedule, 1_000_000_000, 2);
        assert!(used_up <= 130, "{used_up}: twenty a second, and what each of them adds");
        schedule.note_change();
        let more = in_a_second(&mut schedule, 2_000_000_000, 2);
        assert!((140..=180).contains(&more), "{more}: and what a patch site adds");
    }

    #[test]
    fn a_batch_in_a_new_part_of_its_program_is_probed_at_once() {
        let mut schedule = ProbeSchedule::new();
        in_a_second(&mut schedule, 0, 0);
        let now_ns = 1_000_000_000;
        let learned = schedule.next_ns;
        schedule.note_overlap();
        for _ in 0..IN_A_ROW {
            assert!(schedule.is_due(now_ns), "at every poll: next {learned} before");
            schedule.record(false, now_ns);
        }
        assert!(!schedule.is_due(now_ns), "the batch runs known code again");
        schedule.record(true, now_ns + RARELY_NS);
        assert!(schedule.is_due(now_ns + RARELY_NS), "a missed probe counts like a request");
    }

    #[test]
    fn a_batch_next_to_few_requests_is_probed_rarely() {
        let mut schedule = ProbeSchedule::new();
        schedule.note_request();
        let missed = |schedule: &mut ProbeSchedule, from_ns| {
            let polls = (0..POLLS).map(|poll| from_ns + poll * POLL_NS);
            let due = polls.filter(|&now_ns| {
                let is_due = schedule.is_due(now_ns);
                if is_due {
                    schedule.record(true, now_ns);
                }
                is_due
            });
            due.count()
        };
        let first = missed(&mut schedule, 0);
        assert!((39..=41).contains(&first), "{first}: those of a request, then twenty a second");
        schedule.note_request();
        let more = missed(&mut schedule, 1_000_000_000);
        assert!((39..=41).contains(&more), "{more}");
    }

    #[test]
    fn a_sleeping_batch_is_probed_now_and_then() {
        let mut schedule = ProbeSchedule::new();
        for _ in 0..VOID_MAX {
            schedule.record_void(1_000_000);
            assert!(schedule.is_due(1_500_000), "the planner may have run");
        }
        schedule.record_void(1_000_000);
        assert!(!schedule.is_due(2_000_000));
        assert!(schedule.is_due(6_000_000));
    }
}
