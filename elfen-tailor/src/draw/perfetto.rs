//! Writes a trace for ui.perfetto.dev and its trace_processor: a track for each slow request with
//! its segments, and one for each thread with its states.
//!
//! The field numbers are those of Perfetto's trace_packet.proto and track_event.proto. Packets are
//! written one by one, because a trace is larger than its source.

use std::io::{self, Write};

use super::protobuf::Message;
use crate::calls;
use crate::report::Report;
use crate::timeline::{State, Stretch, Timeline};
use crate::trace::Trace;

/// Of `Trace`.
const PACKET: u32 = 1;

/// Of `TracePacket`.
mod packet {
    pub(super) const TIMESTAMP: u32 = 8;
    pub(super) const SEQUENCE: u32 = 10;
    pub(super) const EVENT: u32 = 11;
    pub(super) const DESCRIPTOR: u32 = 60;
}

/// Of `TrackEvent`.
mod event {
    pub(super) const TYPE: u32 = 9;
    pub(super) const TRACK: u32 = 11;
    pub(super) const NAME: u32 = 23;
    pub(super) const BEGIN: u64 = 1;
    pub(super) const END: u64 = 2;
}

/// Of `TrackDescriptor`.
mod descriptor {
    pub(super) const UUID: u32 = 1;
    pub(super) const NAME: u32 = 2;
    pub(super) const PARENT: u32 = 5;
}

/// All packets come from one writer.
const SEQUENCE: u64 = 1;
const REQUESTS: u64 = 1;
const THREADS: u64 = 2;
/// First numbers of the tracks of requests and of threads.
const REQUEST: u64 = 1 << 32;
const THREAD: u64 = 2 << 32;

/// Writes a report's slow requests and a trace's threads.
pub fn write_perfetto(report: &Report, trace: &Trace, out: &mut impl Write) -> io::Result<()> {
    let timeline = Timeline::of(trace);
    let mut writer = PerfettoWriter { out };
    writer.track(REQUESTS, "slow requests", None)?;
    writer.track(THREADS, "threads", None)?;
    for (number, one) in (0_u64..).zip(&report.slowest) {
        let track = REQUEST + number;
        writer.track(track, &format!("request {}", one.request), Some(REQUESTS))?;
        for segment in &one.segments {
            let name = format!("{} {}", segment.kind, segment.who);
            writer.slice(track, segment.from_ns, segment.to_ns, &name)?;
        }
    }
    let last_ns = trace.events.iter().filter_map(|events| events.last()).map(|event| event.at_ns);
    let ended_ns = last_ns.max().unwrap_or(0);
    let mut threads: Vec<(u32, &[Stretch])> = timeline.threads().collect();
    threads.sort_unstable_by_key(|(thread, _)| *thread);
    for (thread, stretches) in threads.into_iter().filter(|(thread, _)| *thread != 0) {
        let track = THREAD + u64::from(thread);
        let name = trace.name_of(trace.identify(thread, ended_ns));
        writer.track(track, &format!("{name} {thread}"), Some(THREADS))?;
        for (at, stretch) in stretches.iter().enumerate() {
            let to_ns = stretches.get(at + 1).map_or(ended_ns, |next| next.from_ns);
            writer.slice(track, stretch.from_ns, to_ns, &state(stretch.state))?;
        }
    }
    Ok(())
}

fn state(state: State) -> String {
    match state {
        State::Running { cpu } => format!("runs on CPU {cpu}"),
        State::Runnable { .. } => "could run".to_owned(),
        State::Sleeping(sleep) if sleep.stopped => "stopped".to_owned(),
        State::Sleeping(sleep) => match sleep.call {
            Some(call) => format!("sleeps in {}", calls::name(call)),
            None => "sleeps".to_owned(),
        },
    }
}

struct PerfettoWriter<'a, W> {
    out: &'a mut W,
}

