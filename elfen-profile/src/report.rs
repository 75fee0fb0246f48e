//! What a profile shows: functions and calls, by how much of the program they are.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use elfen_stream::counts::EdgeKind;
use serde::Serialize;

use crate::paths::{self, PathRow};
use crate::precise_report::SamplesReport;
use crate::profile::{EdgeCount, Profile, Source};
use crate::rule_sums::{self, RuleRow};
use crate::shadows::KINDS;
use crate::source_lines::LineRow;
use crate::stacks::Stacks;
use crate::streams::{self, StreamReport};
use crate::sums::{Sum, error, grouped, how, share, total, without_columns};
use crate::symbols::{FunctionId, ProfileSymbols};
use crate::values::{self, ValueRow};

/// What the report is sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum SortKey {
    /// Functions, by the instructions that they executed
    Function,
    /// Functions, by the instructions that they and all that they call executed
    Total,
    /// Pairs of calling and called function, by the number of calls
    Call,
    /// Paths: what runs between two backward branches, by its instructions
    Path,
    /// What the productions of `record --rules` have collected
    Rule,
    /// Source lines, by the instructions that were executed for them
    Line,
    /// Instructions, by how often their result was the same
    Value,
    /// Instructions, by samples of the processor
    Instruction,
    /// Hot data streams: sequences of memory accesses that repeat
    Stream,
}

#[derive(Serialize, Debug)]
pub(crate) struct ProfileReport {
    program: Vec<String>,
    /// How the numbers came about.
    by: Source,
    /// Bursts that the numbers come from; 0 if everything was counted.
    bursts: u64,
    /// User time of the program, and the estimated part of it that the bursts cost.
    ran_ns: u64,
    cost_ns: u64,
    instructions: u64,
    programs: u64,
    /// What was not counted, and why.
    left: Vec<String>,
    /// System calls of shadows by their kinds. Absent without shadows.
    #[serde(skip_serializing_if = "Option::is_none")]
    system_calls: Option<BTreeMap<&'static str, u64>>,
    /// Page faults of the program while it was sampled by shadows.
    #[serde(skip_serializing_if = "Option::is_none")]
    page_faults: Option<u64>,
    functions: Vec<FunctionRow>,
    calls: Vec<CallRow>,
    /// Only if they are asked for, because the debug information of large files takes long to read.
    #[serde(skip_serializing_if = "Option::is_none")]
    lines: Option<Vec<LineRow>>,
    /// Only if they are asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    paths: Option<Vec<PathRow>>,
    /// Only if they are asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    rules: Option<Vec<RuleRow>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<Vec<ValueRow>>,
    /// What the processor has sampled. Absent in other profiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    samples: Option<SamplesReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    streams: Option<StreamReport>,
}

#[derive(Serialize, Debug)]
struct FunctionRow {
    function: String,
    file: String,
    instructions: u64,
    /// Of all instructions, in percent.
    share_percent: f64,
    /// The same with all that it calls. Absent if stacks were not recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_percent: Option<f64>,
    /// Times that it was called; jumps into it count too.
    calls: u64,
    /// Bursts in which it ran; 0 if everything was counted.
    bursts: u64,
}

#[derive(Serialize, Debug)]
struct CallRow {
    from: String,
    to: String,
    count: u64,
    /// Bursts in which it was called; 0 if everything was counted.
    bursts: u64,
}

/// Calling and called function.
pub(crate) type CallPair = (FunctionId, FunctionId);

/// Counts of functions, and of calls between them.
pub(crate) struct ProfileSums {
    pub(crate) instructions: HashMap<FunctionId, Sum>,
    pub(crate) calls: HashMap<CallPair, Sum>,
}

