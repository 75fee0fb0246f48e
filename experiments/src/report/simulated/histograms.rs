//! How long requests run (Figure 5.1), and how long the pauses between them are (Figure 5.5).

use super::super::figure::{Across, Axis, Figure, Mark, Panel, Point, Series, Style};
use super::super::scale::{percent, said};
use super::lab::{Lab, ms, panel};
use simulator::pair::Control;
use simulator::random::{Purpose, stream};
use simulator::time::{MS, real};
use simulator::trace::Served;

/// Buckets of a figure; longer times are counted and not drawn.
const BUCKETS: usize = 70;
/// The load of Figure 5.5 among the rates of one core: 120 of the thesis's RPS.
const BUSY: usize = 11;

/// Times in equal buckets, each with a weight.
struct Histogram {
    width_ns: u64,
    weights: Vec<f64>,
    sum: f64,
}

impl Histogram {
    fn new(width_ns: u64) -> Self {
        Self { width_ns, weights: vec![0.0; BUCKETS], sum: 0.0 }
    }

    fn add(&mut self, ns: u64, weight: f64) {
        let bucket = usize::try_from(ns / self.width_ns).unwrap_or(usize::MAX);
        if let Some(sum) = self.weights.get_mut(bucket) {
            *sum += weight;
        }
        self.sum += weight;
    }

    /// Each bucket's part at its lower end, up to the last that holds something.
    fn parts(&self) -> Vec<Point> {
        let used = self.weights.iter().rposition(|&weight| weight > 0.0).map_or(1, |last| last + 1);
        let part = |(index, weight): (usize, &f64)| {
            let from_ms = ms(self.width_ns) * index as f64;
            Point::at(from_ms, if self.sum > 0.0 { weight / self.sum } else { 0.0 })
        };
        self.weights[..used].iter().enumerate().map(part).collect()
    }

    /// The part up to each bucket's upper end.
    fn cumulative(&self) -> Vec<Point> {
        let mut sum = 0.0;
        let mut so_far = vec![Point::at(0.0, 0.0)];
        for part in self.parts() {
            sum += part.y;
            so_far.push(Point::at(part.x + ms(self.width_ns), sum));
        }
        so_far
    }

    /// The part up to a time at the end of a bucket.
    fn until(&self, limit_ms: f64) -> f64 {
        self.parts().iter().filter(|part| part.x < limit_ms).map(|part| part.y).sum()
    }

    /// Columns above, and their sum below.
    fn panels(&self, part: &str, name: &str) -> Vec<Panel> {
        let columns = Mark::Histogram { width: ms(self.width_ns) };
        let all = Series::new(name, columns, Style::Blue, self.parts());
        let sum = Series::new("summed up", Mark::Curve, Style::Ink, self.cumulative());
        vec![
            panel(Axis::new(part, format!("in buckets of {} ms", ms(self.width_ns))), vec![all]),
            panel(Axis::new(format!("{part} up to this time"), ""), vec![sum]),
        ]
    }
}

/// Figure 5.1.
pub(super) fn demand(lab: &Lab<'_>) -> Figure {
    let demand = &lab.parameters().demand;
    let mut random = stream(lab.simulation.seed, Purpose::Demand, 0);
    let mut times: Vec<u64> =
        (0..lab.simulation.requests).map(|_| demand.sample(&mut random)).collect();
    times.sort_unstable();
    let quantile = |share: f64| {
        let rank = simulator::time::nanoseconds(share * real(times.len() as u64));
        let rank = usize::try_from(rank).unwrap_or(usize::MAX).min(times.len().saturating_sub(1));
        times.get(rank).copied().unwrap_or(0)
    };
    let mut histogram = Histogram::new(bucket_ns(quantile(0.999)));
    times.iter().for_each(|&ns| histogram.add(ns, 1.0));
    let x = Across::Number(Axis::new("time that a request runs alone", "ms"));
    let mut figure = lab.figure("demand", "Demand: most requests are short, a few are long", x);
    let (median, tail, most) = (quantile(0.5), quantile(0.99), quantile(1.0));
    figure.reading = format!(
        "Half of the requests need {} ms at most, one in a hundred {} ms or more, the longest {} \
         ms: whoever waits behind one of those waits long.",
        said(ms(median)),
        said(ms(tail)),
        said(ms(most)),
    );
    figure.panels = histogram.panels("part of all requests", "requests");
    if lab.parameters().are_of_thesis {
        figure.made_with += " Figure 5.1 prints no numbers: this is the simplest demand that meets \
            those printed elsewhere.";
    }
    figure
}

/// Figure 5.5.
pub(super) fn pauses(lab: &Lab<'_>) -> Figure {
    let (rps, (_, batch)) = (lab.one.rates[BUSY], lab.batch());
    let mut pauses: Vec<u64> = Vec::new();
    let mut free_ns = 0;
    let model = lab.one.model(rps, batch, Control::NoBatch);
    let outcome = model.run_into(&mut |served: &Served| {
        pauses.push(served.started_ns - free_ns);
        free_ns = served.ended_ns;
    });
    // Time-weighted, the tail is longer: the pauses that make up all but 1 % of the idle time.
    pauses.sort_unstable();
    let idle_ns: f64 = pauses.iter().map(|&ns| real(ns)).sum();
    let mut so_far = 0.0;
    let most = pauses.iter().copied().find(|&ns| {
        so_far += real(ns);
        so_far >= idle_ns * 0.99
    });
    let mut histogram = Histogram::new(bucket_ns(most.unwrap_or(MS)));
    pauses.iter().for_each(|&ns| histogram.add(ns, real(ns)));
    let limit_ms = 15.0 * ms(histogram.width_ns);
    let x = Across::Number(Axis::new("length of a pause", "ms"));
    let mut figure = lab.figure("pauses", "Idle time comes in short pauses", x);
    figure.reading = format!(
        "At {} RPS the lane is busy for {} of the time, and {} of its idle time is in pauses of {} \
         ms or less: too short for a scheduler, long enough for a nap of microseconds.",
        said(rps),
        percent(outcome.request_lane_utilisation()),
        percent(histogram.until(limit_ms)),
        said(limit_ms),
    );
    figure.command = lab.command(&format!("--rps {rps} --trace-out pauses.csv"));
    figure.panels = histogram.panels("part of the idle time", "idle time");
    figure.panels[0].series.extend(lab.rings(&[(15.0, 0.023)]));
    figure.panels[1].series.extend(lab.rings(&[(15.0, 0.53)]));
    figure
}

/// A round width with which `most_ns` fits into the figure.
fn bucket_ns(most_ns: u64) -> u64 {
    let least = most_ns / 65 + 1;
    let mut power = 1;
    loop {
        if let Some(factor) = [1, 2, 5].into_iter().find(|factor| factor * power >= least) {
            return factor * power;
        }
        power *= 10;
    }
}