impl<W: Write> PerfettoWriter<'_, W> {
    fn packet(&mut self, packet: Message) -> io::Result<()> {
        let packet = packet.number(packet::SEQUENCE, SEQUENCE);
        self.out.write_all(Message::default().message(PACKET, &packet).encoded())
    }

    fn track(&mut self, uuid: u64, name: &str, parent: Option<u64>) -> io::Result<()> {
        let mut track =
            Message::default().number(descriptor::UUID, uuid).text(descriptor::NAME, name);
        if let Some(parent) = parent {
            track = track.number(descriptor::PARENT, parent);
        }
        self.packet(Message::default().message(packet::DESCRIPTOR, &track))
    }

    /// Skips empty slices, and slices of a damaged file that end before they begin.
    fn slice(&mut self, track: u64, from_ns: u64, to_ns: u64, name: &str) -> io::Result<()> {
        if from_ns >= to_ns {
            return Ok(());
        }
        let event = |kind| Message::default().number(event::TYPE, kind).number(event::TRACK, track);
        let at = |ns| Message::default().number(packet::TIMESTAMP, ns);
        let begin = event(event::BEGIN).text(event::NAME, name);
        self.packet(at(from_ns).message(packet::EVENT, &begin))?;
        self.packet(at(to_ns).message(packet::EVENT, &event(event::END)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::protobuf::read::{Value, fields};
    use super::*;

    fn bytes(value: &Value) -> &[u8] {
        match value {
            Value::Bytes(bytes) => bytes,
            Value::Number(_) => panic!("a number"),
        }
    }

    fn number(fields: &[(u64, Value)], field: u32) -> Option<u64> {
        fields.iter().find_map(|(known, value)| match value {
            Value::Number(number) if *known == u64::from(field) => Some(*number),
            _ => None,
        })
    }

    fn nested(fields: &[(u64, Value)], field: u32) -> Option<Vec<(u64, Value)>> {
        let found = fields.iter().find(|(known, _)| *known == u64::from(field))?;
        super::super::protobuf::read::fields(bytes(&found.1))
    }

    /// Goal: a reader of the format finds tracks that are described before they are used, and
    /// slices that end. Method: a made-up trace, read back.
    #[test]
    fn packets_parse_back() {
        let mut out = Vec::new();
        let mut writer = PerfettoWriter { out: &mut out };
        writer.track(REQUESTS, "slow requests", None).unwrap();
        writer.track(REQUEST, "request 7", Some(REQUESTS)).unwrap();
        writer.slice(REQUEST, 1_000, 2_000, "stopped redis").unwrap();
        writer.slice(REQUEST, 2_000, 2_000, "nothing").unwrap();
        writer.slice(REQUEST, 2_000, 1_000, "nothing").unwrap();
        let packets = fields(&out).expect("a message");
        assert!(packets.iter().all(|(field, _)| *field == u64::from(PACKET)));
        let packets: Vec<Vec<(u64, Value)>> =
            packets.iter().map(|(_, packet)| fields(bytes(packet)).expect("a packet")).collect();
        assert!(packets.iter().all(|packet| number(packet, packet::SEQUENCE) == Some(SEQUENCE)));
        assert_eq!(packets.len(), 4);
        let track = nested(&packets[1], packet::DESCRIPTOR).unwrap();
        let expected = (Some(REQUEST), Some(REQUESTS));
        assert_eq!(
            (number(&track, descriptor::UUID), number(&track, descriptor::PARENT)),
            expected
        );
        let slices: Vec<_> = packets[2..]
            .iter()
            .map(|packet| {
                let event = nested(packet, packet::EVENT).unwrap();
                let at = number(packet, packet::TIMESTAMP);
                (at, number(&event, event::TYPE), number(&event, event::TRACK))
            })
            .collect();
        let slice = |at, kind| (Some(at), Some(kind), Some(REQUEST));
        assert_eq!(slices, [slice(1_000, event::BEGIN), slice(2_000, event::END)]);
    }
}
