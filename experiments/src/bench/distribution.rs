//! Many measurements of one thing, as median, 99th percentile and maximum.

use serde::{Deserialize, Serialize};

/// What every benchmark prints of a series. Values are rounded to a tenth of their unit.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize, Serialize)]
pub(crate) struct Distribution {
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
    pub(crate) n: usize,
}

impl Distribution {
    /// `None` of nothing.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let max = tenth(*values.last()?);
        let (median, p99) = (at(&values, 50), at(&values, 99));
        Some(Self { median, p99, max, n: values.len() })
    }
}

/// The smallest value that `percent` of all do not exceed.
pub(crate) fn at(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    tenth(sorted[rank - 1])
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_the_nearest() {
        let values: Vec<f64> = (1..=200).map(f64::from).rev().collect();
        let found = Distribution::of(values).unwrap();
        assert_eq!(found, Distribution { median: 100.0, p99: 198.0, max: 200.0, n: 200 });
    }

    #[test]
    fn one_value_is_all_of_them_and_none_is_none() {
        let one = Distribution::of(vec![2.04]).unwrap();
        assert_eq!(one, Distribution { median: 2.0, p99: 2.0, max: 2.0, n: 1 });
        assert_eq!(Distribution::of(Vec::new()), None);
    }
}
