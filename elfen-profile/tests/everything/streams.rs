//! Goal: sequences of memory accesses that repeat are found, with their share. Method: a program
//! that walks a list in a fixed order, and uses other memory at random in between.

use std::path::Path;

use elfen_profile::profile::{DataReference, DataStream, Profile, StreamCount, What};
use elfen_profile::rules::{Register, RuleSet, parse};

use super::counted;
use super::program::{Counts, EDGES, compile};

const HPS: &str = include_str!("../../../workloads/profile/hps.rules");
const NODES: u64 = 40;
const ROUNDS: u64 = 20_000;
const STREAMS: What = What { streams: true, ..EDGES };

fn words(program: &Path) -> [std::ffi::OsString; 3] {
    [program.into(), ROUNDS.to_string().into(), NODES.to_string().into()]
}

/// The hottest stream of a rule, and its part of some references.
fn hottest(
    profile: &Profile,
    rule: Option<u32>,
    references: u64,
) -> (&DataStream, StreamCount, f64) {
    let own = profile.streams.iter().filter(|(one, _)| one.rule == rule);
    let heat = |one: &DataStream, count: &StreamCount| one.references.len() as u64 * count.times;
    let (stream, &count) = own.max_by_key(|(one, count)| heat(one, count)).expect("a stream");
    (stream, count, heat(stream, &count) as f64 / references as f64)
}

/// The references of a stream to nodes of the list, from its first node on, as numbers of fields.
fn fields(profile: &Profile, counts: &Counts<'_>, references: &[DataReference]) -> Vec<u64> {
    let in_walk = references.iter().filter(|one| counts.is_in(one.at, "walk"));
    let in_walk: Vec<&DataReference> = in_walk.collect();
    let heap = profile.regions.iter().position(|name| name == "[heap]").unwrap();
    assert!(in_walk.iter().all(|one| one.region as usize == heap), "{references:?}");
    let least = in_walk.iter().map(|one| one.distance).min().unwrap();
    let mut fields: Vec<u64> =
        in_walk.iter().map(|one| (one.distance - least).unsigned_abs() / 8).collect();
    // A node is two words, of which the compiler chooses the order.
    let first = (0..fields.len())
        .find(|&at| fields[at] / 2 == 0 && fields[(at + 1) % fields.len()] / 2 == 0)
        .unwrap_or(0);
    fields.rotate_left(first);
    fields
}

#[test]
fn the_walk_of_a_list_is_the_hottest_stream() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "chase.c", &[]);
    let (_, recorded) = counted(folder.path(), &words(&program), STREAMS);
    let profile = &recorded.profile;
    assert!(profile.left.is_empty());
    let counts = Counts::of(profile, &program);
    let (stream, count, share) = hottest(profile, None, profile.references);
    // All nodes in their order, each with both words.
    let fields = fields(profile, &counts, &stream.references);
    let nodes: Vec<u64> = fields.chunks(2).map(|pair| pair[0] / 2).collect();
    assert_eq!(nodes, (0..NODES).map(|at| at * 7 % NODES).collect::<Vec<_>>());
    assert!(fields.chunks(2).all(|pair| pair[0] ^ pair[1] == 1), "{fields:?}");
    // A round is the walk, 16.5 random words on average, and what `main` and `noise` keep in
    // memory: the state twice, and at most eight words more. The stream may have the latter, too.
    let (walk, other) = ((2 * NODES) as f64, 16.5);
    assert!(stream.references.len() as u64 <= 2 * NODES + 10, "{}", stream.references.len());
    let (least, most) = (walk / (walk + other + 10.0), (walk + 10.0) / (walk + other + 10.0));
    // The parts of a grammar that are seen once cost some of the rounds, and so do the boundaries
    // between grammars.
    assert!((least * 0.95..=most).contains(&share), "{share}, not from {least} to {most}");
    assert!(count.times <= ROUNDS && count.times > ROUNDS * 95 / 100, "{}", count.times);
    assert_eq!(count.bursts, 0);
    let heats =
        profile.streams.iter().map(|(one, count)| one.references.len() as u64 * count.times);
    assert!(heats.sum::<u64>() <= profile.references);
}

/// Goal: a stream is no longer than a burst. Method: bursts that are shorter than the walk.
#[test]
fn short_bursts_have_short_streams() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "chase.c", &[]);
    for burst in [2, 30] {
        let what = What { stream_burst: burst, ..STREAMS };
        let (_, recorded) = counted(folder.path(), &words(&program), what);
        let longest = recorded.profile.streams.keys().map(|one| one.references.len()).max();
        let longest = longest.unwrap() as u64;
        assert!((burst / 2..=burst).contains(&longest), "{longest} of {burst}");
    }
}

/// Goal: productions find the same streams. Method: one that matches each access, and those of the
/// paper with bursts that are longer than a walk.
#[test]
fn productions_find_streams() {
    const ALWAYS: &str = "Streams: T.OPCLASS == mem_op -> call(DataStream) T.INSN, null";
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "chase.c", &[]);
    let fixed = |value| Register { value, is_random: false };
    let rules = parse(HPS).unwrap().with_register("sampleFreq", fixed(-1900)).unwrap();
    let rules = rules.with_register("burstLength", fixed(-100)).unwrap();
    let sets: &'static [RuleSet] = Box::leak(vec![parse(ALWAYS).unwrap(), rules].into());
    let what = What { rules: sets, ..STREAMS };
    let (_, recorded) = counted(folder.path(), &words(&program), what);
    let profile = &recorded.profile;
    let counts = Counts::of(profile, &program);
    let all = |rule| {
        let own = profile.streams.iter().filter(move |(one, _)| one.rule == rule);
        own.map(|(one, count)| (one.references.clone(), *count)).collect::<Vec<_>>()
    };
    assert_eq!((all(None), profile.references), (all(Some(0)), profile.rules[0].references));
    let sampled = profile.rules.iter().position(|one| one.name == "DataStreams").unwrap();
    let references = profile.rules[sampled].references;
    // 100 of 2,001 events are in bursts.
    let expected = profile.references as f64 * 100.0 / 2001.0;
    assert!((references as f64 / expected - 1.0).abs() < 0.1, "{references}, not {expected}");
    let (stream, count, _) = hottest(profile, u32::try_from(sampled).ok(), references);
    assert!(stream.references.iter().any(|one| counts.is_in(one.at, "walk")));
    // Nearly each burst has a whole walk: it is longer than one walk and the next words together.
    let bursts: u64 = ["P5", "P6"].map(|name| matched(profile, name)).iter().sum();
    assert!((bursts / 2..=bursts + 1).contains(&count.bursts), "{} of {bursts}", count.bursts);
}

fn matched(profile: &Profile, rule: &str) -> u64 {
    profile.rules.iter().find(|one| one.name == rule).unwrap().matched
}
