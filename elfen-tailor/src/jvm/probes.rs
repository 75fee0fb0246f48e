//! Finds the probes of a JVM: notes in its library give the address of each, where a breakpoint can
//! be set.

use std::fs::File;
use std::io;
use std::path::Path;

use elfen_kernel::events::ProbePoint;
use elfen_rt::signal::event::Runtime;
use object::read::ReadCache;
use object::read::elf::{
    ElfFile64, FileHeader as _, NoteIterator, ProgramHeader as _, SectionHeader as _,
};
use object::{Endianness, elf};

/// The owner and the type of the notes that describe probes.
const OWNER: &[u8] = b"stapsdt";
const NOTE: u32 = 3;

/// The probes that Tailor uses: provider, name, and meaning.
const PROBES: [(&str, &str, Runtime); 6] = [
    ("hs_private", "safepoint__begin", Runtime::SafepointBegin),
    ("hs_private", "safepoint__end", Runtime::SafepointEnd),
    ("hotspot", "gc__begin", Runtime::GcBegin),
    ("hotspot", "gc__end", Runtime::GcEnd),
    ("hotspot", "vmops__begin", Runtime::Operation([0; 16])),
    ("hotspot", "class__loaded", Runtime::ClassLoaded),
];

/// The probes in a library; empty if it was built without probes.
pub(super) fn probe_sites(library: &Path) -> io::Result<Vec<ProbePoint>> {
    let file = ReadCache::new(File::open(library)?);
    sites_of(&file).map_err(io::Error::other)
}

fn sites_of<'a, R: object::ReadRef<'a>>(data: R) -> object::Result<Vec<ProbePoint>> {
    let file = ElfFile64::<'a, Endianness, R>::parse(data)?;
    let endian = file.endian();
    let header = file.elf_header();
    let sections = header.sections(endian, data)?;
    // Addresses in notes are from before the file was prelinked. The address of this section shows
    // by how much they moved.
    let base = sections.section_by_name(endian, b".stapsdt.base");
    let base = base.map_or(0, |(_, section)| section.sh_addr(endian));
    let segments = header.program_headers(endian, data)?;
    let offset_of = |address: u64| {
        segments.iter().filter(|s| s.p_type(endian) == elf::PT_LOAD).find_map(|segment| {
            let inside = address.checked_sub(segment.p_vaddr(endian))?;
            (inside < segment.p_filesz(endian)).then(|| segment.p_offset(endian) + inside)
        })
    };
    let mut sites = Vec::new();
    for section in sections.iter() {
        let Some(mut notes): Option<NoteIterator<'_, _>> = section.notes(endian, data)? else {
            continue;
        };
        while let Some(note) = notes.next()? {
            if note.name() != OWNER || note.n_type(endian) != NOTE {
                continue;
            }
            let found = parse(note.desc(), base);
            sites.extend(found.and_then(|(address, step, register)| {
                Some(ProbePoint { step, offset: offset_of(address)?, register })
            }));
        }
    }
    Ok(sites)
}

/// Parses a note: address, base and semaphore, then provider, name and arguments. Probes that need
/// their semaphore set are skipped.
fn parse(note: &[u8], base: u64) -> Option<(u64, Runtime, Option<u8>)> {
    let (words, texts) = note.split_at_checked(24)?;
    let word = |at: usize| words[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
    let address = word(0)?;
    let noted_base = word(8)?;
    let semaphore = word(16)?;
    let mut texts = texts.split(|byte| *byte == 0).map(std::str::from_utf8);
    let provider = texts.next()?.ok()?;
    let name = texts.next()?.ok()?;
    let arguments = texts.next()?.ok()?;
    let (.., step) = PROBES.into_iter().find(|probe| (probe.0, probe.1) == (provider, name))?;
    let moved = if base == 0 { 0 } else { base.wrapping_sub(noted_base) };
    let register = match step {
        Runtime::Operation(_) => register(arguments),
        _ => None,
    };
    (semaphore == 0).then_some((address.wrapping_add(moved), step, register))
}

/// The offset in `pt_regs` of the first argument, if it is in a register.
fn register(arguments: &str) -> Option<u8> {
    const REGISTERS: [&str; 15] = [
        "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx",
        "rsi", "rdi",
    ];
    let first = arguments.split(' ').next()?.strip_prefix("8@%")?;
    let at = REGISTERS.iter().position(|name| *name == first)?;
    u8::try_from(at * 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(provider: &str, name: &str, arguments: &str, semaphore: u64) -> Vec<u8> {
        let words = [0x1000_u64, 0x50, semaphore].map(u64::to_le_bytes);
        let texts = format!("{provider}\0{name}\0{arguments}\0");
        [words.as_flattened(), texts.as_bytes()].concat()
    }

    #[test]
    fn notes_give_addresses() {
        let begin = note("hs_private", "safepoint__begin", "", 0);
        assert_eq!(parse(&begin, 0x60), Some((0x1010, Runtime::SafepointBegin, None)));
        let operation = note("hotspot", "vmops__begin", "8@%r12 8@%rdx -4@%eax", 0);
        let found = parse(&operation, 0).unwrap();
        assert_eq!((found.0, found.2), (0x1000, Some(24)));
        let elsewhere = note("hotspot", "vmops__begin", "8@-16(%rbp)", 0);
        assert_eq!(parse(&elsewhere, 0).unwrap().2, None);
        for not in [
            note("hotspot", "thread__start", "", 0),
            note("other", "gc__begin", "", 0),
            note("hotspot", "gc__begin", "", 7),
        ] {
            assert_eq!(parse(&not, 0), None);
        }
        for cut in 0..begin.len() - 1 {
            assert!(parse(&begin[..cut], 0).is_none(), "{cut}");
        }
    }
}
