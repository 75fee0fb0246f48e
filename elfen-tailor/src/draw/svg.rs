//! The elements of both pictures. Colours and fonts are the page's style.

use elfen_console::duration::number;
use elfen_console::page::escape;

pub(super) const WIDTH: f64 = 760.0;
/// About the width of a character of a label.
const CHARACTER: f64 = 6.4;

/// A picture with its description for screen readers.
pub(super) fn picture(height: f64, description: &str, body: &str) -> String {
    format!(
        "<div class=\"scroll\"><svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" \
         viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{}\">\n{body}</svg></div>\n",
        escape(description)
    )
}

pub(super) fn line(class: &str, from: (f64, f64), to: (f64, f64)) -> String {
    let ((x1, y1), (x2, y2)) = (from, to);
    format!(
        "<line class=\"{class}\" x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\"/>\n"
    )
}

/// A bar in one of the page's colours; `tooltip` is shown when the pointer is on it.
pub(super) fn bar(colour: &str, from: (f64, f64), to: (f64, f64), tooltip: &str) -> String {
    let ((x, y), width, height) = (from, (to.0 - from.0).max(0.3), to.1 - from.1);
    format!(
        "<g class=\"{colour}\"><rect class=\"bar\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" \
         height=\"{height:.2}\"><title>{}</title></rect></g>\n",
        escape(tooltip)
    )
}

/// A text, if most of it fits into `width`; all of it is in the tooltip.
pub(super) fn fitted(class: &str, at: (f64, f64), words: &str, width: f64) -> String {
    let (x, y) = at;
    let length = words.chars().count();
    let room = (1..=length).take_while(|&count| size(count) <= width).count();
    if room < length && room < 5 {
        return String::new();
    }
    let whole = escape(words);
    if room == length {
        return format!("<text class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\">{whole}</text>\n");
    }
    let cut: String = words.chars().take(room - 1).collect();
    format!(
        "<text class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\"><title>{whole}</title>{}…</text>\n",
        escape(&cut)
    )
}

fn size(characters: usize) -> f64 {
    number(characters as u64) * CHARACTER
}
