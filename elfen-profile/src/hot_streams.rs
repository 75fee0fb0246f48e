//! Hot data streams: sequences of references that repeat often, in the same order.
//!
//! A sequence becomes a grammar by Sequitur (Nevill-Manning and Witten, 1997): no pair of
//! neighbours occurs twice, and each rule is used at least twice. Then the rules are streams. Hot
//! ones have the largest heat: the product of length and uses (Chilimbi, 2001).
//!
//! This module knows references only as numbers. `engine/streams.rs` feeds it, and bounds it.

use rustc_hash::{FxHashMap, FxHashSet};

/// What is referenced, as a number below [`REFERENCES_MAX`].
pub type Reference = u32;

pub const REFERENCES_MAX: Reference = SEPARATORS;

/// Numbers of symbols: references, then boundaries, rules and guards.
const SEPARATORS: u32 = 1 << 29;
const RULES: u32 = 1 << 30;
const GUARDS: u32 = 1 << 31;

/// A reference, a boundary between two bursts, a rule, or the guard of a rule: the symbol in front
/// of its first and behind its last one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Value(u32);

impl Value {
    fn of_rule(rule: usize) -> Self {
        Self(RULES | low(rule))
    }

    fn of_guard(rule: usize) -> Self {
        Self(GUARDS | low(rule))
    }

    fn rule(self) -> Option<usize> {
        (RULES..GUARDS).contains(&self.0).then(|| (self.0 - RULES) as usize)
    }

    fn guarded(self) -> Option<usize> {
        self.0.checked_sub(GUARDS).map(|rule| rule as usize)
    }

    fn reference(self) -> Option<Reference> {
        (self.0 < SEPARATORS).then_some(self.0)
    }

    fn separator(self) -> Option<usize> {
        (SEPARATORS..RULES).contains(&self.0).then(|| (self.0 - SEPARATORS) as usize)
    }
}

/// The number of a rule or a symbol, which are fewer than 2^30.
#[expect(clippy::cast_possible_truncation, reason = "a grammar has at most 2^30 symbols")]
fn low(number: usize) -> u32 {
    number as u32
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    value: Value,
    before: u32,
    after: u32,
}

/// Links to no symbol: a symbol that is not yet in a rule.
const NONE: u32 = u32::MAX;

/// A grammar of one sequence, whose first rule is all of it.
#[derive(Clone, Debug)]
pub struct Grammar {
    symbols: Vec<Symbol>,
    free: Vec<u32>,
    /// The guards of all rules; `None` for rules that are gone.
    guards: Vec<Option<u32>>,
    free_rules: Vec<usize>,
    uses: Vec<u64>,
    /// Where each pair of neighbours is.
    pairs: FxHashMap<(Value, Value), u32>,
    /// For each boundary, whether it ends a unit.
    separators: Vec<bool>,
}

impl Default for Grammar {
    fn default() -> Self {
        let mut grammar = Self {
            symbols: Vec::new(),
            free: Vec::new(),
            guards: Vec::new(),
            free_rules: Vec::new(),
            uses: Vec::new(),
            pairs: FxHashMap::default(),
            separators: Vec::new(),
        };
        grammar.add_rule();
        grammar
    }
}

impl Grammar {
    /// Appends a reference to the sequence.
    pub fn push(&mut self, reference: Reference) {
        self.append(Value(reference.min(REFERENCES_MAX - 1)));
    }

    /// No stream goes on from what was appended so far to what follows. `ends_unit` says that the
    /// part in front of it counts as one observation.
    pub fn cut(&mut self, ends_unit: bool) {
        // It has a number of its own, so no rule can have it.
        self.append(Value(SEPARATORS | low(self.separators.len())));
        self.separators.push(ends_unit);
    }

    /// The symbols of all rules together, which take some 40 bytes each.
    pub fn size(&self) -> usize {
        self.symbols.len() - self.free.len()
    }

    fn append(&mut self, value: Value) {
        let Some(guard) = self.guards[0] else { return };
        let last = self.at(guard).before;
        let new = self.add(value);
        self.insert_after(last, new);
        self.check(last);
    }

    fn at(&self, symbol: u32) -> Symbol {
        self.symbols[symbol as usize]
    }

    fn at_mut(&mut self, symbol: u32) -> &mut Symbol {
        &mut self.symbols[symbol as usize]
    }

