//! The observer threads of a run.
//!
//! Several observers make one recording, each on its own CPU. While they sample, they share only
//! the flag that ends them. Each has its own memory, words and gaps. An observer that ends sets the
//! flag. The results are merged when all observers have ended.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};

use elfen_machine::affinity;
use elfen_machine::placement::use_ordinary_class;

use crate::recorder::Recorder;
use crate::recording::Pool;
use crate::session::{ObserverConfig, ObserverControl, ObserverResult, Words};

/// The name of observer threads in /proc. Tests and `elfen lab bench` find observers by this name.
pub const OBSERVER: &str = "elfen-observer";

fn run<const BOTH: bool>(
    words: Words,
    config: ObserverConfig,
    pool: Pool,
    control: Arc<ObserverControl>,
) -> ObserverResult {
    let placed = use_ordinary_class().and_then(|()| affinity::pin(config.from));
    let recorder = Recorder::<BOTH>::new(words, config, pool, control);
    if placed.is_ok() { recorder.run() } else { recorder.end_unplaced() }
}

/// The running observers, each on its own CPU.
#[derive(Debug, Default)]
pub struct Observers(Vec<JoinHandle<ObserverResult>>);

impl Observers {
    /// Starts a thread for each observer. If a thread cannot be started, the earlier ones end.
    pub fn start(
        each: impl IntoIterator<Item = (Words, ObserverConfig)>,
        control: &Arc<ObserverControl>,
    ) -> std::io::Result<Self> {
        let mut started = Self::default();
        for (words, config) in each {
            // An observer reads the clock once per sample, or twice if there are rates.
            let run = if words.rates.is_empty() { run::<false> } else { run::<true> };
            let pool = Pool::new(config.memory, words.feeds.len(), config.keeps_last);
            let its_control = control.clone();
            let thread = thread::Builder::new().name(OBSERVER.to_owned());
            match thread.spawn(move || run(words, config, pool, its_control)) {
                Ok(thread) => started.0.push(thread),
                Err(error) => {
                    control.stop.store(true, Relaxed);
                    started.0.into_iter().for_each(|one| drop(join(one)));
                    return Err(error);
                }
            }
        }
        Ok(started)
    }

    pub fn is_done(&self) -> bool {
        self.0.iter().any(JoinHandle::is_finished)
    }

    /// Waits for all observers and merges their results.
    pub fn join(self) -> ObserverResult {
        let all = self.0.into_iter().map(join);
        all.reduce(ObserverResult::merge).expect("a run has an observer")
    }
}

fn join(observer: JoinHandle<ObserverResult>) -> ObserverResult {
    observer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::reach::NumberLocation;
    use crate::recording::{Head, ObserverHead, Recording, write};
    use crate::recording::{Kind, Signal, Source};
    use crate::session::{EndReason, Until};
    use crate::signal_spec::Width;
    use crate::tally::Tally;
    use std::sync::atomic::AtomicU64;
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
            memory: 1 << 20,
            until,
            ..ObserverConfig::default()
        };
        let untils = [None, Some(Until { feed: 0, above: 200, signed: false })];
        let each = names.iter().zip(all).zip(untils);
        let each = each.map(|((name, word), until)| (words(name, word), how(until)));
        let control = Arc::new(ObserverControl::default());
        let observers = Observers::start(each, &control).unwrap();
        let start = Instant::now();
        while !observers.is_done() && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
            all.iter().zip(1..).for_each(|(word, by)| _ = word.fetch_add(by, Relaxed));
        }
        // Only the second observer has a limit. Its end also ends the first observer.
        let seen = observers.join();
        assert_eq!((seen.ended, control.stop.load(Relaxed)), (EndReason::Until, true));
        let signal = |name: &&str| Signal::new(name, Source::Mapped, Kind::Values);
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
        // The observers in this head have more signals than the head itself.
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
