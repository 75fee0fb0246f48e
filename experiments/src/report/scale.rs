//! From values to places on an axis, with ticks at round numbers.

use super::figure::Scale;

/// An axis that covers some values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scaled {
    log: bool,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    /// Digits behind the point in linear labels.
    decimals: usize,
}

/// Below this a logarithm says nothing about a measurement.
const LOG_LEAST: f64 = 1e-9;
/// From this factor between the values on, [`Scale::Auto`] is logarithmic.
const LOG_FROM: f64 = 8.0;
/// A span smaller than this part of the values is rounding.
const SAME: f64 = 1e-9;

impl Scaled {
    /// An axis for `values` with about as many ticks as wanted.
    pub(super) fn over(values: impl Iterator<Item = f64> + Clone, scale: Scale, want: f64) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let can_log = low >= LOG_LEAST;
        match scale {
            Scale::Log if can_log => Self::logarithmic(low, high, want),
            Scale::Auto if can_log && high > low * LOG_FROM => Self::logarithmic(low, high, want),
            Scale::Near => Self::near(low, high, want),
            Scale::Linear | Scale::Log | Scale::Auto => {
                Self::linear(low.min(0.0), high.max(0.0), want)
            }
        }
    }

    fn near(low: f64, high: f64, want: f64) -> Self {
        let size = low.abs().max(high.abs());
        if high - low > size * SAME {
            Self::linear(low, high, want)
        } else {
            let margin = if size > 0.0 { size * 0.05 } else { 1.0 };
            Self::linear(low - margin, high + margin, want)
        }
    }

    fn linear(low: f64, high: f64, want: f64) -> Self {
        let high = if high - low < LOG_LEAST { low + 1.0 } else { high };
        let step = round_up((high - low) / want);
        let first = (low / step + SAME).floor();
        let last = (high / step - SAME).ceil();
        let mut ticks = Vec::new();
        let mut index = first;
        while index <= last {
            ticks.push(index * step);
            index += 1.0;
        }
        let decimals = digits_behind_point(step);
        Self { log: false, low: first * step, high: last * step, ticks, decimals }
    }

    fn logarithmic(low: f64, high: f64, want: f64) -> Self {
        let low = round_down(low);
        let high = round_up(high).max(round_up(low * 1.5));
        let decades = (high / low).log10();
        let ticks = if decades * 3.0 <= want + 2.0 {
            steps(low, high, |mantissa| mantissa < 5.5)
        } else {
            let every = (decades / want).ceil().max(1.0);
            let decade = |tick: &f64| tick.log10().round().rem_euclid(every) == 0.0;
            steps(low, high, |mantissa| mantissa < 1.5).into_iter().filter(decade).collect()
        };
        Self { log: true, low, high, ticks, decimals: 0 }
    }

    /// 0 at the low end of the axis, 1 at its high end.
    pub(super) fn place(&self, value: f64) -> f64 {
        if self.log {
            (value / self.low).log10() / (self.high / self.low).log10()
        } else {
            (value - self.low) / (self.high - self.low)
        }
    }

    /// Where columns stand: 0 if the axis has one.
    pub(super) fn base(&self) -> f64 {
        if self.log { self.low } else { self.low.max(0.0).min(self.high) }
    }

    /// Ticks with their labels.
    pub(super) fn ticks(&self) -> impl Iterator<Item = (f64, String)> {
        self.ticks.iter().map(|&tick| {
            let decimals = if self.log { digits_behind_point(tick) } else { self.decimals };
            (tick, grouped(tick, decimals))
        })
    }
}

/// 1, 2 and 5 times the powers of ten in a range, as far as `wants` the mantissa.
fn steps(low: f64, high: f64, wants: impl Fn(f64) -> bool) -> Vec<f64> {
    let mut ticks = Vec::new();
    let mut exponent = low.log10().floor();
    while exponent <= high.log10() + SAME {
        for mantissa in [1.0, 2.0, 5.0] {
            let tick = mantissa * 10_f64.powf(exponent);
            if wants(mantissa) && tick >= low * (1.0 - SAME) && tick <= high * (1.0 + SAME) {
                ticks.push(tick);
            }
        }
        exponent += 1.0;
    }
    ticks
}

/// The next of 1, 2 and 5 times a power of ten, or the value itself if it is one.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let mantissas = [1.0, 2.0, 5.0, 10.0];
    let enough = mantissas.into_iter().find(|mantissa| mantissa * power >= value * (1.0 - SAME));
    enough.unwrap_or(10.0) * power
}

fn round_down(value: f64) -> f64 {
    let power = 10_f64.powf((value.log10() + SAME).floor());
    let mantissas = [5.0, 2.0, 1.0];
    let enough = mantissas.into_iter().find(|mantissa| mantissa * power <= value * (1.0 + SAME));
    enough.unwrap_or(1.0) * power
}

