//! Goal: a recording is read back as it was written, from memory and from a file. A truncated file
//! is read up to its last complete chunk. Method: a recording of two signals with every state,
//! complete and truncated. `damaged.rs` tests other damage.

use super::*;
use crate::clock::Clock;
use crate::random::Random;

const STEP: u64 = 26;

pub(super) fn head() -> Head {
    let signal = |name, kind| Signal {
        names: vec![(7, "seven".to_owned())],
        ..Signal::new(name, Source::SourceTags, kind)
    };
    Head {
        program: "program".to_owned(),
        process: 4242,
        clock: Clock { ticks_per_second: 2_600_000_000, step_ticks: STEP, unit_ticks: 0 },
        signals: vec![signal("tag", Kind::Tags), signal("value", Kind::Values)],
        samples: 12,
        figures: RunFigures { exit_status: Some(0), ..RunFigures::default() },
        ..Head::default()
    }
}

/// The states of both signals: recurring tags, numbers that jump, and pauses.
fn states(count: u64) -> Vec<(u64, State, State)> {
    let state = |n: u64| match n % 11 {
        3 => (State::Gap, State::Gap),
        5 => (State::NotRunning, State::NotRunning),
        _ => (State::Value(n % 7), State::Value(n.wrapping_mul(0x9e37_79b9_7f4a_7c15))),
    };
    (1..=count).map(|n| (n * 40 * STEP, state(n).0, state(n).1)).collect()
}

fn record(count: u64, bytes: usize, keeps_last: bool) -> (Pool, bool) {
    let mut pool = Pool::new(bytes, 2, keeps_last);
    let mut series = [Kind::Tags, Kind::Values]
        .iter()
        .zip(0..)
        .map(|(kind, index)| Series::new(index, *kind, STEP, STEP));
    let (mut tags, mut values) = (series.next().unwrap(), series.next().unwrap());
    let mut full = false;
    let mut see = |series: &mut Series, at, state, pool: &mut Pool| {
        let seen = match state {
            State::Gap => series.gap(at, false, pool),
            state => series.see(at, state, pool),
        };
        full |= seen.is_err();
    };
    for (at, tag, value) in states(count) {
        see(&mut tags, at, tag, &mut pool);
        see(&mut values, at, value, &mut pool);
    }
    let end = (count + 1) * 40 * STEP;
    for series in [&mut tags, &mut values] {
        full |= series.end(end, &mut pool).is_err();
    }
    (pool, full)
}

