//! The functions of a file by its symbols, with readable names.

use std::fs;
use std::path::{Path, PathBuf};

use elfen_entries::{Frame, FunctionStarts, frame};
use object::read::elf::ElfFile64;
use object::{
    Endianness, Object, ObjectSection, ObjectSegment, ObjectSymbol, ReadCache, SymbolKind,
};

/// The folder in which distributions install the symbols of stripped files, by build id.
pub const DEBUG_SYMBOLS: &str = "/usr/lib/debug/.build-id";

/// A function of a file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FunctionSymbol {
    pub address: u64,
    pub bytes: u64,
    pub name: String,
    /// The symbol itself; empty if there is none.
    pub symbol: String,
    /// Other files may have functions with the same symbol.
    pub is_local: bool,
}

/// The functions of one file, by address.
#[derive(Clone, Debug, Default)]
pub struct FunctionTable {
    functions: Vec<FunctionSymbol>,
    /// Offset, length and address of each loaded segment.
    segments: Vec<[u64; 3]>,
    pub build_id: Vec<u8>,
}

impl FunctionTable {
    /// Reads the symbols of a file; those of a stripped file from where debug packages install
    /// them. Functions without a symbol are named by their addresses, as in `0x1a40`. `None` if it
    /// is not a 64-bit ELF file.
    pub fn read(file: &Path) -> Option<Self> {
        let bytes = read_regular(file)?;
        let elf: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
        let build_id = elf.build_id().ok().flatten().unwrap_or_default().to_vec();
        let segments = elf.segments().map(|segment| {
            let (offset, bytes) = segment.file_range();
            [offset, bytes, segment.address()]
        });
        let mut table = Self { segments: segments.collect(), build_id, ..Self::default() };
        table.add(&elf);
        if elf.symbols().next().is_none()
            && let Some(bytes) = read_debug_file(&table.build_id)
            && let Ok(debug) = ElfFile64::parse(&*bytes)
        {
            table.add(&debug);
        }
        table.functions.sort();
        table.functions.dedup_by_key(|one| one.address);
        table.add_unnamed(&elf);
        Some(table)
    }

    /// Adds the functions that only the unwind tables of the file tell, named by their addresses.
    fn add_unnamed(&mut self, file: &ElfFile64<'_>) -> Option<()> {
        let section = |name: &str| {
            let section = file.section_by_name(name)?;
            Some((section.address(), section.data().ok()?))
        };
        let ((starts_at, starts), (frames_at, frames)) =
            (section(".eh_frame_hdr")?, section(".eh_frame")?);
        let starts = FunctionStarts::parse(starts, starts_at)?;
        let mut unnamed = Vec::new();
        for start in starts.all() {
            let Some(found) = starts.frame_of(start).and_then(|at| frame(frames, frames_at, at))
            else {
                continue;
            };
            if self.at(found.start).is_none() {
                let Frame { start: address, bytes, .. } = found;
                let (name, symbol) = (format!("{address:#x}"), String::new());
                unnamed.push(FunctionSymbol { address, bytes, name, symbol, is_local: true });
            }
        }
        self.functions.append(&mut unnamed);
        self.functions.sort();
        Some(())
    }

    fn add(&mut self, file: &ElfFile64<'_>) {
        for symbol in file.symbols().chain(file.dynamic_symbols()) {
            let Ok(name) = symbol.name() else { continue };
            if symbol.is_undefined() || name.is_empty() || symbol.kind() != SymbolKind::Text {
                continue;
            }
            let (address, bytes) = (symbol.address(), symbol.size());
            self.functions.push(FunctionSymbol {
                address,
                bytes,
                name: demangled(name),
                symbol: name.to_owned(),
                is_local: symbol.is_local(),
            });
        }
    }

    pub fn functions(&self) -> &[FunctionSymbol] {
        &self.functions
    }

    /// The function that contains an address.
    pub fn at(&self, address: u64) -> Option<&FunctionSymbol> {
        let after = self.functions.partition_point(|one| one.address <= address);
        let found = self.functions.get(after.checked_sub(1)?)?;
        (address - found.address < found.bytes.max(1)).then_some(found)
    }

