//! What the parts of this benchmark share: the lanes, a word on a line of its own, the observer.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

use elfen_console::duration::number;
use elfen_console::programs::ProgramError;
use elfen_machine::affinity;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::thread::ThreadSlot;
use elfen_shim::clock::Clock;
use elfen_shim::pacing::Pacing;
use elfen_shim::reach::{NumberLocation, VmReader};
use elfen_shim::recorder::ObserverControl;
use elfen_shim::recording::Source;
use elfen_shim::session::{Observer, ObserverConfig, Words};
use elfen_shim::signal_spec::Width;

/// Where to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes {
    pub(crate) on: u32,
    pub(crate) from: u32,
    pub(crate) clock: Clock,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("the other lane was not to be had: others use it")]
    NoRoundTrip,
    #[error(transparent)]
    Missing(#[from] ProgramError),
    #[error("the truth: {0}")]
    Truth(String),
    #[error("a program: {0}")]
    Program(String),
}

/// In a thread of its own: this one stays where it may be, as its children have to.
pub(super) fn on_lane<T: Send>(
    lane: u32,
    what: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    thread::scope(|scope| {
        let pinned = scope.spawn(move || {
            affinity::pin(lane)?;
            what()
        });
        pinned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A word on a line of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Line(AtomicU64);

/// One that lives as long as this process: the observer's words do.
pub(super) fn line() -> &'static AtomicU64 {
    &Box::leak(Box::<Line>::default()).0
}

/// The observer of `elfen shim`, on one word.
pub(super) fn observe(
    lanes: Lanes,
    word: &'static AtomicU64,
    (period_ticks, pacing): (u64, Option<Pacing>),
    for_ticks: Option<u64>,
    orders: Arc<ObserverControl>,
) -> std::io::Result<Observer> {
    let page: Option<&'static Page<ThreadSlot>> = None;
    let mut words = Words::of(std::process::id(), page);
    let (width, source) = (Width::U64, Source::Mapped);
    let place = NumberLocation { word, offset: 0, width, source, ready: None };
    words.add_number("word".to_owned(), &place).map_err(std::io::Error::other)?;
    let how = ObserverConfig {
        from: lanes.from,
        clock: lanes.clock,
        period_ticks,
        pacing,
        fetch_ticks: u64::MAX,
        for_ticks,
        memory: if for_ticks.is_some() { 64 << 20 } else { 1 << 20 },
        keeps_last: for_ticks.is_none(),
        keeps_samples: false,
        until: None,
        cost_meter: None,
        fold: None,
        live: None,
    };
    Observer::start(words, how, VmReader::default(), orders)
}

/// The smallest value that `percent` of all do not exceed; 0 of nothing.
pub(super) fn at(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

pub(super) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * number(part) / number(whole) }
}
