//! The instructions of one function, with their counts and source lines.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use elfen_instrument::symbols::{FunctionTable, read_regular};
use iced_x86::{
    Decoder, DecoderOptions, Formatter, GasFormatter, Instruction, OpKind, SymbolResolver,
    SymbolResult,
};
use serde::Serialize;

use crate::instructions::InstructionCounts;
use crate::lines::{Lines, SourceFile};
use crate::profile::{Profile, Source};
use crate::report::ProfileSums;
use crate::source_lines::short_paths;
use crate::sums::{Sum, error, grouped, how, share, total, without_columns};
use crate::symbols::{FunctionId, ProfileSymbols};

/// Names that a failure lists.
const CANDIDATES: usize = 5;

/// A function with its instructions, in the order of their addresses.
#[derive(Serialize, Debug)]
pub(crate) struct Annotation {
    program: Vec<String>,
    by: Source,
    bursts: u64,
    function: String,
    /// The program or library that it is in.
    file: String,
    /// Instructions that it executed, and their part of all, in percent.
    instructions: u64,
    share_percent: f64,
    rows: Vec<InstructionRow>,
    /// The text of each source line that the rows refer to.
    #[serde(skip)]
    sources: HashMap<(String, u32), String>,
}

#[derive(Serialize, Debug)]
struct InstructionRow {
    /// 0 if it did not run.
    count: u64,
    /// Bursts in which it ran; 0 if everything was counted.
    bursts: u64,
    /// Of the function's instructions, in percent.
    share_percent: f64,
    address: u64,
    /// As AT&T assemblers read it.
    instruction: String,
    path: Option<String>,
    line: Option<u32>,
}

/// Why a function is not annotated. Names are the best candidates.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum AnnotateError {
    Unknown(Vec<String>),
    Ambiguous(Vec<String>),
    NotRun,
    Unreadable(String),
}

/// A function that was found by its name.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct FoundFunction {
    id: FunctionId,
    /// Functions of that name that ran.
    pub(crate) others: usize,
}

/// Finds a function that ran: by its name, or by a part that only one name has.
pub(crate) fn find(
    name: &str,
    sums: &ProfileSums,
    symbols: &ProfileSymbols,
) -> Result<FoundFunction, AnnotateError> {
    let ran = sums.instructions.iter().filter(|(id, sum)| id.start.is_some() && sum.count > 0);
    let mut ran: Vec<(u64, &FunctionId, String)> =
        ran.map(|(id, sum)| (sum.count, id, symbols.name(id))).collect();
    ran.sort_by(|a, b| (b.0, a.1).cmp(&(a.0, b.1)));
    let names: Vec<&str> = ran.iter().map(|(_, _, name)| &**name).collect();
    let is_known = symbols.has_function(name);
    let matching = choose(name, &names, is_known)?;
    let [first, others @ ..] = &*matching else { return Err(AnnotateError::NotRun) };
    Ok(FoundFunction { id: ran[*first].1.clone(), others: others.len() })
}

/// The indices of the names that match, of names in the order of their heat.
fn choose(name: &str, names: &[&str], is_known: bool) -> Result<Vec<usize>, AnnotateError> {
    let all = |matches: &dyn Fn(&str) -> bool| -> Vec<usize> {
        (0..names.len()).filter(|&at| matches(names[at])).collect()
    };
    let exact = all(&|one| one == name);
    if !exact.is_empty() {
        return Ok(exact);
    }
    if is_known {
        return Err(AnnotateError::NotRun);
    }
    let listed = |indices: &[usize]| {
        let mut listed: Vec<String> = Vec::new();
        for &at in indices {
            if !listed.iter().any(|one| one == names[at]) {
                listed.push(names[at].to_owned());
            }
            if listed.len() == CANDIDATES {
                break;
            }
        }
        listed
    };
    let part = all(&|one| one.contains(name));
    match &*part {
        [] => Err(AnnotateError::Unknown(listed(&(0..names.len()).collect::<Vec<_>>()))),
        [first, ..] if part.iter().all(|&at| names[at] == names[*first]) => Ok(part),
        _ => Err(AnnotateError::Ambiguous(listed(&part))),
    }
}

