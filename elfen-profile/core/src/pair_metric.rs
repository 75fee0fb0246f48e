//! Metrics of pairs of samples, as small expressions.
//!
//! ```text
//! metric = sum [ "if" sum ]                     the second one chooses pairs
//! sum    = and { "||" and }
//! and    = compare { "&&" compare }
//! compare = term [ ("<" | "<=" | ">" | ">=" | "==" | "!=") term ]
//! term   = product { ("+" | "-") product }
//! product = factor { ("*" | "/") factor }
//! factor = number | field | name | "abs(" sum ")" | "!" factor | "-" factor | "(" sum ")"
//! field  = ("a." | "b.") word
//! ```
//!
//! `a` is the instruction that the metric is of, and `b` the other one of the pair. Times are in
//! cycles since the fetch of `a`. A field that a sample does not have makes its value absent, and
//! the pair is left out; `false && absent` is false, and `true || absent` is true.

use crate::instruction::{Class, Instruction};
use crate::sample::{InstructionSample, Outcome, SamplePair, to_float};
use crate::trace::Trace;
use crate::truth::Sites;

/// Expressions with a name, which expressions can use.
pub const NAMED: [(&str, &str, &str); 5] = [
    (
        "useful",
        "b issues while a is in progress, and retires",
        "b.retired && b.issue >= 0 && b.issue < a.end",
    ),
    (
        "retires_near",
        "both retire within 15 cycles",
        "a.retired && b.retired && abs(b.retire - a.retire) <= 15",
    ),
    ("ipc", "instructions per cycle around a", "retires_near / 30"),
    ("on_hit", "useful instructions while a hits the data cache", "useful if !a.dcache_miss"),
    ("on_miss", "useful instructions while a misses the data cache", "useful if a.dcache_miss"),
];

/// A parsed metric.
#[derive(Clone, PartialEq, Debug)]
pub struct PairMetric {
    value: Expression,
    condition: Option<Expression>,
}

#[derive(Clone, PartialEq, Debug)]
enum Expression {
    Number(f64),
    Field(Side, Field),
    Not(Box<Expression>),
    Negative(Box<Expression>),
    Absolute(Box<Expression>),
    Both(Operator, Box<(Expression, Expression)>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operator {
    Or,
    And,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Equal,
    Unequal,
    Add,
    Subtract,
    Multiply,
    Divide,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    A,
    B,
}

/// What is known of one sample of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Field {
    Fetch,
    Map,
    Ready,
    Issue,
    Completion,
    RetireReady,
    Retire,
    End,
    Retired,
    Aborted,
    IcacheMiss,
    ItlbMiss,
    DcacheMiss,
    DtlbMiss,
    Taken,
    Mispredicted,
    Conflict,
    Loads,
    Stores,
    Of(Class),
    Branch,
    Distance,
}

const FIELDS: [(&str, Field); 31] = [
    ("fetch", Field::Fetch),
    ("map", Field::Map),
    ("ready", Field::Ready),
    ("issue", Field::Issue),
    ("completion", Field::Completion),
    ("retire_ready", Field::RetireReady),
    ("retire", Field::Retire),
    ("end", Field::End),
    ("retired", Field::Retired),
    ("aborted", Field::Aborted),
    ("icache_miss", Field::IcacheMiss),
    ("itlb_miss", Field::ItlbMiss),
    ("dcache_miss", Field::DcacheMiss),
    ("dtlb_miss", Field::DtlbMiss),
    ("taken", Field::Taken),
    ("mispredicted", Field::Mispredicted),
    ("conflict", Field::Conflict),
    ("loads", Field::Loads),
    ("stores", Field::Stores),
    ("branch", Field::Branch),
    ("distance", Field::Distance),
    ("integer", Field::Of(Class::Integer)),
    ("multiply", Field::Of(Class::Multiply)),
    ("divide", Field::Of(Class::Divide)),
    ("float_add", Field::Of(Class::FloatAdd)),
    ("float_multiply", Field::Of(Class::FloatMultiply)),
    ("float_divide", Field::Of(Class::FloatDivide)),
    ("vector", Field::Of(Class::Vector)),
    ("fence", Field::Of(Class::Fence)),
    ("system_call", Field::Of(Class::SystemCall)),
    ("other", Field::Of(Class::Other)),
];

/// Names of all fields.
pub fn field_names() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().map(|(name, _)| *name)
}

