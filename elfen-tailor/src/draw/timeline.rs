//! Draws one request: its segments, below them what ran on the CPUs that it needed, and an arrow
//! for each wake-up.

use std::collections::BTreeSet;

use elfen_console::duration::{number, show};
use elfen_console::page::escape;
use elfen_rt::signal::event::EventKind;

use crate::report::{SegmentRow, SlowRequest};
use crate::timeline::Timeline;
use crate::trace::Trace;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 14.0;
const BAR: f64 = 20.0;
/// The height of a row: a bar, the names below it, and some space.
const ROW: f64 = 46.0;
const TOP: f64 = 4.0;
const FOOT: f64 = 34.0;
/// Limits of the picture: a machine may have hundreds of CPUs, and a request may run on all of
/// them.
const MOST_CPUS: usize = 6;
const MOST_THREADS: usize = 16;
/// Narrower pieces are joined, so that the size of the picture is bounded.
const LEAST_WIDTH: f64 = 0.5;
/// The least distance between two arrows.
const BETWEEN_ARROWS: f64 = 3.0;
const TICKS: u64 = 8;

/// The colours of segments, with their meaning and the kinds of segments.
pub(super) const COLOURS: [(&str, &str, &[&str]); 8] = [
    ("blue", "work", &["work"]),
    ("aqua", "waits in the queue", &["queue", "busy"]),
    ("red", "other threads had the CPU", &["preempted", "steal", "jit"]),
    ("violet", "stopped", &["stopped", "throttled", "safepoint", "gc"]),
    (
        "orange",
        "storage and locks",
        &["io", "lock", "classload", "contention", "reclaim", "compaction"],
    ),
    ("ochre", "interrupts and waking", &["wake", "irq", "softirq"]),
    ("green", "held back by TCP", &["tcp-out"]),
    ("grey", "waits, or unknown", &["sleep", "wait", "unknown"]),
];

fn colour(kind: &str) -> &'static str {
    let known = COLOURS.iter().find(|(.., kinds)| kinds.contains(&kind));
    known.map_or("grey", |(colour, ..)| colour)
}

/// A piece of a bar, with its name.
#[derive(Clone, PartialEq, Debug)]
struct Piece {
    from: f64,
    to: f64,
    colour: &'static str,
    name: String,
    tooltip: String,
}

pub(super) struct Drawer<'a> {
    pub(super) trace: &'a Trace,
    pub(super) timeline: &'a Timeline,
}

