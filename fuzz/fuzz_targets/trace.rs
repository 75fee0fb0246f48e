//! A trace, as a file and as events in any order: parsed, explained, and drawn.
#![no_main]

use elfen_tailor::draw::{page, write_perfetto};
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::report;
use elfen_tailor::trace::{Header, Note, ThreadName, Trace};
use libfuzzer_sys::fuzz_target;

const CPUS: u32 = 4;
const EVENTS_MAX: usize = 400;

fuzz_target!(|input: (bool, &[u8])| {
    let (is_file, bytes) = input;
    let trace = if is_file { Trace::read(bytes).ok() } else { Some(made_of(bytes)) };
    let Some(trace) = trace else { return };
    // What a file says of a machine is believed as far as memory goes.
    if trace.events.iter().map(Vec::len).sum::<usize>() > EVENTS_MAX {
        return;
    }
    let Ok(report) = report(&trace, SlowThreshold::Quantile(990_000), 3, &[]) else { return };
    let _text = report.text();
    let _page = page(&report, &trace);
    write_perfetto(&report, &trace, &mut std::io::sink()).unwrap();
});

/// Events of which all words are anything, but close enough to each other to be of one story.
fn made_of(bytes: &[u8]) -> Trace {
    let mut trace = Trace::new(Header {
        kernel: "6.1".to_owned(),
        cpus: CPUS,
        detail: "full".to_owned(),
        port: 80,
        service: "fuzzed".to_owned(),
        began_ns: 0,
        cores: vec![vec![0, 1], vec![2, 3]],
        lacks: Vec::new(),
    });
    for event in bytes.chunks_exact(16).take(EVENTS_MAX) {
        let byte = |at: usize| u64::from(event[at]);
        let small = |at: usize| byte(at) % 8;
        // Kind and flags, thread, time, and two words whose halves are small or arbitrary.
        let head = byte(0) % 32 | byte(1) << 8 | small(2) << 32;
        let at = u64::from_le_bytes([event[3], event[4], event[5], 0, 0, 0, 0, event[6] / 255]);
        let word = |at: usize| small(at) << 32 | small(at + 1) | byte(at + 2) << 16;
        let words = [head, at, word(7), word(10)];
        match event[15] % 8 {
            7 => trace.add_marks(u32::from(event[14]) % CPUS, &[words]),
            cpu => trace.add_events(u32::from(cpu) % CPUS, &[words]),
        }
    }
    let named = |thread| ThreadName { thread, at_ns: 0, name: format!("thread {thread}") };
    trace.add_note(Note::Names((1..8).map(named).collect()));
    trace.add_note(Note::Processes(vec![1, 2]));
    trace
}