/// Where an expression cannot be understood.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("column {column}: {what}")]
pub struct MetricError {
    /// From 1 on.
    pub column: usize,
    pub what: String,
}

/// Deeper expressions are refused.
const DEPTH_MAX: usize = 50;
const BYTES_MAX: usize = 10_000;

/// A sample of a pair, as an expression sees it.
#[derive(Clone, Copy, Debug)]
struct View<'a> {
    sample: &'a InstructionSample,
    code: &'a Instruction,
    /// Its fetch, and its number in the order of fetch, from those of `a`.
    fetch: f64,
    distance: f64,
}

impl View<'_> {
    fn field(&self, field: Field) -> Option<f64> {
        let sample = self.sample;
        let latencies = &sample.latencies;
        let [map, ready, issue, retire_ready, retire] = latencies.since_fetch();
        let cycle = |since: Option<u64>| Some(self.fetch + to_float(since?));
        let completion = match latencies.load_issue_to_completion {
            Some(load) => issue.map(|issue| issue + u64::from(load)),
            None if self.code.reads_memory() => None,
            None => retire_ready,
        };
        let is = |event: bool| Some(f64::from(u8::from(event)));
        let events = &sample.events;
        match field {
            Field::Fetch => Some(self.fetch),
            Field::Map => cycle(map),
            Field::Ready => cycle(ready),
            Field::Issue => cycle(issue),
            Field::Completion => cycle(completion),
            Field::RetireReady => cycle(retire_ready),
            Field::Retire => cycle(retire),
            Field::End => cycle(latencies.in_progress()),
            Field::Retired => is(sample.outcome? == Outcome::Retired),
            Field::Aborted => is(matches!(sample.outcome?, Outcome::Aborted(_))),
            Field::IcacheMiss => is(events.icache_miss?),
            Field::ItlbMiss => is(events.itlb_miss?),
            Field::DcacheMiss => is(events.dcache_miss?),
            Field::DtlbMiss => is(events.dtlb_miss?),
            Field::Taken => is(events.taken?),
            Field::Mispredicted => is(events.mispredicted?),
            Field::Conflict => is(events.conflict?),
            Field::Loads => is(self.code.reads_memory()),
            Field::Stores => is(self.code.writes_memory()),
            Field::Of(class) => is(self.code.class == class),
            Field::Branch => is(self.code.class.branch().is_some()),
            Field::Distance => Some(self.distance),
        }
    }
}

impl Expression {
    fn value(&self, a: &View<'_>, b: &View<'_>) -> Option<f64> {
        let is = |is: bool| f64::from(u8::from(is));
        Some(match self {
            Self::Number(number) => *number,
            Self::Field(Side::A, field) => a.field(*field)?,
            Self::Field(Side::B, field) => b.field(*field)?,
            Self::Not(one) => is(one.value(a, b)? == 0.0),
            Self::Negative(one) => -one.value(a, b)?,
            Self::Absolute(one) => one.value(a, b)?.abs(),
            Self::Both(operator @ (Operator::And | Operator::Or), both) => {
                let decides = |value: f64| (value != 0.0) == (*operator == Operator::Or);
                let [one, other] = [&both.0, &both.1].map(|each| each.value(a, b));
                match (one, other) {
                    (Some(one), _) if decides(one) => is(one != 0.0),
                    (_, Some(other)) if decides(other) => is(other != 0.0),
                    (Some(_), Some(other)) => is(other != 0.0),
                    _ => return None,
                }
            }
            Self::Both(operator, both) => {
                let (one, other) = (both.0.value(a, b)?, both.1.value(a, b)?);
                match operator {
                    Operator::Less => is(one < other),
                    Operator::LessOrEqual => is(one <= other),
                    Operator::Greater => is(one > other),
                    Operator::GreaterOrEqual => is(one >= other),
                    // Cycles and events are whole numbers.
                    Operator::Equal => is((one - other).abs() < 0.5),
                    Operator::Unequal => is((one - other).abs() >= 0.5),
                    Operator::Add => one + other,
                    Operator::Subtract => one - other,
                    Operator::Multiply => one * other,
                    Operator::Divide => one / other,
                    Operator::And | Operator::Or => return None,
                }
            }
        })
    }
}

