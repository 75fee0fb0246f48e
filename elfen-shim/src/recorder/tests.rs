//! Goal: a recording contains the right threads, and no rate mixes the counters of two threads.
//! Method: two threads on one lane, with a task slot and a page made here.

use super::*;
use crate::followed_lane::ThreadWord;
use crate::pacing::Pacing;
use crate::rates::Rate;
use crate::recording::Kind;
use crate::recording::{Head, Recording, Signal, Source};
use crate::session::Feed;
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

fn recorder<const BOTH: bool>(words: Words) -> Recorder<BOTH> {
    let pool = Pool::new(0, words.feeds.len(), false);
    let mut recorder = Recorder::new(words, ObserverConfig::default(), pool, Arc::default());
    // The times of these tests begin at 0.
    let feeds = recorder.words.feeds.iter().zip(0..);
    recorder.series = feeds.map(|(feed, index)| Series::new(index, feed.kind, 1, 0)).collect();
    recorder
}

/// Samples a lane that runs these tasks, one per sample. Returns the state of `calls` after each
/// sample, and the number of kept rates.
fn seen(children: bool, runs: &[u64]) -> (Vec<State>, u64) {
    // SAFETY: a TaskSlot consists of atomic integers, for which zero bytes are valid.
    let slot: &'static TaskSlot = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    let page = page();
    let first = page.slot(0).unwrap();
    first.claims.store(2, Relaxed);
    for (index, (process, calls)) in (0..).zip([(OURS, 1_000), (CHILDS, 9_000_000)]) {
        let thread = page.slot(index).unwrap();
        thread.thread.store(thread_word(process, process), Relaxed);
        thread.words.calls.store(calls, Relaxed);
    }
    let mut observed = Words::of(OURS, Some(page));
    observed.children = children;
    observed.lanes.push(FollowedLane::new(slot, 0, vec![(1, ThreadWord::Calls)]));
    observed.feeds.push(Feed { lane: Some(0), ..Feed::of_word(Kind::Values, 1) });
    observed.rates.push(Rate::new("calls".to_owned(), 1, None, 1.0, 1_000));
    let mut recorder: Recorder<true> = recorder(observed);
    recorder.gap_ticks = u64::MAX;
    let mut words = [&slot.task, &ZERO_WORD];
    let mut states = Vec::new();
    for (at, &task) in (1..).zip(runs) {
        slot.task.store(task, Relaxed);
        for index in 0..2 {
            page.slot(index).unwrap().words.calls.fetch_add(1, Relaxed);
        }
        let now = at * 1_000;
        let words_now = words.map(|word| word.load(Relaxed));
        let sample = Sample { start: now, end: now, words: words_now };
        recorder.add_sample(&sample, &mut words);
        recorder.keep_going(now, &mut words);
        states.push(recorder.series[0].state());
    }
    let figures = recorder.words.rates[0].figures(|_| String::new());
    let fastest = figures.iter().map(|figure| figure.p90).fold(0.0, f64::max);
    assert!(fastest < 1.0, "one call per sample, and no rate between two threads: {fastest}");
    (states, recorder.words.rates[0].dte(&crate::clock::Clock::default()).kept)
}

#[test]
fn children_are_observed_only_with_follow() {
    let [ours, child, other] = [OURS, CHILDS, 72].map(|process| thread_word(process, process));
    let runs = [ours, ours, ours, child, child, child, other, other, ours, ours, ours];
    let (states, kept) = seen(false, &runs);
    let ran = |state: &State| matches!(state, State::Value(_));
    assert_eq!(states.iter().filter(|state| ran(state)).count(), 4, "{states:?}");
    assert_eq!(states[5], State::NotRunning, "{states:?}");
    let (followed, more) = seen(true, &runs);
    assert!(matches!(followed[5], State::Value(9_000_000..)), "{followed:?}");
    assert_eq!(followed[7], State::NotRunning, "an unrelated process: {followed:?}");
    assert!(more > kept && kept > 0, "{more} {kept}");
}