    fn add(&mut self, value: Value) -> u32 {
        if let Some(rule) = value.rule() {
            self.uses[rule] += 1;
        }
        let symbol = Symbol { value, before: NONE, after: NONE };
        match self.free.pop() {
            Some(at) => {
                *self.at_mut(at) = symbol;
                at
            }
            None => {
                self.symbols.push(symbol);
                low(self.symbols.len() - 1)
            }
        }
    }

    fn add_rule(&mut self) -> usize {
        let rule = self.free_rules.pop().unwrap_or(self.guards.len());
        if rule == self.guards.len() {
            self.guards.push(None);
            self.uses.push(0);
        }
        let guard = self.add(Value::of_guard(rule));
        (self.at_mut(guard).before, self.at_mut(guard).after) = (guard, guard);
        self.guards[rule] = Some(guard);
        rule
    }

    fn is_guard(&self, at: u32) -> bool {
        self.at(at).value.guarded().is_some()
    }

    /// A symbol and the one after it; `None` at the end of a rule.
    fn pair(&self, at: u32) -> Option<(Value, Value)> {
        let after = self.at(at).after;
        (after != NONE && !self.is_guard(at) && !self.is_guard(after))
            .then(|| (self.at(at).value, self.at(after).value))
    }

    fn forget_pair(&mut self, at: u32) {
        if let Some(pair) = self.pair(at)
            && self.pairs.get(&pair) == Some(&at)
        {
            self.pairs.remove(&pair);
        }
    }

    /// Whether a symbol is the middle one of three equal ones.
    fn is_amid_equals(&self, at: u32) -> bool {
        let Symbol { value, before, after } = self.at(at);
        before != NONE
            && after != NONE
            && !self.is_guard(at)
            && self.at(before).value == value
            && self.at(after).value == value
    }

    fn join(&mut self, left: u32, right: u32) {
        if self.at(left).after != NONE {
            self.forget_pair(left);
            // Of three equal symbols only the first pair is noted. The second one takes its place
            // when the first is broken up.
            if self.is_amid_equals(right)
                && let Some(pair) = self.pair(right)
            {
                self.pairs.insert(pair, right);
            }
            if self.is_amid_equals(left) {
                let before = self.at(left).before;
                if let Some(pair) = self.pair(before) {
                    self.pairs.insert(pair, before);
                }
            }
        }
        self.at_mut(left).after = right;
        self.at_mut(right).before = left;
    }

    fn insert_after(&mut self, at: u32, new: u32) {
        let after = self.at(at).after;
        self.join(new, after);
        self.join(at, new);
    }

    fn remove(&mut self, at: u32) {
        let Symbol { value, before, after } = self.at(at);
        self.forget_pair(at);
        self.join(before, after);
        if let Some(rule) = value.rule() {
            self.uses[rule] -= 1;
        }
        self.free.push(at);
    }

    /// Looks for another pair like the one at a symbol, and replaces both. False if it is new.
    fn check(&mut self, at: u32) -> bool {
        let Some(pair) = self.pair(at) else { return false };
        let Some(&known) = self.pairs.get(&pair) else {
            self.pairs.insert(pair, at);
            return false;
        };
        // Two pairs of three equal symbols overlap.
        if known != at && self.at(known).after != at && self.at(at).after != known {
            self.replace_both(at, known, pair);
        }
        true
    }

    fn replace_both(&mut self, at: u32, known: u32, pair: (Value, Value)) {
        let before = self.at(known).before;
        let end = self.at(self.at(known).after).after;
        let rule = match (self.at(before).value.guarded(), self.is_guard(end)) {
            // The other pair is a whole rule.
            (Some(rule), true) => {
                self.replace(at, rule);
                rule
            }
            _ => {
                let rule = self.add_rule();
                let Some(guard) = self.guards[rule] else { return };
                let first = self.add(pair.0);
                self.insert_after(guard, first);
                let second = self.add(pair.1);
                self.insert_after(first, second);
                self.replace(known, rule);
                self.replace(at, rule);
                self.pairs.insert(pair, first);
                rule
            }
        };
        let Some(guard) = self.guards[rule] else { return };
        let first = self.at(guard).after;
        if let Some(inner) = self.at(first).value.rule()
            && self.uses[inner] == 1
        {
            self.expand(first, inner);
        }
    }

    /// Replaces a pair by a rule.
    fn replace(&mut self, at: u32, rule: usize) {
        let before = self.at(at).before;
        self.remove(self.at(before).after);
        self.remove(self.at(before).after);
        let new = self.add(Value::of_rule(rule));
        self.insert_after(before, new);
        if !self.check(before) {
            self.check(new);
        }
    }