/// A sum over pairs.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
struct Sum {
    value: f64,
    count: u64,
}

/// A metric of one site.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MetricValue {
    /// Summed over the instructions in the window around one execution.
    pub around: f64,
    /// Pairs that told it.
    pub pairs: u64,
}

impl PairMetric {
    /// Parses an expression.
    pub fn parse(text: &str) -> Result<Self, MetricError> {
        let named = NAMED.iter().find(|(name, ..)| *name == text.trim());
        Parser::parse(named.map_or(text, |&(.., text)| text), 0)
    }

    /// The metric of each site, from all pairs with instructions of it. `None` without pairs that
    /// tell it, on one side or the other.
    pub fn of(
        &self,
        trace: &Trace,
        sites: &Sites,
        pairs: &[SamplePair],
        window: u32,
    ) -> Vec<Option<MetricValue>> {
        let mut sums = vec![[Sum::default(); 2]; sites.len()];
        for pair in pairs {
            let code =
                |sample: &InstructionSample| trace.instructions.get(sample.instruction? as usize);
            let (Some(first), Some(second)) = (code(&pair.first), code(&pair.second)) else {
                continue;
            };
            let first = (&pair.first, first);
            let second = (&pair.second, second);
            let (later, distance) = (to_float(pair.fetch_latency), f64::from(pair.distance));
            for (side, one, other, sign) in [(0, first, second, 1.0), (1, second, first, -1.0)] {
                let view = |(sample, code), sign: f64| View {
                    sample,
                    code,
                    fetch: sign * later,
                    distance: sign * distance,
                };
                let (a, b) = (view(one, 0.0), view(other, sign));
                let is_meant = self.condition.as_ref().map_or(Some(1.0), |one| one.value(&a, &b));
                let value = self.value.value(&a, &b).filter(|value| value.is_finite());
                let (Some(is_meant), Some(value)) = (is_meant, value) else { continue };
                let site = one.0.instruction.map(|one| sites.of(one));
                let sum = site.and_then(|site| sums.get_mut(site)).map(|sums| &mut sums[side]);
                if let Some(sum) = sum.filter(|_| is_meant != 0.0) {
                    sum.value += value;
                    sum.count += 1;
                }
            }
        }
        let around = |[after, before]: [Sum; 2]| {
            let mean = |sum: Sum| (sum.count > 0).then(|| sum.value / to_float(sum.count));
            let around = (mean(after)? + mean(before)?) * f64::from(window);
            Some(MetricValue { around, pairs: after.count + before.count })
        };
        sums.into_iter().map(around).collect()
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

type Parsed = Result<Expression, MetricError>;

impl Parser<'_> {
    fn parse(text: &str, depth: usize) -> Result<PairMetric, MetricError> {
        if text.len() > BYTES_MAX {
            let what = format!("it is longer than {BYTES_MAX} bytes");
            return Err(MetricError { column: 1, what });
        }
        let mut parser = Parser { text, at: 0, depth };
        let value = parser.sum()?;
        let condition = if parser.takes_word("if") { Some(parser.sum()?) } else { None };
        parser.pass_spaces();
        if parser.at < text.len() {
            return Err(parser.error("an operator was expected"));
        }
        Ok(PairMetric { value, condition })
    }

    fn error(&self, what: &str) -> MetricError {
        let before = self.text.get(..self.at).unwrap_or(self.text);
        MetricError { column: before.chars().count() + 1, what: what.to_owned() }
    }

    fn rest(&self) -> &str {
        self.text.get(self.at..).unwrap_or("")
    }

    fn pass_spaces(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn takes(&mut self, sign: &str) -> bool {
        self.pass_spaces();
        let is_next = self.rest().starts_with(sign);
        if is_next {
            self.at += sign.len();
        }
        is_next
    }

    fn word(&mut self) -> &str {
        self.pass_spaces();
        let rest = self.rest();
        let is_inside = |one: char| one.is_ascii_alphanumeric() || one == '_' || one == '.';
        let length = rest.find(|one| !is_inside(one)).unwrap_or(rest.len());
        rest.get(..length).unwrap_or("")
    }

    fn takes_word(&mut self, expected: &str) -> bool {
        let is_next = self.word() == expected;
        if is_next {
            self.at += expected.len();
        }
        is_next
    }

    fn chain(
        &mut self,
        operators: &[(&str, Operator)],
        each: fn(&mut Self) -> Parsed,
        most: usize,
    ) -> Parsed {
        let mut found = each(self)?;
        for _ in 0..most {
            let next = operators.iter().find(|(sign, _)| self.takes(sign));
            let Some(&(_, operator)) = next else { break };
            let other = each(self)?;
            found = Expression::Both(operator, Box::new((found, other)));
        }
        Ok(found)
    }

    fn sum(&mut self) -> Parsed {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.error("it is nested too deeply"));
        }
        let found = self.chain(&[("||", Operator::Or)], Self::and, DEPTH_MAX)?;
        self.depth -= 1;
        Ok(found)
    }

