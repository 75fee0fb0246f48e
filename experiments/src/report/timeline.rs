//! The timeline of one pair: when its request lane was busy, and when its batch lane ran the batch.
//!
//! One row of two lanes for each scenario. The scenarios have the same requests and the same axis,
//! so a reader sees what a policy changes. The picture is one SVG file for documents. It defines
//! its colours for light and for dark pages, and has a background of its own, so that it is
//! readable on either.

use elfen_console::duration::{number, show};
use elfen_console::page::escape;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use simulator::trace::Served;

use super::draw::{Area, Drawn, FONT, PX, colour, count, fit, svg, text_style};
use super::text::short;

/// A part of the time, in nanoseconds.
type Span = (u64, u64);

/// The data of a picture.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The shown part of the time.
    pub between: Span,
    pub rows: Vec<Row>,
    /// Where the data comes from, such as the command. It is the last line of the picture.
    pub made_with: String,
}

/// The lanes of a pair in one scenario.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    pub scenario: String,
    /// The overlap of the whole run, as a part of the time in which requests ran.
    pub overlap: f64,
    /// When the request lane was busy.
    pub busy: Vec<Span>,
    /// When the batch ran next to an idle request lane.
    pub borrowed: Vec<Span>,
    /// When the batch ran next to a request.
    pub overlapped: Vec<Span>,
}

impl Row {
    /// Collects the spans of one core from its requests, in the order in which they were served.
    ///
    /// Within a request, the batch runs only at the start: under every policy, a nap lasts until
    /// the request lane idles. So the length of a request's overlap is enough. After a nap, the
    /// batch runs `wake_ns` after the start of the idle period.
    pub fn of(scenario: &str, overlap: f64, served: &[Served], wake_ns: u64, until: u64) -> Self {
        let mut row = Self { scenario: scenario.to_owned(), overlap, ..Self::default() };
        let mut idle_from = 0;
        for one in served {
            if idle_from < one.started_ns {
                row.borrowed.push((idle_from, one.started_ns));
            }
            row.busy.push((one.started_ns, one.ended_ns));
            if one.overlapped_ns > 0 {
                row.overlapped.push((one.started_ns, one.started_ns + one.overlapped_ns));
            }
            let has_napped = one.started_ns + one.overlapped_ns < one.ended_ns;
            idle_from = one.ended_ns + if has_napped { wake_ns } else { 0 };
        }
        if idle_from < until {
            row.borrowed.push((idle_from, until));
        }
        row
    }

    /// Formats the overlap as in the table of `elfen lab simulate`.
    fn share(&self) -> String {
        format!("{:.2} %", self.overlap * 100.0)
    }

    /// Returns the longest overlap that begins in a part of the time.
    fn longest_overlap_ns(&self, (from, to): Span) -> u64 {
        let shown = self.overlapped.iter().filter(|span| (from..to).contains(&span.0));
        shown.map(|span| span.1 - span.0).max().unwrap_or(0)
    }
}

const WIDTH: i32 = 800 * PX;
const LEFT: i32 = 112 * PX;
const RIGHT: i32 = 32 * PX;
/// The height of the legend, of a row's title, and of a lane with the space below it.
const LEGEND: i32 = 34 * PX;
const TITLE: i32 = 20 * PX;
const LANE: i32 = 20 * PX;
const SPACE: i32 = 3 * PX;
const BETWEEN_ROWS: i32 = 6 * PX;
const AXIS: i32 = 26 * PX;
const CAPTION: i32 = 22 * PX;