impl ProfileSums {
    pub(crate) fn of(profile: &Profile, symbols: &ProfileSymbols) -> Self {
        let mut instructions: HashMap<FunctionId, Sum> = HashMap::new();
        for (&start, block) in &profile.blocks {
            let executed = block.count.saturating_mul(block.instructions.into());
            instructions.entry(symbols.function_of(start)).or_default().add(executed, block.bursts);
        }
        let mut calls: HashMap<CallPair, Sum> = HashMap::new();
        for (edge, &EdgeCount { count, bursts }) in &profile.edges {
            let is_call = match edge.kind {
                EdgeKind::Call | EdgeKind::ComputedCall => true,
                // The last call of a function is often a jump.
                EdgeKind::Jump | EdgeKind::ComputedJump | EdgeKind::Taken => {
                    let [from, to] = [edge.from, edge.to].map(|place| symbols.function_of(place));
                    from != to
                }
                EdgeKind::Falls | EdgeKind::Return | EdgeKind::ReturnFar => false,
            };
            if is_call {
                let [from, to] = [edge.from, edge.to].map(|place| symbols.function_of(place));
                calls.entry((from, to)).or_default().add(count, bursts);
            }
        }
        Self { instructions, calls }
    }
}

impl ProfileReport {
    /// The `top` largest rows of each table.
    pub(crate) fn of(
        profile: &Profile,
        symbols: &ProfileSymbols,
        sort: SortKey,
        top: usize,
    ) -> Self {
        let ProfileSums { mut instructions, calls } = ProfileSums::of(profile, symbols);
        let mut called: HashMap<&FunctionId, u64> = HashMap::new();
        for ((_, to), sum) in &calls {
            let calls = called.entry(to).or_default();
            *calls = calls.saturating_add(sum.count);
        }
        let all = total(instructions.values());
        let has_functions = matches!(sort, SortKey::Function | SortKey::Total);
        let (totals, all_of_stacks) = match has_functions {
            true => Stacks::new(profile, symbols).totals(),
            false => Default::default(),
        };
        if sort == SortKey::Total {
            for function in totals.keys() {
                instructions.entry(function.clone()).or_default();
            }
        }
        let mut functions: Vec<FunctionRow> = instructions
            .iter()
            .map(|(function, &Sum { count: instructions, bursts })| FunctionRow {
                function: symbols.name(function),
                file: symbols.file_name(function.file).to_owned(),
                instructions,
                share_percent: share(instructions, all),
                total_percent: (all_of_stacks > 0)
                    .then(|| share(totals.get(function).copied().unwrap_or(0), all_of_stacks)),
                calls: called.get(function).copied().unwrap_or(0),
                bursts,
            })
            .collect();
        functions.sort_by(|a, b| {
            let by_total = match sort {
                SortKey::Total => b.total_percent.partial_cmp(&a.total_percent),
                _ => None,
            };
            let by_own =
                (b.instructions, &a.function, &a.file).cmp(&(a.instructions, &b.function, &b.file));
            by_total.unwrap_or(Ordering::Equal).then(by_own)
        });
        functions.truncate(top);
        let mut calls: Vec<CallRow> = calls
            .iter()
            .map(|((from, to), &Sum { count, bursts })| CallRow {
                from: symbols.name(from),
                to: symbols.name(to),
                count,
                bursts,
            })
            .collect();
        calls.sort_by(|a, b| (b.count, &a.from, &a.to).cmp(&(a.count, &b.from, &b.to)));
        calls.truncate(top);
        Self {
            program: profile.program.clone(),
            by: profile.by,
            bursts: profile.bursts,
            ran_ns: profile.ran_ns,
            cost_ns: profile.cost_ns,
            instructions: profile.instructions,
            programs: profile.programs,
            left: profile.left.clone(),
            system_calls: (profile.by == Source::Shadows)
                .then(|| KINDS.into_iter().zip(profile.calls).collect()),
            page_faults: (profile.by == Source::Shadows).then_some(profile.faults),
            functions,
            calls,
            lines: None,
            paths: (sort == SortKey::Path).then(|| paths::hottest(profile, symbols, top)),
            rules: (sort == SortKey::Rule).then(|| rule_sums::hottest(profile, symbols, top)),
            values: (sort == SortKey::Value).then(|| values::hottest(profile, symbols, top)),
            samples: (profile.by == Source::Samples)
                .then(|| SamplesReport::of(profile, symbols, sort == SortKey::Instruction, top)),
            streams: (sort == SortKey::Stream).then(|| streams::report(profile, symbols, top)),
        }
    }

