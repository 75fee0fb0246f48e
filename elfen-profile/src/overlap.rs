//! How much two profiles agree: the sum, over all members, of the smaller of their two shares.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;

/// The part of a profile that HPS compares.
const HOT: f64 = 0.9;

#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
pub(crate) fn float(count: u64) -> f64 {
    count as f64
}

fn total<K>(all: &HashMap<K, u64>) -> f64 {
    all.values().map(|&count| float(count)).sum()
}

/// The sum of the smaller shares.
pub(crate) fn overlap<K: Eq + Hash>(exact: &HashMap<K, u64>, estimated: &HashMap<K, u64>) -> f64 {
    let totals = (total(exact).max(1.0), total(estimated).max(1.0));
    exact.iter().fold(0.0, |sum, (key, &count)| {
        let other = estimated.get(key).map_or(0.0, |&other| float(other) / totals.1);
        sum + (float(count) / totals.0).min(other)
    })
}

/// The members with the largest counts that make 90 % of a profile.
pub fn hot_part<K: Clone + Ord + Hash>(all: &HashMap<K, u64>) -> HashMap<K, u64> {
    let mut sorted: Vec<(&K, u64)> = all.iter().map(|(key, &count)| (key, count)).collect();
    sorted.sort_by_key(|&(key, count)| (Reverse(count), key));
    let enough = total(all) * HOT;
    let mut sum = 0.0;
    let hot = sorted.into_iter().take_while(|&(_, count)| {
        let is_short = sum < enough;
        sum += float(count);
        is_short
    });
    hot.map(|(key, count)| (key.clone(), count)).collect()
}

/// The accuracy of HPS: the overlap of the hot parts of two profiles.
pub fn accuracy<K: Clone + Ord + Hash>(
    exact: &HashMap<K, u64>,
    estimated: &HashMap<K, u64>,
) -> f64 {
    overlap(&hot_part(exact), &hot_part(estimated))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(all: &[(u32, u64)]) -> HashMap<u32, u64> {
        all.iter().copied().collect()
    }

    #[test]
    fn the_hot_part_ends_with_the_member_that_completes_it() {
        let hot = |all: &[(u32, u64)]| {
            let mut keys: Vec<u32> = hot_part(&map(all)).into_keys().collect();
            keys.sort_unstable();
            keys
        };
        assert_eq!(hot(&[(1, 50), (2, 40), (3, 10)]), [1, 2]);
        assert_eq!(hot(&[(1, 50), (2, 39), (3, 11)]), [1, 2, 3]);
        assert_eq!(hot(&[(1, 0)]), [0_u32; 0]);
        assert_eq!(hot(&[(4, 5), (3, 5), (2, 5), (1, 5)]), [1, 2, 3, 4]);
    }

    #[test]
    fn accuracy_is_one_for_equal_shares_and_leaves_the_cold_part_out() {
        let exact = map(&[(1, 600), (2, 300), (3, 60), (4, 40)]);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(accuracy(&exact, &map(&[(1, 6), (2, 3)])), 1.0));
        // Two thirds and one third, against one half each.
        assert!(close(accuracy(&exact, &map(&[(1, 5), (2, 5)])), 5.0 / 6.0));
        assert!(close(accuracy(&exact, &map(&[(1, 7)])), 2.0 / 3.0));
        assert!(close(accuracy(&exact, &map(&[(9, 7)])), 0.0));
        assert!(close(accuracy(&exact, &map(&[])), 0.0));
    }
}