impl Drawer<'_> {
    pub(super) fn picture(&self, one: &SlowRequest) -> String {
        let span = Span::of(one);
        let threads: BTreeSet<u32> =
            one.segments.iter().map(|segment| segment.tid).take(MOST_THREADS).collect();
        let cpus = self.cpus(one, &threads);
        let mut body = text("", (0.0, TOP + 14.0), "request");
        let own = one.segments.iter().map(|segment| self.segment(segment, &span));
        body += &draw_pieces(TOP, merge_narrow(own));
        for (row, &cpu) in (1_u32..).zip(&cpus) {
            let y = TOP + ROW * f64::from(row);
            body += &text("", (0.0, y + 14.0), &format!("CPU {cpu}"));
            body += &line("base", (LEFT, y + BAR), (WIDTH - RIGHT, y + BAR));
            let runs = self.timeline.runs(cpu, span.from_ns, span.to_ns);
            let ran = runs.filter(|(.., thread, _)| *thread != 0);
            let ran =
                ran.map(|(from, to, thread, _)| self.run((from, to), thread, &threads, &span));
            body += &draw_pieces(y, merge_narrow(ran));
        }
        body += &self.arrows(&cpus, &threads, &span);
        let bottom = TOP + ROW * (number(cpus.len() as u64) + 1.0) - 6.0;
        body += &ticks(&span, bottom);
        let height = bottom + FOOT;
        format!("<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {height:.0}\">\n{body}</svg>\n")
    }

    /// The CPUs that a request ran on, or would have run on next.
    fn cpus(&self, one: &SlowRequest, threads: &BTreeSet<u32>) -> Vec<u32> {
        let used = one.segments.iter().filter_map(|segment| segment.cpu);
        let next = threads.iter().filter_map(|&t| self.timeline.next_cpu(t, one.arrived_ns));
        let all: BTreeSet<u32> = used.chain(next).collect();
        all.into_iter().take(MOST_CPUS).collect()
    }

    fn segment(&self, segment: &SegmentRow, span: &Span) -> Piece {
        let SegmentRow { from_ns, to_ns, kind, who, cpu, tid } = segment;
        let thread = self.trace.name_of(self.trace.identify(*tid, *from_ns));
        // A segment of the request's thread is named by its kind only.
        let name = if *who == thread { kind.clone() } else { format!("{kind}:{who}") };
        let on = cpu.map_or_else(String::new, |cpu| format!(", CPU {cpu}"));
        Piece {
            from: span.x(*from_ns),
            to: span.x(*to_ns),
            colour: colour(kind),
            tooltip: format!("{name}: {}{on}, thread {thread} {tid}", show(to_ns - from_ns)),
            name: format!("{name} {}", show(to_ns - from_ns)),
        }
    }

    fn run(&self, (from, to): (u64, u64), thread: u32, own: &BTreeSet<u32>, span: &Span) -> Piece {
        let name = self.trace.name_of(self.trace.identify(thread, from));
        Piece {
            from: span.x(from),
            to: span.x(to),
            colour: if own.contains(&thread) { "blue" } else { "red" },
            tooltip: format!("{name} {thread}: {}", show(to.saturating_sub(from))),
            name,
        }
    }

    /// Draws an arrow from each waker to the CPU that the woken thread of the request ran on next.
    fn arrows(&self, cpus: &[u32], threads: &BTreeSet<u32>, span: &Span) -> String {
        let row = |cpu: u32| {
            let at = (1_u32..).zip(cpus).find(|(_, known)| **known == cpu)?.0;
            Some(TOP + ROW * f64::from(at))
        };
        let mut wakes: Vec<(u64, u32, u32, u32)> = Vec::new();
        for (cpu, events) in (0_u32..).zip(&self.trace.events) {
            let first = events.partition_point(|event| event.at_ns < span.from_ns);
            let within = events[first..].iter().take_while(|event| event.at_ns <= span.to_ns);
            wakes.extend(within.filter_map(|event| match event.kind {
                EventKind::Waking { waker, .. } if threads.contains(&event.thread) => {
                    Some((event.at_ns, event.thread, cpu, waker))
                }
                _ => None,
            }));
        }
        wakes.sort_unstable();
        let mut arrows = String::new();
        let mut last = f64::NEG_INFINITY;
        for (at_ns, thread, from_cpu, waker) in wakes {
            let to = self.timeline.next_cpu(thread, at_ns).and_then(row);
            let (Some(to), x) = (to, span.x(at_ns)) else { continue };
            if x - last < BETWEEN_ARROWS {
                continue;
            }
            last = x;
            // If the waker's CPU has no row, the arrow comes from above.
            let from = row(from_cpu).filter(|from| *from != to);
            let (from, to) = match from {
                Some(from) if from > to => (from, to + BAR),
                Some(from) => (from + BAR, to),
                None => (to - 12.0, to),
            };
            let down = if from < to { -4.0 } else { 4.0 };
            let name = |thread| self.trace.name_of(self.trace.identify(thread, at_ns));
            let by = if waker == 0 { "an interrupt".to_owned() } else { name(waker) };
            let tooltip = escape(&format!("{by} wakes {}", name(thread)));
            arrows += &format!(
                "<path class=\"wake\" d=\"M{x:.2} {from:.2}V{to:.2}m-3 {down}l3 {}l3 {down}\">\
                 <title>{tooltip}</title></path>\n",
                -down
            );
        }
        arrows
    }
}

struct Span {
    from_ns: u64,
    to_ns: u64,
}

impl Span {
    fn of(one: &SlowRequest) -> Self {
        let from_ns = one.arrived_ns;
        Self { from_ns, to_ns: from_ns.saturating_add(one.latency_ns.max(1)) }
    }

    fn x(&self, at_ns: u64) -> f64 {
        let part = number(at_ns.clamp(self.from_ns, self.to_ns) - self.from_ns);
        LEFT + (WIDTH - LEFT - RIGHT) * part / number(self.to_ns - self.from_ns)
    }
}

