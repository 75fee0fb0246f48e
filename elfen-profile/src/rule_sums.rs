//! What the handlers of rules have collected, by functions.

use std::cmp::{Ordering, Reverse};
use std::collections::HashMap;

use elfen_stream::counts::EdgeKind;
use serde::Serialize;

use crate::profile::{Edge, Place, Profile};
use crate::rules::{Handler, Kind, parse_pattern};
use crate::streams;
use crate::sums::{Sum, error, grouped, share, total};
use crate::symbols::{FunctionId, ProfileSymbols};

/// A hot method, or a caller and what it calls.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Method {
    pub(crate) caller: Option<FunctionId>,
    pub(crate) function: FunctionId,
}

impl Method {
    /// The same in another profile.
    pub(crate) fn renamed(&self, files: &HashMap<u32, u32>) -> Option<Self> {
        let function =
            |one: &FunctionId| Some(FunctionId { file: *files.get(&one.file)?, start: one.start });
        let caller = match &self.caller {
            Some(caller) => Some(function(caller)?),
            None => None,
        };
        Some(Self { caller, function: function(&self.function)? })
    }
}

/// Sums for each rule of a profile.
pub(crate) fn sums(profile: &Profile, symbols: &ProfileSymbols) -> Vec<HashMap<Method, Sum>> {
    let mut sums = vec![HashMap::new(); profile.rules.len()];
    for (member, count) in &profile.rule_counts {
        let sum = usize::try_from(member.rule).ok().and_then(|rule| sums.get_mut(rule));
        let method = match (member.from, member.to) {
            (from, Some(to)) => {
                let caller = from.map(|from| symbols.function_of(from));
                Method { caller, function: called(symbols, to) }
            }
            (Some(at), None) => Method { caller: None, function: symbols.function_of(at) },
            (None, None) => continue,
        };
        if let Some(sum) = sum {
            sum.entry(method).or_insert_with(Sum::default).add(count.count, count.bursts);
        }
    }
    sums
}

/// How often the handler of each rule was called, by function.
pub fn counts(profile: &Profile) -> Vec<HashMap<Method, u64>> {
    let (symbols, _) = ProfileSymbols::read(profile);
    let sums = sums(profile, &symbols).into_iter();
    sums.map(|one| one.into_iter().map(|(method, sum)| (method, sum.count)).collect()).collect()
}

/// What a rule would have collected without its conditions, by the edges of an exact profile.
/// `None` if these do not tell: for accesses to memory, and for patterns with addresses.
pub(crate) fn exactly(
    text: &str,
    handler: Handler,
    exact: &Profile,
    symbols: &ProfileSymbols,
) -> Option<HashMap<Method, u64>> {
    let pattern = parse_pattern(text).ok()?;
    let others = [Kind::Memory, Kind::Return, Kind::Syscall];
    if pattern.has_numbers() || others.iter().any(|&kind| pattern.kinds().contains(kind)) {
        return None;
    }
    let mut counts: HashMap<Method, u64> = HashMap::new();
    for (edge, count) in &exact.edges {
        let kind = match edge.kind {
            EdgeKind::Jump => Kind::Jump,
            EdgeKind::Taken => Kind::CondBranch,
            EdgeKind::Call => Kind::Call,
            EdgeKind::ComputedJump => Kind::IndirectJump,
            EdgeKind::ComputedCall => Kind::IndirectCall,
            EdgeKind::Falls | EdgeKind::Return | EdgeKind::ReturnFar => continue,
        };
        if pattern.may_hold(kind, order(edge)) == Some(false) {
            continue;
        }
        let is_call = matches!(kind, Kind::Call | Kind::IndirectCall);
        let method = match handler {
            Handler::CallPair => Method {
                caller: Some(symbols.function_of(edge.from)),
                function: called(symbols, edge.to),
            },
            Handler::HotMethod if is_call => {
                Method { caller: None, function: called(symbols, edge.to) }
            }
            Handler::HotMethod => Method { caller: None, function: symbols.function_of(edge.from) },
            // Edges do not tell which memory was used.
            Handler::DataStream => return None,
        };
        let known = counts.entry(method).or_default();
        *known = known.saturating_add(count.count);
    }
    Some(counts)
}

/// How the address of a branch compares with that of its target.
fn order(edge: &Edge) -> Option<Ordering> {
    (edge.from.file == edge.to.file).then(|| edge.from.offset.cmp(&edge.to.offset))
}

