//! Estimates from samples, and how well they fit the truth.

use crate::pipeline::AbortReason;
use crate::sample::{InstructionSample, Outcome, SampleLatencies, SamplePair, Sampling, to_float};
use crate::truth::{SiteTruth, Sites};

/// The relative error of a count of `samples` times the interval.
pub fn relative_error(samples: u64) -> Option<f64> {
    (samples > 0).then(|| 1.0 / to_float(samples).sqrt())
}

/// A mean over the samples that have a field.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Mean {
    pub sum: u64,
    pub count: u64,
}

impl Mean {
    fn add(&mut self, value: Option<u64>) {
        if let Some(value) = value {
            self.sum += value;
            self.count += 1;
        }
    }

    fn merge(&mut self, other: Self) {
        self.sum = self.sum.saturating_add(other.sum);
        self.count = self.count.saturating_add(other.count);
    }

    pub fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| to_float(self.sum) / to_float(self.count))
    }
}

/// Latencies that are summed up: the six of Table 1, and further ones that processors measure.
pub const LATENCIES: usize = 12;

/// Events whose rates are summed up.
pub const RATES: usize = 7;

/// The latencies of a sample in the order of [`SiteEstimate::latencies`].
pub fn latencies_of(of: &SampleLatencies) -> [Option<u32>; LATENCIES] {
    [
        of.fetch_to_map,
        of.map_to_ready,
        of.ready_to_issue,
        of.issue_to_retire_ready,
        of.retire_ready_to_retire,
        of.load_issue_to_completion,
        of.fetch,
        of.map_to_issue,
        of.map_to_retire,
        of.dcache_refill,
        of.translation,
        of.between_retirements,
    ]
}

/// The samples of one site.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SiteEstimate {
    pub samples: u64,
    pub retired: u64,
    /// Its fetch was completed, and nothing else is known.
    pub fetched: u64,
    /// Aborted after a wrong direction or return, and for another reason or an unknown one.
    pub aborted: [u64; 3],
    /// In the order of [`latencies_of`].
    pub latencies: [Mean; LATENCIES],
    pub in_progress: Mean,
    /// Rates: samples with the event, of all that have the field.
    pub dcache_misses: Mean,
    pub dtlb_misses: Mean,
    pub icache_misses: Mean,
    pub itlb_misses: Mean,
    pub taken: Mean,
    pub mispredicted: Mean,
    pub conflicts: Mean,
    /// Samples in pairs, from both sides, and the sum of their cycles in progress.
    pub in_pairs: u64,
    pub pair_progress: u64,
    /// Pairs whose other instruction usefully overlaps: after this one, and before it.
    pub useful: [u64; 2],
}

impl SiteEstimate {
    pub fn add(&mut self, sample: &InstructionSample) {
        let one = |event: Option<bool>| event.map(u64::from);
        self.samples += 1;
        match sample.outcome {
            Some(Outcome::Retired) => self.retired += 1,
            Some(Outcome::Fetched) => self.fetched += 1,
            Some(Outcome::Aborted(Some(AbortReason::Direction))) => self.aborted[0] += 1,
            Some(Outcome::Aborted(Some(AbortReason::Return))) => self.aborted[1] += 1,
            Some(Outcome::Aborted(_)) => self.aborted[2] += 1,
            None => {}
        }
        let latencies = &sample.latencies;
        for (mean, latency) in self.latencies.iter_mut().zip(latencies_of(latencies)) {
            mean.add(latency.map(u64::from));
        }
        self.in_progress.add(latencies.in_progress());
        let events = &sample.events;
        for (mean, event) in self.rates_mut().into_iter().zip([
            events.dcache_miss,
            events.dtlb_miss,
            events.icache_miss,
            events.itlb_miss,
            events.taken,
            events.mispredicted,
            events.conflict,
        ]) {
            mean.add(one(event));
        }
    }

    /// Adds the samples of another site. Those of a hostile file may be too many to add.
    pub fn merge(&mut self, other: &Self) {
        self.samples = self.samples.saturating_add(other.samples);
        self.retired = self.retired.saturating_add(other.retired);
        self.fetched = self.fetched.saturating_add(other.fetched);
        for (sum, &one) in self.aborted.iter_mut().zip(&other.aborted) {
            *sum = sum.saturating_add(one);
        }
        for (mean, &one) in self.latencies.iter_mut().zip(&other.latencies) {
            mean.merge(one);
        }
        self.in_progress.merge(other.in_progress);
        for (mean, one) in self.rates_mut().into_iter().zip(other.rates()) {
            mean.merge(one);
        }
        self.in_pairs = self.in_pairs.saturating_add(other.in_pairs);
        self.pair_progress = self.pair_progress.saturating_add(other.pair_progress);
        for (sum, &one) in self.useful.iter_mut().zip(&other.useful) {
            *sum = sum.saturating_add(one);
        }
    }

    /// Samples with each event, of all that have the field.
    pub fn rates(&self) -> [Mean; RATES] {
        [
            self.dcache_misses,
            self.dtlb_misses,
            self.icache_misses,
            self.itlb_misses,
            self.taken,
            self.mispredicted,
            self.conflicts,
        ]
    }

    /// The same, in the same order.
    pub fn rates_mut(&mut self) -> [&mut Mean; RATES] {
        [
            &mut self.dcache_misses,
            &mut self.dtlb_misses,
            &mut self.icache_misses,
            &mut self.itlb_misses,
            &mut self.taken,
            &mut self.mispredicted,
            &mut self.conflicts,
        ]
    }

    /// The part of the samples with a known outcome that aborted.
    pub fn aborted_share(&self) -> Option<f64> {
        let aborted = self.aborted.iter().fold(0, |sum: u64, &one| sum.saturating_add(one));
        let known = aborted.saturating_add(self.retired).saturating_add(self.fetched);
        Mean { sum: aborted, count: known }.value()
    }