    /// Puts the symbols of a rule in the place of its only use.
    fn expand(&mut self, at: u32, rule: usize) {
        let Some(guard) = self.guards[rule].take() else { return };
        let Symbol { before, after, .. } = self.at(at);
        let (first, last) = (self.at(guard).after, self.at(guard).before);
        self.forget_pair(before);
        self.forget_pair(at);
        self.uses[rule] = 0;
        self.free.extend([at, guard]);
        self.free_rules.push(rule);
        self.at_mut(before).after = first;
        self.at_mut(first).before = before;
        self.at_mut(last).after = after;
        self.at_mut(after).before = last;
        if let Some(pair) = self.pair(last) {
            self.pairs.insert(pair, last);
        }
    }

    /// The symbols of a rule.
    fn body(&self, rule: usize) -> impl Iterator<Item = Value> {
        let guard = self.guards.get(rule).copied().flatten();
        let mut at = guard.map(|guard| self.at(guard).after);
        std::iter::from_fn(move || {
            let symbol = self.at(at.filter(|&at| Some(at) != guard)?);
            at = Some(symbol.after);
            Some(symbol.value)
        })
    }

    /// The rules that exist. Each one comes before the rules in its body.
    fn topological_order(&self) -> Vec<usize> {
        let mut open = self.uses.clone();
        let (mut order, mut ready) = (Vec::new(), vec![0]);
        while let Some(rule) = ready.pop() {
            order.push(rule);
            for inner in self.body(rule).filter_map(Value::rule) {
                open[inner] -= 1;
                if open[inner] == 0 {
                    ready.push(inner);
                }
            }
        }
        order
    }

    /// All references of some symbols.
    fn expanded(&self, symbols: impl Iterator<Item = Value>) -> Vec<Reference> {
        let mut found = Vec::new();
        let mut open: Vec<Value> = symbols.collect();
        open.reverse();
        while let Some(value) = open.pop() {
            if let Some(inner) = value.rule() {
                let from = open.len();
                open.extend(self.body(inner));
                open[from..].reverse();
            }
            found.extend(value.reference());
        }
        found
    }
}

/// Which streams are hot.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeatLimits {
    /// References of a stream, at least and at most.
    pub length_min: u64,
    pub length_max: u64,
    /// The part of all references that a stream makes up at least.
    pub share_min: f64,
}

/// A sequence that repeats.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HotStream {
    pub references: Vec<Reference>,
    /// Times that it occurs, those inside other hot streams left out.
    pub times: u64,
    pub units: Units,
}

/// In how many units a stream occurs. A unit is what lies between two boundaries that end one.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Units {
    pub count: u64,
    /// It occurs in the first one, which may have begun in another grammar, and in the last one,
    /// which may go on in another.
    pub in_first: bool,
    pub in_last: bool,
}

/// Symbols next to each other in a rule that are a stream together.
#[derive(Debug)]
struct Piece {
    rule: usize,
    symbols: Vec<Value>,
    times: u64,
}

/// What is known of all rules while streams are looked for.
struct Search {
    limits: HeatLimits,
    /// The heat that makes a stream hot.
    enough: f64,
    lengths: Vec<u64>,
    /// Occurrences of each rule in the whole sequence, and those outside hot streams.
    occurrences: Vec<u64>,
    uses: Vec<u64>,
    is_hot: Vec<bool>,
    pieces: Vec<Piece>,
}

impl Grammar {
    /// The hot streams, with the most references first.
    ///
    /// A rule of the right length is a stream. A longer one is cut into pieces, each of them as
    /// long as it may be; rules in it that are hot themselves are left out of these.
    pub fn hot_streams(&self, limits: HeatLimits) -> Vec<HotStream> {
        let order = self.topological_order();
        let mut lengths = vec![0_u64; self.guards.len()];
        for &rule in order.iter().rev() {
            let parts = self.body(rule).map(|value| length_of(value, &lengths));
            lengths[rule] = parts.fold(0, u64::saturating_add);
        }
        let mut occurrences = vec![0_u64; self.guards.len()];
        occurrences[0] = 1;
        for &rule in &order {
            for inner in self.body(rule).filter_map(Value::rule) {
                occurrences[inner] = occurrences[inner].saturating_add(occurrences[rule]);
            }
        }
        let enough = limits.share_min * float(lengths[0]);
        let uses = vec![0; self.guards.len()];
        let is_hot = vec![false; self.guards.len()];
        let pieces = Vec::new();
        let mut search = Search { limits, enough, lengths, occurrences, uses, is_hot, pieces };
        search.uses[0] = 1;
        for &rule in &order {
            let (length, times) = (search.lengths[rule], search.uses[rule]);
            if rule != 0 && search.is_stream(length, times) {
                search.is_hot[rule] = true;
                let symbols = vec![Value::of_rule(rule)];
                search.pieces.push(Piece { rule, symbols, times });
            } else if rule != 0 && times > 0 && length > limits.length_max {
                self.cut_rule(rule, &mut search);
            } else {
                for inner in self.body(rule).filter_map(Value::rule) {
                    search.uses[inner] = search.uses[inner].saturating_add(times);
                }
            }
        }
        self.streams_of(&search)
    }

