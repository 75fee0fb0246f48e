//! A recording of which a part was cut out, made ready to be written again.

use super::pool::Pool;
use super::read::Recording;
use super::series::Series;

/// What is left of a recording of which a part was cut out, as it is written.
pub fn again(recording: &Recording) -> Pool {
    let mut pool = Pool::growing(recording.runs.len());
    let signals = recording.head.signals.iter().zip(&recording.runs).zip(0..);
    for ((signal, runs), index) in signals {
        let start_ticks = runs.first().map_or(0, |run| run.start_ticks);
        let series = Series::new(index, signal.kind, recording.head.clock.unit(), start_ticks);
        series.write_all(runs, &mut pool).expect("a pool that grows is never full");
    }
    pool
}
