//! Source lines of a program, from its DWARF: for each address the functions that were inlined
//! there, and the line in each.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use elfen_instrument::symbols::{read_debug_file, read_regular};
use gimli::{
    AttributeValue, DebuggingInformationEntry, Dwarf, EndianSlice, LineProgramHeader, LittleEndian,
    Unit, UnitOffset, constants as dw,
};
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use object::read::elf::ElfFile64;
use object::{CompressionFormat, Object, ObjectSection};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// More abstract origins than one function has.
const ORIGINS_MAX: u32 = 8;
/// More than a section of the largest program takes.
const SECTION_MAX: u64 = 1 << 32;

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
    pub(crate) line: u32,
    discriminator: u32,
    /// Index in [`Lines::sources`].
    source: Option<u32>,
}

/// A source file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SourceFile {
    /// Without `.` and `..`. Absolute, unless the compiler was told to hide its folder.
    pub(crate) path: String,
    /// The path from the folder that the compiler ran in, if the file is in it.
    pub(crate) in_folder: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Lines {
    rows: Vec<Row>,
    sources: Vec<SourceFile>,
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
    /// Reads the lines of a file; those of a stripped file from where debug packages install
    /// them. `None` if it has none.
    pub(crate) fn read(file: &Path) -> Option<Self> {
        let bytes = read_regular(file)?;
        let elf: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
        if elf.section_by_name(gimli::SectionId::DebugLine.name()).is_some() {
            return Self::parse(&elf);
        }
        let bytes = read_debug_file(elf.build_id().ok()??)?;
        Self::parse(&ElfFile64::parse(&*bytes).ok()?)
    }

    fn parse(elf: &ElfFile64<'_>) -> Option<Self> {
        let sections = gimli::DwarfSections::load(|id| {
            let section = elf.section_by_name(id.name());
            Ok::<_, gimli::Error>(section.and_then(|one| contents(&one)).unwrap_or_default())
        });
        let sections = sections.ok()?;
        let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        let mut units = Vec::new();
        let mut headers = dwarf.units();
        while let Ok(Some(header)) = headers.next() {
            units.extend(dwarf.unit(header));
        }
        let mut reader =
            Reader { dwarf: &dwarf, units: &units, known: HashMap::new(), sources: HashMap::new() };
        let mut lines = Self::default();
        for number in 0..units.len() {
            // A unit that cannot be read has no lines.
            let _unread = reader.read_unit(number, &mut lines);
        }
        lines.rows.sort_by_key(|row| (row.range.start, row.range.end));
        lines.outer.sort_by_key(|(range, _)| (range.start, range.end));
        (!lines.rows.is_empty()).then_some(lines)
    }

    /// The source file of a row.
    pub(crate) fn source(&self, row: &Row) -> Option<&SourceFile> {
        self.sources.get(usize::try_from(row.source?).ok()?)
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
        let scopes = self.scopes_at(row.range.start);
        let mut frames = Vec::new();
        for (at, scope) in scopes.iter().enumerate() {
            let function = &self.functions[scope.function];
            let [line, discriminator] = match scopes.get(at + 1) {
                Some(inner) => inner.call,
                None => [row.line, row.discriminator],
            };
            // 16 bits, because code of a header may be in front of its function.
            let line = line.wrapping_sub(function.line) & 0xffff;
            let at = Location { line, discriminator: base(discriminator) };
            frames.push(Frame { function: &function.name, at });
        }
        frames
    }

    /// The function that the code at an address was written in, which may be inlined there.
    pub(crate) fn innermost(&self, address: u64) -> Option<&str> {
        let scope = self.scopes_at(address).pop()?;
        Some(&self.functions[scope.function].name)
    }

    /// The scopes of an address, from the outermost to the innermost.
    fn scopes_at(&self, address: u64) -> Vec<&Scope> {
        let mut scopes = Vec::new();
        let mut next = self.outer_at(address).map(|(_, scope)| scope);
        while let Some(scope) = next.map(|scope| &self.scopes[scope]) {
            scopes.push(scope);
            let holds = |&&inner: &&usize| {
                self.scopes[inner].ranges.iter().any(|range| range.contains(&address))
            };
            next = scope.inner.iter().find(holds).copied();
        }
        scopes
    }
}

/// The bytes of a section, which may be compressed.
fn contents<'a>(section: &impl ObjectSection<'a>) -> Option<Cow<'a, [u8]>> {
    let found = section.compressed_data().ok()?;
    match found.format {
        CompressionFormat::None => Some(Cow::Borrowed(found.data)),
        CompressionFormat::Zlib => {
            let bytes = usize::try_from(found.uncompressed_size.min(SECTION_MAX)).ok()?;
            decompress_to_vec_zlib_with_limit(found.data, bytes).ok().map(Cow::Owned)
        }
        _ => None,
    }
}

/// A path without `.` and `..`, except for those at its start.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if plain.file_name().is_some_and(|name| name != "..") => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
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
    /// Source files by their paths.
    sources: HashMap<String, u32>,
}

type Entry<'a> = DebuggingInformationEntry<Slice<'a>>;

