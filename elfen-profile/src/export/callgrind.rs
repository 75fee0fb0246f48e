//! Callgrind's format: the instructions of each function, and for each call how often it was
//! executed and how many instructions ran until it returned.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;

use elfen_stream::counts::EdgeKind;

use crate::profile::{Place, Profile};
use crate::stacks::{Sources, Stacks, in_one_line};
use crate::symbols::{FunctionId, ProfileSymbols};

/// No instruction is longer.
const INSTRUCTION_BYTES_MAX: u64 = 15;

/// The name of a source file that is not known.
const NO_SOURCE: &str = "???";

/// A call instruction, by one of its bytes, and the function that it calls.
type Call = (Place, FunctionId);

#[derive(Default)]
struct FunctionCost {
    /// Instructions by the start of their block.
    own: BTreeMap<Place, u64>,
    /// Instructions until the call returned.
    calls: BTreeMap<Call, u64>,
}

pub(crate) fn costs(profile: &Profile, symbols: &ProfileSymbols, sources: &Sources) -> String {
    let mut costs: BTreeMap<FunctionId, FunctionCost> = BTreeMap::new();
    for (&start, block) in &profile.blocks {
        let cost = costs.entry(symbols.function_of(start)).or_default();
        let executed = block.count.saturating_mul(block.instructions.into());
        cost.own.insert(start, executed);
    }
    let stacks = Stacks::new(profile, symbols);
    let (mut frames, mut calls) = (Vec::new(), BTreeSet::new());
    for (end, count) in stacks.all() {
        stacks.frames(end, &mut frames);
        calls.clear();
        for pair in frames.windows(2) {
            if let [callee, caller] = pair {
                calls.insert((caller.function.clone(), (caller.at, callee.function.clone())));
            }
        }
        // A call within itself counts once.
        for (caller, call) in &calls {
            let cost = costs.entry(caller.clone()).or_default();
            let sum = cost.calls.entry(call.clone()).or_default();
            *sum = sum.saturating_add(count.instructions);
        }
    }
    let executed = Executed::of(profile, symbols);
    let mut text = String::from("# callgrind format\nversion: 1\ncreator: elfen\n");
    let program = in_one_line(&profile.program.join(" "));
    let _written = writeln!(text, "cmd: {program}\npositions: instr line\nevents: Ir");
    let address = |place: Place| {
        let table = symbols.table(place.file);
        table.and_then(|table| table.address_of(place.offset)).unwrap_or(place.offset)
    };
    let path = |file: u32| {
        let file = usize::try_from(file).ok().and_then(|file| profile.files.get(file));
        in_one_line(file.map_or("?", |file| &*file.path))
    };
    let line = |place: Place| sources.line(place.file, address(place)).unwrap_or((NO_SOURCE, 0));
    let first_line = |function: &FunctionId| {
        let found = function.start.and_then(|start| sources.line(function.file, start));
        found.unwrap_or((NO_SOURCE, 0))
    };
    for (function, cost) in &costs {
        let (outer, _) = first_line(function);
        let (file, name) = (path(function.file), stacks.name(function));
        let _written = writeln!(text, "\nob={file}\nfl={outer}\nfn={name}");
        let mut current = outer;
        // Names the source file of the next line, if it is another one: that of inlined code.
        let mut go_to = |text: &mut String, place: Place| {
            let (source, line) = line(place);
            if source != current {
                let key = if source == outer { "fe" } else { "fi" };
                let _written = writeln!(text, "{key}={source}");
                current = source;
            }
            line
        };
        for (&start, instructions) in &cost.own {
            let line = go_to(&mut text, start);
            let _written = writeln!(text, "{:#x} {line} {instructions}", address(start));
        }
        for ((call, callee), instructions) in &cost.calls {
            let times = executed.times(*call, callee).max(1);
            let entry = callee.start.unwrap_or(0);
            let (source, first) = first_line(callee);
            let line = go_to(&mut text, *call);
            let (file, name) = (path(callee.file), stacks.name(callee));
            let _written = writeln!(text, "cob={file}\ncfi={source}\ncfn={name}");
            let _written = writeln!(text, "calls={times} {entry:#x} {first}");
            let _written = writeln!(text, "{:#x} {line} {instructions}", address(*call));
        }
    }
    let _written = writeln!(text, "\ntotals: {}", profile.instructions);
    text
}

/// How often calls were executed.
struct Executed(HashMap<Place, Vec<(FunctionId, u64)>>);

impl Executed {
    fn of(profile: &Profile, symbols: &ProfileSymbols) -> Self {
        let mut times: HashMap<Place, Vec<(FunctionId, u64)>> = HashMap::new();
        for (edge, count) in &profile.edges {
            if matches!(edge.kind, EdgeKind::Call | EdgeKind::ComputedCall) {
                let callee = symbols.function_of(edge.to);
                times.entry(edge.from).or_default().push((callee, count.count));
            }
        }
        Self(times)
    }

    fn times(&self, call: Place, callee: &FunctionId) -> u64 {
        let starts = (0..INSTRUCTION_BYTES_MAX).filter_map(|before| {
            let offset = call.offset.checked_sub(before)?;
            self.0.get(&Place { offset, ..call })
        });
        let found = starts.into_iter().next().into_iter().flatten();
        found.filter(|(to, _)| to == callee).fold(0, |all, (_, times)| all.saturating_add(*times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{BlockCount, Edge, EdgeCount};
    use crate::stacks::tests::profile;

    #[test]
    fn a_call_has_its_times_and_what_ran_until_it_returned() {
        let (mut profile, symbols) = profile();
        let [call, block] = [(0, 0x100), (1, 0x200)].map(|(file, offset)| Place { file, offset });
        let count = BlockCount { bytes: 9, instructions: 10, count: 10, bursts: 2 };
        profile.add_block(block, count);
        let edge = Edge { from: call, to: block, kind: EdgeKind::Call };
        profile.add_edge(edge, EdgeCount { count: 6, bursts: 2 });
        let text = costs(&profile, &symbols, &Sources::default());
        let own = "fn=b:[no symbol]\n0x200 0 100\n";
        let called = "cfn=b:[no symbol]\ncalls=6 0x0 0\n0x104 0 70\n";
        assert!(text.contains(own) && text.contains(called), "{text}");
    }
}
