//! Applies productions to executed instructions.
//!
//! All productions look at one instruction at a time, with the counters as they were in front of
//! it. The handlers of matching productions are called first, in the order of the file. Then the
//! counters change, in the same order. So the event that overflows a counter is still seen without
//! that overflow, and no event is counted by two counters.
//!
//! Flags change seldom. So the engine keeps, for each value of all flags that has occurred, what is
//! left of the productions for each kind of instruction: most often one comparison, or nothing.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::expression::{COUNTERS, Expression, Flags, overflow, zero};
use super::kinds::{Kind, Kinds};
use super::production::{Control, Handler, PRODUCTIONS_MAX, RuleSet, Value};

/// More values of flags than sensible productions come to.
const TABLES_MAX: usize = 64;

/// An executed instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Executed {
    pub(crate) kind: Kind,
    pub(crate) pc: u64,
    /// The address that it leads to: that of a branch that is taken, else the next instruction.
    pub(crate) target: u64,
}

/// The counters of a rule set, and what has matched.
#[derive(Clone, Debug)]
pub(crate) struct Engine<'a> {
    rules: &'a RuleSet,
    kinds: Kinds,
    counters: [u32; COUNTERS],
    flags: Flags,
    /// The flags that any production asks for.
    asked: Flags,
    tables: Vec<MatchTable>,
    /// The table of the current flags.
    current: usize,
    random: Xoshiro256PlusPlus,
    /// How often each production has matched.
    matched: Vec<u64>,
    /// How often a counter was set: what is collected between two times belongs together.
    episode: u64,
}

/// What may match under some flags.
#[derive(Clone, Debug)]
struct MatchTable {
    flags: Flags,
    by_kind: [Vec<Candidate>; Kind::ALL.len()],
}

/// A production, and which comparison decides whether it matches.
#[derive(Clone, Debug)]
struct Candidate {
    production: usize,
    test: Expression,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(rules: &'a RuleSet) -> Self {
        let kinds = rules.productions.iter().map(|one| one.matches.kinds());
        let mut engine = Self {
            rules,
            kinds: kinds.fold(Kinds::default(), Kinds::with),
            counters: [0; COUNTERS],
            flags: (0..COUNTERS).fold(0, |flags, counter| flags | zero(counter)),
            asked: rules.productions.iter().fold(0, |all, one| all | one.matches.flags()),
            tables: Vec::new(),
            current: 0,
            random: Xoshiro256PlusPlus::seed_from_u64(rules.seed),
            matched: vec![0; rules.productions.len()],
            episode: 0,
        };
        for &control in &rules.start {
            engine.apply(control);
        }
        engine.current = engine.table();
        engine
    }

    /// The kinds of instructions that any production can match.
    pub(crate) fn kinds(&self) -> Kinds {
        self.kinds
    }