    /// The streams that pieces of rules are. A sequence may be that of several rules, because how
    /// it is taken apart depends on what is next to it.
    fn streams_of(&self, search: &Search) -> Vec<HotStream> {
        let mut numbers: FxHashMap<Vec<Reference>, usize> = FxHashMap::default();
        let mut streams: Vec<HotStream> = Vec::new();
        let mut by_rule: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
        for piece in &search.pieces {
            let mut references = self.expanded(piece.symbols.iter().copied());
            // Of a loop, one round is the stream, wherever it begins.
            let length = period(&references);
            let rounds = (references.len() / length.max(1)) as u64;
            references.truncate(length);
            if (length as u64) < search.limits.length_min {
                continue;
            }
            let mut rotated = references.clone();
            rotated.rotate_left(first_rotation(&references));
            let number = *numbers.entry(rotated).or_insert_with(|| {
                streams.push(HotStream { references, times: 0, units: Units::default() });
                streams.len() - 1
            });
            let times = streams[number].times.saturating_add(piece.times.saturating_mul(rounds));
            streams[number].times = times;
            by_rule.entry(piece.rule).or_default().push(number);
        }
        self.count_units(search, &by_rule, &mut streams);
        let heat = |one: &HotStream| one.times.saturating_mul(one.references.len() as u64);
        streams.sort_by(|a, b| (heat(b), &a.references).cmp(&(heat(a), &b.references)));
        streams
    }

    /// Cuts a rule that is too long for a stream.
    fn cut_rule(&self, rule: usize, search: &mut Search) {
        let times = search.uses[rule];
        let (mut symbols, mut length) = (Vec::new(), 0);
        let body: Vec<Value> = self.body(rule).collect();
        for value in body {
            let own = length_of(value, &search.lengths);
            let is_apart = value.rule().is_some_and(|inner| {
                own > search.limits.length_max || search.is_stream(own, search.occurrences[inner])
            });
            if is_apart || length + own > search.limits.length_max {
                search.end_piece(rule, std::mem::take(&mut symbols), length);
                length = 0;
            }
            match value.rule().filter(|_| is_apart) {
                Some(inner) => search.uses[inner] = search.uses[inner].saturating_add(times),
                None => {
                    symbols.push(value);
                    length += own;
                }
            }
        }
        search.end_piece(rule, symbols, length);
    }

    /// Counts the units in which each stream occurs, by the streams that rules have pieces of.
    fn count_units(
        &self,
        search: &Search,
        by_rule: &FxHashMap<usize, Vec<usize>>,
        streams: &mut [HotStream],
    ) {
        let mut rules = FxHashSet::default();
        let mut found: FxHashSet<usize> = FxHashSet::default();
        let mut is_first = true;
        for value in self.body(0) {
            match (value.rule(), value.separator()) {
                (Some(rule), _) => {
                    let mut open = vec![rule];
                    while let Some(rule) = open.pop() {
                        if !rules.insert(rule) {
                            continue;
                        }
                        found.extend(by_rule.get(&rule).into_iter().flatten());
                        if !search.is_hot[rule] {
                            open.extend(self.body(rule).filter_map(Value::rule));
                        }
                    }
                }
                (_, Some(number)) if self.separators.get(number) == Some(&true) => {
                    for stream in found.drain() {
                        streams[stream].units.count += 1;
                        streams[stream].units.in_first |= is_first;
                    }
                    rules.clear();
                    is_first = false;
                }
                _ => {}
            }
        }
        for stream in found {
            let Units { count, in_first, .. } = streams[stream].units;
            streams[stream].units =
                Units { count: count + 1, in_first: in_first || is_first, in_last: true };
        }
    }
}

