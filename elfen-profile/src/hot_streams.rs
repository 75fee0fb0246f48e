//! Hot data streams: sequences of references that repeat often, in the same order.
//!
//! A sequence becomes a grammar by Sequitur (Nevill-Manning and Witten, 1997): no pair of
//! neighbours occurs twice, and each rule is used at least twice. Then the rules are streams. Hot
//! ones have the largest products of length and uses (Chilimbi, 2001).
//!
//! No command uses this module yet: references need the addresses of data, which are not recorded
//! with rules.

use std::collections::HashMap;

/// What is referenced, as a number.
pub type Reference = u32;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Value {
    Reference(Reference),
    Rule(usize),
    /// Before the first and behind the last symbol of a rule, whose number it has.
    Guard(usize),
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    value: Value,
    before: usize,
    after: usize,
}

/// Links to no symbol: a symbol that is not yet in a rule.
const NONE: usize = usize::MAX;

/// A grammar of one sequence, whose first rule is all of it.
#[derive(Clone, Debug)]
pub struct Grammar {
    symbols: Vec<Symbol>,
    free: Vec<usize>,
    /// The guards of all rules; `None` for rules that are gone.
    guards: Vec<Option<usize>>,
    uses: Vec<u64>,
    /// Where each pair of neighbours is.
    pairs: HashMap<(Value, Value), usize>,
}

impl Default for Grammar {
    fn default() -> Self {
        let (symbols, free, guards) = (Vec::new(), Vec::new(), Vec::new());
        let mut grammar = Self { symbols, free, guards, uses: Vec::new(), pairs: HashMap::new() };
        grammar.add_rule();
        grammar
    }
}

impl Grammar {
    /// Appends a reference to the sequence.
    pub fn push(&mut self, reference: Reference) {
        let Some(guard) = self.guards[0] else { return };
        let last = self.symbols[guard].before;
        let new = self.add(Value::Reference(reference));
        self.insert_after(last, new);
        self.check(last);
    }

    fn add(&mut self, value: Value) -> usize {
        if let Value::Rule(rule) = value {
            self.uses[rule] += 1;
        }
        let symbol = Symbol { value, before: NONE, after: NONE };
        match self.free.pop() {
            Some(at) => {
                self.symbols[at] = symbol;
                at
            }
            None => {
                self.symbols.push(symbol);
                self.symbols.len() - 1
            }
        }
    }

    fn add_rule(&mut self) -> usize {
        let rule = self.guards.len();
        let guard = self.add(Value::Guard(rule));
        (self.symbols[guard].before, self.symbols[guard].after) = (guard, guard);
        self.guards.push(Some(guard));
        self.uses.push(0);
        rule
    }

    fn is_guard(&self, at: usize) -> bool {
        matches!(self.symbols[at].value, Value::Guard(_))
    }

    /// A symbol and the one after it; `None` at the end of a rule.
    fn pair(&self, at: usize) -> Option<(Value, Value)> {
        let after = self.symbols[at].after;
        (after != NONE && !self.is_guard(at) && !self.is_guard(after))
            .then(|| (self.symbols[at].value, self.symbols[after].value))
    }

    fn forget_pair(&mut self, at: usize) {
        if let Some(pair) = self.pair(at)
            && self.pairs.get(&pair) == Some(&at)
        {
            self.pairs.remove(&pair);
        }
    }

    /// Whether a symbol is the middle one of three equal ones.
    fn is_amid_equals(&self, at: usize) -> bool {
        let Symbol { value, before, after } = self.symbols[at];
        before != NONE
            && after != NONE
            && !self.is_guard(at)
            && self.symbols[before].value == value
            && self.symbols[after].value == value
    }

    fn join(&mut self, left: usize, right: usize) {
        if self.symbols[left].after != NONE {
            self.forget_pair(left);
            // Of three equal symbols only the first pair is noted. The second one takes its place
            // when the first is broken up.
            if self.is_amid_equals(right)
                && let Some(pair) = self.pair(right)
            {
                self.pairs.insert(pair, right);
            }
            if self.is_amid_equals(left) {
                let before = self.symbols[left].before;
                if let Some(pair) = self.pair(before) {
                    self.pairs.insert(pair, before);
                }
            }
        }
        self.symbols[left].after = right;
        self.symbols[right].before = left;
    }

    fn insert_after(&mut self, at: usize, new: usize) {
        let after = self.symbols[at].after;
        self.join(new, after);
        self.join(at, new);
    }

    fn remove(&mut self, at: usize) {
        let Symbol { value, before, after } = self.symbols[at];
        self.forget_pair(at);
        self.join(before, after);
        if let Value::Rule(rule) = value {
            self.uses[rule] -= 1;
        }
        self.free.push(at);
    }

    /// Looks for another pair like the one at a symbol, and replaces both. False if it is new.
    fn check(&mut self, at: usize) -> bool {
        let Some(pair) = self.pair(at) else { return false };
        let Some(&known) = self.pairs.get(&pair) else {
            self.pairs.insert(pair, at);
            return false;
        };
        // Two pairs of three equal symbols overlap.
        if known != at && self.symbols[known].after != at && self.symbols[at].after != known {
            self.replace_both(at, known, pair);
        }
        true
    }

