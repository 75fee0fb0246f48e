//! Source lines of a program, from its DWARF: for each address the functions that were inlined
//! there, and the line in each.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use gimli::{
    AttributeValue, DebuggingInformationEntry, Dwarf, EndianSlice, LittleEndian, Unit, UnitOffset,
    constants as dw,
};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// More abstract origins than one function has.
const ORIGINS_MAX: u32 = 8;

/// A line, as a distance from the first line of its function, and which code of that line.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) struct Location {
    pub(crate) line: u32,
    pub(crate) discriminator: u32,
}

/// A function at an address, and where in it the address, or the function inlined there, is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Frame<'a> {
    pub(crate) function: &'a str,
    pub(crate) at: Location,
}

#[derive(Debug)]
struct Function {
    name: String,
    /// The line of its declaration.
    line: u32,
}

/// A function, or an inlined one, and the addresses of its code.
#[derive(Debug)]
struct Scope {
    ranges: Vec<Range<u64>>,
    function: usize,
    /// Where the enclosing scope has it: line and discriminator.
    call: [u32; 2],
    inner: Vec<usize>,
}

/// A piece of code of one line.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) range: Range<u64>,
    line: u32,
    discriminator: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Lines {
    rows: Vec<Row>,
    functions: Vec<Function>,
    scopes: Vec<Scope>,
    /// Functions that are not inlined, by their addresses.
    outer: Vec<(Range<u64>, usize)>,
}

impl Row {
    /// How many copies of the line's code run in turn.
    pub(crate) fn copies(&self) -> u64 {
        copies(self.discriminator).into()
    }
}

impl Lines {
    /// Reads the lines of a file. `None` if it has none.
    pub(crate) fn read(file: &Path) -> Option<Self> {
        let bytes = fs::read(file).ok()?;
        let elf: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
        let section = |id: gimli::SectionId| -> Result<Slice<'_>, gimli::Error> {
            let found = elf.section_by_name(id.name()).and_then(|section| section.data().ok());
            Ok(EndianSlice::new(found.unwrap_or_default(), LittleEndian))
        };
        let dwarf = Dwarf::load(section).ok()?;
        let mut units = Vec::new();
        let mut headers = dwarf.units();
        while let Ok(Some(header)) = headers.next() {
            units.push(dwarf.unit(header).ok()?);
        }
        let mut reader = Reader { dwarf: &dwarf, units: &units, known: HashMap::new() };
        let mut lines = Self::default();
        for number in 0..units.len() {
            // A unit that cannot be read has no lines.
            let _unread = reader.read_unit(number, &mut lines);
        }
        lines.rows.sort_by_key(|row| (row.range.start, row.range.end));
        lines.outer.sort_by_key(|(range, _)| (range.start, range.end));
        (!lines.rows.is_empty()).then_some(lines)
    }

    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The row of an address.
    pub(crate) fn row_at(&self, address: u64) -> Option<&Row> {
        let after = self.rows.partition_point(|row| row.range.start <= address);
        self.rows.get(after.checked_sub(1)?).filter(|row| row.range.contains(&address))
    }

    /// The name of the function that begins at an address.
    pub(crate) fn function_from(&self, address: u64) -> Option<&str> {
        let (range, scope) = self.outer_at(address)?;
        (range.start == address).then(|| &*self.functions[self.scopes[scope].function].name)
    }

    fn outer_at(&self, address: u64) -> Option<(Range<u64>, usize)> {
        let after = self.outer.partition_point(|(range, _)| range.start <= address);
        let found = self.outer.get(after.checked_sub(1)?)?;
        found.0.contains(&address).then(|| found.clone())
    }

    /// The functions of a row, from the outermost to the one whose line it is.
    pub(crate) fn frames(&self, row: &Row) -> Vec<Frame<'_>> {
        let address = row.range.start;
        let Some((_, mut scope)) = self.outer_at(address) else { return Vec::new() };
        let mut frames = Vec::new();
        loop {
            let found = &self.scopes[scope];
            let function = &self.functions[found.function];
            let holds = |inner: &&usize| {
                self.scopes[**inner].ranges.iter().any(|range| range.contains(&address))
            };
            let inner = found.inner.iter().find(holds);
            let [line, discriminator] = match inner {
                Some(&inner) => self.scopes[inner].call,
                None => [row.line, row.discriminator],
            };
            // 16 bits, because code of a header may be in front of its function.
            let line = line.wrapping_sub(function.line) & 0xffff;
            let at = Location { line, discriminator: base(discriminator) };
            frames.push(Frame { function: &function.name, at });
            match inner {
                Some(&inner) => scope = inner,
                None => return frames,
            }
        }
    }
}

/// A discriminator of LLVM has three numbers of variable length: an odd one is 0, and bit 6 marks a
/// long one. The first tells the code of one line apart.
fn base(discriminator: u32) -> u32 {
    if discriminator & 1 == 1 {
        return 0;
    }
    let number = discriminator >> 1;
    if number & 0x20 == 0 { number & 0x1f } else { (number >> 1) & 0xfe0 | number & 0x1f }
}

/// The second number: how often a loop was unrolled, each copy of which runs less often.
fn copies(discriminator: u32) -> u32 {
    let length = match discriminator {
        odd if odd & 1 == 1 => 1,
        long if long & 0x40 != 0 => 14,
        _ => 7,
    };
    base(discriminator >> length).max(1)
}

struct Reader<'a, 'd> {
    dwarf: &'d Dwarf<Slice<'a>>,
    units: &'d [Unit<Slice<'a>>],
    /// Functions by unit and offset of their entry.
    known: HashMap<(usize, usize), usize>,
}

