//! What observing by `elfen shim` gives, and what it costs: how often a word can be read, what the
//! observed pays, whether double-time error finds the wrong rates, and whether a recording agrees
//! with the observed's own account.
//!
//! All of it depends on how far apart the two lanes are, which in a virtual machine changes under
//! us: it is measured before and after each part, and a far machine is waited for.

mod bare;
mod competitor;
mod cost;
mod distance;
mod dte;
mod functions;
mod profile;
mod programs;
mod rates;
mod spread;
mod stage;
mod switches;
mod truth;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::round_trip;
use serde::Serialize;

use distance::NEAR_TICKS;
use stage::on_lane;

pub(crate) use competitor::Competitor;
pub(crate) use cost::{CHEAP_PERCENT, Cost, cheap_from};
pub(crate) use dte::Dte;
pub(crate) use functions::{Functions, TRUE_SHARE_PERCENT};
pub(crate) use profile::Profile;
pub(crate) use programs::Agreement;
pub(crate) use rates::Rate;
pub(crate) use spread::Spread;
pub(crate) use stage::{Error, Lanes};
pub(crate) use switches::Switches;
pub(crate) use truth::{Size, Truth};

const WAITS: u32 = 10;
const WAIT: Duration = Duration::from_secs(1);
/// A part that was measured while the lanes were far apart is measured again, so often.
const REPEATS: u32 = 2;

/// What can be measured by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Part {
    Rates,
    Dte,
    Truth,
    Competitor,
    Switches,
    Costs,
    Functions,
    Programs,
    Profile,
    Spread,
}

/// How far apart the lanes were: ticks for a line there and back.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct RoundTrip {
    pub(crate) part: Part,
    pub(crate) before: u64,
    /// `None` if the other lane was not to be had.
    pub(crate) after: Option<u64>,
}

/// What to measure, and how.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) lanes: Lanes,
    /// All, if none is named.
    pub(crate) only: Vec<Part>,
    pub(crate) pairs: usize,
    /// What runs the scripts of programs.
    pub(crate) lua: Vec<PathBuf>,
}

/// Everything that was measured.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Measured {
    pub(crate) clock_step_ticks: u64,
    pub(crate) ticks_per_us: f64,
    /// The longest that anything was measured at.
    pub(crate) line_round_trip_ticks: Option<u64>,
    pub(crate) round_trips: Vec<RoundTrip>,
    pub(crate) rates: Vec<Rate>,
    pub(crate) costs: Vec<Cost>,
    /// Costs that `elfen shim --measure-cost` says as well.
    pub(crate) agreements: Vec<Agreement>,
    pub(crate) functions: Vec<Functions>,
    pub(crate) profiles: Vec<Profile>,
    pub(crate) spreads: Vec<Spread>,
    pub(crate) truth: Vec<Truth>,
    pub(crate) sizes: Vec<Size>,
    pub(crate) dte: Vec<Dte>,
    pub(crate) competitor: Option<Competitor>,
    pub(crate) switches: Option<Switches>,
    /// Parts that were measured with the lanes far apart, however often they were begun anew.
    pub(crate) disturbed: Vec<Part>,
    /// What could not be measured here, and why.
    pub(crate) left_out: Vec<String>,
}

pub(crate) fn measure(order: &Order) -> Result<Measured, Error> {
    let lanes = order.lanes;
    let mut measured = Measured {
        clock_step_ticks: lanes.clock.step_ticks,
        ticks_per_us: number(lanes.clock.ticks_per_second) / 1e6,
        ..Measured::default()
    };
    let asked = |part| order.only.is_empty() || order.only.contains(&part);
    if asked(Part::Rates) {
        measured.rates = measured.near(lanes, Part::Rates, |_| rates::measure(lanes))?;
    }
    if asked(Part::Dte) {
        measured.dte = measured.near(lanes, Part::Dte, |near| dte::measure(lanes, near))?;
    }
    if asked(Part::Truth) {
        let truth = measured.near(lanes, Part::Truth, |_| truth::measure(lanes))?;
        (measured.truth, measured.sizes) = truth;
    }
    if asked(Part::Competitor) {
        let beside = measured.near(lanes, Part::Competitor, |_| competitor::measure(lanes))?;
        measured.competitor = Some(beside);
    }
    if asked(Part::Switches) {
        match measured.near(lanes, Part::Switches, |_| switches::measure(lanes))? {
            Ok(switches) => measured.switches = Some(switches),
            Err(why) => measured.left_out.push(why),
        }
    }
    if asked(Part::Costs) {
        let costs = |_| on_lane(lanes.on, || cost::measure(lanes, order.pairs));
        measured.costs = measured.near(lanes, Part::Costs, costs)?;
    }
    if asked(Part::Functions) {
        match measured.near(lanes, Part::Functions, |_| functions::measure(lanes))? {
            Ok(rows) => measured.functions = rows,
            Err(why) => measured.left_out.push(format!("functions: {why}")),
        }
    }
    if order.lua.is_empty()
        && [Part::Programs, Part::Profile, Part::Spread].iter().any(|&p| asked(p))
    {
        let why = "programs, profile and spread: there is no lua5.4, and --lua names none";
        measured.left_out.push(why.to_owned());
        return Ok(measured);
    }
    if asked(Part::Programs) {
        measured.programs(order)?;
    }
    if asked(Part::Profile) {
        measured.profile(order)?;
    }
    if asked(Part::Spread) {
        measured.spread(order)?;
    }
    Ok(measured)
}