impl Search {
    fn is_stream(&self, length: u64, times: u64) -> bool {
        let HeatLimits { length_min, length_max, .. } = self.limits;
        let heat = float(length.saturating_mul(times));
        times > 1 && (length_min..=length_max).contains(&length) && heat >= self.enough
    }

    /// Keeps a piece of a rule if it is a stream; otherwise the rules in it may be streams.
    fn end_piece(&mut self, rule: usize, symbols: Vec<Value>, length: u64) {
        let times = self.uses[rule];
        if self.is_stream(length, times) {
            self.pieces.push(Piece { rule, symbols, times });
            return;
        }
        for inner in symbols.into_iter().filter_map(Value::rule) {
            self.uses[inner] = self.uses[inner].saturating_add(times);
        }
    }
}

fn length_of(value: Value, lengths: &[u64]) -> u64 {
    match value.rule() {
        Some(rule) => lengths[rule],
        None => u64::from(value.reference().is_some()),
    }
}

/// The length of the shortest sequence that a sequence repeats.
pub fn period<T: PartialEq>(sequence: &[T]) -> usize {
    let length = sequence.len();
    let repeats = |&period: &usize| {
        length.is_multiple_of(period) && sequence[period..] == sequence[..length - period]
    };
    (1..length).find(repeats).unwrap_or(length)
}