pub(super) fn file(count: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&head(), &record(count, 8 << 20, false).0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_recording_is_read_back() {
    let count = 4_000;
    let (pool, full) = record(count, 8 << 20, false);
    assert!(!full);
    let recording = Recording::of(head(), &pool).unwrap();
    let from_file = Recording::parse(&file(count)).unwrap();
    assert_eq!((from_file.head, from_file.cut), (head(), false));
    assert_eq!(from_file.runs, recording.runs);
    for signal in [0, 1] {
        let mut stretches = recording.runs_with_ends(signal).skip(1).peekable();
        for (at, tag, value) in states(count) {
            let expected = if signal == 0 { tag } else { value };
            while stretches.peek().is_some_and(|(_, end)| *end <= at) {
                stretches.next();
            }
            let (run, end) = stretches.peek().expect("up to the end");
            assert_eq!((run.state, run.start_ticks <= at, at < *end), (expected, true, true));
        }
    }
    let samples: u64 = recording.runs[0].iter().map(|run| run.samples).sum();
    let gaps = states(count).iter().filter(|(_, tag, _)| *tag == State::Gap).count() as u64;
    assert_eq!(samples, count - gaps);
}

/// Goal: a run of a tag takes three bytes if there are few tags.
#[test]
fn runs_of_tags_take_three_bytes() {
    let mut pool = Pool::new(8 << 20, 1, false);
    let mut series = Series::new(0, Kind::Tags, STEP, 0);
    for n in 1..=100_000 {
        series.see(n * 2600, State::Value(0x4000_0000 + n % 20), &mut pool).unwrap();
    }
    let (runs, bytes) = pool.chunks().iter().fold((0, 0), |(runs, bytes), (head, payload)| {
        (runs + u64::from(head.runs), bytes + payload.len() as u64)
    });
    assert!(runs > 99_000 && bytes * 10 <= runs * 31, "{bytes} bytes of {runs} runs");
}

/// Goal: a file is smaller than the runs in memory, even with many tags. Method: about sixty tags,
/// some of them frequent, with thirty different lengths.
#[test]
fn runs_of_many_tags_are_compressed() {
    let mut random = Random::of(88_172_645_463_325_252);
    let (mut pool, mut at) = (Pool::new(1 << 20, 1, false), 0);
    let mut series = Series::new(0, Kind::Tags, 8, 0);
    for _ in 0..60_000 {
        let tag = random.below(13) * random.below(13);
        series.see(at, State::Value(2 * tag), &mut pool).unwrap();
        at += 161 + random.below(30) * 8;
    }
    let before: usize = pool.chunks().iter().map(|(_, runs)| runs.len()).sum();
    let after: usize = pool.chunks().iter().map(|(_, runs)| file::pack(runs).len()).sum();
    assert!(after * 100 < before * 85, "{after} of {before} bytes");
}

/// Goal: the error of recorded times is less than a unit, and a moment has the same time in all
/// signals and chunks. So a part of a recording can be written again without a change. Method: two
/// signals that change at odd ticks, in many chunks, with different starts.
#[test]
fn times_are_in_whole_units() {
    let clock = Clock { step_ticks: 3, ..head().clock }.in_units(0);
    let head = Head { clock, ..head() };
    let mut pool = Pool::new(8 << 20, 2, false);
    let mut tags = Series::new(0, Kind::Tags, clock.unit(), 5);
    let mut values = Series::new(1, Kind::Values, clock.unit(), 11);
    let times: Vec<u64> = (1..30_000).map(|n| n * 1_013 + n % 7).collect();
    for (&at, n) in times.iter().zip(0..) {
        tags.see(at, State::Value(n % 5), &mut pool).unwrap();
        values.see(at, State::Value(n), &mut pool).unwrap();
    }
    for series in [&mut tags, &mut values] {
        series.end(times[times.len() - 1] + 1_000, &mut pool).unwrap();
    }
    assert!(pool.chunks().len() > 4);
    let mut recording = Recording::of(head, &pool).unwrap();
    for runs in &recording.runs {
        let found = runs.iter().skip(1).map(|run| run.start_ticks);
        for (found, at) in found.zip(&times) {
            assert_eq!(found, at - at % clock.unit());
        }
    }
    recording.cut_to(2_000_000, 9_000_000);
    let written = Recording::of(recording.head.clone(), &recording.to_pool()).unwrap();
    assert_eq!(written.runs, recording.runs);
}

/// Makes a file with one chunk of the first signal.
pub(super) fn file_of_chunk(head: &Head, runs: u32, packed: &[u8]) -> Vec<u8> {
    const TAIL_BYTES: usize = 1 + 4 + 4 + 8;
    let mut file = Vec::new();
    write(head, &Pool::new(0, 2, false), &mut file).unwrap();
    file.truncate(file.len() - TAIL_BYTES);
    let chunk = ChunkHead { series: 0, first_ticks: 1000, runs, bytes: 0 };
    file::write_chunk(&chunk, packed, &mut file).unwrap();
    file
}

/// Goal: the format of version 1 does not change, and a tag that its chunk does not define is
/// refused. Method: chunks as bytes. Each run has its length, and its samples with its state. Then
/// follow the number of its tag and the value of a new tag, or the difference of its value.
#[test]
fn runs_are_read_from_their_bytes() {
    let run = |step, state, samples| Run { start_ticks: 1000 + step * STEP, state, samples };
    let value = |samples: u8| samples << 2 | 3;
    let tags = [5, value(2), 0, 7, 3, value(1), 1, 9, 2, value(1), 0, 4, 1, 0, 0];
    let read = Recording::parse(&file_of_chunk(&head(), 5, &file::pack(&tags))).unwrap();
    let expected = [
        run(0, State::Value(7), 2),
        run(5, State::Value(9), 1),
        run(8, State::Value(7), 1),
        run(10, State::NotRunning, 0),
        run(14, State::Gap, 0),
    ];
    assert_eq!(read.runs[0], expected);
    let undefined = [5, value(2), 0, 7, 3, value(1), 2];
    let wrong = Recording::parse(&file_of_chunk(&head(), 2, &file::pack(&undefined))).unwrap_err();
    assert!(wrong.to_string().contains("a tag that it does not define"), "{wrong}");
    let mut head = head();
    head.signals[0].kind = Kind::Values;
    let values = [5, value(3), 14, 35, value(1), 1, 0, 0];
    let read = Recording::parse(&file_of_chunk(&head, 3, &file::pack(&values))).unwrap();
    let expected = [run(0, State::Value(7), 3), run(5, State::Value(6), 1), run(40, State::Gap, 0)];
    assert_eq!(read.runs[0], expected);
}

/// Goal: no chunk in a file unpacks to more than eight times its bytes, and every written chunk
/// respects that bound. Bytes after the compressed runs are refused. Method: a signal whose runs
/// repeat exactly, the same bytes compressed without the bound, and an additional byte.
#[test]
fn a_chunk_expands_at_most_eightfold() {
    let mut pool = Pool::new(1 << 20, 1, false);
    let mut series = Series::new(0, Kind::Tags, STEP, 0);
    for n in 1..=20_000 {
        series.see(n * 40 * STEP, State::Value(n % 2), &mut pool).unwrap();
    }
    let chunks = pool.chunks();
    let (chunk, runs) = chunks[0];
    let packed = file::pack(runs);
    assert!(packed.len() < runs.len() / 3 && packed.len() * form::EXPANSION_MAX >= runs.len());
    let read = Recording::parse(&file_of_chunk(&head(), chunk.runs, &packed)).unwrap();
    assert_eq!(read.runs[0].len(), usize::try_from(chunk.runs).unwrap());
    let longer = [&packed[..], &[0]].concat();
    let refused = Recording::parse(&file_of_chunk(&head(), chunk.runs, &longer)).unwrap_err();
    assert!(refused.to_string().contains("bytes after its compressed runs"), "{refused}");
    let bomb = miniz_oxide::deflate::compress_to_vec(runs, 9);
    assert!(bomb.len() * form::EXPANSION_MAX < runs.len());
    let refused = Recording::parse(&file_of_chunk(&head(), chunk.runs, &bomb)).unwrap_err();
    assert!(refused.to_string().contains("too many bytes"), "{refused}");
}

#[test]
fn a_full_pool_says_so_and_a_ring_keeps_the_end() {
    let (pool, full) = record(200_000, 1 << 20, false);
    assert!(full && !pool.chunks().is_empty());
    let first = Recording::of(head(), &pool).unwrap();
    assert_eq!(first.span().unwrap().0, STEP);
    let (pool, full) = record(200_000, 1 << 20, true);
    assert!(!full);
    let last = Recording::of(head(), &pool).unwrap();
    let (from, to) = last.span().unwrap();
    assert!(from > STEP && to == 200_001 * 40 * STEP, "{from} {to}");
}

#[test]
fn parts_are_cut_out() {
    let mut recording = Recording::parse(&file(1000)).unwrap();
    let whole = recording.span().unwrap();
    let clock = recording.head.clock;
    recording.cut_to(clock.ns(200 * 40 * STEP), clock.ns(300 * 40 * STEP));
    let (from, to) = recording.span().unwrap();
    assert!(from > whole.0 && to < whole.1);
    assert!((to - from).abs_diff(100 * 40 * STEP) <= 40 * STEP, "{}", to - from);
    recording.cut_to(0, 0);
    assert_eq!(recording.span(), None);
    assert!(recording.to_pool().chunks().is_empty());
}

/// Goal: a value that may have been read during a gap does not begin a run before it. Method: a
/// value that occurs only in the last sample before a gap.
#[test]
fn the_last_sample_before_a_gap_begins_no_run() {
    let mut pool = Pool::new(1 << 20, 1, false);
    let mut series = Series::new(0, Kind::Tags, STEP, 0);
    let at = |n: u64| n * 40 * STEP;
    for (n, value) in [(1, 7), (2, 7), (3, 8)] {
        series.see(at(n), State::Value(value), &mut pool).unwrap();
    }
    series.gap(at(3), false, &mut pool).unwrap();
    series.see(at(9), State::Value(8), &mut pool).unwrap();
    series.end(at(10), &mut pool).unwrap();
    let recording = Recording::of(head(), &pool).unwrap();
    let states: Vec<(u64, State)> =
        recording.runs[0].iter().map(|run| (run.start_ticks, run.state)).collect();
    let (seven, eight) = (State::Value(7), State::Value(8));
    let expected = [(0, State::Gap), (at(1), seven), (at(3), State::Gap), (at(9), eight)];
    assert_eq!(states[..4], expected);
}

#[test]
fn each_sample_can_be_a_run_of_its_own() {
    let mut pool = Pool::new(1 << 20, 1, false);
    let mut series = Series::new(0, Kind::Tags, STEP, 0).singly();
    (1..=100).for_each(|n| series.see(n * 40 * STEP, State::Value(7), &mut pool).unwrap());
    series.end(101 * 40 * STEP, &mut pool).unwrap();
    let recording = Recording::of(head(), &pool).unwrap();
    let single = recording.runs[0].iter().filter(|run| run.samples == 1).count();
    assert_eq!((single, recording.runs[0].len()), (100, 102));
}

#[test]
fn a_truncated_file_is_read_up_to_its_last_complete_chunk() {
    let whole = file(4000);
    let all = Recording::parse(&whole).unwrap();
    let (mut read, mut most) = (0, 0);
    for cut in (0..whole.len()).step_by(211).chain(whole.len() - 60..whole.len()) {
        match Recording::parse(&whole[..cut]) {
            Ok(part) => {
                assert!(part.cut, "{cut}");
                let runs: usize = part.runs.iter().map(Vec::len).sum();
                assert!(part.runs[0].iter().zip(&all.runs[0]).all(|(a, b)| a == b));
                read += 1;
                most = most.max(runs);
            }
            Err(error) => assert!(matches!(error, ReadError::CutInHead), "{cut}: {error}"),
        }
    }
    assert!(read > 60 && most == all.runs.iter().map(Vec::len).sum::<usize>());
}