impl Measured {
    fn programs(&mut self, order: &Order) -> Result<(), Error> {
        let Order { lanes, pairs, .. } = *order;
        if !programs::has_perf() {
            self.left_out.push("perf record beside the same programs: no perf here".to_owned());
        }
        for lua in &order.lua {
            let measure = |_| programs::measure(lanes, lua, pairs);
            let (costs, agreements) = self.near(lanes, Part::Programs, measure)?;
            self.costs.extend(costs);
            self.agreements.extend(agreements);
        }
        Ok(())
    }

    fn profile(&mut self, order: &Order) -> Result<(), Error> {
        let lanes = order.lanes;
        for lua in &order.lua {
            let measure = |_| profile::measure(lanes, lua);
            let (profiles, sizes) = self.near(lanes, Part::Profile, measure)?;
            if sizes.is_empty() {
                self.left_out.push(without_functions("profile", lua));
            }
            self.profiles.extend(profiles);
            self.sizes.extend(sizes);
        }
        Ok(())
    }

    fn spread(&mut self, order: &Order) -> Result<(), Error> {
        let lanes = order.lanes;
        for lua in &order.lua {
            match self.near(lanes, Part::Spread, |_| spread::measure(lanes, lua))? {
                Some(rows) => self.spreads.extend(rows),
                None => self.left_out.push(without_functions("rates of calls", lua)),
            }
        }
        Ok(())
    }

    /// One part, with the lanes near each other before and after if that is to be had.
    fn near<T>(
        &mut self,
        lanes: Lanes,
        part: Part,
        measure: impl Fn(u64) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // These keep apart themselves what was measured near and far.
        let keeps_apart = matches!(part, Part::Costs | Part::Programs);
        let mut repeats = if keeps_apart { REPEATS } else { 0 };
        loop {
            let before = waited_for(lanes)?;
            let found = measure(before)?;
            let after = on_lane(lanes.from, || Ok(round_trip::measure_ticks(lanes.on)))?;
            let longest = after.map_or(u64::MAX, |after| after.max(before));
            // Lanes that were waited for in vain are far apart for good.
            if before <= NEAR_TICKS && longest > NEAR_TICKS && repeats < REPEATS {
                repeats += 1;
                continue;
            }
            self.round_trips.push(RoundTrip { part, before, after });
            self.disturbed.extend((longest > NEAR_TICKS && !keeps_apart).then_some(part));
            self.line_round_trip_ticks = self.line_round_trip_ticks.max(after.or(Some(before)));
            return Ok(found);
        }
    }
}

fn without_functions(what: &str, lua: &Path) -> String {
    format!("{what}: the functions of {} do not say that they are entered", lua.display())
}

/// The round trip of a line, once it is short, or when that was waited for in vain.
fn waited_for(lanes: Lanes) -> Result<u64, Error> {
    let mut least = None;
    for _ in 0..WAITS {
        let now = on_lane(lanes.from, || Ok(round_trip::measure_ticks(lanes.on)))?;
        least = [least, now].into_iter().flatten().min();
        if now.is_some_and(|ticks| ticks <= NEAR_TICKS) {
            break;
        }
        thread::sleep(WAIT);
    }
    least.ok_or(Error::NoRoundTrip)
}
