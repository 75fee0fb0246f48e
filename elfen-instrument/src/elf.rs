//! Reads an ELF file: its kind, the compiler hooks that it calls, and the NOPs at its function
//! entries.

use elfen_entries::{FunctionStarts, SECTION, is_entry, nop_run};
use object::elf::{
    EM_X86_64, ET_DYN, ET_EXEC, FileHeader32, FileHeader64, PT_GNU_EH_FRAME, PT_INTERP,
    R_X86_64_RELATIVE,
};
use object::read::elf::{ElfFile, ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, FileKind, Object, ObjectSection, ObjectSegment, ObjectSymbol};
use object::{RelocationFlags, RelocationTarget};

/// What kind of ELF file it is. Only 64-bit x86 programs are read further.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Elf {
    X86_64(Executable),
    ThirtyTwoBits,
    /// For another machine; its number in `e_machine`.
    Foreign(u16),
    /// An object file or a core dump: the kernel cannot execute it.
    NotExecutable,
}

/// A 64-bit x86 program, and what in it matters for checks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Executable {
    /// It names a loader (`PT_INTERP`), which also loads libraries from `LD_PRELOAD`.
    pub(crate) dynamic: bool,
    pub(crate) mcount: bool,
    pub(crate) fentry: bool,
    pub(crate) cyg: bool,
    /// It was built with AddressSanitizer, which refuses to start after a preloaded library.
    pub(crate) asan: bool,
    /// Set if its source has checks: where the slow path of these checks is.
    pub(crate) inline: Option<SlowPath>,
    pub(crate) entries: Option<Entries>,
    pub(crate) compiles: Option<Compiler>,
}

/// A virtual machine that compiles code at run time. Such code is not in the program's file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compiler {
    HotSpot,
    V8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SlowPath {
    InProgram,
    InLibrary,
}

/// The function entries that the compiler filled with NOPs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entries {
    /// Number of entries that are listed and really begin a function.
    pub(crate) usable: usize,
    /// The fewest bytes of NOPs at any of these entries.
    pub(crate) room: usize,
}

/// Reads a file. `None` if it is not an ELF file, an error if it is a damaged one.
pub(crate) fn read(bytes: &[u8]) -> Option<Result<Elf, object::Error>> {
    if !bytes.starts_with(&object::elf::ELFMAG) {
        return None;
    }
    Some(match FileKind::parse(bytes) {
        Ok(FileKind::Elf64) => read_64(bytes),
        Ok(FileKind::Elf32) => read_32(bytes),
        Ok(_) => Ok(Elf::NotExecutable),
        Err(error) => Err(error),
    })
}

fn read_32(bytes: &[u8]) -> Result<Elf, object::Error> {
    let header = FileHeader32::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    Ok(match header.e_machine(endian) {
        object::elf::EM_386 => Elf::ThirtyTwoBits,
        other => Elf::Foreign(other),
    })
}

fn read_64(bytes: &[u8]) -> Result<Elf, object::Error> {
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    if header.e_machine(endian) != EM_X86_64 {
        return Ok(Elf::Foreign(header.e_machine(endian)));
    }
    if !matches!(header.e_type(endian), ET_EXEC | ET_DYN) {
        return Ok(Elf::NotExecutable);
    }
    let file: ElfFile64<'_> = ElfFile::parse(bytes)?;
    let mut program = Executable { dynamic: has_segment(&file, PT_INTERP), ..Default::default() };
    for symbol in file.dynamic_symbols() {
        let name = symbol.name_bytes()?;
        // Symbols of the C++ namespaces `v8` and `node`, which the program defines or imports.
        if name.starts_with(b"_ZN2v8") || name.starts_with(b"_ZN4node5Start") {
            program.compiles = Some(Compiler::V8);
        }
        if !symbol.is_undefined() {
            continue;
        }
        match name {
            b"JLI_Launch" | b"JNI_CreateJavaVM" => program.compiles = Some(Compiler::HotSpot),
            // `_mcount` does not count: glibc defines it too, and the preload library replaces only
            // `mcount`.
            b"mcount" => program.mcount = true,
            b"__fentry__" => program.fentry = true,
            b"__cyg_profile_func_enter" => program.cyg = true,
            b"__asan_init" => program.asan = true,
            b"elfen_look_1" => program.inline = Some(SlowPath::InLibrary),
            _ => {}
        }
    }
    if file.section_by_name(".note.elfen.check").is_some() {
        program.inline = Some(SlowPath::InProgram);
    }
    program.entries = entries(&file);
    Ok(Elf::X86_64(program))
}

