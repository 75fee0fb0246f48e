//! Runs a program once, and judges each set of productions on its stream.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;

use elfen_console::duration::number;
use elfen_profile::everything::{self, Ended, TraceError};
use elfen_profile::overlap::{accuracy, hot_part};
use elfen_profile::profile::{DataReference, Profile, What};
use elfen_profile::rule_sums::{Method, counts};
use elfen_profile::rules::{Register, RuleSet, parse};
use elfen_profile::streams;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use super::cost::{Executed, Overhead, Profiled};

const FRAMEWORK: &str = include_str!("../../../../workloads/profile/hps.rules");
/// Everything that the framework samples.
const EXACT: &str = "\
Pairs: T.OPCLASS == proc_call -> call(CallPair), null
Methods: T.OPCLASS == proc_call || T.OPCLASS == branch && T.PC > T.Target -> call(HotMethod), null
Streams: T.OPCLASS == mem_op -> call(DataStream), null
";
const EXACT_PRODUCTIONS: usize = 3;

pub(crate) const BURSTS: [u32; 4] = [1, 10, 50, 100];
/// Inverse frequencies: of this number of events, one is profiled.
pub(crate) const PERIODS: [u32; 5] = [100, 500, 1_000, 5_000, 10_000];

/// The parameters of one set of productions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Setting {
    pub(crate) burst: u32,
    /// The inverse of the frequency: burst / (burst + sparsity).
    pub(crate) period: u32,
    /// Intervals are drawn from half to one and a half of the sparsity.
    pub(crate) is_random: bool,
}

impl Setting {
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for is_random in [false, true] {
            for burst in BURSTS {
                all.extend(PERIODS.map(|period| Self { burst, period, is_random }));
            }
        }
        all
    }

    fn sparsity(self) -> u32 {
        self.burst * (self.period - 1)
    }

    fn rules(self, framework: &RuleSet, seed: u64) -> Option<RuleSet> {
        let register = |value: u32, is_random| Register {
            value: i32::try_from(value).unwrap_or(i32::MAX).wrapping_neg(),
            is_random,
        };
        let rules = framework
            .clone()
            .with_register("sampleFreq", register(self.sparsity(), self.is_random))?;
        let rules = rules.with_register("burstLength", register(self.burst, false))?;
        Some(rules.with_seed(seed))
    }
}

/// How well one kind of profile was sampled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Sampled {
    pub(crate) samples: u64,
    pub(crate) accuracy_percent: f64,
    /// The accuracy of as many samples, each drawn at random from the exact profile.
    pub(crate) drawn_percent: f64,
    pub(crate) overhead_percent: f64,
}

/// How well data streams were sampled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct SampledStreams {
    /// Memory accesses in bursts, and the bursts.
    pub(crate) samples: u64,
    pub(crate) bursts: u64,
    pub(crate) accuracy_percent: f64,
    /// The part of the exact profile in streams that are not in the sampled one.
    pub(crate) missing_percent: f64,
    pub(crate) overhead_percent: f64,
}

impl SampledStreams {
    /// The accesses of a burst, on average.
    pub(crate) fn per_burst(&self) -> f64 {
        number(self.samples) / number(self.bursts.max(1))
    }
}

/// One setting on one program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judged {
    pub(crate) setting: Setting,
    pub(crate) pairs: Sampled,
    pub(crate) methods: Sampled,
    pub(crate) streams: SampledStreams,
}

/// The overheads of one kind of profile, at a frequency of 1/100 and the paper's burst: 1, or 100
/// for streams.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Compared {
    pub(crate) hps: Overhead,
    pub(crate) dise: Overhead,
    pub(crate) two_copies: Overhead,
}

#[derive(Clone, Debug)]
pub(crate) struct Studied {
    pub(crate) executed: Executed,
    /// Different call pairs and methods that make 90 % of all.
    pub(crate) hot_pairs: usize,
    pub(crate) hot_methods: usize,
    /// The same of data streams, and the part of all accesses that streams make up.
    pub(crate) hot_streams: usize,
    pub(crate) covered_percent: f64,
    pub(crate) judged: Vec<Judged>,
    pub(crate) pairs: Compared,
    pub(crate) methods: Compared,
    /// The same of data streams.
    pub(crate) streams: Compared,
    /// What the profile has left out.
    pub(crate) left: Vec<String>,
}

/// Why a program has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StudyError {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("it ended with {0:?}")]
    Ended(Ended),
    #[error("the productions of the framework are invalid")]
    Framework,
}

/// The sets of productions of all settings, behind the one that counts everything.
pub(crate) fn rule_sets(seed: u64) -> Result<&'static [RuleSet], StudyError> {
    let parsed = |text| parse(text).map_err(|_| StudyError::Framework);
    let framework = parsed(FRAMEWORK)?;
    let mut sets = vec![parsed(EXACT)?];
    for setting in Setting::all() {
        sets.push(setting.rules(&framework, seed).ok_or(StudyError::Framework)?);
    }
    // They are used until this process ends.
    Ok(Box::leak(sets.into()))
}

