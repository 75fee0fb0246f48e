//! Converts the signals and rates that the user named into the words that each observer reads.

use elfen_console::failure::{Failure, Status};
use elfen_rt::signal::service::ServiceReader;

use super::numbers::{address_of, globals_of, refuse, thread_word};
use super::target::Run;
use crate::filter;
use crate::followed_lane::ThreadWord;
use crate::rates::Rate;
use crate::reach::{self, NumberLocation, ProcState, ReachError, VmReader};
use crate::recording::{Kind, Source};
use crate::session::{THREADS_MAX, TooMany, Words};
use crate::signal_spec::{SignalSpec, Width};

/// The type of functions and tags: the lower half of an address.
const LOW: Width = Width { bytes: 4, signed: false };

/// Gathers the words of each observer, in the order of their lanes. Without named signals, it takes
/// all signals that do not slow the program. A signal that belongs to no lane goes to the observer
/// with the fewest words. Rates go to the first observer.
pub(super) fn gather_words(run: &Run<'_>) -> Result<Vec<Words>, Failure> {
    let (specs, rates, target) = (&run.args.watch, run.args.rates(), &run.target);
    let parts = run.lanes.parts();
    let too_many = |error: TooMany| {
        Failure::new(Status::Usage, "--watch", error, "watch less at a time, or fewer lanes")
    };
    let wants = |spec: &SignalSpec| specs.is_empty() || specs.contains(spec);
    let asked_task = specs.contains(&SignalSpec::Task);
    let of_thread = specs
        .iter()
        .any(|spec| matches!(spec, SignalSpec::Function | SignalSpec::Tag | SignalSpec::Value));
    let map = match &run.map {
        Err(why) if asked_task => {
            let fix = "run it as root, or as a member of group elfen where elfend runs";
            return Err(Failure::new(Status::Failed, "watching \"task\"", why, fix));
        }
        Err(_) => None,
        Ok(map) => Some(*map).filter(|map| {
            let wanted = wants(&SignalSpec::Task) || of_thread || !rates.is_empty();
            wanted && parts.iter().all(|(_, on)| Words::follows(map, on))
        }),
    };
    let follows = map.is_some();
    let mut all = Vec::new();
    let mut lanes = 0;
    for (index, (_, on)) in parts.iter().enumerate() {
        let mut words = Words::of(target.process, target.page);
        words.children = run.args.follow;
        if parts.len() > 1 {
            words = words.for_part(if follows { lanes } else { index * THREADS_MAX });
        }
        if let Some(map) = map {
            words.add_tasks(map, on, wants(&SignalSpec::Task)).map_err(too_many)?;
        }
        lanes += on.len();
        all.push(words);
    }
    if asked_task && !follows {
        let why = "one observer cannot follow so many lanes";
        let fix = "name fewer lanes with --cpu, or more observers with --observer-cpu";
        return Err(Failure::new(Status::Usage, "watching \"task\"", why, fix));
    }
    if run.args.follow && !follows {
        let why = match &run.map {
            Err(why) => why.as_str(),
            Ok(_) => "children are found by the task map, and no signal of it is watched",
        };
        let fix = "run it as root, or as a member of group elfen where elfend runs, and watch tag, \
                   function or task";
        return Err(Failure::new(Status::Failed, "--follow", why, fix));
    }
    if of_thread && target.page.is_none() {
        let why = "the process has no page of its threads: it sets no tags, and `elfen shim` did \
                   not start it";
        let fix = "start it with `elfen shim --`, or watch another signal";
        return Err(Failure::new(Status::Failed, "watching its threads", why, fix));
    }
    if target.page.is_some() {
        let mut signals = Vec::new();
        if let Some(source) =
            target.reporting.map(Source::from).filter(|_| wants(&SignalSpec::Function))
        {
            signals.push(("function", Kind::Tags, 0, LOW, source));
        } else if specs.contains(&SignalSpec::Function) {
            let why = "the program's functions do not report that they are entered";
            let fix = "build it with -fpatchable-function-entry=43, or -finstrument-functions, and \
                       start it with `elfen shim --`";
            return Err(Failure::new(Status::Failed, "watching \"function\"", why, fix));
        }
        if wants(&SignalSpec::Tag) {
            signals.push(("tag", Kind::Tags, 4, LOW, Source::SourceTags));
        }
        if !signals.is_empty() {
            for words in &mut all {
                words.add_thread_word(ThreadWord::FunctionAndTag, &signals).map_err(too_many)?;
            }
        }
        if specs.contains(&SignalSpec::Value) {
            let value = [("value", Kind::Values, 0, Width::U64, Source::SourceTags)];
            for words in &mut all {
                words.add_thread_word(ThreadWord::Value, &value).map_err(too_many)?;
            }
        }
    }
    if specs.is_empty()
        && !follows
        && target.process != 0
        && let Ok(state) = ProcState::open(target.process)
    {
        all[0].add_state(state).map_err(too_many)?;
    }
    for spec in specs {
        let name = spec.to_string();
        let with_fewest = all.iter_mut().min_by_key(|words| words.count());
        let Some(words) = with_fewest else { break };
        match spec {
            SignalSpec::Task | SignalSpec::Function | SignalSpec::Tag | SignalSpec::Value => {}
            SignalSpec::Service { name, word } => {
                let page = ServiceReader::open(name).map_err(|error| {
                    let fix = "start the service first, and check its name";
                    Failure::new(Status::Failed, format!("service {name:?}"), error, fix)
                })?;
                words.add_service(name, *word, page).map_err(too_many)?;
            }
            spec => {
                let place = locate_number(spec, run, &mut words.reader);
                let place = place.map_err(|error| refuse(&name, &error))?;
                words.add_number(name, &place).map_err(too_many)?;
            }
        }
    }
    for rate in rates {
        add_rate(&rate, run, &mut all[0])?;
    }
    let idle = all.iter().position(Words::is_empty).map(|index| parts[index].0);
    let Some(from) = idle else { return Ok(all) };
    if all[0].is_empty() {
        let why = run.map.as_ref().err().map_or("it has no signal to watch", String::as_str);
        let fix = "name a signal with --watch; `elfen shim signals` lists them";
        return Err(Failure::new(Status::Failed, "elfen shim", why, fix));
    }
    let why = format!("the observer on lane {from} would have no signal to watch");
    Err(Failure::new(Status::Usage, "--observer-cpu", why, "name fewer lanes, or watch more"))
}

