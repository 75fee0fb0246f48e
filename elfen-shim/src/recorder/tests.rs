//! Goal: a recording is of the threads that it is to be of, and no rate goes from one thread's
//! counter to another's. Method: two threads on one lane, by a task slot and a page of our own.

use super::*;
use elfen_rt::memory::Memory;
use elfen_rt::signal::task::TaskSlot;
use elfen_rt::signal::thread::thread_word;

const OURS: u32 = 70;
const CHILDS: u32 = 71;

fn page() -> &'static Page<ThreadSlot> {
    let bytes = Page::<ThreadSlot>::bytes(8);
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
    memory.remove_name().unwrap();
    Box::leak(Box::new(Page::format(memory, 8, 0, &[0; 32]).unwrap()))
}

/// Who runs, sample by sample, and what is seen of its calls; with rates as they were added.
fn seen(children: bool, runs: &[u64]) -> (Vec<State>, u64) {
    // SAFETY: all bits zero is a slot that the kernel has not written yet.
    let slot: &'static TaskSlot = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    let page = page();
    let first = page.slot(0).unwrap();
    first.claims.store(2, Relaxed);
    for (index, (process, calls)) in (0..).zip([(OURS, 1_000), (CHILDS, 9_000_000)]) {
        let thread = page.slot(index).unwrap();
        thread.thread.store(thread_word(process, process), Relaxed);
        thread.words.calls.store(calls, Relaxed);
    }
    let mut recorder: Recorder<true> =
        Recorder::new(Pool::new(0, 1, false), Some(page), Arc::default());
    (recorder.process, recorder.children) = (OURS, children);
    recorder.lanes.push(Follow::new(slot, 0, vec![(1, ThreadWord::Calls)]));
    let feed = Feed {
        kind: Kind::Values,
        word: 1,
        offset: 0,
        width: Width::U64,
        lane: Some(0),
        ready: None,
    };
    recorder.feeds.push(feed);
    recorder.series.push(Series::new(0, Kind::Values, 1, 0));
    recorder.rates.push(Rate::new("calls".to_owned(), 1, None, 1.0, 1_000));
    let mut words = [&slot.task, &NOTHING];
    let mut states = Vec::new();
    for (at, &task) in (1..).zip(runs) {
        slot.task.store(task, Relaxed);
        for index in 0..2 {
            page.slot(index).unwrap().words.calls.fetch_add(1, Relaxed);
        }
        let now = at * 1_000;
        let words_now = words.map(|word| word.load(Relaxed));
        let sample = Sample { start: now, end: now, words: words_now };
        recorder.take(&sample, &mut words);
        recorder.goes_on(now, &mut words);
        states.push(recorder.series[0].state());
    }
    let figures = recorder.rates[0].figures(|_| String::new());
    let fastest = figures.iter().map(|figure| figure.p90).fold(0.0, f64::max);
    assert!(fastest < 1.0, "a call a sample, and no thread's in place of another's: {fastest}");
    (states, recorder.rates[0].dte(&crate::clock::Clock::default()).kept)
}

#[test]
fn children_are_observed_where_that_is_asked_for() {
    let [ours, child, other] = [OURS, CHILDS, 72].map(|process| thread_word(process, process));
    let runs = [ours, ours, ours, child, child, child, other, other, ours, ours, ours];
    let (states, kept) = seen(false, &runs);
    let ran = |state: &State| matches!(state, State::Value(_));
    assert_eq!(states.iter().filter(|state| ran(state)).count(), 4, "{states:?}");
    assert_eq!(states[5], State::NotRunning, "{states:?}");
    let (followed, more) = seen(true, &runs);
    assert!(matches!(followed[5], State::Value(9_000_000..)), "{followed:?}");
    assert_eq!(followed[7], State::NotRunning, "a stranger: {followed:?}");
    assert!(more > kept && kept > 0, "{more} {kept}");
}

