//! SVG by hand: the elements that both kinds of figure are made of.
//!
//! Colours, fonts and line widths are the page's (`elfen-console/src/page.css`), so that one file
//! serves light, dark and paper. Every mark holds its numbers as a `title`, which browsers show
//! when pointed at.

pub(super) use elfen_console::page::escape;

use super::figure::{Mark, Point, Rule, Series, Style};
use super::scale::short;

/// Every figure is as wide, so that text is as large in all of them.
pub(super) const WIDTH: f64 = 760.0;

/// A character of the labels is about this wide.
const CHARACTER: f64 = 6.4;

/// A coordinate, to a hundredth of a pixel.
pub(super) fn px(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

pub(super) fn line(class: &str, from: (f64, f64), to: (f64, f64)) -> String {
    let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(px);
    format!("<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>\n")
}

pub(super) fn text(class: &str, at: (f64, f64), text: &str) -> String {
    let (x, y, text) = (px(at.0), px(at.1), escape(text));
    format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>\n")
}

/// A text that has to fit: cut off where it doesn't, whole when pointed at.
pub(super) fn fitted(class: &str, at: (f64, f64), words: &str, width: f64) -> String {
    let length = words.chars().count();
    let room = (1..=length).take_while(|&count| count as f64 * CHARACTER <= width).count();
    if room == length {
        return text(class, at, words);
    }
    let cut: String = words.chars().take(room.saturating_sub(1)).collect();
    let (x, y, cut) = (px(at.0), px(at.1), escape(&cut));
    let whole = escape(words);
    format!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\"><title>{whole}</title>{cut}…</text>\n")
}

/// The marker of a point, with its numbers.
pub(super) fn marker(series: &Series, at: (f64, f64), numbers: &str) -> String {
    let Some(class) = series.mark.marker_class() else { return String::new() };
    let (x, y, outline) = (px(at.0), px(at.1), series.style.marker());
    format!(
        "<g class=\"mark\" transform=\"translate({x} {y})\"><title>{}</title>\
         <path class=\"{class}\" d=\"{outline}\"/></g>\n",
        escape(numbers)
    )
}

/// A column or a row, with its numbers.
pub(super) fn bar(from: (f64, f64), to: (f64, f64), numbers: &str) -> String {
    let (left, right) = (from.0.min(to.0), from.0.max(to.0));
    let (top, bottom) = (from.1.min(to.1), from.1.max(to.1));
    let [x, y, width, height] = [left, top, right - left, bottom - top].map(px);
    format!(
        "<rect class=\"bar\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\">\
         <title>{}</title></rect>\n",
        escape(numbers)
    )
}

/// An interval as an I, upright or lying.
pub(super) fn whisker(from: (f64, f64), to: (f64, f64)) -> String {
    if from == to {
        return String::new();
    }
    let along = if from.0 == to.0 { (2.5, 0.0) } else { (0.0, 3.0) };
    let cap = |at: (f64, f64)| {
        line("whisker", (at.0 - along.0, at.1 - along.1), (at.0 + along.0, at.1 + along.1))
    };
    line("whisker", from, to) + &cap(from) + &cap(to)
}

/// What a mark says when pointed at.
pub(super) fn numbers(series: &Series, point: &Point, place: &str, unit: &str) -> String {
    let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
    let interval = point.interval.map_or_else(String::new, |(low, high)| {
        format!(" (95 %: {} to {})", short(low), short(high))
    });
    format!("{}, {place}: {}{unit}{interval}", series.name, short(point.y))
}

/// The parts of a series, in its colour.
pub(super) fn coloured(style: Style, parts: &str) -> String {
    format!("<g class=\"{}\">\n{parts}</g>\n", style.class())
}

/// The values that an axis has to cover.
pub(super) fn extent<'a>(
    series: &'a [Series],
    rules: &'a [Rule],
) -> impl Iterator<Item = f64> + Clone + 'a {
    let of_point = |point: &Point| {
        let (low, high) = point.interval.unwrap_or((point.y, point.y));
        [point.y, low, high]
    };
    let points = series.iter().flat_map(|series| &series.points);
    points.flat_map(of_point).chain(rules.iter().map(|rule| rule.y))
}

/// A series as the legend shows it.
pub(super) fn swatch(mark: Mark, style: Style) -> String {
    let stroke = match mark {
        Mark::Line | Mark::Curve => {
            format!("<path class=\"stroke\" stroke-dasharray=\"{}\" d=\"M1 7H35\"/>", style.dash())
        }
        Mark::Bars | Mark::Histogram { .. } => {
            "<rect class=\"bar\" x=\"10\" y=\"1\" width=\"16\" height=\"12\"/>".to_owned()
        }
        Mark::Dots | Mark::Rings => String::new(),
    };
    let dot = mark.marker_class().map_or_else(String::new, |class| {
        format!("<path class=\"{class}\" transform=\"translate(18 7)\" d=\"{}\"/>", style.marker())
    });
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"swatch {}\" width=\"36\" height=\"14\" \
         aria-hidden=\"true\">{stroke}{dot}</svg>",
        style.class()
    )
}