fn has_segment(file: &ElfFile64<'_>, kind: u32) -> bool {
    let endian = file.endian();
    file.elf_program_headers().iter().any(|header| header.p_type(endian) == kind)
}

/// `None` if the file has no list of entries or no table of function starts.
fn entries(file: &ElfFile64<'_>) -> Option<Entries> {
    let listed = listed_entries(file)?;
    let (bytes, address) = segment_of_kind(file, PT_GNU_EH_FRAME)?;
    let starts = FunctionStarts::parse(bytes, address)?;
    let rooms = listed.into_iter().filter_map(|entry| nop_bytes(file, &starts, entry));
    let (usable, room) =
        rooms.fold((0, usize::MAX), |(usable, least), room| (usable + 1, least.min(room)));
    Some(Entries { usable, room: if usable == 0 { 0 } else { room } })
}

/// The addresses that the section lists. In a position-independent program they are the addends of
/// the relocations that fill the section.
fn listed_entries(file: &ElfFile64<'_>) -> Option<Vec<u64>> {
    let section = file.section_by_name(SECTION)?;
    let (start, end) = (section.address(), section.address().checked_add(section.size())?);
    let relative = |(at, relocation): (u64, object::Relocation)| {
        let ours = (start..end).contains(&at)
            && relocation.target() == RelocationTarget::Absolute
            && relocation.flags() == RelocationFlags::Elf { r_type: R_X86_64_RELATIVE };
        ours.then(|| relocation.addend().cast_unsigned())
    };
    let relocated: Vec<u64> =
        file.dynamic_relocations().into_iter().flatten().filter_map(relative).collect();
    if !relocated.is_empty() {
        return Some(relocated);
    }
    let (words, _) = section.data().ok()?.as_chunks::<8>();
    Some(words.iter().copied().map(u64::from_le_bytes).filter(|&word| word != 0).collect())
}

/// The number of NOP bytes at `entry`; `None` if no function begins there.
fn nop_bytes(file: &ElfFile64<'_>, starts: &FunctionStarts<'_>, entry: u64) -> Option<usize> {
    let (code, start) = segment_with(file, entry)?;
    let at = usize::try_from(entry.checked_sub(start)?).ok()?;
    let before = at.checked_sub(4).and_then(|from| code.get(from..at)?.try_into().ok());
    if !is_entry(entry, before.unwrap_or_default(), starts) {
        return None;
    }
    Some(nop_run(code.get(at..)?)).filter(|&room| room > 0)
}

/// The contents and the address of the segment that contains `address`.
fn segment_with<'a>(file: &ElfFile64<'a>, address: u64) -> Option<(&'a [u8], u64)> {
    let segment = file.segments().find(|segment| {
        address.checked_sub(segment.address()).is_some_and(|offset| offset < segment.size())
    })?;
    Some((segment.data().ok()?, segment.address()))
}

fn segment_of_kind<'a>(file: &ElfFile64<'a>, kind: u32) -> Option<(&'a [u8], u64)> {
    let endian = file.endian();
    let header = file.elf_program_headers().iter().find(|header| header.p_type(endian) == kind)?;
    Some((header.data(endian, file.data()).ok()?, header.p_vaddr(endian)))
}