/// A colour in the light theme, and the name of its variable.
type Ink = (u32, &'static str);
const TEXT: Ink = (0x2b2b29, "ink");
const SOFT: Ink = (0x5f5e5a, "soft");
const EMPTY: Ink = (0xe1e0da, "line");
const PAPER: Ink = (0xfcfcfb, "paper");
const BUSY: Ink = (0x706f6c, "busy");
const BORROWED: Ink = (0x033da1, "blue");
const OVERLAP: Ink = (0xe76e1c, "orange");

/// The colours of `elfen-console/src/page.css`.
const THEMES: &str = "svg { --ink: #2b2b29; --soft: #5f5e5a; --line: #e1e0da; --paper: #fcfcfb; \
     --busy: #706f6c; --blue: #033da1; --orange: #e76e1c; }\n\
     @media (prefers-color-scheme: dark) { svg { --ink: #e9e8e4; --soft: #aeaca5; --line: #353431; \
     --paper: #161615; --busy: #a8a7a4; --blue: #4a74d6; --orange: #f86322; } }\n\
     text { font-family: system-ui, -apple-system, \"Segoe UI\", Roboto, \"Noto Sans\", \
     \"DejaVu Sans\", sans-serif; }\n";

impl Timeline {
    /// Draws the timeline as one SVG file.
    pub fn svg(&self) -> String {
        let row = TITLE + 2 * (LANE + SPACE) + BETWEEN_ROWS;
        let height = LEGEND + row * count(self.rows.len()) + AXIS + CAPTION;
        let picture = svg((WIDTH, height), |area, _| self.draw(area, height));
        let size = format!("width=\"{WIDTH}\" height=\"{height}\"");
        let (width, height) = (WIDTH / PX, height / PX);
        let picture = picture.replacen(
            &size,
            &format!("role=\"img\" width=\"{width}\" height=\"{height}\""),
            1,
        );
        let head_ends = picture.find(">\n").map_or(0, |at| at + 2);
        let (head, rest) = picture.split_at(head_ends);
        let title = escape(&self.title());
        format!("{head}<title>{title}</title>\n<style>\n{THEMES}{}</style>\n{rest}", style())
    }

    fn title(&self) -> String {
        let of = |row: &Row| {
            format!("{}: the batch runs during {} of the requests' time", row.scenario, row.share())
        };
        let rows: Vec<String> = self.rows.iter().map(of).collect();
        format!("Timeline of a request lane and a batch lane. {}.", rows.join("; "))
    }

    fn draw(&self, area: &Area<'_>, height: i32) -> Drawn {
        let fill = |ink: Ink| colour(ink.0).filled();
        area.draw(&Rectangle::new([(0, 0), (WIDTH, height)], fill(PAPER)))?;
        legend(area)?;
        let mut top = LEGEND;
        for row in &self.rows {
            area.draw_text(&fit(&row.scenario, LEFT), &bold(), (12 * PX, top + TITLE / 2))?;
            let soft = text_style(SOFT.0, HPos::Left);
            let note = fit(&self.note(row), WIDTH - LEFT - RIGHT);
            area.draw_text(&note, &soft, (LEFT, top + TITLE / 2))?;
            top += TITLE;
            let request_lane = [(BUSY, &row.busy)];
            let batch_lane = [(BORROWED, &row.borrowed), (OVERLAP, &row.overlapped)];
            self.draw_lane(area, top, "request lane", &request_lane)?;
            self.draw_lane(area, top + LANE + SPACE, "batch lane", &batch_lane)?;
            top += 2 * (LANE + SPACE) + BETWEEN_ROWS;
        }
        self.draw_axis(area, top)?;
        let caption = fit(&self.made_with, WIDTH - 24 * PX);
        let style = text_style(SOFT.0, HPos::Left);
        area.draw_text(&caption, &style, (12 * PX, top + AXIS + CAPTION / 2))?;
        Ok(())
    }

    /// Returns the overlap in words, and whether it is too short to be seen.
    fn note(&self, row: &Row) -> String {
        let share = row.share();
        let longest_ns = row.longest_overlap_ns(self.between);
        let is_visible = self.length(longest_ns) >= PX;
        let longest = if longest_ns == 0 || is_visible {
            String::new()
        } else {
            format!("; here at most {} at a time, too short to see", show(longest_ns))
        };
        format!("the batch runs during {share} of the requests' time{longest}")
    }

    fn draw_lane(
        &self,
        area: &Area<'_>,
        top: i32,
        name: &str,
        spans: &[(Ink, &Vec<Span>)],
    ) -> Drawn {
        let middle = top + LANE / 2;
        area.draw_text(name, &text_style(SOFT.0, HPos::Right), (LEFT - 8 * PX, middle))?;
        let whole = [(LEFT, top), (WIDTH - RIGHT, top + LANE)];
        area.draw(&Rectangle::new(whole, colour(EMPTY.0).filled()))?;
        for &(ink, spans) in spans {
            let shown = spans.iter().filter(|span| span.1 > self.between.0);
            for span in shown.filter(|span| span.0 < self.between.1) {
                let (from, to) = (self.place(span.0), self.place(span.1));
                // Rounding would draw a shorter span as long as a unit, or not at all.
                if to > from && self.length(span.1 - span.0) > 0 {
                    let corners = [(from, top), (to, top + LANE)];
                    area.draw(&Rectangle::new(corners, colour(ink.0).filled()))?;
                }
            }
        }
        Ok(())
    }

    fn draw_axis(&self, area: &Area<'_>, top: i32) -> Drawn {
        const TICKS: [u64; 3] = [1, 2, 5];
        let (from, to) = self.between;
        let decades = (0..18).map(|power| 10_u64.pow(power));
        let mut steps = decades.flat_map(|decade| TICKS.map(|tick| tick * decade));
        let step = steps.find(|step| (to - from) / step <= 12).unwrap_or(u64::MAX);
        let style = text_style(SOFT.0, HPos::Center);
        for tick in (0..=(to - from) / step).map(|tick| tick * step) {
            let x = self.place(from + tick);
            let line = [(x, top), (x, top + 4 * PX)];
            area.draw(&PathElement::new(line, colour(SOFT.0).stroke_width(10)))?;
            let last = tick + step > to - from;
            let label = short(number(tick) / 1e6) + if last { " ms" } else { "" };
            area.draw_text(&label, &style, (x, top + 12 * PX))?;
        }
        Ok(())
    }

    /// Returns how long a time is on the picture.
    fn length(&self, ns: u64) -> i32 {
        self.place(self.between.0.saturating_add(ns)) - LEFT
    }

    /// Returns where a time is on the picture, at most at its ends.
    fn place(&self, ns: u64) -> i32 {
        let (from, to) = self.between;
        let part = number(ns.clamp(from, to) - from) / number(to - from);
        #[expect(clippy::cast_possible_truncation, reason = "a part of the width")]
        let along = (part * f64::from(WIDTH - LEFT - RIGHT)).round() as i32;
        LEFT + along
    }
}

/// Maps the colours of the light theme to the variables of both themes.
fn style() -> String {
    let one = |(rgb, name): Ink| {
        format!(
            "[fill=\"#{rgb:06X}\"] {{ fill: var(--{name}); }} \
             [stroke=\"#{rgb:06X}\"] {{ stroke: var(--{name}); }}\n"
        )
    };
    [TEXT, SOFT, EMPTY, PAPER, BUSY, BORROWED, OVERLAP].map(one).concat()
}

fn bold() -> TextStyle<'static> {
    let mut style = text_style(TEXT.0, HPos::Left);
    style.font = ("sans-serif", f64::from(FONT) * 1.24, FontStyle::Bold).into_font();
    style
}