/// Joins pieces that are too narrow to see. A joined piece has the colour and name of its widest
/// part.
fn merge_narrow(pieces: impl Iterator<Item = Piece>) -> Vec<Piece> {
    let mut all: Vec<(Piece, f64)> = Vec::new();
    for piece in pieces {
        let width = piece.to - piece.from;
        match all.last_mut() {
            Some((last, largest))
                if piece.from - last.to < LEAST_WIDTH && last.to - last.from < LEAST_WIDTH =>
            {
                let from = last.from;
                if width > *largest {
                    *last = Piece { from, ..piece };
                    *largest = width;
                } else {
                    last.to = piece.to;
                }
            }
            _ => all.push((piece, width)),
        }
    }
    all.into_iter().map(|(piece, _)| piece).collect()
}

/// Draws bars with their names below. Each piece is an SVG image of its own, so that a name wider
/// than its bar is cut off. The tooltip has the whole name.
fn draw_pieces(y: f64, pieces: Vec<Piece>) -> String {
    let draw = |Piece { from, to, colour, name, tooltip }: Piece| {
        let (width, height, baseline) = ((to - from).max(0.3), BAR + 18.0, BAR + 13.0);
        let (name, tooltip) = (escape(&name), escape(&tooltip));
        format!(
            "<svg class=\"{colour}\" x=\"{from:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" \
             height=\"{height}\"><title>{tooltip}</title><rect width=\"100%\" height=\"{BAR}\"/>\
             <text class=\"tick\" y=\"{baseline}\">{name}</text></svg>\n"
        )
    };
    pieces.into_iter().map(draw).collect()
}

fn text(class: &str, (x, y): (f64, f64), words: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\">{}</text>\n", escape(words))
}

/// Draws ticks at round times since the arrival.
fn ticks(span: &Span, y: f64) -> String {
    let all_ns = span.to_ns - span.from_ns;
    let step_ns = tick_step(all_ns);
    let mut ticks = String::new();
    for count in 0..=all_ns / step_ns {
        let x = span.x(span.from_ns + count * step_ns);
        let label = if count == 0 { "0".to_owned() } else { show(count * step_ns) };
        ticks += &line("tick-line", (x, y), (x, y + 4.0));
        ticks += &text("tick middle", (x, y + 18.0), &label);
    }
    ticks
}

/// The smallest step of the series 1, 2, 5, 10, 20, 50 that does not give too many ticks.
fn tick_step(all_ns: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        for step in [1, 2, 5].map(|factor| power.saturating_mul(factor)) {
            if all_ns / step <= TICKS {
                return step;
            }
        }
        power = power.saturating_mul(10);
    }
}

fn line(class: &str, from: (f64, f64), to: (f64, f64)) -> String {
    let ((x1, y1), (x2, y2)) = (from, to);
    format!(
        "<line class=\"{class}\" x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\"/>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_few() {
        assert_eq!([1, 8, 9, 44_000_000].map(tick_step), [1, 1, 2, 5_000_000]);
        assert!(u64::MAX / tick_step(u64::MAX) <= TICKS);
    }

    /// Goal: a request of a million pieces gives a picture that a browser can show, and a large
    /// piece stays visible. Method: many tiny pieces, and among them one of a tenth of the width.
    #[test]
    fn narrow_pieces_are_drawn_as_one() {
        let piece = |from: f64, to: f64, name: &str| Piece {
            from,
            to,
            colour: "blue",
            name: name.to_owned(),
            tooltip: String::new(),
        };
        let dust = |from: f64, count: u32| {
            (0..count).map(move |at| {
                let from = from + f64::from(at) / 1_000.0;
                piece(from, from + 0.001, if at % 2 == 0 { "a" } else { "b" })
            })
        };
        let all = dust(70.0, 300_000).chain([piece(370.0, 440.0, "stop")]);
        let drawn = merge_narrow(all.chain(dust(440.0, 300_000)));
        assert!(drawn.len() < 1_500, "{}", drawn.len());
        let stop: Vec<&Piece> = drawn.iter().filter(|piece| piece.name == "stop").collect();
        assert!(stop.len() == 1 && stop[0].to - stop[0].from >= 70.0, "{stop:?}");
        let ends: Vec<(f64, f64)> = drawn.iter().map(|piece| (piece.from, piece.to)).collect();
        assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-6));
    }
}
