//! A file of machine code: its segments and its functions.

use std::fs;
use std::path::Path;

use elfen_entries::{Frame, FunctionStarts, GoFunctions, frame};
use object::read::elf::ElfFile64;
use object::{Object as _, ObjectSection, ObjectSegment};

/// The address for a position-independent file.
const BASE: u64 = 0x20_0000_0000;
/// Distance from there, or from 0, to the memory of the test, within 2 GiB of the code.
const NEAR: u64 = 0x4000_0000;

pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) size: u64,
}

pub(super) struct Object {
    pub(super) near: u64,
    pub(super) segments: Vec<Segment>,
    pub(super) functions: Vec<Frame>,
}

impl Object {
    pub(super) fn read(path: &Path) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let file: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
        let bias = if file.kind() == object::ObjectKind::Executable { 0 } else { BASE };
        let segments = file.segments().filter_map(|segment| {
            let bytes = segment.data().ok()?.to_vec();
            Some(Segment { address: segment.address() + bias, bytes, size: segment.size() })
        });
        let section = |name: &str| {
            let section = file.section_by_name(name)?;
            Some((section.address() + bias, section.data().ok()?))
        };
        let unwound = || unwound(section(".eh_frame_hdr")?, section(".eh_frame")?);
        Some(Self {
            near: bias + NEAR,
            segments: segments.collect(),
            functions: section(".gopclntab").map_or_else(unwound, |(_, table)| of_go(table))?,
        })
    }

    pub(super) fn bytes(&self, start: u64, count: u64) -> Option<&[u8]> {
        let held = |segment: &&Segment| {
            (segment.address..segment.address + segment.bytes.len() as u64).contains(&start)
        };
        let segment = self.segments.iter().find(held)?;
        let from = usize::try_from(start - segment.address).ok()?;
        segment.bytes.get(from..from.checked_add(usize::try_from(count).ok()?)?)
    }
}

/// The functions by their unwind information.
fn unwound(header: (u64, &[u8]), frames: (u64, &[u8])) -> Option<Vec<Frame>> {
    let starts = FunctionStarts::parse(header.1, header.0)?;
    let of = |start| frame(frames.1, frames.0, starts.frame_of(start)?);
    Some(starts.all().filter_map(of).collect())
}

fn of_go(table: &[u8]) -> Option<Vec<Frame>> {
    let functions = GoFunctions::parse(table)?;
    let of = |start| {
        let (start, end) = functions.bounds_of(start)?;
        Some(Frame { start, bytes: end - start, is_signal: false, has_landing_pads: false })
    };
    Some(functions.all().filter_map(of).collect())
}
