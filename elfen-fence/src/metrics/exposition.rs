//! The Prometheus text format, version 0.0.4: metric families with their samples.

use std::fmt::Write;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// All samples of one metric name.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) kind: Kind,
    /// The names of the labels that each sample has, for the reference.
    pub(crate) labels: &'static [&'static str],
    samples: String,
}

/// Names and values of a sample's labels.
pub(crate) type Labels<'a> = [(&'static str, &'a str)];

impl Family {
    pub(crate) fn new(
        name: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self { name, help, kind, labels, samples: String::new() }
    }

    pub(crate) fn number(&mut self, labels: &Labels<'_>, value: u64) {
        self.sample("", labels, None, &value.to_string());
    }

    /// A time in seconds, with all digits of the nanoseconds.
    pub(crate) fn time(&mut self, labels: &Labels<'_>, ns: u64) {
        self.sample("", labels, None, &seconds(ns));
    }

    pub(crate) fn ratio(&mut self, labels: &Labels<'_>, ratio: f64) {
        self.sample("", labels, None, &ratio.to_string());
    }

    /// Buckets by their upper bounds, each with the count of all values up to there; then the count
    /// and sum of all values.
    pub(crate) fn histogram(
        &mut self,
        labels: &Labels<'_>,
        buckets: &[(u64, u64)],
        count: u64,
        sum_ns: u64,
    ) {
        for &(top_ns, up_to) in buckets {
            self.sample("_bucket", labels, Some(&seconds(top_ns)), &up_to.to_string());
        }
        self.sample("_bucket", labels, Some("+Inf"), &count.to_string());
        self.sample("_sum", labels, None, &seconds(sum_ns));
        self.sample("_count", labels, None, &count.to_string());
    }

    fn sample(&mut self, suffix: &str, labels: &Labels<'_>, le: Option<&str>, value: &str) {
        debug_assert!(
            labels.iter().map(|(name, _)| name).eq(self.labels),
            "{}: {labels:?} instead of {:?}",
            self.name,
            self.labels
        );
        let pairs = labels.iter().copied().chain(le.map(|le| ("le", le)));
        let pairs: Vec<String> =
            pairs.map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels =
            if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) };
        // Writing to a String cannot fail.
        writeln!(self.samples, "{}{suffix}{labels} {value}", self.name).ok();
    }
}

pub(crate) fn text(families: &[Family]) -> String {
    let family = |family: &Family| {
        let Family { name, help, kind, samples, .. } = family;
        format!("# HELP {name} {help}\n# TYPE {name} {}\n{samples}", kind.name())
    };
    families.iter().map(family).collect()
}

/// Exact: a floating-point number has fewer than 18 digits, and counters must never seem to
/// decrease.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Escapes a label value.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_written_as_the_format_says() {
        let mut time =
            Family::new("t_seconds_total", Kind::Counter, &["program", "lane"], "A time.");
        time.time(&[("program", "a\"b\\c\nd"), ("lane", "1")], 1_500_000_000);
        let mut histogram = Family::new("h_seconds", Kind::Histogram, &[], "Another.");
        histogram.histogram(&[], &[(1_000, 2), (2_000_000_000, 3)], 4, 10);
        let expected = "\
# HELP t_seconds_total A time.
# TYPE t_seconds_total counter
t_seconds_total{program=\"a\\\"b\\\\c\\nd\",lane=\"1\"} 1.5
# HELP h_seconds Another.
# TYPE h_seconds histogram
h_seconds_bucket{le=\"0.000001\"} 2
h_seconds_bucket{le=\"2\"} 3
h_seconds_bucket{le=\"+Inf\"} 4
h_seconds_sum 0.00000001
h_seconds_count 4
";
        assert_eq!(text(&[time, histogram]), expected);
    }

    #[test]
    fn seconds_have_every_digit_and_no_more() {
        let times = [0, 1, 1_000_000_000, 10_000_000_000, u64::MAX].map(seconds);
        assert_eq!(times, ["0", "0.000000001", "1", "10", "18446744073.709551615"]);
    }
}
