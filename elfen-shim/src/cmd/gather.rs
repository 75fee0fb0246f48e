//! Turns the signals and rates that the user named into the words that each observer reads.

use elfen_console::failure::{Failure, Status};
use elfen_machine::cpulist::CpuSet;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceReader;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::ThreadSlot;

use super::lane_choice::LaneChoice;
use super::wait::block_signals;
use crate::clock::Clock;
use crate::filter;
use crate::followed_lane::ThreadWord;
use crate::rates::Rate;
use crate::reach::{
    self, NumberLocation, PageSupervisor, ProcState, ReachError, SharedGlobals, VmReader,
};
use crate::recording::{Kind, Source};
use crate::session::{THREADS_MAX, TooMany, Words};
use crate::signal_spec::{SignalSpec, Width};
use crate::symbols::{Global, Layout, Symbols};

/// What is known of the process, the lanes and the machine.
pub(super) struct Context<'a> {
    pub(super) process: u32,
    /// Whether its forked children are observed too.
    pub(super) children: bool,
    pub(super) page: Option<&'static Page<ThreadSlot>>,
    pub(super) map: Result<&'static TaskMap, String>,
    pub(super) chosen: &'a LaneChoice,
    pub(super) globals: &'a [(String, NumberLocation)],
    pub(super) layout: &'a Layout,
    /// The source of functions, if the program's functions report that they run.
    pub(super) functions: Option<Source>,
    pub(super) clock: Clock,
    /// The round trip of a line in ticks, if it could be measured.
    pub(super) round_trip: Option<u64>,
}

/// The type of functions and tags: the lower half of an address.
const LOW: Width = Width { bytes: 4, signed: false };

/// Gathers the words of each observer, in the order of their lanes. If the user named no signals,
/// it takes all that cost the program nothing. A signal that belongs to no lane goes to the
/// observer with the fewest words. Rates go to the first observer.
pub(super) fn gather_words(
    specs: &[SignalSpec],
    rates: &[String],
    context: &Context<'_>,
) -> Result<Vec<Words>, Failure> {
    let parts = context.chosen.parts();
    let too_many = |error: TooMany| {
        Failure::new(Status::Usage, "--watch", error, "watch less at a time, or fewer lanes")
    };
    let wants = |spec: &SignalSpec| specs.is_empty() || specs.contains(spec);
    let asked_task = specs.contains(&SignalSpec::Task);
    let of_thread = specs
        .iter()
        .any(|spec| matches!(spec, SignalSpec::Function | SignalSpec::Tag | SignalSpec::Value));
    let map = match &context.map {
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
        let mut words = Words::of(context.process, context.page);
        words.children = context.children;
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
    if context.children && !follows {
        let why = match &context.map {
            Err(why) => why.as_str(),
            Ok(_) => "children are found by the task map, and no signal of it is watched",
        };
        let fix = "run it as root, or as a member of group elfen where elfend runs, and watch tag, \
                   function or task";
        return Err(Failure::new(Status::Failed, "--follow", why, fix));
    }
    if of_thread && context.page.is_none() {
        let why = "the process has no page of its threads: it sets no tags, and `elfen shim` did \
                   not start it";
        let fix = "start it with `elfen shim --`, or watch another signal";
        return Err(Failure::new(Status::Failed, "watching its threads", why, fix));
    }
    if context.page.is_some() {
        let mut signals = Vec::new();
        if let Some(source) = context.functions.filter(|_| wants(&SignalSpec::Function)) {
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
        && context.process != 0
        && let Ok(state) = ProcState::open(context.process)
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
                let place = locate_number(spec, context, &mut words.reader);
                let place = place.map_err(|error| refuse(&name, &error))?;
                words.add_number(name, &place).map_err(too_many)?;
            }
        }
    }
    for rate in rates {
        add_rate(rate, context, &mut all[0])?;
    }
    let idle = all.iter().position(Words::is_empty);
    match idle.map(|index| parts[index].0) {
        Some(from) if !all[0].is_empty() => {
            let why = format!("the observer on lane {from} would have no signal to watch");
            Err(Failure::new(
                Status::Usage,
                "--observer-cpu",
                why,
                "name fewer lanes, or watch more",
            ))
        }
        _ => Ok(all),
    }
}