impl Annotation {
    pub(crate) fn of(
        profile: &Profile,
        symbols: &ProfileSymbols,
        sums: &ProfileSums,
        found: &FoundFunction,
    ) -> Result<Self, AnnotateError> {
        let id = &found.id;
        let file = usize::try_from(id.file).ok().and_then(|file| profile.files.get(file));
        let path = file.map_or("", |file| &file.path);
        let unreadable = || AnnotateError::Unreadable(path.to_owned());
        let table = symbols.table(id.file).ok_or_else(unreadable)?;
        let bytes = read_regular(Path::new(path)).ok_or_else(unreadable)?;
        let symbol = id.start.and_then(|start| table.at(start)).ok_or_else(unreadable)?;
        let range = symbol.address..symbol.address.saturating_add(symbol.bytes.max(1));
        let counts = InstructionCounts::of(profile, id.file, Some((table, &bytes)));
        let counts: BTreeMap<u64, Sum> =
            counts.by_address.range(range.clone()).map(|(&at, &sum)| (at, sum)).collect();
        let code = table.offset_of(range.start).and_then(|offset| {
            let bytes = bytes.get(usize::try_from(offset).ok()?..)?;
            let length = usize::try_from(range.end - range.start).ok()?;
            Some(&bytes[..length.min(bytes.len())])
        });
        let code = disassemble(code.ok_or_else(unreadable)?, &range, &counts, table);
        let lines = Lines::read(Path::new(path));
        let instructions = total(counts.values());
        let mut used: Vec<&SourceFile> = Vec::new();
        let mut rows = Vec::new();
        for (address, instruction) in code {
            let sum = counts.get(&address).copied().unwrap_or_default();
            let line = lines.as_ref().and_then(|lines| {
                let row = lines.row_at(address)?;
                Some((lines.source(row)?, row.line))
            });
            used.extend(line.map(|(source, _)| source));
            rows.push(InstructionRow {
                count: sum.count,
                bursts: sum.bursts,
                share_percent: share(sum.count, instructions),
                address,
                instruction,
                path: line.map(|(source, _)| source.path.clone()),
                line: line.map(|(_, line)| line),
            });
        }
        Ok(Self {
            program: profile.program.clone(),
            by: profile.by,
            bursts: profile.bursts,
            function: symbols.name(id),
            file: path.to_owned(),
            instructions,
            share_percent: share(instructions, total(sums.instructions.values())),
            sources: source_texts(&rows, &used),
            rows,
        })
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn text(&self) -> String {
        let mut text = format!(
            "{} of {}: {} instructions, {:.2} % of {}, {}\n\n",
            self.function,
            self.file,
            grouped(self.instructions),
            self.share_percent,
            self.program.join(" "),
            how(self.by, self.bursts),
        );
        let rows = self.rows.iter().map(InstructionRow::cells).collect();
        let head = ["count", "± %", "share %", "address", "instruction"];
        let is_exact = self.by == Source::Everything;
        let table = without_columns(&head, rows, if is_exact { &[1] } else { &[] });
        let mut lines = table.lines();
        text.extend(lines.next().map(|head| format!("{head}\n")));
        let mut before = None;
        for (row, cells) in self.rows.iter().zip(lines) {
            let line = row.path.clone().zip(row.line);
            if line != before {
                let source = line.as_ref().and_then(|line| self.sources.get(line));
                text += &format!("{}\n", source.map_or("[no line]", String::as_str));
                before = line;
            }
            text += &format!("{cells}\n");
        }
        text
    }
}

impl InstructionRow {
    fn cells(&self) -> Vec<String> {
        let [count, error, share] = match self.count {
            0 => [const { String::new() }; 3],
            count => [grouped(count), error(self.bursts), format!("{:.2}", self.share_percent)],
        };
        vec![count, error, share, format!("{:#x}", self.address), self.instruction.clone()]
    }
}

/// File, number and text of each source line; without text if the file cannot be read.
fn source_texts(rows: &[InstructionRow], used: &[&SourceFile]) -> HashMap<(String, u32), String> {
    let names = short_paths(used.iter().copied());
    let mut files: HashMap<&str, Option<Vec<u8>>> = HashMap::new();
    let mut texts = HashMap::new();
    for row in rows {
        let (Some(path), Some(line)) = (&row.path, row.line) else { continue };
        let name = names.get(&**path).copied().unwrap_or(path);
        let file = files.entry(path).or_insert_with(|| read_regular(Path::new(path)));
        texts.entry((path.clone(), line)).or_insert_with(|| {
            let text = file.as_ref().and_then(|bytes| line_of(bytes, line)).unwrap_or_default();
            format!("{name}:{line}  {text}").trim_end().to_owned()
        });
    }
    texts
}

/// A line of a file, with a space for each character that terminals would interpret.
fn line_of(bytes: &[u8], line: u32) -> Option<String> {
    let before = usize::try_from(line).ok()?.checked_sub(1)?;
    let text = bytes.split(|&byte| byte == b'\n').nth(before)?;
    let text = String::from_utf8_lossy(text);
    Some(text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect())
}

/// The instructions in a range, with their addresses.
///
/// Data between instructions is not told apart. But each address that ran is an instruction, so
/// decoding begins again there.
fn disassemble(
    code: &[u8],
    range: &Range<u64>,
    counts: &BTreeMap<u64, Sum>,
    table: &FunctionTable,
) -> Vec<(u64, String)> {
    let mut decoder = Decoder::with_ip(64, code, range.start, DecoderOptions::NONE);
    // An instruction, or an address up to which bytes are none.
    let mut decoded: Vec<(Instruction, Option<u64>)> = Vec::new();
    let mut names = BranchNames::default();
    while decoder.can_decode() {
        let instruction = decoder.decode();
        let (from, end) = (instruction.ip(), instruction.next_ip());
        let inside = counts.range(from + 1..end.max(from + 1)).next().map(|(&at, _)| at);
        let is_code = !instruction.is_invalid() && (inside.is_none() || counts.contains_key(&from));
        if is_code && let Some(to) = branch_target(&instruction) {
            names.add(to, table);
        }
        decoded.push((instruction, (!is_code).then_some(inside.unwrap_or(end))));
        if let Some(position) = inside.and_then(|at| usize::try_from(at - range.start).ok()) {
            // It is within the code, so that neither of these fails.
            let _moved = decoder.set_position(position);
            decoder.set_ip(range.start + position as u64);
        }
    }
    let mut formatter = GasFormatter::with_options(Some(Box::new(names)), None);
    let options = formatter.options_mut();
    options.set_uppercase_hex(false);
    options.set_branch_leading_zeros(false);
    options.set_small_hex_numbers_in_decimal(false);
    options.set_space_after_operand_separator(false);
    options.set_rip_relative_addresses(true);
    let mut rows = Vec::new();
    for (instruction, data_until) in &decoded {
        let mut text = String::new();
        if let Some(end) = data_until {
            let at = |address: u64| usize::try_from(address.saturating_sub(range.start)).ok();
            let bytes =
                at(instruction.ip()).zip(at(*end)).and_then(|(from, to)| code.get(from..to));
            let bytes: Vec<String> =
                bytes.unwrap_or_default().iter().map(|byte| format!("{byte:#04x}")).collect();
            text = format!(".byte {}", bytes.join(","));
        } else {
            formatter.format(instruction, &mut text);
        }
        rows.push((instruction.ip(), text));
    }
    rows
}

fn branch_target(instruction: &Instruction) -> Option<u64> {
    (instruction.op0_kind() == OpKind::NearBranch64).then(|| instruction.near_branch_target())
}

/// The functions that branches lead to, by the address in them.
#[derive(Default)]
struct BranchNames(HashMap<u64, (u64, String)>);

impl BranchNames {
    fn add(&mut self, to: u64, table: &FunctionTable) {
        if let Some(function) = table.at(to) {
            self.0.entry(to).or_insert_with(|| (function.address, function.name.clone()));
        }
    }
}

impl SymbolResolver for BranchNames {
    fn symbol(
        &mut self,
        instruction: &Instruction,
        _operand: u32,
        _instruction_operand: Option<u32>,
        address: u64,
        _address_size: u32,
    ) -> Option<SymbolResult<'_>> {
        branch_target(instruction).filter(|&to| to == address)?;
        let (start, name) = self.0.get(&address)?;
        Some(SymbolResult::with_str(*start, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_exactly_or_by_a_part_of_one() {
        let names = ["sum", "checksum", "main", "sum", "vec::push", "vec::push"];
        let found = |name| choose(name, &names, false);
        assert_eq!(found("sum"), Ok(vec![0, 3]));
        assert_eq!(found("checks"), Ok(vec![1]));
        assert_eq!(found("push"), Ok(vec![4, 5]));
        let listed = |all: &[&str]| all.iter().map(|&one| one.to_owned()).collect();
        let ambiguous = AnnotateError::Ambiguous(listed(&["sum", "checksum"]));
        assert_eq!(found("su"), Err(ambiguous));
        let hottest = AnnotateError::Unknown(listed(&["sum", "checksum", "main", "vec::push"]));
        assert_eq!(found("other"), Err(hottest));
        assert_eq!(choose("push", &names, true), Err(AnnotateError::NotRun));
    }

    #[test]
    fn lines_of_a_file_are_printable() {
        assert_eq!(line_of(b"a\n\tb\x1b[0m\r\nc", 2).as_deref(), Some(" b [0m "));
        assert_eq!(line_of(b"a\nb", 3), None);
        assert_eq!(line_of(b"a", 0), None);
    }

    /// Goal: what ran is decoded where it ran, behind data and within other instructions.
    #[test]
    fn decoding_follows_what_ran() {
        // jmp +1; (a byte of data); lock incl (%rdi); jne 0x1000; ret
        let code = [0xeb, 1, 0x48, 0xf0, 0xff, 7, 0x75, 0xf8, 0xc3];
        let table = FunctionTable::default();
        let range = 0x1000..0x1009;
        let ran = |all: &[u64]| all.iter().map(|&at| (at, Sum { count: 1, bursts: 0 })).collect();
        let text = |ran: BTreeMap<u64, Sum>| -> Vec<String> {
            let rows = disassemble(&code, &range, &ran, &table);
            rows.iter().map(|(at, text)| format!("{at:x} {text}")).collect()
        };
        let tail = ["1006 jne 0x1000", "1008 ret"];
        let expected = ["1000 jmp 0x1003", "1002 .byte 0x48", "1003 lock incl (%rdi)"];
        assert_eq!(text(ran(&[0x1000, 0x1003, 0x1006])), [&expected[..], &tail].concat());
        // The prefix is jumped over, and also executed.
        let expected = [&expected[..], &["1004 incl (%rdi)"], &tail].concat();
        assert_eq!(text(ran(&[0x1000, 0x1003, 0x1004])), expected);
    }
}