/// Where the rotation of a sequence begins that comes first in order.
///
/// A loop is the same stream wherever a burst has entered it.
pub fn first_rotation<T: Ord>(sequence: &[T]) -> usize {
    let length = sequence.len();
    let rotated = |from: usize| sequence[from..].iter().chain(&sequence[..from]);
    (0..length).min_by(|&a, &b| rotated(a).cmp(rotated(b))).unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn grammar(references: &[Reference]) -> Grammar {
        let mut grammar = Grammar::default();
        references.iter().for_each(|&one| grammar.push(one));
        grammar
    }

    /// Whether no pair occurs twice, and each rule is used twice at least, as often as counted.
    fn assert_is_small(grammar: &Grammar) {
        let mut pairs = HashSet::new();
        let mut uses: HashMap<usize, u64> = HashMap::new();
        for rule in 0..grammar.guards.len() {
            let body: Vec<Value> = grammar.body(rule).collect();
            let mut overlaps = false;
            for pair in body.windows(2) {
                let is_new = pairs.insert((pair[0], pair[1]));
                // Of three equal symbols, the second pair overlaps the first.
                overlaps = !is_new && !overlaps && pair[0] == pair[1];
                assert!(is_new || overlaps, "{pair:?} twice");
            }
            for inner in body.into_iter().filter_map(Value::rule) {
                *uses.entry(inner).or_default() += 1;
            }
        }
        for (rule, guard) in grammar.guards.iter().enumerate().skip(1) {
            let used = uses.get(&rule).copied().unwrap_or(0);
            assert_eq!(grammar.uses[rule], used);
            assert!(guard.is_none() && used == 0 || guard.is_some() && used > 1, "{rule}: {used}");
        }
    }

    #[test]
    fn a_grammar_says_its_sequence_again() {
        let mut state = 1_u32;
        let mut random = move |limit: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % limit
        };
        for round in 0..400 {
            let kinds = 1 + random(5);
            let length = random(120) as usize;
            let mut references: Vec<Reference> = (0..length).map(|_| random(kinds)).collect();
            if round % 3 == 0 {
                references = references.repeat(3);
            }
            let grammar = grammar(&references);
            assert_eq!(grammar.expanded(grammar.body(0)), references);
            assert_is_small(&grammar);
        }
        for equal in 0..40 {
            let references = vec![7; equal];
            let grammar = grammar(&references);
            assert_eq!(grammar.expanded(grammar.body(0)), references);
            assert_is_small(&grammar);
        }
    }

    #[test]
    fn repeated_sequences_share_a_rule() {
        let grammar = grammar(&[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]);
        let limits = HeatLimits { length_min: 2, length_max: 100, share_min: 0.1 };
        let units = Units { count: 1, in_first: true, in_last: true };
        let expected = HotStream { references: vec![1, 2, 3], times: 3, units };
        assert_eq!(grammar.hot_streams(limits), [expected]);
    }

    /// Goal: streams are found by length and heat, and one inside a hot one is not counted again.
    #[test]
    fn limits_choose_streams() {
        let mut references = Vec::new();
        for round in 0..40 {
            references.extend([10, 11, 12, 13, 14, 15]);
            if round % 4 == 0 {
                references.extend([20, 21, 22, 1000 + round]);
            }
        }
        let grammar = grammar(&references);
        let found = |length_min, length_max, share_min| {
            grammar.hot_streams(HeatLimits { length_min, length_max, share_min })
        };
        let of = |streams: &[HotStream], reference| {
            let holds = |one: &&HotStream| one.references.contains(&reference);
            streams.iter().filter(holds).map(|one| one.times * one.references.len() as u64).sum()
        };
        let short: Vec<HotStream> = found(2, 6, 0.01);
        let (first, second): (u64, u64) = (of(&short, 10), of(&short, 20));
        assert!((6 * 30..=6 * 40).contains(&first), "{short:?}");
        assert!((2 * 5..=9 * 10).contains(&second), "{short:?}");
        assert!(short.iter().all(|one| (2..=6).contains(&one.references.len())), "{short:?}");
        let all: u64 = short.iter().map(|one| one.times * one.references.len() as u64).sum();
        assert!(all <= references.len() as u64);
        assert_eq!(found(2, 6, 0.99), []);
        assert_eq!(found(500, 600, 0.01), []);
        assert_eq!(
            Grammar::default().hot_streams(HeatLimits {
                length_min: 0,
                length_max: 9,
                share_min: 0.0
            }),
            []
        );
    }

    /// Goal: no stream goes across a boundary, and units are counted. Method: a sequence in each
    /// second one of four units, and one across all boundaries.
    #[test]
    fn streams_end_at_boundaries() {
        let mut grammar = Grammar::default();
        for unit in 0..4 {
            for reference in [8, 8, 9] {
                grammar.push(reference);
                grammar.cut(false);
            }
            if unit % 2 == 0 {
                [1, 2, 3, 4, 1, 2, 3, 5].into_iter().for_each(|one| grammar.push(one));
            }
            if unit < 3 {
                grammar.cut(true);
            }
        }
        let limits = HeatLimits { length_min: 2, length_max: 7, share_min: 0.0 };
        let units = Units { count: 2, in_first: true, in_last: false };
        let expected = HotStream { references: vec![1, 2, 3], times: 4, units };
        assert_eq!(grammar.hot_streams(limits), [expected]);
    }

    /// Goal: of a sequence that is too long, its pieces are streams. Method: 25 references, at most
    /// 10 in a stream, of which 5 are hot in other places too.
    #[test]
    fn long_sequences_are_cut() {
        let mut grammar = Grammar::default();
        for round in 0..30 {
            (0..25).for_each(|reference| grammar.push(reference));
            grammar.push(100 + round);
            (10..15).for_each(|reference| grammar.push(reference));
            grammar.push(200 + round);
        }
        let limits = HeatLimits { length_min: 3, length_max: 10, share_min: 0.01 };
        let mut streams = grammar.hot_streams(limits);
        streams.sort_by_key(|one| one.references[0]);
        let found: Vec<(Reference, usize, u64)> = streams
            .iter()
            .map(|one| (one.references[0], one.references.len(), one.times))
            .collect();
        let all: u64 = found.iter().map(|&(_, length, times)| length as u64 * times).sum();
        assert!(all <= 30 * 30 && all > 30 * 28, "{found:?}");
        assert!(found.iter().all(|&(first, length, _)| first < 25 && length <= 10), "{found:?}");
        let often = found.iter().filter(|&&(first, ..)| (10..15).contains(&first));
        assert!(often.map(|&(.., times)| times).max() >= Some(58), "{found:?}");
    }

    /// Goal: the numbers of rules that are gone are used again, so that the grammar of a sequence
    /// that repeats stays small.
    #[test]
    fn a_sequence_that_repeats_needs_little_memory() {
        let mut grammar = Grammar::default();
        for at in 0..400_000 {
            grammar.push(at % 37);
        }
        assert!(grammar.size() < 500, "{}", grammar.size());
        assert!(grammar.guards.len() < 1000 && grammar.symbols.len() < 2000);
        assert!(grammar.pairs.len() < 1000);
        let all = grammar.expanded(grammar.body(0));
        assert!(all.len() == 400_000 && (0..).zip(&all).all(|(at, &one)| one == at % 37));
    }

    #[test]
    fn loops_have_a_period_and_a_first_rotation() {
        assert_eq!([&[1, 1, 1][..], &[1, 2, 1, 2], &[1, 2, 1], &[]].map(period), [1, 2, 3, 0]);
        assert_eq!([&[3, 1, 2][..], &[1, 2], &[2, 1, 1], &[]].map(first_rotation), [1, 0, 1, 0]);
    }
}