pub(super) fn refuse(name: &str, error: &ReachError) -> Failure {
    let (status, fix) = match error {
        ReachError::Invalid(_) => (Status::Usage, "choose one of `elfen shim signals`"),
        ReachError::Failed(_) | ReachError::Io(_) => {
            (Status::Failed, "see in `elfen doctor` what this user may observe")
        }
    };
    Failure::new(status, format!("watching {name:?}"), error, fix)
}

/// Locates a number in the program's memory.
fn locate_number(
    spec: &SignalSpec,
    context: &Context<'_>,
    reader: &mut VmReader,
) -> Result<NumberLocation, ReachError> {
    let process = context.process;
    match spec {
        SignalSpec::Address { at, width } => {
            let shared = context.globals.iter().find(|(known, _)| *known == spec.to_string());
            match shared {
                Some((_, place)) => Ok(place.clone()),
                None => reach::locate_address(process, *at, *width, reader),
            }
        }
        SignalSpec::Map { of, offset, width } => {
            reach::locate_in_mapping(process, of, *offset, *width, reader)
        }
        SignalSpec::Jvm { counter } => reach::locate_jvm_counter(process, counter),
        SignalSpec::Symbol { name, offset, width } => {
            let shared = context.globals.iter().find(|(known, _)| *known == spec.to_string());
            if let Some((_, place)) = shared {
                return Ok(place.clone());
            }
            let all = globals_of(context.layout);
            let (global, width) = reach::find_global(&all, name, *offset, *width)?;
            let at = address_of(context.layout, global).ok_or_else(|| {
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

/// Lists the globals of a running process.
pub(super) fn globals_of(layout: &Layout) -> Vec<Global> {
    let symbols = layout
        .objects
        .iter()
        .filter_map(|loaded| Symbols::read(&layout.file_of(loaded), &loaded.path));
    symbols.flat_map(|symbols| symbols.globals).collect()
}

/// Finds the address of a file's global in the process.
fn address_of(layout: &Layout, global: &Global) -> Option<u64> {
    let loaded = layout.objects.iter().find(|loaded| loaded.path == global.path)?;
    let symbols = Symbols::read(&layout.file_of(loaded), &loaded.path)?;
    Some(loaded.start.wrapping_add(global.address).wrapping_sub(symbols.base))
}

/// Locations of numbers, by the names of their signals.
pub(super) type Globals = Vec<(String, NumberLocation)>;

/// Prepares to share all requested symbols with a program from its start.
pub(super) fn share_at_start(
    specs: &[SignalSpec],
    rates: &[String],
    program: &std::path::Path,
) -> Result<(Globals, Option<SharedGlobals>), Failure> {
    let wanted: Vec<SignalSpec> = specs
        .iter()
        .filter(|spec| matches!(spec, SignalSpec::Symbol { .. }))
        .cloned()
        .chain(symbols_of_rates(rates))
        .collect();
    if wanted.is_empty() {
        return Ok((Vec::new(), None));
    }
    if Symbols::read(program, program).is_none() {
        let why = "it is not a 64-bit x86 program; if it is a script, name its interpreter";
        let why = ReachError::Invalid(why.to_owned());
        return Err(refuse(&program.display().to_string(), &why));
    }
    let all = reach::globals_of(program);
    let io = |error: std::io::Error| refuse("globals", &ReachError::Io(error));
    let mut shared = SharedGlobals::new().map_err(io)?;
    let mut places = Vec::new();
    for spec in wanted {
        let SignalSpec::Symbol { name, offset, width } = &spec else { continue };
        let found = reach::find_global(&all, name, *offset, *width);
        let place = found.and_then(|(global, width)| shared.share(global, *offset, width));
        places.push((spec.to_string(), place.map_err(|error| refuse(name, &error))?));
    }
    Ok((places, Some(shared)))
}

/// Shares all requested symbols and addresses of a running process.
pub(super) fn share_running(
    specs: &[SignalSpec],
    rates: &[String],
    process: u32,
    layout: &Layout,
    lanes: &CpuSet,
) -> Result<(Globals, PageSupervisor), Failure> {
    let all = globals_of(layout);
    let mut found = Vec::new();
    for spec in specs.iter().cloned().chain(symbols_of_rates(rates)) {
        let at = match &spec {
            SignalSpec::Address { at, width } => (*at, *width),
            SignalSpec::Symbol { name, offset, width } => {
                let global = reach::find_global(&all, name, *offset, *width);
                let (global, width) = global.map_err(|error| refuse(name, &error))?;
                let at = address_of(layout, global).ok_or_else(|| {
                    refuse(name, &ReachError::Failed("its file is not mapped".to_owned()))
                })?;
                (at + offset, width)
            }
            _ => continue,
        };
        found.push((spec.to_string(), at));
    }
    if found.is_empty() {
        let why = "no watched signal is a number in the process's memory";
        let fix = "watch a SYMBOL or 0xADDRESS";
        return Err(Failure::new(Status::Usage, "--share", why, fix));
    }
    let addresses: Vec<u64> = found.iter().map(|(_, (at, _))| *at).collect();
    let refused = |error| refuse("its pages, shared", &error);
    block_signals()?;
    let supervisor = PageSupervisor::share(process, &addresses, lanes).map_err(refused)?;
    let place = |(name, (at, width)): (String, (u64, Width))| {
        Ok((name, supervisor.place(at, width).map_err(refused)?))
    };
    let places: Result<Globals, Failure> = found.into_iter().map(place).collect();
    Ok((places?, supervisor))
}

/// Lists the symbols in rates.
fn symbols_of_rates(rates: &[String]) -> impl Iterator<Item = SignalSpec> {
    rates.iter().flat_map(|rate| rate.split('/')).filter_map(|word| {
        let spec: SignalSpec = word.parse().ok()?;
        (thread_word(word).is_none() && matches!(spec, SignalSpec::Symbol { .. })).then_some(spec)
    })
}

/// Finds the thread word of a counter's name in a rate.
fn thread_word(name: &str) -> Option<ThreadWord> {
    match name {
        "calls" => Some(ThreadWord::Calls),
        "instructions" => Some(ThreadWord::Instructions),
        "cycles" => Some(ThreadWord::Cycles),
        "value" => Some(ThreadWord::Value),
        _ => None,
    }
}

fn add_rate(text: &str, context: &Context<'_>, words: &mut Words) -> Result<(), Failure> {
    let wrong = |why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Usage, format!("--rate {text:?}"), why, fix)
    };
    let mut index_of = |name: &str| -> Result<usize, Failure> {
        if let Some(part) = thread_word(name) {
            if context.page.is_none() {
                let why = "the process has no page of its threads";
                return Err(wrong(&why, "start it with `elfen shim --`"));
            }
            let word = words.add_rate_word_of_thread(part);
            return word.map_err(|error| wrong(&error, "watch less at a time"));
        }
        let spec: SignalSpec = name.parse().map_err(|why: String| wrong(&why, "see --help"))?;
        let place = locate_number(&spec, context, &mut words.reader);
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
    let ticks = elfen_console::duration::number(context.clock.ticks_per_second) / 1e6;
    let name = if divisor.is_some() { text.to_owned() } else { format!("{text} per us") };
    let floor_ticks = filter::floor_ticks(&context.clock, context.round_trip);
    words.add_rate(Rate::new(name, counter, divisor, ticks, floor_ticks));
    Ok(())
}
