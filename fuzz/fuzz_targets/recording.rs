//! A recording of `elfen shim`: parsed and summarized.
#![no_main]

use elfen_shim::clock::Clock;
use elfen_shim::recording::{Head, Kind, MAGIC, Recording, Signal, Source, VERSION};
use elfen_shim::summary::Summary;
use libfuzzer_sys::fuzz_target;

// With a version, the bytes are chunks after a valid head; otherwise they are a whole file.
fuzz_target!(|input: (Option<u8>, &[u8])| {
    let (version, bytes) = input;
    let file = match version {
        Some(version) => [&before_chunks(1 + u32::from(version) % VERSION), bytes].concat(),
        None => bytes.to_vec(),
    };
    let Ok(mut recording) = Recording::parse(&file) else { return };
    let _summary = Summary::of(&recording);
    for signal in 0..recording.head.signals.len() {
        let _joined = recording.joined(signal).count();
        let _runs = recording.runs_with_ends(signal).count();
    }
    if let Some((from, to)) = recording.span() {
        recording.cut_to(from.saturating_add(1), to.saturating_sub(1));
    }
});

fn before_chunks(version: u32) -> Vec<u8> {
    let signal = |kind| Signal {
        name: "one".to_owned(),
        source: Source::SourceTags,
        kind,
        signed: false,
        names: Vec::new(),
    };
    let head = Head {
        clock: Clock { ticks_per_second: 1 << 31, step_ticks: 26, unit_ticks: 0 },
        signals: vec![signal(Kind::Tags), signal(Kind::Values)],
        ..Head::default()
    };
    let head = serde_json::to_vec(&head).unwrap();
    let length = u32::try_from(head.len()).unwrap().to_le_bytes();
    [&MAGIC[..], &version.to_le_bytes(), &length, &[0; 4], &head].concat()
}