/// Locates a number in the program's memory.
fn locate_number(
    spec: &SignalSpec,
    run: &Run<'_>,
    reader: &mut VmReader,
) -> Result<NumberLocation, ReachError> {
    let process = run.target.process;
    let name = spec.to_string();
    if let Some((_, shared)) = run.target.globals.iter().find(|(known, _)| *known == name) {
        return Ok(shared.clone());
    }
    match spec {
        SignalSpec::Address { at, width } => reach::locate_address(process, *at, *width, reader),
        SignalSpec::Map { of, offset, width } => {
            reach::locate_in_mapping(process, of, *offset, *width, reader)
        }
        SignalSpec::Jvm { counter } => reach::locate_jvm_counter(process, counter),
        SignalSpec::Symbol { name, offset, width } => {
            let all = globals_of(&run.layout);
            let (global, width) = reach::find_global(&all, name, *offset, *width)?;
            let at = address_of(&run.layout, global).ok_or_else(|| {
                ReachError::Failed(format!("{} is not mapped", global.path.display()))
            })?;
            reach::locate_address(process, at + offset, width, reader)
        }
        SignalSpec::Task
        | SignalSpec::Function
        | SignalSpec::Tag
        | SignalSpec::Value
        | SignalSpec::Service { .. } => {
            Err(ReachError::Invalid(format!("{spec} is not a number in memory")))
        }
    }
}

fn add_rate(text: &str, run: &Run<'_>, words: &mut Words) -> Result<(), Failure> {
    let wrong = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Usage, format!("--rate {text:?}"), why, fix)
    };
    let mut index_of = |name: &str| -> Result<usize, Failure> {
        if let Some(part) = thread_word(name) {
            if run.target.page.is_none() {
                let why = "the process has no page of its threads";
                return Err(wrong(&why, "start it with `elfen shim --`"));
            }
            let word = words.add_rate_word_of_thread(part);
            return word.map_err(|error| wrong(&error, "watch less at a time"));
        }
        let spec: SignalSpec = name.parse().map_err(|why: String| wrong(&why, "see --help"))?;
        let place = locate_number(&spec, run, &mut words.reader);
        let place = place.map_err(|error| refuse(name, &error))?;
        if place.width != Width::U64 {
            return Err(wrong(&"the counter of a rate has eight bytes", "name such a counter"));
        }
        words.add_rate_word(&place).map_err(|error| wrong(&error, "watch less at a time"))
    };
    let (counter, divisor) = match text.split_once('/') {
        Some((counter, divisor)) => (index_of(counter)?, Some(index_of(divisor)?)),
        None => (index_of(text)?, None),
    };
    // Without a divisor, the rate is per microsecond.
    let ticks = elfen_console::duration::number(run.clock.ticks_per_second) / 1e6;
    let name = if divisor.is_some() { text.to_owned() } else { format!("{text} per us") };
    let floor_ticks = filter::floor_ticks(&run.clock, run.round_trip);
    words.rates.push(Rate::new(name, counter, divisor, ticks, floor_ticks));
    Ok(())
}
