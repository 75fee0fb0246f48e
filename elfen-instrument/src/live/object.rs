//! Finds the function around an address, by the unwind tables that its object has mapped.
//!
//! All tables are read from the memory of the process. The file may have been replaced since, or
//! may not be visible to this process.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

use elfen_entries::{Frame, FunctionStarts, GoFunctions, frame, visit_frames};
use object::{Object as _, ObjectSection, ReadCache};

use super::missed::Missed;
use crate::remote::{Mapping, Memory};

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
const SEGMENTS_MAX: u16 = 64;
/// More than four times the longest table that we measured.
const TABLE_MAX: u64 = 1 << 26;
const PT_LOAD: u32 = 1;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
/// How Go's table begins, in both supported versions.
const GO_TABLE: [[u8; 8]; 2] =
    [[0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8], [0xf0, 0xff, 0xff, 0xff, 0, 0, 1, 8]];
const GO_ALIGNED: usize = 16;

/// The objects of a process, by start address and file: after a library is unloaded, another may be
/// mapped at its address.
#[derive(Clone, Debug, Default)]
pub(super) struct Objects {
    known: HashMap<(u64, Option<(String, u64)>), Object>,
}

/// The tables of one object.
#[derive(Clone, Debug, Default)]
struct Object {
    /// `.eh_frame_hdr` and `.eh_frame`, with their addresses.
    starts: Table,
    frames: Table,
    /// Every function in order, for programs without `.eh_frame_hdr`.
    listed: Vec<Bounds>,
    go: Table,
}

/// The bounds of a function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    pub(super) range: Range<u64>,
    /// Control can enter the middle of the function without a visible branch.
    pub(super) has_landing_pads: bool,
}

impl Bounds {
    fn of(frame: &Frame) -> Option<Self> {
        let range = frame.start..frame.start.checked_add(frame.bytes)?;
        (!frame.is_signal).then_some(Self { range, has_landing_pads: frame.has_landing_pads })
    }
}

#[derive(Clone, Debug, Default)]
struct Table {
    address: u64,
    bytes: Vec<u8>,
}

impl Objects {
    /// The function around `ip`, which lies in the code mapping `code`.
    pub(super) fn function_around(
        &mut self,
        process: u32,
        memory: &Memory,
        mapped: &[Mapping],
        code: &Mapping,
        ip: u64,
    ) -> Result<Bounds, Missed> {
        let base = base(mapped, code).ok_or(Missed::NoFunction)?;
        let object = match self.known.entry((base, code.file.clone())) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(Object::read(process, memory, mapped, base).ok_or(Missed::NoFunction)?)
            }
        };
        let found = object.function(ip).ok_or(Missed::NoFunction)?;
        // The tables are untrusted input.
        let Range { start, end } = found.range;
        if start <= ip && code.range.start <= start && ip < end && end <= code.range.end {
            return Ok(found);
        }
        Err(Missed::NoFunction)
    }
}

/// Where the object begins that `code` is mapped from.
fn base(mapped: &[Mapping], code: &Mapping) -> Option<u64> {
    let before = mapped.iter().filter(|one| one.range.start <= code.range.start);
    let own = before.filter(|one| one.file == code.file && one.offset == 0);
    own.map(|one| one.range.start).next_back()
}

/// The position of an object in memory, by its own program headers.
pub(super) struct Loaded {
    /// Added to the addresses in the file to get addresses in memory.
    pub(super) bias: u64,
    segments: Vec<Segment>,
}

impl Loaded {
    /// The object that `code` is a mapping of.
    pub(super) fn of(memory: &Memory, mapped: &[Mapping], code: &Mapping) -> Option<Self> {
        Self::read(memory, base(mapped, code)?)
    }

    fn read(memory: &Memory, base: u64) -> Option<Self> {
        let header = memory.read_vec(base, HEADER_BYTES).ok()?;
        // ELF, 64 bits, little-endian.
        if header.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let at = base.checked_add(u64_at(&header, 32)?)?;
        let (size, count) = (u16_at(&header, 54)?, u16_at(&header, 56)?);
        if usize::from(size) != SEGMENT_BYTES || count > SEGMENTS_MAX {
            return None;
        }
        let bytes = memory.read_vec(at, SEGMENT_BYTES * usize::from(count)).ok()?;
        let segments: Vec<Segment> =
            bytes.chunks_exact(SEGMENT_BYTES).filter_map(Segment::read).collect();
        let first = segments.iter().find(|one| one.kind == PT_LOAD)?;
        let bias = base.wrapping_sub(first.address - first.address % 4096);
        Some(Self { bias, segments })
    }