    /// Estimated issue slots that were wasted while this instruction was in progress: L C S / 2
    /// less U W S (section 5.2.3).
    pub fn wasted(&self, sampling: &Sampling, issue_width: u32) -> f64 {
        let every = sampling.every_pair();
        let useful = to_float(self.useful.iter().sum());
        to_float(self.pair_progress) * f64::from(issue_width) * every / 2.0
            - useful * f64::from(sampling.window) * every
    }
}

/// Whether `other` issues while `one` is in progress, and retires. `later` is how many cycles after
/// `one` the other was fetched.
pub fn is_useful_overlap(one: &InstructionSample, other: &InstructionSample, later: i64) -> bool {
    let [_, _, issue, _, _] = other.latencies.since_fetch();
    let (Some(issue), Some(end)) = (issue, one.latencies.in_progress()) else { return false };
    let issue = later.saturating_add_unsigned(issue);
    other.outcome == Some(Outcome::Retired)
        && issue >= 0
        && issue < 0_i64.saturating_add_unsigned(end)
}

/// All estimates, by site.
pub fn estimate(
    sites: &Sites,
    samples: &[InstructionSample],
    pairs: &[SamplePair],
) -> Vec<SiteEstimate> {
    let mut of = vec![SiteEstimate::default(); sites.len()];
    let site = |sample: &InstructionSample| sample.instruction.map(|one| sites.of(one));
    for sample in samples {
        if let Some(one) = site(sample).and_then(|site| of.get_mut(site)) {
            one.add(sample);
        }
    }
    for pair in pairs {
        let later = 0_i64.saturating_add_unsigned(pair.fetch_latency);
        let SamplePair { first, second, .. } = pair;
        for (side, one, other, later) in [(0, first, second, later), (1, second, first, -later)] {
            let Some(known) = site(one).and_then(|site| of.get_mut(site)) else { continue };
            known.in_pairs += 1;
            known.pair_progress += one.latencies.in_progress().unwrap_or(0);
            known.useful[side] += u64::from(is_useful_overlap(one, other, later));
        }
    }
    of
}

/// How many points lie inside of one standard deviation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct Envelope {
    pub inside: u64,
    pub points: u64,
}

/// Fewer expected samples make steps of whole samples visible.
pub const EXPECTED_MIN: f64 = 10.0;

impl Envelope {
    /// Adds an estimate from `samples` of an actual count. Points are chosen by the samples that
    /// are expected. Chosen by the samples found, they would be too high.
    pub fn add(&mut self, actual: u64, samples: u64, every: u64) {
        let expected = to_float(actual) / to_float(every);
        if expected < EXPECTED_MIN {
            return;
        }
        self.points += 1;
        // The relative error is at most 1 / sqrt(expected).
        self.inside += u64::from((to_float(samples) - expected).abs() <= expected.sqrt());
    }

    pub fn share(&self) -> Option<f64> {
        (self.points > 0).then(|| to_float(self.inside) / to_float(self.points))
    }
}

/// How the estimates of a run fit its truth.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Fit {
    pub retired: Envelope,
    pub dcache_misses: Envelope,
    /// Slots wasted, estimated and true, over all instructions.
    pub wasted: f64,
    pub wasted_truly: f64,
    /// Of the instructions that waste most, how many the estimates name among as many.
    pub worst_named: usize,
    pub worst: usize,
}

/// How many of the worst instructions are compared.
pub const WORST: usize = 20;

/// Compares estimates with the truth.
pub fn fit(
    estimates: &[SiteEstimate],
    truth: &[SiteTruth],
    sampling: &Sampling,
    issue_width: u32,
) -> Fit {
    let mut fit = Fit::default();
    for (estimate, truth) in estimates.iter().zip(truth) {
        fit.retired.add(truth.retired, estimate.retired, sampling.every);
        fit.dcache_misses.add(truth.dcache_misses, estimate.dcache_misses.sum, sampling.every);
        fit.wasted += estimate.wasted(sampling, issue_width);
        fit.wasted_truly += signed_to_float(truth.wasted(issue_width));
    }
    let named = worst(estimates.iter().map(|one| one.wasted(sampling, issue_width)));
    let truly = worst(truth.iter().map(|one| signed_to_float(one.wasted(issue_width))));
    fit.worst = truly.len();
    fit.worst_named = truly.iter().filter(|site| named.contains(site)).count();
    fit
}

fn signed_to_float(number: i64) -> f64 {
    to_float(number.unsigned_abs()).copysign(if number < 0 { -1.0 } else { 1.0 })
}

/// The sites with the largest values above 0.
fn worst(values: impl Iterator<Item = f64>) -> Vec<usize> {
    let mut order: Vec<(usize, f64)> =
        values.enumerate().filter(|(_, value)| *value > 0.0).collect();
    order.sort_by(|one, other| other.1.total_cmp(&one.1));
    order.truncate(WORST);
    order.into_iter().map(|(site, _)| site).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: with Poisson counts, two thirds to three quarters of the points lie inside.
    #[test]
    fn the_envelope_is_chosen_by_what_is_expected() {
        let mut envelope = Envelope::default();
        envelope.add(900, 1, 100);
        assert_eq!(envelope.points, 0, "fewer than ten are expected");
        for samples in [0, 89, 90, 100, 110, 111, 200] {
            envelope.add(10_000, samples, 100);
        }
        assert_eq!((envelope.inside, envelope.points), (3, 7));
    }

    #[test]
    fn the_error_is_that_of_the_number_of_samples() {
        assert_eq!(relative_error(0), None);
        assert_eq!(relative_error(25), Some(0.2));
    }
}
