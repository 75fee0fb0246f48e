//! A recording of `elfen shim`: parsed and summarized.
#![no_main]

use elfen_shim::clock::Clock;
use elfen_shim::recording::{Head, Kind, MAGIC, Recording, Signal, Source, VERSION};
use elfen_shim::summary::Summary;
use libfuzzer_sys::fuzz_target;

// The bytes are a whole file, or chunks after a valid head.
fuzz_target!(|input: (bool, &[u8])| {
    let (is_whole, bytes) = input;
    let file = if is_whole { bytes.to_vec() } else { [&before_chunks(), bytes].concat() };
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

fn before_chunks() -> Vec<u8> {
    let signal = |kind| Signal::new("one", Source::SourceTags, kind);
    let head = Head {
        clock: Clock { ticks_per_second: 1 << 31, step_ticks: 26, unit_ticks: 0 },
        signals: vec![signal(Kind::Tags), signal(Kind::Values)],
        ..Head::default()
    };
    let head = serde_json::to_vec(&head).unwrap();
    let length = u32::try_from(head.len()).unwrap().to_le_bytes();
    [&MAGIC[..], &VERSION.to_le_bytes(), b"H", &length, &[0; 4], &head].concat()
}