    fn and(&mut self) -> Parsed {
        self.chain(&[("&&", Operator::And)], Self::compare, DEPTH_MAX)
    }

    fn compare(&mut self) -> Parsed {
        let operators = [
            ("<=", Operator::LessOrEqual),
            ("<", Operator::Less),
            (">=", Operator::GreaterOrEqual),
            (">", Operator::Greater),
            ("==", Operator::Equal),
            ("!=", Operator::Unequal),
        ];
        self.chain(&operators, Self::term, 1)
    }

    fn term(&mut self) -> Parsed {
        let operators = [("+", Operator::Add), ("-", Operator::Subtract)];
        self.chain(&operators, Self::product, DEPTH_MAX)
    }

    fn product(&mut self) -> Parsed {
        let operators = [("*", Operator::Multiply), ("/", Operator::Divide)];
        self.chain(&operators, Self::factor, DEPTH_MAX)
    }

    fn factor(&mut self) -> Parsed {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.error("it is nested too deeply"));
        }
        let found = self.factor_inside()?;
        self.depth -= 1;
        Ok(found)
    }

    fn factor_inside(&mut self) -> Parsed {
        if self.takes("!") {
            return Ok(Expression::Not(Box::new(self.factor()?)));
        }
        if self.takes("-") {
            return Ok(Expression::Negative(Box::new(self.factor()?)));
        }
        if self.takes("(") {
            return self.close();
        }
        let word = self.word().to_owned();
        if word == "abs" {
            self.at += word.len();
            if !self.takes("(") {
                return Err(self.error("a parenthesis was expected after abs"));
            }
            return Ok(Expression::Absolute(Box::new(self.close()?)));
        }
        if word.starts_with(|one: char| one.is_ascii_digit()) {
            let number = word.parse().map_err(|_| self.error("it is not a number"))?;
            self.at += word.len();
            return Ok(Expression::Number(number));
        }
        if let Some((side, name)) = word.split_once('.') {
            let side = match side {
                "a" => Side::A,
                "b" => Side::B,
                _ => return Err(self.error("a field begins with a. or b.")),
            };
            let field = FIELDS.iter().find(|(known, _)| *known == name);
            let &(_, field) = field.ok_or_else(|| {
                let names: Vec<&str> = field_names().collect();
                self.error(&format!("fields are {}", names.join(", ")))
            })?;
            self.at += word.len();
            return Ok(Expression::Field(side, field));
        }
        let named = NAMED.iter().find(|(name, ..)| *name == word);
        let Some((_, _, text)) = named else {
            let names: Vec<&str> = NAMED.iter().map(|(name, ..)| *name).collect();
            let what =
                format!("a number, a field or a name was expected; names are {}", names.join(", "));
            return Err(self.error(&what));
        };
        let found = Parser::parse(text, self.depth)?;
        match found.condition {
            None => {
                self.at += word.len();
                Ok(found.value)
            }
            Some(_) => Err(self.error("it chooses pairs, so it cannot be part of an expression")),
        }
    }

    fn close(&mut self) -> Parsed {
        let inside = self.sum()?;
        if self.takes(")") {
            return Ok(inside);
        }
        Err(self.error("a closing parenthesis was expected"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Events, Fetched, NEVER, Times};
    use crate::predictor::History;
    use crate::sample::sample;
    use crate::synthetic::{load, repeat};
    use crate::truth::kind_of;

    /// A load that is fetched in a cycle and issues four cycles later, and its trace.
    fn at(fetch: u64, aborts: bool) -> InstructionSample {
        let times = Times {
            fetch,
            map: fetch + 2,
            ready: fetch + 3,
            issue: if aborts { NEVER } else { fetch + 4 },
            completion: if aborts { NEVER } else { fetch + 10 },
            retire_ready: if aborts { NEVER } else { fetch + 9 },
            retire: if aborts { NEVER } else { fetch + 20 },
        };
        let abort = aborts.then_some((crate::pipeline::AbortReason::Direction, fetch + 30));
        let fetched = Fetched {
            number: 0,
            instruction: 0,
            block: 0,
            pc: 0,
            address: None,
            times,
            slot: 0,
            events: Events { dcache_miss: true, ..Events::default() },
            history: History::default(),
            abort,
        };
        sample(&fetched, kind_of(&load(&[], &[])))
    }

    fn value(text: &str, first: (u64, bool), second: (u64, bool)) -> Option<[f64; 2]> {
        let trace = repeat("test", &[load(&[], &[])], 1, |_| vec![0]);
        let sites = Sites::new(&trace);
        let pair = SamplePair {
            first: at(first.0, first.1),
            second: at(second.0, second.1),
            distance: 7,
            fetch_latency: second.0 - first.0,
        };
        let metric = PairMetric::parse(text).unwrap();
        let found = metric.of(&trace, &sites, &[pair], 10)[0]?;
        Some([found.around, to_float(found.pairs)])
    }

    #[test]
    fn a_pair_is_seen_from_both_sides() {
        // The second issues at 9, when the first is ready to retire. The first has issued before.
        assert_eq!(value("useful", (0, false), (5, false)), Some([0.0, 2.0]));
        assert_eq!(value("useful", (0, false), (4, false)), Some([20.0, 2.0]));
        // The second aborts: only the first one is useful to the other.
        assert_eq!(value("useful", (0, false), (4, true)), Some([10.0, 2.0]));
        assert_eq!(value("b.fetch + b.distance", (0, false), (4, false)), Some([0.0, 2.0]));
        assert_eq!(value("abs(b.fetch) * 2 - 3 / 2", (0, false), (4, false)), Some([130.0, 2.0]));
        assert_eq!(value("ipc", (0, false), (15, false)), Some([20.0 / 30.0, 2.0]));
        assert_eq!(value("ipc", (0, false), (16, false)), Some([0.0, 2.0]));
        assert_eq!(value("1 if a.dcache_miss", (0, false), (1, false)), Some([20.0, 2.0]));
        assert_eq!(value("on_hit", (0, false), (1, false)), None);
    }

    #[test]
    fn absent_fields_leave_a_pair_out_unless_they_do_not_matter() {
        // Aborted: it did not issue, and whether it missed is not known.
        assert_eq!(value("a.issue", (0, true), (4, true)), None);
        assert_eq!(value("a.dcache_miss", (0, true), (4, true)), None);
        assert_eq!(value("a.aborted && b.aborted", (0, true), (4, true)), Some([20.0, 2.0]));
        assert_eq!(value("b.retired && b.issue > 0", (0, true), (4, true)), Some([0.0, 2.0]));
        assert_eq!(value("a.issue > 0 || 1", (0, true), (4, true)), Some([20.0, 2.0]));
        assert_eq!(value("a.issue > 0 && 1", (0, true), (4, true)), None);
        assert_eq!(value("!a.retired && a.end == 30", (0, true), (4, true)), Some([20.0, 2.0]));
    }

    #[test]
    fn errors_name_the_column() {
        for (text, column) in [
            ("", 1),
            ("a.fetch <", 10),
            ("a.nothing", 1),
            ("c.fetch", 1),
            ("(a.fetch", 9),
            ("1 2", 3),
            ("useful + on_hit", 10),
            ("1 if", 5),
            ("abs 3", 5),
            ("1x", 1),
        ] {
            assert_eq!(PairMetric::parse(text).unwrap_err().column, column, "{text}");
        }
        let deep = "(".repeat(5000);
        assert!(PairMetric::parse(&deep).is_err());
        assert!(PairMetric::parse(&"!".repeat(9000)).is_err());
        for (name, ..) in NAMED {
            PairMetric::parse(name).unwrap();
        }
    }
}