/// Runs a program with its output in a file, and judges all settings. A handler executes `handler`
/// instructions.
pub(crate) fn study(
    words: &[OsString],
    output: &Path,
    sets: &'static [RuleSet],
    handler: u64,
    seed: u64,
) -> Result<Studied, StudyError> {
    // A shell redirects the output, and then executes the program. The output is a file: some
    // programs do less if it is /dev/null.
    let shell = "export LC_ALL=C PYTHONHASHSEED=0; exec \"$@\" < /dev/null > \"$0\" 2>&1";
    let mut all: Vec<OsString> = ["sh", "-c", shell].map(OsString::from).into();
    all.push(output.into());
    all.extend_from_slice(words);
    let what = What { rules: sets, ..What::default() };
    let recorded = everything::record(&all, what, |_| {})?;
    if recorded.ended != Ended::Exited(0) {
        return Err(StudyError::Ended(recorded.ended));
    }
    judge(&recorded.profile, sets, handler, seed).ok_or(StudyError::Framework)
}

/// Compares what the sets have collected.
fn judge(profile: &Profile, sets: &[RuleSet], handler: u64, seed: u64) -> Option<Studied> {
    let found = counts(profile);
    let matched = |rule: usize| profile.rules.get(rule).map(|one| one.matched);
    let (pairs, methods) = (found.first()?, found.get(1)?);
    let executed = Executed {
        instructions: profile.instructions,
        calls: matched(0)?,
        events: matched(1)?,
        accesses: matched(2)?,
    };
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut sampled = |exact: &HashMap<Method, u64>, rule: usize| {
        let samples = matched(rule)?;
        let drawn = draw(exact, samples, &mut random);
        Some(Sampled {
            samples,
            accuracy_percent: 100.0 * accuracy(exact, found.get(rule)?),
            drawn_percent: 100.0 * accuracy(exact, &drawn),
            overhead_percent: executed.by_hps(samples, handler).all(),
        })
    };
    // The number of the exact production of streams.
    let exact = streams::heats(profile, Some(2));
    let hot_streams = hot_part(&exact);
    let productions = sets.get(1)?.productions.len();
    let mut judged = Vec::new();
    for (number, setting) in Setting::all().into_iter().enumerate() {
        // The profiles are the last three productions of the framework.
        let end = EXACT_PRODUCTIONS + (number + 1) * productions;
        let (pairs, methods) = (sampled(pairs, end - 3)?, sampled(methods, end - 2)?);
        let samples = matched(end - 1)?;
        // Each burst ends with P5 or P6.
        let ends = [end - productions + 4, end - productions + 5].map(matched);
        let found = streams::heats(profile, Some(u32::try_from(end - 1).ok()?));
        let streams = SampledStreams {
            samples,
            bursts: ends[0]? + ends[1]?,
            accuracy_percent: 100.0 * accuracy(&exact, &found),
            missing_percent: missing(&hot_streams, &hot_part(&found)),
            overhead_percent: executed.by_hps(samples, handler).all(),
        };
        judged.push(Judged { setting, pairs, methods, streams });
    }
    let at = |burst: u32| {
        judged.iter().find(|one| (one.setting.burst, one.setting.period) == (burst, 100))
    };
    let (often, streams_often) = (at(1)?, at(100)?);
    let compared = |profiled: Profiled, collected: u64| Compared {
        hps: executed.by_hps(collected, handler),
        dise: executed.by_dise(profiled, collected, handler),
        two_copies: executed.by_two_copies(collected, handler),
    };
    let references = profile.rules.get(2)?.references;
    Some(Studied {
        executed,
        hot_pairs: hot_part(pairs).len(),
        hot_methods: hot_part(methods).len(),
        hot_streams: hot_streams.len(),
        covered_percent: 100.0 * number(exact.values().sum()) / number(references.max(1)),
        pairs: compared(Profiled::Events(executed.calls), often.pairs.samples),
        methods: compared(Profiled::Events(executed.events), often.methods.samples),
        streams: compared(Profiled::Others(executed.accesses), streams_often.streams.samples),
        judged,
        left: profile.left.clone(),
    })
}

/// The part of an exact profile that another one lacks, in percent.
fn missing(
    exact: &HashMap<Vec<DataReference>, u64>,
    found: &HashMap<Vec<DataReference>, u64>,
) -> f64 {
    let lacks = exact.iter().filter(|(stream, _)| !found.contains_key(*stream));
    let part: u64 = lacks.map(|(_, &heat)| heat).sum();
    100.0 * number(part) / number(exact.values().sum::<u64>().max(1))
}

/// Draws samples from an exact profile, each independent of the others.
fn draw(
    exact: &HashMap<Method, u64>,
    samples: u64,
    random: &mut Xoshiro256PlusPlus,
) -> HashMap<Method, u64> {
    let mut sorted: Vec<(&Method, u64)> = exact.iter().map(|(key, &count)| (key, count)).collect();
    sorted.sort();
    let mut until = 0;
    let ends: Vec<u64> = sorted
        .iter()
        .map(|(_, count)| {
            until += count;
            until
        })
        .collect();
    let mut drawn = HashMap::new();
    for _ in 0..if until == 0 { 0 } else { samples } {
        let at = random.random_range(0..until);
        let index = ends.partition_point(|&end| end <= at);
        *drawn.entry(sorted[index].0.clone()).or_default() += 1;
    }
    drawn
}

/// The mean of some numbers; 0 without any.
pub(crate) fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = numbers.fold((0_u64, 0.0), |(count, sum), one| (count + 1, sum + one));
    sum / number(count.max(1))
}