    pub(crate) fn with_lines(self, lines: Vec<LineRow>) -> Self {
        Self { lines: Some(lines), ..self }
    }

    pub(crate) fn text(&self, sort: SortKey) -> String {
        let plural = if self.programs == 1 { "program" } else { "programs" };
        if let Some(samples) = &self.samples {
            let (program, how) = (self.program.join(" "), samples.how());
            let mut text = format!("{program}: {} {plural}, {how}\n", self.programs);
            for left in &self.left {
                text += &format!("not counted: {left}\n");
            }
            return text + "\n" + &samples.table();
        }
        let how = how(self.by, self.bursts);
        let mut text = format!(
            "{}: {} instructions of {} {plural}, {how}\n",
            self.program.join(" "),
            grouped(self.instructions),
            self.programs
        );
        for left in &self.left {
            text += &format!("not counted: {left}\n");
        }
        if let Some(calls) = &self.system_calls {
            text += &system_calls(calls);
        }
        if let Some(streams) = &self.streams {
            text += &streams.summary();
        }
        text.push('\n');
        let is_exact = self.by == Source::Everything;
        let (head, rows): (&[&str], Vec<Vec<String>>) = match sort {
            SortKey::Function | SortKey::Total => (
                &["share %", "± %", "total %", "instructions", "calls", "function", "file"],
                self.functions.iter().map(FunctionRow::cells).collect(),
            ),
            SortKey::Call => {
                (&["calls", "± %", "from", "to"], self.calls.iter().map(CallRow::cells).collect())
            }
            SortKey::Path => (
                &["share %", "± %", "instructions", "times", "blocks", "path"],
                self.paths.iter().flatten().map(PathRow::cells).collect(),
            ),
            SortKey::Rule => (
                &["rule", "share %", "± %", "times", "caller", "function", "file"],
                self.rules.iter().flatten().map(RuleRow::cells).collect(),
            ),
            SortKey::Value => {
                (&ValueRow::HEADING, self.values.iter().flatten().map(ValueRow::cells).collect())
            }
            SortKey::Stream => {
                let rows = self.streams.as_ref().map(StreamReport::cells);
                (&StreamReport::HEADING, rows.unwrap_or_default())
            }
            SortKey::Line => (
                &["share %", "± %", "instructions", "line", "function"],
                self.lines.iter().flatten().map(LineRow::cells).collect(),
            ),
            // Only a profile by samples has them, and is printed above.
            SortKey::Instruction => (&[], Vec::new()),
        };
        let mut left = Vec::new();
        // Rules sample on their own.
        left.extend((is_exact && sort != SortKey::Rule).then_some(1));
        let has_total = self.functions.iter().any(|one| one.total_percent.is_some());
        let has_functions = matches!(sort, SortKey::Function | SortKey::Total);
        left.extend((has_functions && !has_total).then_some(2));
        text += &without_columns(head, rows, &left);
        text
    }
}

/// The kinds of system calls, in percent.
fn system_calls(calls: &BTreeMap<&'static str, u64>) -> String {
    let all = calls.values().fold(0, |all: u64, &count| all.saturating_add(count));
    let parts: Vec<String> = KINDS
        .into_iter()
        .map(|kind| format!("{:.0} % {kind}", share(calls.get(kind).copied().unwrap_or(0), all)))
        .collect();
    match all {
        0 => String::new(),
        all => format!("{} system calls in shadows: {}\n", grouped(all), parts.join(", ")),
    }
}

impl FunctionRow {
    fn cells(&self) -> Vec<String> {
        vec![
            format!("{:.2}", self.share_percent),
            if self.instructions > 0 { error(self.bursts) } else { String::new() },
            self.total_percent.map(|total| format!("{total:.2}")).unwrap_or_default(),
            grouped(self.instructions),
            grouped(self.calls),
            self.function.clone(),
            self.file.clone(),
        ]
    }
}

impl CallRow {
    fn cells(&self) -> Vec<String> {
        vec![grouped(self.count), error(self.bursts), self.from.clone(), self.to.clone()]
    }
}