type Entry<'a> = DebuggingInformationEntry<Slice<'a>>;

impl<'a> Reader<'a, '_> {
    fn read_unit(&mut self, number: usize, lines: &mut Lines) -> Result<(), gimli::Error> {
        let unit = &self.units[number];
        self.read_rows(unit, lines)?;
        let mut entries = unit.entries();
        // The scopes that enclose the current entry, by their depth.
        let mut open: Vec<(isize, usize)> = Vec::new();
        while let Some(entry) = entries.next_dfs()? {
            open.retain(|&(depth, _)| depth < entry.depth());
            let is_inlined = entry.tag() == dw::DW_TAG_inlined_subroutine;
            if !is_inlined && entry.tag() != dw::DW_TAG_subprogram {
                continue;
            }
            let mut ranges = Vec::new();
            let mut found = self.dwarf.die_ranges(unit, entry)?;
            while let Some(range) = found.next()? {
                if range.begin < range.end && range.begin > 0 {
                    ranges.push(range.begin..range.end);
                }
            }
            let Some(function) = self.function(number, entry, lines).filter(|_| !ranges.is_empty())
            else {
                continue;
            };
            let call = [dw::DW_AT_call_line, dw::DW_AT_GNU_discriminator];
            let call = call.map(|name| number_of(entry, name).unwrap_or(0));
            let scope = lines.scopes.len();
            match open.last() {
                Some(&(_, outer)) if is_inlined => lines.scopes[outer].inner.push(scope),
                _ => lines.outer.extend(ranges.iter().map(|range| (range.clone(), scope))),
            }
            lines.scopes.push(Scope { ranges, function, call, inner: Vec::new() });
            open.push((entry.depth(), scope));
        }
        Ok(())
    }

    fn read_rows(&self, unit: &Unit<Slice<'a>>, lines: &mut Lines) -> Result<(), gimli::Error> {
        let Some(program) = unit.line_program.clone() else { return Ok(()) };
        let mut rows = program.rows();
        let mut before: Option<(u64, u32, u32)> = None;
        while let Some((_, row)) = rows.next_row()? {
            if let Some((start, line, discriminator)) = before
                && start < row.address()
                && line > 0
            {
                lines.rows.push(Row { range: start..row.address(), line, discriminator });
            }
            let line = row.line().and_then(|line| u32::try_from(line.get()).ok()).unwrap_or(0);
            let discriminator = u32::try_from(row.discriminator()).unwrap_or(0);
            before = (!row.end_sequence()).then_some((row.address(), line, discriminator));
        }
        Ok(())
    }

    /// The function of an entry: its name and line may be in the entry that it comes from.
    fn function(&mut self, unit: usize, entry: &Entry<'a>, lines: &mut Lines) -> Option<usize> {
        let key = (unit, entry.offset().0);
        if let Some(&known) = self.known.get(&key) {
            return Some(known);
        }
        let (mut name, mut linkage_name, mut line) = (None, None, None);
        let (mut number, mut current) = (unit, entry.clone());
        for _ in 0..ORIGINS_MAX {
            let unit = &self.units[number];
            let text = |attribute| {
                let value = current.attr_value(attribute)?;
                let text = self.dwarf.attr_string(unit, value).ok()?;
                Some(text.to_string_lossy().into_owned())
            };
            linkage_name = linkage_name.or_else(|| text(dw::DW_AT_linkage_name));
            name = name.or_else(|| text(dw::DW_AT_name));
            line = line.or_else(|| number_of(&current, dw::DW_AT_decl_line));
            let origin = [dw::DW_AT_abstract_origin, dw::DW_AT_specification]
                .into_iter()
                .find_map(|attribute| current.attr_value(attribute));
            let Some((next, at)) = origin.and_then(|origin| self.find(number, &origin)) else {
                break;
            };
            (number, current) = (next, self.units[next].entry(at).ok()?);
        }
        let name = linkage_name.or(name)?;
        let function = lines.functions.len();
        lines.functions.push(Function { name, line: line.unwrap_or(0) });
        self.known.insert(key, function);
        Some(function)
    }

    /// The unit and the offset in it that a reference leads to.
    fn find(
        &self,
        unit: usize,
        reference: &AttributeValue<Slice<'a>>,
    ) -> Option<(usize, UnitOffset)> {
        match *reference {
            AttributeValue::UnitRef(at) => Some((unit, at)),
            AttributeValue::DebugInfoRef(at) => (0..)
                .zip(self.units)
                .find_map(|(number, unit)| Some((number, at.to_unit_offset(&unit.header)?))),
            _ => None,
        }
    }
}

fn number_of(entry: &Entry<'_>, name: gimli::DwAt) -> Option<u32> {
    entry.attr_value(name)?.udata_value().and_then(|value| u32::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_of_a_discriminator_is_its_first_number() {
        assert_eq!([0, 2, 4, 1, 3, 62].map(base), [0, 1, 2, 0, 0, 31]);
        // 32 takes seven bits: 0x20 << 1 with bit 6 as the mark.
        assert_eq!(base((0x20 << 1 | 0x20) << 1), 32);
    }

    #[test]
    fn copies_are_the_second_number() {
        assert_eq!([0, 2, 1].map(copies), [1, 1, 1]);
        // No base, 4 copies; base 2, 3 copies; base 32, 2 copies.
        assert_eq!([4 << 2 | 1, 3 << 8 | 2 << 1, 2 << 15 | 0xc0].map(copies), [4, 3, 2]);
    }
}