fn digits_behind_point(step: f64) -> usize {
    (0..12).find(|&digits| step * 10_f64.powi(digits) >= 1.0 - SAME).map_or(12, |digits| {
        usize::try_from(digits).unwrap_or_else(|_| unreachable!("digits count from 0"))
    })
}

/// A number with its thousands apart.
pub(super) fn grouped(value: f64, decimals: usize) -> String {
    let value = if value == 0.0 { 0.0 } else { value };
    if value.abs() >= 1e9 {
        return format!("{value:e}");
    }
    let text = format!("{value:.decimals$}");
    let (sign, digits) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("−", rest));
    let (whole, fraction) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    let mut apart = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 && whole.len() > 4 {
            apart.push('\u{202f}');
        }
        apart.push(digit);
    }
    format!("{sign}{apart}{fraction}")
}

/// A number to four digits, for people.
pub(super) fn short(value: f64) -> String {
    let decimals = match value.abs() {
        0.0 => 0,
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        size if size >= 1e-3 => 3,
        _ => return format!("{value:.1e}"),
    };
    grouped(value, decimals)
}

/// A number to three digits and without zeros at its end, for sentences.
pub(super) fn said(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    let text = grouped(value, decimals);
    if decimals == 0 || text.contains('e') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A part as a percentage, for sentences.
pub(super) fn percent(part: f64) -> String {
    said(part * 100.0) + " %"
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(values: &[f64], scale: Scale) -> Vec<String> {
        let scaled = Scaled::over(values.iter().copied(), scale, 5.0);
        scaled.ticks().map(|(_, label)| label).collect()
    }

    /// Goal: ticks are those that a person would write. Method: by hand.
    #[test]
    fn ticks_at_round_numbers() {
        assert_eq!(labels(&[3.0, 97.0], Scale::Linear), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(&[0.31, 0.9], Scale::Linear), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(
            labels(&[0.97, 1.06], Scale::Near),
            ["0.96", "0.98", "1.00", "1.02", "1.04", "1.06"]
        );
        assert_eq!(labels(&[-3.0, 5.0], Scale::Linear), ["−4", "−2", "0", "2", "4", "6"]);
        assert_eq!(labels(&[0.0, 0.0], Scale::Linear), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(&[3.0, 90.0], Scale::Log), ["2", "5", "10", "20", "50", "100"]);
        assert_eq!(labels(&[0.2, 80_000.0], Scale::Log), ["1", "100", "10\u{202f}000"]);
        assert_eq!(labels(&[4.0], Scale::Log), ["2", "5"]);
        assert_eq!(labels(&[0.0, 90.0], Scale::Log), labels(&[0.0, 90.0], Scale::Linear));
        assert_eq!(labels(&[15.0, 90.0], Scale::Auto), labels(&[15.0, 90.0], Scale::Linear));
        assert_eq!(labels(&[], Scale::Auto), labels(&[1.0], Scale::Linear));
    }

    #[test]
    fn numbers_for_people() {
        let numbers = [0.0, 1.49, 76.48, 117.5, 5705.0, 12345.6, 1e12, -0.5, 0.000_12];
        let text: Vec<String> = numbers.into_iter().map(short).collect();
        let expected =
            ["0", "1.490", "76.48", "117.5", "5705", "12\u{202f}346", "1e12", "−0.500", "1.2e-4"];
        assert_eq!(text, expected);
        let spoken: Vec<String> =
            [0.0, 1.5, 110.0, 0.9999, 51.63, 5.0].into_iter().map(said).collect();
        assert_eq!(spoken, ["0", "1.5", "110", "1", "51.6", "5"]);
        assert_eq!(percent(0.6382), "63.8 %");
    }

    proptest! {
        /// Goal: whatever the values, they and the ticks lie on the axis, and ticks are few.
        /// Method: values of all sizes, of both signs, on every scale.
        #[test]
        fn everything_lies_on_the_axis(
            values in prop::collection::vec(
                prop_oneof![-1e15..1e15, -1.0..1.0, Just(0.0), 1e-300..1e-10, 1.0..100.0], 1..20),
            scale in prop_oneof![
                Just(Scale::Linear), Just(Scale::Log), Just(Scale::Auto), Just(Scale::Near)],
        ) {
            let scaled = Scaled::over(values.iter().copied(), scale, 5.0);
            let ticks: Vec<f64> = scaled.ticks().map(|tick| tick.0).collect();
            prop_assert!((2..=12).contains(&ticks.len()), "{ticks:?}");
            for value in values.iter().chain(&ticks) {
                let place = scaled.place(*value);
                prop_assert!((-1e-6..=1.0 + 1e-6).contains(&place), "{value} at {place}");
            }
        }
    }
}