    /// The address of the byte at an offset of the file.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        self.segments.iter().find_map(|&[start, bytes, address]| {
            let inside = offset.checked_sub(start).filter(|&inside| inside < bytes)?;
            address.checked_add(inside)
        })
    }

    /// The offset in the file of the byte at an address.
    pub fn offset_of(&self, address: u64) -> Option<u64> {
        self.segments.iter().find_map(|&[offset, bytes, start]| {
            let inside = address.checked_sub(start).filter(|&inside| inside < bytes)?;
            offset.checked_add(inside)
        })
    }
}

/// The bytes of a file. `None` if it cannot be read, or is a device or a pipe, which may never end.
pub fn read_regular(file: &Path) -> Option<Vec<u8>> {
    fs::metadata(file).ok().filter(fs::Metadata::is_file)?;
    fs::read(file).ok()
}

/// The address of a symbol that a file exports.
pub fn address_of_symbol(file: &[u8], name: &str) -> Option<u64> {
    let elf: ElfFile64<'_> = ElfFile64::parse(file).ok()?;
    let found = elf.dynamic_symbols().find(|symbol| symbol.name() == Ok(name));
    found.map(|symbol| symbol.address())
}

/// The build id of a file; empty if it has none, `None` if it is not a 64-bit ELF file.
pub fn build_id_of(file: &Path) -> Option<Vec<u8>> {
    let file = ReadCache::new(fs::File::open(file).ok()?);
    let elf: ElfFile64<'_, Endianness, _> = ElfFile64::parse(&file).ok()?;
    Some(elf.build_id().ok().flatten().unwrap_or_default().to_vec())
}

/// The debug file with the symbols of a stripped program.
pub fn debug_file(build_id: &[u8], folder: &Path) -> Option<PathBuf> {
    let (first, rest) = build_id.split_first()?;
    let rest: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(folder.join(format!("{first:02x}/{rest}.debug")))
}

/// The bytes of the debug file of a stripped program, if it is installed.
pub fn read_debug_file(build_id: &[u8]) -> Option<Vec<u8>> {
    read_regular(&debug_file(build_id, Path::new(DEBUG_SYMBOLS))?)
}

/// The readable form of a symbol of Rust or C++.
pub fn demangled(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    if name.starts_with("_Z") {
        let symbol = cpp_demangle::Symbol::new(name).ok();
        let options = cpp_demangle::DemangleOptions::new();
        if let Some(text) = symbol.and_then(|symbol| symbol.demangle_with_options(&options).ok()) {
            return text;
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_knows_its_functions_by_offset() {
        let program = std::env::current_exe().unwrap();
        let own = FunctionTable::read(&program).unwrap();
        assert_eq!(build_id_of(&program).as_ref(), Some(&own.build_id));
        let this = own
            .functions
            .iter()
            .find(|one| one.name.ends_with("tests::a_file_knows_its_functions_by_offset"));
        let this = this.unwrap().clone();
        assert_eq!(own.at(this.address + this.bytes - 1), Some(&this));
        assert_ne!(own.at(this.address + this.bytes), Some(&this));
        let [offset, _, address] = own.segments[1];
        assert_eq!(own.address_of(offset + 1), Some(address + 1));
        assert_eq!(own.offset_of(address + 1), Some(offset + 1));
        assert_eq!([own.address_of(u64::MAX), own.offset_of(u64::MAX)], [None; 2]);
    }

    #[test]
    fn devices_are_not_read() {
        assert_eq!(read_regular(Path::new("/dev/zero")), None);
        assert!(read_regular(Path::new("/proc/self/exe")).is_some());
    }

    #[test]
    fn names_are_readable() {
        assert_eq!(demangled("_ZN3foo3barEi"), "foo::bar(int)");
        assert_eq!(demangled("_RNvCs1234_7mycrate3foo"), "mycrate::foo");
        assert_eq!(demangled("main"), "main");
    }
}