/// Goal: what was there for two periods was looked at or lies in a gap, and not where samples are
/// so near each other that a line takes longer; and where the period follows the distance, gaps do.
#[test]
fn a_gap_is_two_periods() {
    let mut recorder: Recorder<false> = Recorder::new(Pool::new(0, 1, false), None, Arc::default());
    recorder.gap_least_ticks = 4_000;
    let mut gap = |period| {
        recorder.pace(Period(period));
        recorder.gap_ticks
    };
    assert_eq!(
        [0, 1_000, 2_000, 2_600, 26_000].map(&mut gap),
        [4_000, 4_000, 4_000, 5_200, 52_000]
    );
    recorder.pacing = Some(Pacing::new(3_000, 100));
    let found = Stretch { samples: 64, changed: 64, waited: Some(500) };
    let period = (0..15).fold(Period(7), |now, _| Sink::<1>::period(&mut recorder, now, &found));
    assert_eq!(period, Period(1_000 * crate::pacing::TIMES));
    assert_eq!(recorder.gap_ticks, 2_000 * crate::pacing::TIMES);
}

/// Goal: a lane's switches before the first sample and behind the last are none that were missed.
#[test]
fn only_switches_while_somebody_looks_can_be_missed() {
    // SAFETY: all bits zero is a slot that the kernel has not written yet.
    let slot: &'static TaskSlot = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    let mut recorder: Recorder<false> = Recorder::new(Pool::new(0, 1, false), None, Arc::default());
    slot.switches.store(100, Relaxed);
    recorder.lanes.push(Follow::new(slot, 0, Vec::new()));
    slot.switches.store(110, Relaxed);
    recorder.lanes.iter_mut().for_each(Follow::begin);
    slot.switches.store(117, Relaxed);
    recorder.lanes.iter_mut().for_each(Follow::end);
    slot.switches.store(130, Relaxed);
    assert_eq!(recorder.missed_switches(), Some(7));
}

/// Goal: a gap is joined if the lane did not switch in it, and not if it did, or if that is not
/// known. Method: samples of a slot of our own, with gaps between them.
#[test]
fn only_a_lane_that_did_not_switch_stayed() {
    // SAFETY: all bits zero is a slot that the kernel has not written yet.
    let slot: &'static TaskSlot = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    let pool = Pool::new(0, 2, false);
    let mut recorder: Recorder<false> = Recorder::new(pool, None, Arc::default());
    (recorder.gap_ticks, recorder.process) = (100, OURS);
    recorder.lanes.push(Follow::new(slot, 0, vec![(1, ThreadWord::Calls)]));
    for (word, lane) in [(0, None), (1, Some(0))] {
        let (kind, width) = (Kind::Tags, Width::U64);
        recorder.feeds.push(Feed { kind, word, offset: 0, width, lane, ready: None });
        let index = u8::try_from(word).unwrap();
        recorder.series.push(Series::new(index, Kind::Tags, 1, 0));
    }
    let mut words = [&slot.task, &NOTHING];
    let mut see = |at: u64, task: u64, switches: u64| {
        slot.switches_begun.store(switches, Relaxed);
        slot.task.store(task, Relaxed);
        let words_now = words.map(|word| word.load(Relaxed));
        recorder.take(&Sample { start: at, end: at, words: words_now }, &mut words);
        recorder.goes_on(at, &mut words);
    };
    for (at, task, switches) in [
        (1_000, 7, 1),
        (1_050, 7, 1),
        (2_000, 7, 1), // It stayed.
        (2_050, 7, 1),
        (3_000, 7, 3), // It was away and came back.
        (3_050, 7, 3),
        (4_000, 9, 4), // Another task.
        (5_000, 9, 4), // Counted behind the last sample before the gap: not known.
        (5_050, 9, 4),
        (6_000, 9, 4), // It stayed.
    ] {
        see(at, task, switches);
    }
    recorder.close();
    let names = ["task", "calls"].map(|name| crate::recording::Signal {
        name: name.to_owned(),
        source: crate::recording::Source::TaskMap,
        kind: Kind::Tags,
        signed: false,
        names: Vec::new(),
    });
    let clock = crate::clock::Clock { ticks_per_second: 1, step_ticks: 1, unit_ticks: 0 };
    let signals = names.to_vec();
    let head = crate::recording::Head { clock, signals, ..Default::default() };
    let recording = crate::recording::Recording::of(head, &recorder.pool).unwrap();
    for signal in [0, 1] {
        let runs = &recording.runs[signal];
        let gaps = runs.iter().filter(|run| run.state == State::Gap && run.start_ticks >= 1_000);
        let proven: Vec<u64> = gaps.map(|run| run.samples).collect();
        // The last is the end of the recording.
        assert_eq!(proven, [1, 0, 0, 0, 1, 0], "{runs:?}");
    }
}