    fn replace_both(&mut self, at: usize, known: usize, pair: (Value, Value)) {
        let before = self.symbols[known].before;
        let end = self.symbols[self.symbols[known].after].after;
        let rule = match (self.symbols[before].value, self.symbols[end].value) {
            // The other pair is a whole rule.
            (Value::Guard(rule), Value::Guard(_)) => {
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
        let first = self.symbols[guard].after;
        if let Value::Rule(inner) = self.symbols[first].value
            && self.uses[inner] == 1
        {
            self.expand(first, inner);
        }
    }

    /// Replaces a pair by a rule.
    fn replace(&mut self, at: usize, rule: usize) {
        let before = self.symbols[at].before;
        self.remove(self.symbols[before].after);
        self.remove(self.symbols[before].after);
        let new = self.add(Value::Rule(rule));
        self.insert_after(before, new);
        if !self.check(before) {
            self.check(new);
        }
    }

    /// Puts the symbols of a rule in the place of its only use.
    fn expand(&mut self, at: usize, rule: usize) {
        let Some(guard) = self.guards[rule].take() else { return };
        let Symbol { before, after, .. } = self.symbols[at];
        let (first, last) = (self.symbols[guard].after, self.symbols[guard].before);
        self.forget_pair(before);
        self.forget_pair(at);
        self.uses[rule] = 0;
        self.free.extend([at, guard]);
        self.symbols[before].after = first;
        self.symbols[first].before = before;
        self.symbols[last].after = after;
        self.symbols[after].before = last;
        if let Some(pair) = self.pair(last) {
            self.pairs.insert(pair, last);
        }
    }

    /// The symbols of a rule.
    fn body(&self, rule: usize) -> impl Iterator<Item = Value> {
        let guard = self.guards.get(rule).copied().flatten();
        let mut at = guard.map(|guard| self.symbols[guard].after);
        std::iter::from_fn(move || {
            let symbol = self.symbols[at.filter(|&at| Some(at) != guard)?];
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
            for value in self.body(rule) {
                if let Value::Rule(inner) = value {
                    open[inner] -= 1;
                    if open[inner] == 0 {
                        ready.push(inner);
                    }
                }
            }
        }
        order
    }

    /// All references of a rule.
    fn expanded(&self, rule: usize) -> Vec<Reference> {
        let mut found = Vec::new();
        let mut open: Vec<Value> = self.body(rule).collect();
        open.reverse();
        while let Some(value) = open.pop() {
            match value {
                Value::Reference(reference) => found.push(reference),
                Value::Rule(inner) => {
                    let from = open.len();
                    open.extend(self.body(inner));
                    open[from..].reverse();
                }
                Value::Guard(_) => {}
            }
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
}

impl Grammar {
    /// The hot streams, with the most references first.
    pub fn hot_streams(&self, limits: HeatLimits) -> Vec<HotStream> {
        let order = self.topological_order();
        let mut lengths = vec![0_u64; self.guards.len()];
        for &rule in order.iter().rev() {
            let parts = self.body(rule).map(|value| match value {
                Value::Rule(inner) => lengths[inner],
                _ => 1,
            });
            lengths[rule] = parts.sum();
        }
        let enough = limits.share_min * float(lengths[0]);
        // Uses outside hot streams.
        let mut uses = vec![0_u64; self.guards.len()];
        uses[0] = 1;
        let mut streams = Vec::new();
        for rule in order {
            let heat = lengths[rule].saturating_mul(uses[rule]);
            let has_length = (limits.length_min..=limits.length_max).contains(&lengths[rule]);
            if rule != 0 && has_length && float(heat) >= enough {
                streams
                    .push((heat, HotStream { references: self.expanded(rule), times: uses[rule] }));
                continue;
            }
            for value in self.body(rule) {
                if let Value::Rule(inner) = value {
                    uses[inner] += uses[rule];
                }
            }
        }
        streams.sort_by(|a, b| (b.0, &a.1.references).cmp(&(a.0, &b.1.references)));
        streams.into_iter().map(|(_, stream)| stream).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

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
            for value in body {
                if let Value::Rule(inner) = value {
                    *uses.entry(inner).or_default() += 1;
                }
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
            assert_eq!(grammar.expanded(0), references);
            assert_is_small(&grammar);
        }
        for equal in 0..40 {
            let references = vec![7; equal];
            let grammar = grammar(&references);
            assert_eq!(grammar.expanded(0), references);
            assert_is_small(&grammar);
        }
    }

    #[test]
    fn repeated_sequences_share_a_rule() {
        let grammar = grammar(&[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]);
        let limits = HeatLimits { length_min: 2, length_max: 100, share_min: 0.1 };
        let expected = HotStream { references: vec![1, 2, 3], times: 3 };
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
}
