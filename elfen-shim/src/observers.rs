//! Several observers of one run, each on a lane of its own: they make one recording.
//!
//! Each has memory, words and gaps of its own, as they share nothing while they look; what they saw
//! is put together when they have ended. Who ends by itself tells the others, by their orders.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::recorder::{Ended, Orders};
use crate::session::{How, Observer, Seen, Words};

/// Observers at work, each on a lane of its own.
#[derive(Debug)]
pub struct Observers(Vec<Observer>);

impl Observers {
    /// Starts them all; if one cannot be, those before it end.
    pub fn start(
        each: impl Iterator<Item = (Words, How, crate::reach::Reader)>,
        orders: &Arc<Orders>,
    ) -> std::io::Result<Self> {
        let mut started = Self(Vec::new());
        for (words, how, reader) in each {
            match Observer::start(words, how, reader, orders.clone()) {
                Ok(observer) => started.0.push(observer),
                Err(error) => {
                    orders.stop.store(true, Relaxed);
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

    /// What all of them saw.
    pub fn join(self) -> Seen {
        let all = self.0.into_iter().map(Observer::join);
        all.reduce(Seen::beside).expect("a run has an observer")
    }
}

impl Seen {
    /// Adds what another observer of the same run saw; of rates there are the first one's.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        let both = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(one + other),
            (one, other) => one.or(other),
        };
        Self {
            pool: self.pool.beside(other.pool),
            samples: self.samples + other.samples,
            // Who ends by itself ends all others, which are told.
            ended: if self.ended == Ended::Told { other.ended } else { self.ended },
            missed_switches: both(self.missed_switches, other.missed_switches),
            seen_switches: self.seen_switches + other.seen_switches,
            // The slowest.
            period_ticks: self.period_ticks.max(other.period_ticks),
            rates: self.rates,
            tag_signal: self.tag_signal,
            cost_ratios: self.cost_ratios,
            failed_reads: self.failed_reads + other.failed_reads,
            tally: match (self.tally, other.tally) {
                (Some(one), Some(other)) => Some(one.beside(other)),
                (one, other) => one.or(other),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::reach::Place;
    use crate::reach::Reader;
    use crate::recorder::Until;
    use crate::recording::{Head, Observing, Recording, write};
    use crate::recording::{Kind, Signal, Source};
    use crate::signal_spec::Width;
    use crate::tally::Tally;
    use elfen_host::affinity;
    use std::io::Write;
    use std::sync::atomic::AtomicU64;
    use std::thread;
    use std::time::{Duration, Instant};

    fn words(name: &str, word: &'static AtomicU64) -> Words {
        let mut words = Words::of(std::process::id(), None);
        let (width, source) = (Width::U64, Source::Mapped);
        let place = Place { word, offset: 0, width, source, ready: None };
        words.add_place(name.to_owned(), &place).unwrap();
        words
    }

    /// Goal: of several observers one recording is made, what one did not see is no gap of the
    /// other's, and all end when one has enough. Method: two on one lane, so that each keeps the
    /// other from it: together they cannot have looked for longer than it took.
    #[test]
    fn observers_have_gaps_of_their_own_and_end_together() {
        let clock = match Clock::of_this_machine() {
            Ok(clock) => clock,
            Err(why) => {
                let mut terminal = std::io::stderr();
                return writeln!(terminal, "skipped: several observers: {why}").unwrap();
            }
        };
        let lanes = affinity::allowed().unwrap();
        let from = lanes.iter().next().unwrap();
        let all: [&'static AtomicU64; 2] = [(); 2].map(|()| &*Box::leak(Box::default()));
        let names = ["first", "second"];
        let how = |until| How {
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
            costing: None,
            fold: None,
            live: None,
        };
        let untils = [None, Some(Until { feed: 0, above: 200, signed: false })];
        let each = names.iter().zip(all).zip(untils);
        let each =
            each.map(|((name, word), until)| (words(name, word), how(until), Reader::default()));
        let orders = Arc::new(Orders::default());
        let observers = Observers::start(each, &orders).unwrap();
        let start = Instant::now();
        while !observers.is_done() && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
            all.iter().zip(1..).for_each(|(word, by)| _ = word.fetch_add(by, Relaxed));
        }
        // The first is told by the second, and by nobody else.
        let seen = observers.join();
        assert_eq!((seen.ended, orders.stop.load(Relaxed)), (Ended::Until, true));
        let signal = |name: &&str| {
            let (source, kind, names) = (Source::Mapped, Kind::Values, Vec::new());
            Signal { name: (*name).to_owned(), source, kind, signed: false, names }
        };
        let one = || Observing { from, on: "0".to_owned(), signals: 1 };
        let observers = vec![one(), one()];
        let signals = names.iter().map(signal).collect();
        let head = Head { clock, observers, signals, ..Head::default() };
        let mut file = Vec::new();
        write(&head, &seen.pool, &mut file).unwrap();
        let recording = Recording::parse(&file).unwrap();
        let tally = Tally::of(&recording);
        let (first, end) = recording.span().unwrap();
        let [one, other] = tally.looked[..] else { panic!("{:?}", tally.looked) };
        assert!(one.gaps > 0 && other.gaps > 0, "{:?}", tally.looked);
        let looked = one.observed_ticks + other.observed_ticks;
        assert!(looked <= (end - first) / 50 * 51, "{looked} of {}", end - first);
        let most = tally.signals.iter().map(|signal| signal.values.unwrap().most);
        let [low, high] = most.collect::<Vec<i128>>()[..] else { panic!("two signals") };
        assert!(high > 200 && low < high, "{low} {high}");
        // A head that tells of other signals than there are.
        let head = Head {
            observers: vec![Observing { signals: 2, ..head.observers[0].clone() }; 2],
            ..head
        };
        let mut file = Vec::new();
        write(&head, &seen.pool, &mut file).unwrap();
        assert!(Recording::parse(&file).unwrap_err().to_string().contains("of other signals"));
    }
}