impl<'a> Reader<'a, '_> {
    fn read_unit(&mut self, number: usize, lines: &mut Lines) -> Result<(), gimli::Error> {
        let units = self.units;
        let unit = &units[number];
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

    fn read_rows(&mut self, unit: &Unit<Slice<'a>>, lines: &mut Lines) -> Result<(), gimli::Error> {
        let Some(program) = unit.line_program.clone() else { return Ok(()) };
        let mut rows = program.rows();
        let mut before: Option<Row> = None;
        // Source files by their numbers in this unit.
        let mut known: HashMap<u64, Option<u32>> = HashMap::new();
        // The linker moves code that it removes to address 0.
        let mut is_removed = false;
        while let Some((header, row)) = rows.next_row()? {
            let address = row.address();
            if let Some(mut before) = before.take() {
                before.range.end = address;
                if !before.range.is_empty() && before.line > 0 && !is_removed {
                    lines.rows.push(before);
                }
            } else {
                is_removed = address == 0;
            }
            if row.end_sequence() {
                continue;
            }
            let number = row.file_index();
            let source = *known
                .entry(number)
                .or_insert_with(|| self.source(unit, header, number, &mut lines.sources));
            let line = row.line().and_then(|line| u32::try_from(line.get()).ok()).unwrap_or(0);
            let discriminator = u32::try_from(row.discriminator()).unwrap_or(0);
            before = Some(Row { range: address..address, line, discriminator, source });
        }
        Ok(())
    }

    /// The index of a unit's source file, which may be new.
    fn source(
        &mut self,
        unit: &Unit<Slice<'a>>,
        header: &LineProgramHeader<Slice<'a>>,
        number: u64,
        sources: &mut Vec<SourceFile>,
    ) -> Option<u32> {
        let text = |value| {
            let text = self.dwarf.attr_string(unit, value).ok()?;
            Some(text.to_string_lossy().into_owned())
        };
        let file = header.file(number)?;
        let name = text(file.path_name())?;
        let folder = file.directory(header).and_then(text).unwrap_or_default();
        let compiled_in = unit.comp_dir.map(|folder| folder.to_string_lossy().into_owned());
        let compiled_in = plain(Path::new(&compiled_in.unwrap_or_default()));
        let path = plain(&compiled_in.join(folder).join(name));
        let in_folder = path.strip_prefix(&compiled_in).ok().filter(|_| path.is_absolute());
        let in_folder = in_folder.map(|path| path.to_string_lossy().into_owned());
        let path = path.to_string_lossy().into_owned();
        if let Some(&known) = self.sources.get(&path) {
            return Some(known);
        }
        let index = u32::try_from(sources.len()).ok()?;
        self.sources.insert(path.clone(), index);
        sources.push(SourceFile { path, in_folder });
        Some(index)
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
            AttributeValue::DebugInfoRef(at) => {
                // Units are in the order of their offsets.
                let start = |unit: &Unit<Slice<'a>>| unit.header.debug_info_offset();
                let after = self.units.partition_point(|unit| start(unit).is_some_and(|s| s <= at));
                let number = after.checked_sub(1)?;
                Some((number, at.to_unit_offset(&self.units[number].header)?))
            }
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
    fn paths_lose_their_detours() {
        let cases = [
            ("/a/./b/../c.c", "/a/c.c"),
            ("./string/../x/y.S", "x/y.S"),
            ("../up.c", "../up.c"),
            ("../../up.c", "../../up.c"),
            ("/../a.c", "/../a.c"),
        ];
        for (path, expected) in cases {
            assert_eq!(plain(Path::new(path)), Path::new(expected), "{path}");
        }
    }

    /// Goal: addresses of this test program lead to this file, and to a function that is here.
    #[test]
    fn lines_have_files_and_functions() {
        let program = std::env::current_exe().unwrap();
        let lines = Lines::read(&program).unwrap();
        let here = |row: &&Row| {
            lines.source(row).is_some_and(|file| file.path.ends_with("elfen-profile/src/lines.rs"))
        };
        let rows: Vec<&Row> = lines.rows().iter().filter(here).collect();
        let source = lines.source(rows[0]).unwrap();
        assert_eq!(source.in_folder.as_deref(), Some("elfen-profile/src/lines.rs"));
        assert_eq!(source.path, concat!(env!("CARGO_MANIFEST_DIR"), "/src/lines.rs"));
        let first = line!();
        let is_inside = |row: &&&Row| {
            let name = lines.innermost(row.range.start).unwrap_or_default();
            name.contains("lines_have_files_and_functions")
        };
        let this = rows.iter().find(is_inside).unwrap();
        assert!(this.line.abs_diff(first) < 30, "{} is not around {first}", this.line);
        assert_eq!(lines.row_at(this.range.start).unwrap().range, this.range);
    }

    #[test]
    fn copies_are_the_second_number() {
        assert_eq!([0, 2, 1].map(copies), [1, 1, 1]);
        // No base, 4 copies; base 2, 3 copies; base 32, 2 copies.
        assert_eq!([4 << 2 | 1, 3 << 8 | 2 << 1, 2 << 15 | 0xc0].map(copies), [4, 3, 2]);
    }
}