    /// Address and length of the first segment of a kind.
    pub(super) fn segment(&self, kind: u32) -> Option<(u64, u64)> {
        let one = self.segments.iter().find(|one| one.kind == kind)?;
        Some((self.bias.checked_add(one.address)?, one.bytes))
    }
}

impl Object {
    fn read(process: u32, memory: &Memory, mapped: &[Mapping], base: u64) -> Option<Self> {
        let Loaded { bias, segments } = Loaded::read(memory, base)?;
        let mut object = Self::default();
        if let Some(unwind) = segments.iter().find(|one| one.kind == PT_GNU_EH_FRAME) {
            object.read_frames(memory, &segments, bias, unwind);
        } else {
            object.listed = list_functions(process, memory, base, bias).unwrap_or_default();
        }
        let loaded = segments.iter().filter(|one| one.kind == PT_LOAD).filter_map(|one| {
            let start = bias.checked_add(one.address)?;
            Some(start..start.checked_add(one.bytes)?)
        });
        let readable = loaded.filter(|range| {
            mapped.iter().any(|one| one.range.contains(&range.start) && !one.executable)
        });
        object.go = readable.filter_map(|range| go_table(memory, range)).next().unwrap_or_default();
        Some(object)
    }

    fn read_frames(
        &mut self,
        memory: &Memory,
        segments: &[Segment],
        bias: u64,
        unwind: &Segment,
    ) -> Option<()> {
        let address = bias.checked_add(unwind.address)?;
        let starts = Table::read(memory, address, unwind.bytes)?;
        // Version, three encodings, and the distance from here to the frames.
        let distance = starts.bytes.get(4..8)?.try_into().ok().map(i32::from_le_bytes)?;
        let frames = address.checked_add(4)?.checked_add_signed(distance.into())?;
        let inside = segments.iter().filter(|one| one.kind == PT_LOAD).find_map(|one| {
            let start = bias.checked_add(one.address)?;
            let end = start.checked_add(one.bytes)?;
            (start..end).contains(&frames).then_some(end)
        })?;
        self.frames = Table::read(memory, frames, inside - frames)?;
        self.starts = starts;
        Some(())
    }

    fn function(&self, ip: u64) -> Option<Bounds> {
        let by_frame = || {
            let starts = FunctionStarts::parse(&self.starts.bytes, self.starts.address)?;
            let entry = starts.frame_of(ip)?;
            let found = Bounds::of(&frame(&self.frames.bytes, self.frames.address, entry)?)?;
            found.range.contains(&ip).then_some(found)
        };
        let by_list = || {
            let after = self.listed.partition_point(|one| one.range.start <= ip);
            let found = self.listed.get(after.checked_sub(1)?)?;
            found.range.contains(&ip).then(|| found.clone())
        };
        let by_go = || {
            let (start, end) = GoFunctions::parse(&self.go.bytes)?.bounds_of(ip)?;
            // The Go runtime enters functions by its own tables.
            Some(Bounds { range: start..end, has_landing_pads: true })
        };
        by_frame().or_else(by_list).or_else(by_go)
    }
}

/// The functions of a static program without a search table. Only the file shows where the frames
/// are; their contents are read from memory.
fn list_functions(process: u32, memory: &Memory, base: u64, bias: u64) -> Option<Vec<Bounds>> {
    let file = ReadCache::new(File::open(format!("/proc/{process}/exe")).ok()?);
    let file = object::read::elf::ElfFile64::<object::Endianness, _>::parse(&file).ok()?;
    let section = file.section_by_name(".eh_frame")?;
    let address = bias.checked_add(section.address())?;
    let table = Table::read(memory, address.max(base), section.size())?;
    let mut found: Vec<Bounds> = Vec::new();
    visit_frames(&table.bytes, table.address, |frame| found.extend(Bounds::of(&frame)));
    found.sort_by_key(|one| one.range.start);
    Some(found)
}

/// A program header.
struct Segment {
    kind: u32,
    address: u64,
    bytes: u64,
}