    pub(crate) fn rules(&self) -> &'a RuleSet {
        self.rules
    }

    pub(crate) fn matched(&self) -> &[u64] {
        &self.matched
    }

    /// Applies the productions to an instruction. Calls `collect` for each handler, with the number
    /// of its production and of the current episode.
    pub(crate) fn execute(&mut self, one: Executed, mut collect: impl FnMut(usize, Handler, u64)) {
        let mut matching = [0_usize; PRODUCTIONS_MAX];
        let mut count = 0;
        for candidate in &self.tables[self.current].by_kind[one.kind.index()] {
            if candidate.test.holds(one.pc, one.target) {
                matching[count] = candidate.production;
                count += 1;
            }
        }
        for &production in &matching[..count] {
            self.matched[production] += 1;
            if let Some(handler) = self.rules.productions[production].handler {
                collect(production, handler, self.episode);
            }
        }
        let flags = self.flags & self.asked;
        for &production in &matching[..count] {
            for &control in &self.rules.productions[production].controls {
                self.apply(control);
            }
        }
        if self.flags & self.asked != flags {
            self.current = self.table();
        }
    }

    fn apply(&mut self, control: Control) {
        let (counter, value) = match control {
            Control::Inc(counter) => {
                let value = self.counters[counter].wrapping_add(1);
                if value == 0 {
                    self.flags |= overflow(counter);
                }
                (counter, value)
            }
            Control::Dec(counter) => (counter, self.counters[counter].wrapping_sub(1)),
            Control::Set(counter, value) => {
                self.flags &= !overflow(counter);
                self.episode += 1;
                (counter, self.value(value))
            }
        };
        self.counters[counter] = value;
        self.flags &= !zero(counter);
        if value == 0 {
            self.flags |= zero(counter);
        }
    }

    fn value(&mut self, value: Value) -> u32 {
        let register = match value {
            Value::Number(number) => return number,
            Value::Register(register) => self.rules.registers[register].1,
        };
        if !register.is_random {
            return register.value.cast_unsigned();
        }
        let magnitude = u64::from(register.value.unsigned_abs());
        let random = self.random.random_range(magnitude.div_ceil(2)..=magnitude * 3 / 2);
        let random = u32::try_from(random).unwrap_or(u32::MAX);
        if register.value < 0 { random.wrapping_neg() } else { random }
    }

    /// The number of the table of the current flags.
    fn table(&mut self) -> usize {
        let flags = self.flags & self.asked;
        if let Some(known) = self.tables.iter().position(|table| table.flags == flags) {
            return known;
        }
        let candidates = |kind: Kind| {
            let left = self.rules.productions.iter().enumerate().map(|(production, one)| {
                Candidate { production, test: one.matches.under(kind, flags) }
            });
            left.filter(|one| one.test != Expression::Always(false)).collect()
        };
        if self.tables.len() >= TABLES_MAX {
            self.tables.clear();
        }
        self.tables.push(MatchTable { flags, by_kind: Kind::ALL.map(candidates) });
        self.tables.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse::parse;
    use super::super::production::Register;
    use super::*;

    const FILE: &str = include_str!("../../../workloads/profile/hps.rules");

    fn engine(rules: RuleSet) -> Engine<'static> {
        Engine::new(Box::leak(rules.into()))
    }

    fn framework(sparsity: i32, burst: i32) -> RuleSet {
        let fixed = |value| Register { value, is_random: false };
        let rules = parse(FILE).unwrap().with_register("sampleFreq", fixed(-sparsity)).unwrap();
        rules.with_register("burstLength", fixed(-burst)).unwrap()
    }

    const CALL: Executed = Executed { kind: Kind::Call, pc: 0x100, target: 0x900 };
    const BACK: Executed = Executed { kind: Kind::CondBranch, pc: 0x100, target: 0x40 };
    const FORWARD: Executed = Executed { kind: Kind::Jump, pc: 0x100, target: 0x140 };
    const RETURN: Executed = Executed { kind: Kind::Return, pc: 0x100, target: 0x40 };

    /// Goal: the shipped file samples as the paper's text says. Method: a plain account of
    /// intervals, bursts and the events that end them, over a random stream.
    #[test]
    fn bursts_have_their_length_and_distance() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(7);
        for (sparsity, burst) in [(1, 1), (3, 2), (9, 1), (40, 10), (5, 50)] {
            let mut engine = engine(framework(sparsity, burst));
            let (mut outside, mut inside) = (0, 0);
            let mut collected = 0;
            for at in 0..2_000 {
                let one = [CALL, BACK, FORWARD, RETURN][random.random_range(0..4)];
                let mut found = Vec::new();
                engine.execute(one, |_, handler, _| found.push(handler));
                let mut expected = Vec::new();
                if [CALL, BACK].contains(&one) {
                    if outside < sparsity {
                        outside += 1;
                    } else if inside < burst {
                        inside += 1;
                        expected.extend((one == CALL).then_some(Handler::CallPair));
                        expected.push(Handler::HotMethod);
                    } else {
                        (outside, inside) = (0, 0);
                    }
                }
                assert_eq!(found, expected, "event {at} of {sparsity} and {burst}");
                collected += found.len();
            }
            assert!(collected > 10, "{collected}");
        }
    }

    /// Goal: what one burst collects is one episode.
    #[test]
    fn each_burst_is_an_episode() {
        let mut engine = engine(framework(2, 3));
        let mut episodes = Vec::new();
        for _ in 0..12 {
            engine.execute(BACK, |_, _, episode| episodes.push(episode));
        }
        let first = episodes[0];
        assert!(episodes[..3].iter().all(|&episode| episode == first), "{episodes:?}");
        assert!(episodes[3..].iter().all(|&episode| episode > first), "{episodes:?}");
        assert_eq!(episodes.len(), 6);
    }

    /// Goal: P5 as it is printed ends each burst at its first call.
    #[test]
    fn the_printed_condition_of_p5_is_that_of_p3() {
        let p5 = "P5: T.OPCLASS == proc_call && overflow_1 && ";
        let printed = FILE.replace(&format!("{p5}overflow_2"), &format!("{p5}!overflow_2"));
        assert_ne!(printed, FILE);
        let fixed = |value| Register { value, is_random: false };
        let rules = parse(&printed).unwrap().with_register("sampleFreq", fixed(-2)).unwrap();
        let mut engine = engine(rules.with_register("burstLength", fixed(-3)).unwrap());
        let mut seen = Vec::new();
        for at in 0..9 {
            engine.execute(CALL, |_, handler, _| {
                seen.extend((handler == Handler::CallPair).then_some(at));
            });
        }
        assert_eq!(seen, [2, 5, 8]);
    }

    #[test]
    fn counters_count_down_and_are_compared_at_once() {
        let text = "start: set_0(2)\n\
                    A: T.OPCLASS == return && !zero_0 -> null, dec_0\n\
                    B: T.OPCLASS == return && zero_0 -> call(HotMethod), set_0(1), inc_1";
        let mut engine = engine(parse(text).unwrap());
        let mut seen = Vec::new();
        for at in 0..6 {
            engine.execute(RETURN, |_, _, _| seen.push(at));
        }
        // The return that makes the counter zero is not yet the one that is seen.
        assert_eq!(seen, [2, 4]);
        assert_eq!(engine.matched(), [4, 2]);
        engine.execute(CALL, |_, _, _| unreachable!("a call matches nothing"));
    }

    #[test]
    fn random_intervals_lie_around_their_register() {
        let random = Register { value: -100, is_random: true };
        let rules = framework(1, 1).with_register("sampleFreq", random).unwrap();
        let mut lengths = Vec::new();
        for seed in [1, 2] {
            let mut engine = engine(rules.clone().with_seed(seed));
            let mut last = None;
            for at in 0_u32..60_000 {
                engine.execute(BACK, |_, _, _| {
                    lengths.extend(last.replace(at).map(|last| at - last - 2));
                });
            }
        }
        let sum: u32 = lengths.iter().sum();
        let mean = sum as usize / lengths.len();
        assert!((97..=103).contains(&mean), "{mean}");
        let (least, most) = (lengths.iter().min().unwrap(), lengths.iter().max().unwrap());
        assert!((50..56).contains(least) && (145..=150).contains(most), "{least} {most}");
        assert_ne!(lengths[..50], lengths[lengths.len() / 2..][..50]);
    }

    /// Goal: the tables of many different flags do not grow without end, and stay right.
    #[test]
    fn many_values_of_flags_are_forgotten_and_found_again() {
        let mut text = String::new();
        for counter in 0..8 {
            text +=
                &format!("Z{counter}: T.INSN == jump && zero_{counter} -> null, inc_{counter}\n");
            // Each counter is set at other jumps, so that all values of the flags occur.
            text += &format!(
                "S{counter}: T.INSN == jump && T.Target == {counter} && !zero_{counter} -> null, \
                 set_{counter}(0)\n"
            );
        }
        let mut engine = engine(parse(&text).unwrap());
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut zero = [true; 8];
        let mut expected = [0_u64; 16];
        for _ in 0..5_000 {
            let target = random.random_range(0..9);
            engine.execute(Executed { kind: Kind::Jump, pc: 0, target }, |_, _, _| {});
            for counter in 0..8 {
                if zero[counter] {
                    expected[2 * counter] += 1;
                    zero[counter] = false;
                } else if target == counter as u64 {
                    expected[2 * counter + 1] += 1;
                    zero[counter] = true;
                }
            }
        }
        assert_eq!(engine.matched(), expected);
        assert!(engine.tables.len() <= TABLES_MAX);
    }
}