/// A called function. It begins where it is called: stubs for functions of libraries lie in one
/// section, and each is one of its own.
fn called(symbols: &ProfileSymbols, place: Place) -> FunctionId {
    let address = symbols.table(place.file).and_then(|table| table.address_of(place.offset));
    FunctionId { file: place.file, start: Some(address.unwrap_or(place.offset)) }
}

#[derive(Serialize, Debug)]
pub(crate) struct RuleRow {
    /// The name of the production.
    rule: String,
    /// The calling function of a call pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    caller: Option<String>,
    /// Of a data stream: the reference that it begins with.
    function: String,
    file: String,
    /// Times that the handler was called for it; of a data stream, its references.
    count: u64,
    /// Of all calls of the handler, or of all references, in percent.
    share_percent: f64,
    /// Bursts in which it was; 0 for an exact count.
    bursts: u64,
}

/// The `top` largest sums of each rule.
pub(crate) fn hottest(profile: &Profile, symbols: &ProfileSymbols, top: usize) -> Vec<RuleRow> {
    let mut rows = Vec::new();
    for (number, (rule, sums)) in (0..).zip(profile.rules.iter().zip(sums(profile, symbols))) {
        let streams = streams::of_rule(profile, symbols, number, top).into_iter();
        rows.extend(streams.map(|(function, first, heat, bursts)| RuleRow {
            rule: rule.name.clone(),
            caller: None,
            function,
            file: symbols.file_name(first.file).to_owned(),
            count: heat,
            share_percent: share(heat, rule.references),
            bursts,
        }));
        let all = total(sums.values());
        let mut sorted: Vec<(Method, Sum)> = sums.into_iter().collect();
        sorted.sort_by_key(|(method, sum)| (Reverse(sum.count), method.clone()));
        rows.extend(sorted.into_iter().take(top).map(|(method, sum)| RuleRow {
            rule: rule.name.clone(),
            caller: method.caller.map(|caller| symbols.name(&caller)),
            function: symbols.start_of(&method.function),
            file: symbols.file_name(method.function.file).to_owned(),
            count: sum.count,
            share_percent: share(sum.count, all),
            bursts: sum.bursts,
        }));
    }
    rows
}

impl RuleRow {
    pub(crate) fn cells(&self) -> Vec<String> {
        vec![
            self.rule.clone(),
            format!("{:.2}", self.share_percent),
            // What was counted without a condition, by everything, has no error.
            if self.bursts > 0 { error(self.bursts) } else { String::new() },
            grouped(self.count),
            self.caller.clone().unwrap_or_default(),
            self.function.clone(),
            self.file.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::EdgeCount;

    /// Goal: edges of an exact profile tell what a production would collect. Method: a loop with a
    /// forward and a backward branch, and calls.
    #[test]
    fn edges_tell_what_a_pattern_collects() {
        let mut profile = Profile::default();
        let file = profile.file("/nonexistent/a");
        let place = |offset| Place { file, offset };
        for (kind, from, to, count) in [
            (EdgeKind::Call, 10, 90, 7),
            (EdgeKind::ComputedCall, 12, 80, 2),
            (EdgeKind::Taken, 20, 4, 50),
            (EdgeKind::Jump, 22, 40, 30),
            (EdgeKind::Return, 90, 15, 7),
            (EdgeKind::Falls, 20, 22, 1),
        ] {
            let edge = Edge { from: place(from), to: place(to), kind };
            profile.edges.insert(edge, EdgeCount { count, bursts: 0 });
        }
        let (symbols, _) = ProfileSymbols::read(&profile);
        let sorted = |text: &str, handler| {
            let counts = exactly(text, handler, &profile, &symbols)?;
            let mut counts: Vec<u64> = counts.into_values().collect();
            counts.sort_unstable();
            Some(counts)
        };
        let methods = "(T.OPCLASS == proc_call || T.OPCLASS == branch && T.PC > T.Target) \
                       && overflow_1 && !overflow_2";
        assert_eq!(sorted(methods, Handler::HotMethod), Some(vec![2, 7, 50]));
        let pairs = "T.OPCLASS == proc_call && overflow_1";
        assert_eq!(sorted(pairs, Handler::CallPair), Some(vec![2, 7]));
        assert_eq!(sorted("T.INSN == jump && zero_1", Handler::HotMethod), Some(vec![30]));
        for unknown in ["T.PC == 3 && T.INSN == call", "T.OPCLASS != branch", "damaged"] {
            assert_eq!(sorted(unknown, Handler::HotMethod), None);
        }
    }
}