fn legend(area: &Area<'_>) -> Drawn {
    let entries = [
        (BUSY, "a request runs"),
        (BORROWED, "the batch runs, next to an idle lane"),
        (OVERLAP, "the batch runs next to a request (overlap)"),
        (EMPTY, "idle, or napping"),
    ];
    let mut left = 12 * PX;
    for (ink, text) in entries {
        let corners = [(left, 11 * PX), (left + 14 * PX, 23 * PX)];
        area.draw(&Rectangle::new(corners, colour(ink.0).filled()))?;
        let style = text_style(TEXT.0, HPos::Left);
        area.draw_text(text, &style, (left + 20 * PX, LEGEND / 2))?;
        left += 36 * PX + count(text.len()) * 59;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(started_ns: u64, ended_ns: u64, overlapped_ns: u64) -> Served {
        let demand_ns = ended_ns - started_ns;
        Served { core: 0, arrived_ns: started_ns, started_ns, ended_ns, demand_ns, overlapped_ns }
    }

    /// Goal: the spans of a pair follow from its requests. Method: a request next to the batch, one
    /// directly behind it, one that stops the batch at once, and one that it overlaps to its end.
    #[test]
    fn spans_of_a_pair() {
        let requests = [served(10, 20, 3), served(20, 30, 0), served(50, 60, 2), served(70, 75, 5)];
        let row = Row::of("it", 0.4, &requests, 1, 90);
        assert_eq!(row.busy, [(10, 20), (20, 30), (50, 60), (70, 75)]);
        assert_eq!(row.overlapped, [(10, 13), (50, 52), (70, 75)]);
        assert_eq!(row.borrowed, [(0, 10), (31, 50), (61, 70), (75, 90)]);
        assert_eq!(row.longest_overlap_ns((40, 70)), 2);
    }

    /// Goal: the picture is one valid SVG file that shows each visible span in its colour, for both
    /// themes. Method: one row with one long and one very short overlap, parsed as XML.
    #[test]
    fn a_picture_shows_its_spans() {
        let requests = [served(2_000_000, 4_000_000, 1_000_000), served(6_000_000, 7_000_000, 9)];
        let row = Row::of("a <b>", 0.25, &requests, 700, 10_000_000);
        let timeline = Timeline {
            between: (0, 10_000_000),
            rows: vec![row],
            made_with: "made & drawn".to_owned(),
        };
        let picture = timeline.svg();
        let document = roxmltree::Document::parse(&picture).unwrap();
        let fills = |ink: Ink| {
            let fill = format!("#{:06X}", ink.0);
            let rects = document.descendants().filter(|node| node.has_tag_name("rect"));
            // The first one of a colour is in the legend.
            rects.filter(|node| node.attribute("fill") == Some(&fill)).count() - 1
        };
        assert_eq!([fills(BUSY), fills(BORROWED), fills(OVERLAP)], [2, 3, 1]);
        let texts: Vec<String> = document
            .descendants()
            .filter(|node| node.has_tag_name("text"))
            .map(|node| node.text().unwrap_or_default().trim().to_owned())
            .collect();
        for text in [
            "a <b>",
            "10 ms",
            "made & drawn",
            "the batch runs during 25.00 % of the requests' time",
        ] {
            assert!(texts.iter().any(|found| found == text), "{text}: {texts:?}");
        }
        assert!(picture.contains("prefers-color-scheme: dark"));
        assert!(!picture.contains("http") || picture.matches("http").count() == 1, "{picture}");
    }

    /// Goal: an overlap that is thinner than a pixel is named. Method: 9 ns of 10 ms.
    #[test]
    fn a_short_overlap_is_named() {
        let row = Row::of("it", 0.01, &[served(10, 1_000, 9)], 0, 10_000_000);
        let timeline =
            Timeline { between: (0, 10_000_000), rows: vec![row], made_with: String::new() };
        let note = timeline.note(&timeline.rows[0]);
        assert!(note.ends_with("; here at most 9 ns at a time, too short to see"), "{note}");
    }
}
