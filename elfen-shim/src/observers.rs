//! Several observers of one run, each on its own CPU, that make one recording.
//!
//! While they sample, observers share nothing but the flag that ends them: each has its own memory,
//! words and gaps. An observer that ends sets the flag. The results are merged when all have ended.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::recorder::{EndReason, ObserverControl};
use crate::session::{Observer, ObserverConfig, ObserverResult, Words};

/// The running observers, each on its own CPU.
#[derive(Debug)]
pub struct Observers(Vec<Observer>);

impl Observers {
    /// Starts all observers. If one of them cannot be started, those before it end.
    pub fn start(
        each: impl Iterator<Item = (Words, ObserverConfig, crate::reach::VmReader)>,
        control: &Arc<ObserverControl>,
    ) -> std::io::Result<Self> {
        let mut started = Self(Vec::new());
        for (words, how, reader) in each {
            match Observer::start(words, how, reader, control.clone()) {
                Ok(observer) => started.0.push(observer),
                Err(error) => {
                    control.stop.store(true, Relaxed);
                    started.0.into_iter().for_each(|one| drop(one.join()));
                    return Err(error);
                }
            }
        }
        Ok(started)
    }

    pub fn is_done(&self) -> bool {
        self.0.iter().any(Observer::is_done)
    }

    /// Waits for all observers and merges their results.
    pub fn join(self) -> ObserverResult {
        let all = self.0.into_iter().map(Observer::join);
        all.reduce(ObserverResult::merge).expect("a run has an observer")
    }
}

impl ObserverResult {
    /// Merges the result of another observer of the same run. Only the first observer has rates.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let both = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(one + other),
            (one, other) => one.or(other),
        };
        Self {
            pool: self.pool.with_observer(other.pool),
            samples: self.samples + other.samples,
            // One observer ends for a reason of its own and then stops the others.
            ended: if self.ended == EndReason::Stopped { other.ended } else { self.ended },
            missed_switches: both(self.missed_switches, other.missed_switches),
            seen_switches: self.seen_switches + other.seen_switches,
            // The slowest.
            period_ticks: self.period_ticks.max(other.period_ticks),
            rates: self.rates,
            tag_signal: self.tag_signal,
            cost_ratios: self.cost_ratios,
            failed_reads: self.failed_reads + other.failed_reads,
            tally: match (self.tally, other.tally) {
                (Some(one), Some(other)) => Some(one.with_observer(other)),
                (one, other) => one.or(other),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::reach::NumberLocation;
    use crate::reach::VmReader;
    use crate::recorder::Until;
    use crate::recording::{Head, ObserverHead, Recording, write};
    use crate::recording::{Kind, Signal, Source};
    use crate::signal_spec::Width;
    use crate::tally::Tally;
    use elfen_machine::affinity;
    use std::sync::atomic::AtomicU64;
    use std::thread;
    use std::time::{Duration, Instant};

    fn words(name: &str, word: &'static AtomicU64) -> Words {
        let mut words = Words::of(std::process::id(), None);
        let (width, source) = (Width::U64, Source::Mapped);
        let place = NumberLocation { word, offset: 0, width, source, ready: None };
        words.add_number(name.to_owned(), &place).unwrap();
        words
    }

    /// Goal: several observers make one recording, each has its own gaps, and all end when one of
    /// them ends. Method: two observers on one CPU, where only one can run at a time. Together they
    /// cannot have observed for longer than the run took.
    #[test]
    fn observers_have_separate_gaps_and_end_together() {
        let clock = Clock::of_this_machine().unwrap();
        let lanes = affinity::allowed().unwrap();
        let from = lanes.iter().next().unwrap();
        let all: [&'static AtomicU64; 2] = [(); 2].map(|()| &*Box::leak(Box::default()));
        let names = ["first", "second"];
        let how = |until| ObserverConfig {
            from,
            clock,
            period_ticks: clock.ticks(1_000),
            pacing: None,
            fetch_ticks: u64::MAX,
            for_ticks: None,
            memory: 1 << 20,
            keeps_last: false,
            keeps_samples: false,
            until,
            cost_meter: None,
            fold: None,
            live: None,
        };
        let untils = [None, Some(Until { feed: 0, above: 200, signed: false })];
        let each = names.iter().zip(all).zip(untils);
        let each =
            each.map(|((name, word), until)| (words(name, word), how(until), VmReader::default()));
        let control = Arc::new(ObserverControl::default());
        let observers = Observers::start(each, &control).unwrap();
        let start = Instant::now();
        while !observers.is_done() && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
            all.iter().zip(1..).for_each(|(word, by)| _ = word.fetch_add(by, Relaxed));
        }
        // Only the second observer has a limit; it ends the first one.
        let seen = observers.join();
        assert_eq!((seen.ended, control.stop.load(Relaxed)), (EndReason::Until, true));
        let signal = |name: &&str| {
            let (source, kind, names) = (Source::Mapped, Kind::Values, Vec::new());
            Signal { name: (*name).to_owned(), source, kind, signed: false, names }
        };
        let one = || ObserverHead { from, on: "0".to_owned(), signals: 1 };
        let observers = vec![one(), one()];
        let signals = names.iter().map(signal).collect();
        let head = Head { clock, observers, signals, ..Head::default() };
        let mut file = Vec::new();
        write(&head, &seen.pool, &mut file).unwrap();
        let recording = Recording::parse(&file).unwrap();
        let tally = Tally::of(&recording);
        let (first, end) = recording.span().unwrap();
        let [one, other] = tally.coverage[..] else { panic!("{:?}", tally.coverage) };
        assert!(one.gaps > 0 && other.gaps > 0, "{:?}", tally.coverage);
        let coverage = one.observed_ticks + other.observed_ticks;
        assert!(coverage <= (end - first) / 50 * 51, "{coverage} of {}", end - first);
        let most = tally.signals.iter().map(|signal| signal.values.unwrap().most);
        let [low, high] = most.collect::<Vec<i128>>()[..] else { panic!("two signals") };
        assert!(high > 200 && low < high, "{low} {high}");
        // A head whose observers have more signals than the head itself.
        let head = Head {
            observers: vec![ObserverHead { signals: 2, ..head.observers[0].clone() }; 2],
            ..head
        };
        let mut file = Vec::new();
        write(&head, &seen.pool, &mut file).unwrap();
        assert!(
            Recording::parse(&file).unwrap_err().to_string().contains("do not have all signals")
        );
    }
}