impl Segment {
    fn read(header: &[u8]) -> Option<Self> {
        let kind = u32::from_le_bytes(*header.first_chunk()?);
        Some(Self { kind, address: u64_at(header, 16)?, bytes: u64_at(header, 40)? })
    }
}

impl Table {
    fn read(memory: &Memory, address: u64, bytes: u64) -> Option<Self> {
        let length = usize::try_from(bytes.min(TABLE_MAX)).ok()?;
        Some(Self { address, bytes: memory.read_vec(address, length).ok()? })
    }
}

/// Finds Go's table by its first bytes, because only the file names the section that holds it.
fn go_table(memory: &Memory, range: Range<u64>) -> Option<Table> {
    let mut table = Table::read(memory, range.start, range.end - range.start)?;
    let found = table
        .bytes
        .chunks_exact(GO_ALIGNED)
        .position(|chunk| GO_TABLE.iter().any(|begins| chunk.starts_with(begins)))?
        * GO_ALIGNED;
    let bytes = table.bytes.split_off(found);
    GoFunctions::parse(&bytes)?;
    Some(Table { address: table.address.checked_add(u64::try_from(found).ok()?)?, bytes })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at.checked_add(2)?)?.try_into().ok().map(u16::from_le_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::mappings;

    fn bounds(ip: u64) -> Result<Range<u64>, Missed> {
        let own = std::process::id();
        let memory = Memory::open(own).unwrap();
        let mapped = mappings(own).unwrap();
        let code = mapped.iter().find(|one| one.range.contains(&ip)).unwrap();
        Objects::default().function_around(own, &memory, &mapped, code, ip).map(|found| found.range)
    }

    #[test]
    fn a_function_is_found_by_any_address_in_it() {
        let start = u64_at as fn(&[u8], usize) -> Option<u64> as usize as u64;
        let found = bounds(start).unwrap();
        assert_eq!(found.start, start);
        assert_eq!(bounds(found.end - 1).unwrap(), found);
        let library = libc::strtoul as *const () as usize as u64;
        assert!(bounds(library + 1).unwrap().contains(&library), "of a library");
    }

    #[test]
    fn memory_without_an_object_has_no_functions() {
        let heap = Box::new([0x7f_u8; 4096]);
        let at = heap.as_ptr().expose_provenance() as u64;
        assert!(matches!(bounds(at), Err(Missed::NoFunction)));
    }

    /// Goal: hostile tables in a process's memory are parsed or rejected, without a panic. Method:
    /// the image of a program with some changed bytes, most of them in tables, and any address.
    #[test]
    fn damaged_objects_are_parsed_or_rejected() {
        const CASES: u64 = 1_000;
        let own = std::process::id();
        let memory = Memory::open(own).unwrap();
        let image = std::fs::read("/bin/true").unwrap();
        let mut bytes = image.clone();
        let base = bytes.as_ptr().expose_provenance() as u64;
        let mapped = [Mapping {
            range: base..base + bytes.len() as u64,
            writable: false,
            executable: true,
            private: true,
            offset: 0,
            file: Some(("8:1".to_owned(), 1)),
            name: "/bin/true".to_owned(),
        }];
        let found = |ip: u64| {
            Objects::default().function_around(own, &memory, &mapped, &mapped[0], base + ip).is_ok()
        };
        let length = image.len() as u64;
        assert!((0..length).step_by(64).any(found), "a function of it is found");
        let mut seed = 88_172_645_463_325_252_u64;
        let mut next = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        let tables = Loaded::read(&memory, base).unwrap().segment(PT_GNU_EH_FRAME).unwrap();
        let tables = tables.0 - base;
        let mut still = 0;
        for _ in 0..CASES {
            bytes.copy_from_slice(&image);
            for _ in 0..=next(6) {
                let near = [0, 0x40, tables, tables + 16, next(length)];
                let site = near[usize::try_from(next(5)).unwrap()] + next(0x200);
                let with = [0, 0xff, 0x7f, 0x80, next(256)][usize::try_from(next(5)).unwrap()];
                if let Some(byte) = bytes.get_mut(usize::try_from(site).unwrap()) {
                    *byte = u8::try_from(with).unwrap();
                }
            }
            still += u32::from(found(next(length)));
        }
        assert!(still > 0, "some damaged images still parse");
    }
}
