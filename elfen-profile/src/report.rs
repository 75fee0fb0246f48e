//! What a profile shows: functions and calls, by how much of the program they are.

use std::collections::HashMap;

use elfen_console::table;
use elfen_stream::counts::EdgeKind;
use serde::Serialize;

use crate::profile::Profile;
use crate::symbols::{FunctionId, ProfileSymbols};

/// What the report is sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum SortKey {
    /// Functions, by the instructions that they executed
    Function,
    /// Pairs of calling and called function, by the number of calls
    Call,
}

#[derive(Serialize, Debug)]
pub(crate) struct ProfileReport {
    program: Vec<String>,
    /// How the numbers came about.
    by: &'static str,
    instructions: u64,
    programs: u64,
    /// What was not counted, and why.
    left: Vec<String>,
    functions: Vec<FunctionRow>,
    calls: Vec<CallRow>,
}

#[derive(Serialize, Debug)]
struct FunctionRow {
    function: String,
    file: String,
    instructions: u64,
    /// Of all instructions, in percent.
    share_percent: f64,
    /// Times that it was called; jumps into it count too.
    calls: u64,
}

#[derive(Serialize, Debug)]
struct CallRow {
    from: String,
    to: String,
    count: u64,
}

impl ProfileReport {
    /// The `top` largest rows of each table.
    pub(crate) fn of(profile: &Profile, symbols: &ProfileSymbols, top: usize) -> Self {
        let mut instructions: HashMap<FunctionId, u64> = HashMap::new();
        for (&start, block) in &profile.blocks {
            let executed = block.count.saturating_mul(block.instructions.into());
            *instructions.entry(symbols.function_of(start)).or_default() += executed;
        }
        let mut calls: HashMap<(FunctionId, FunctionId), u64> = HashMap::new();
        for (edge, &count) in &profile.edges {
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
                let pair = [edge.from, edge.to].map(|place| symbols.function_of(place));
                let [from, to] = pair;
                *calls.entry((from, to)).or_default() += count;
            }
        }
        let mut called: HashMap<&FunctionId, u64> = HashMap::new();
        for ((_, to), &count) in &calls {
            *called.entry(to).or_default() += count;
        }
        let all: u64 = instructions.values().sum();
        let mut functions: Vec<FunctionRow> = instructions
            .iter()
            .map(|(function, &instructions)| FunctionRow {
                function: symbols.name(function),
                file: symbols.file_name(function.file).to_owned(),
                instructions,
                share_percent: share(instructions, all),
                calls: called.get(function).copied().unwrap_or(0),
            })
            .collect();
        functions.sort_by(|a, b| {
            (b.instructions, &a.function, &a.file).cmp(&(a.instructions, &b.function, &b.file))
        });
        functions.truncate(top);
        let mut calls: Vec<CallRow> = calls
            .iter()
            .map(|((from, to), &count)| CallRow {
                from: symbols.name(from),
                to: symbols.name(to),
                count,
            })
            .collect();
        calls.sort_by(|a, b| (b.count, &a.from, &a.to).cmp(&(a.count, &b.from, &b.to)));
        calls.truncate(top);
        Self {
            program: profile.program.clone(),
            by: "everything",
            instructions: profile.instructions,
            programs: profile.programs,
            left: profile.left.clone(),
            functions,
            calls,
        }
    }

    pub(crate) fn text(&self, sort: SortKey) -> String {
        let plural = if self.programs == 1 { "program" } else { "programs" };
        let mut text = format!(
            "{}: {} instructions of {} {plural}, all counted\n",
            self.program.join(" "),
            grouped(self.instructions),
            self.programs
        );
        for left in &self.left {
            text += &format!("not counted: {left}\n");
        }
        text.push('\n');
        text += &match sort {
            SortKey::Function => {
                let rows: Vec<Vec<String>> =
                    self.functions.iter().map(FunctionRow::cells).collect();
                table::lines(&["share %", "instructions", "calls", "function", "file"], &rows)
            }
            SortKey::Call => {
                let cells =
                    |one: &CallRow| vec![grouped(one.count), one.from.clone(), one.to.clone()];
                let rows: Vec<Vec<String>> = self.calls.iter().map(cells).collect();
                table::lines(&["calls", "from", "to"], &rows)
            }
        };
        text
    }
}

impl FunctionRow {
    fn cells(&self) -> Vec<String> {
        vec![
            format!("{:.2}", self.share_percent),
            grouped(self.instructions),
            grouped(self.calls),
            self.function.clone(),
            self.file.clone(),
        ]
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 * 100.0 }
}

/// A number with its digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