/// Goal: samples that are more than two periods apart have a gap between them. For short periods
/// the limit is longer, because one line transfer may exceed two periods. The limit follows an
/// adaptive period.
#[test]
fn a_gap_is_longer_than_two_periods() {
    let mut recorder: Recorder<false> = recorder(Words::of(OURS, None));
    recorder.min_gap_ticks = 4_000;
    let mut gap = |period| {
        recorder.set_period(Period(period));
        recorder.gap_ticks
    };
    assert_eq!(
        [0, 1_000, 2_000, 2_600, 26_000].map(&mut gap),
        [4_000, 4_000, 4_000, 5_200, 52_000]
    );
    recorder.config.pacing = Some(Pacing::new(3_000, 100));
    let found = BlockStats { samples: 64, changed: 64, waited: Some(500) };
    let period =
        (0..15).fold(Period(7), |now, _| Sink::<1>::next_period(&mut recorder, now, &found));
    assert_eq!(period, Period(1_000 * crate::pacing::PERIOD_FACTOR));
    assert_eq!(recorder.gap_ticks, 2_000 * crate::pacing::PERIOD_FACTOR);
}

/// Goal: a lane's switches before the first sample and after the last are not counted as missed.
#[test]
fn only_switches_during_observation_are_missed() {
    // SAFETY: a TaskSlot consists of atomic integers, for which zero bytes are valid.
    let slot: &'static TaskSlot = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    slot.switches.store(100, Relaxed);
    let mut words = Words::of(OURS, None);
    words.lanes.push(FollowedLane::new(slot, 0, Vec::new()));
    slot.switches.store(110, Relaxed);
    let mut recorder: Recorder<false> = recorder(words);
    slot.switches.store(117, Relaxed);
    recorder.words.lanes.iter_mut().for_each(FollowedLane::end_counting);
    slot.switches.store(130, Relaxed);
    assert_eq!(recorder.missed_switches(), Some(7));
}

/// Goal: a gap is marked as proven only if the lane is known not to have switched in it. Method:
/// samples of a slot made here, with gaps between them.
#[test]
fn a_gap_is_proven_only_without_a_switch() {
    // SAFETY: a TaskSlot consists of atomic integers, for which zero bytes are valid.
    let slot: &'static TaskSlot = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
    let mut observed = Words::of(OURS, None);
    observed.lanes.push(FollowedLane::new(slot, 0, vec![(1, ThreadWord::Calls)]));
    for (word, lane) in [(0, None), (1, Some(0))] {
        observed.feeds.push(Feed { lane, ..Feed::of_word(Kind::Tags, word) });
    }
    let mut recorder: Recorder<false> = recorder(observed);
    recorder.gap_ticks = 100;
    let mut words = [&slot.task, &ZERO_WORD];
    let mut see = |at: u64, task: u64, switches: u64| {
        slot.switches_begun.store(switches, Relaxed);
        slot.task.store(task, Relaxed);
        let words_now = words.map(|word| word.load(Relaxed));
        recorder.add_sample(&Sample { start: at, end: at, words: words_now }, &mut words);
        recorder.keep_going(at, &mut words);
    };
    for (at, task, switches) in [
        (1_000, 7, 1),
        (1_050, 7, 1),
        (2_000, 7, 1), // No switch.
        (2_050, 7, 1),
        (3_000, 7, 3), // The task left and returned.
        (3_050, 7, 3),
        (4_000, 9, 4), // Another task.
        (5_000, 9, 4), // Unknown: the count was first read after the last sample before the gap.
        (5_050, 9, 4),
        (6_000, 9, 4), // No switch.
    ] {
        see(at, task, switches);
    }
    recorder.close();
    let signals = ["task", "calls"].map(|name| Signal::new(name, Source::TaskMap, Kind::Tags));
    let clock = crate::clock::Clock { ticks_per_second: 1, step_ticks: 1, unit_ticks: 0 };
    let head = Head { clock, signals: signals.to_vec(), ..Head::default() };
    let recording = Recording::of(head, &recorder.pool).unwrap();
    for signal in [0, 1] {
        let runs = &recording.runs[signal];
        let gaps = runs.iter().filter(|run| run.state == State::Gap && run.start_ticks >= 1_000);
        let proven: Vec<u64> = gaps.map(|run| run.samples).collect();
        // The last gap is the end of the recording.
        assert_eq!(proven, [1, 0, 0, 0, 1, 0], "{runs:?}");
    }
}
