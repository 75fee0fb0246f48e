//! Names of addresses and addresses of names, from the files that a process has mapped.
//!
//! The lower half of an address is all that a thread stores, so objects are told apart by it. The
//! maps are read while the process lives; files are read when names are asked for.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use elfen_instrument::remote::{Mapping, mappings};
use elfen_instrument::{ENTRIES_SECTION, RETURN_SECTION};
use object::elf::{PF_W, PT_GNU_RELRO, PT_LOAD, STT_TLS};
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSegment, ObjectSymbol, SymbolFlags};

use crate::recording::Source;

/// What functions call that were built with -finstrument-functions.
const HOOK: &[u8] = b"__cyg_profile_func_enter";
/// Names of stripped files, by their build id.
const DEBUG_SYMBOLS: &str = "/usr/lib/debug/.build-id";
/// Bytes of a name that is read from a program.
const NAME_BYTES: usize = 200;

/// A file of a process, where it lies in the process's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loaded {
    pub path: PathBuf,
    pub device: String,
    pub inode: u64,
    /// Of the first byte of the file that is mapped, less its offset.
    pub start: u64,
    pub end: u64,
}

/// The files with code that a process has mapped.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    pub process: u32,
    pub objects: Vec<Loaded>,
    /// Pages of globals that the program was seen to share with us.
    pub shared_pages: u64,
}

impl Layout {
    /// Adds what the process has mapped by now.
    pub fn look(&mut self, process: u32) {
        self.process = process;
        let Ok(mappings) = mappings(process) else { return };
        let shared = mappings.iter().filter(|mapping| mapping.name.contains("memfd:elfen-globals"));
        let bytes: u64 = shared.map(|mapping| mapping.range.end - mapping.range.start).sum();
        self.shared_pages = self.shared_pages.max(bytes / 4096);
        for loaded in loaded(&mappings) {
            match self.objects.iter_mut().find(|known| known.start == loaded.start) {
                Some(known) => *known = loaded,
                None => self.objects.push(loaded),
            }
        }
    }

    /// The program's own file.
    pub fn program(&self) -> Option<&Loaded> {
        self.objects.first()
    }

    /// Where a file can be opened: also one that was replaced, or is in another root.
    pub fn file_of(&self, loaded: &Loaded) -> PathBuf {
        let own = Path::new("/proc").join(self.process.to_string());
        match fs::metadata(own.join("exe")) {
            Ok(exe) if std::os::unix::fs::MetadataExt::ino(&exe) == loaded.inode => own.join("exe"),
            Ok(_) => {
                let inside = loaded.path.strip_prefix("/").unwrap_or(&loaded.path);
                own.join("root").join(inside)
            }
            Err(_) => loaded.path.clone(),
        }
    }
}

fn loaded(mappings: &[Mapping]) -> Vec<Loaded> {
    let mut found: Vec<Loaded> = Vec::new();
    for mapping in mappings {
        let Some((device, inode)) = &mapping.file else { continue };
        let is_file = mapping.name.starts_with('/') && !mapping.name.starts_with("/SYSV");
        if !is_file || !mapping.private {
            continue;
        }
        let last = found.last_mut().filter(|last| last.inode == *inode && mapping.offset > 0);
        match last {
            Some(last) => last.end = mapping.range.end,
            None if mapping.offset == 0 => found.push(Loaded {
                path: mapping.name.trim_end_matches(" (deleted)").into(),
                device: device.clone(),
                inode: *inode,
                start: mapping.range.start,
                end: mapping.range.end,
            }),
            None => {}
        }
    }
    found
}

/// A global of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Global {
    pub name: String,
    pub path: PathBuf,
    /// As the file has it, before it is mapped.
    pub address: u64,
    pub size: u64,
    pub kind: GlobalKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GlobalKind {
    Writable,
    /// It cannot change, or only until the program starts.
    ReadOnly,
    /// Each thread has its own.
    ThreadLocal,
}

/// How the functions of a program can say that they run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Saying {
    /// They call hooks where they are entered and where they return.
    Hooks,
    /// They have room at their entries, and return as ever.
    Entries,
    /// They have room at their entries, and return by `libelfen_return.a`.
    EntriesAndReturns,
}

impl From<Saying> for Source {
    fn from(saying: Saying) -> Self {
        match saying {
            Saying::Hooks | Saying::EntriesAndReturns => Self::EntriesAndReturns,
            Saying::Entries => Self::Entries,
        }
    }
}

/// The symbols of one file.
#[derive(Debug, Default)]
pub struct Symbols {
    pub globals: Vec<Global>,
    /// Start, length and name of functions, in order.
    pub functions: Vec<(u64, u64, String)>,
    /// Of the first loaded segment.
    pub base: u64,
    /// Bytes that the loader maps, with their addresses: for names of tags.
    segments: Vec<(u64, Vec<u8>)>,
    pub saying: Option<Saying>,
    pub has_tags: bool,
}

impl Symbols {
    /// `None` if it is no file of a program.
    pub fn read(file: &Path, shown: &Path) -> Option<Self> {
        Self::read_with(file, shown, Path::new(DEBUG_SYMBOLS))
    }

    fn read_with(file: &Path, shown: &Path, names: &Path) -> Option<Self> {
        let bytes = fs::read(file).ok()?;
        let elf: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
        let base = elf.segments().map(|segment| segment.address()).min()? & !0xfff;
        let mut symbols = Self { base, ..Self::default() };
        symbols.add(&elf, &elf, shown);
        // Stripped: distributions keep the names elsewhere.
        if elf.symbols().next().is_none()
            && let Some(debug) = elf.build_id().ok().flatten().and_then(|id| debug_file(id, names))
            && let Ok(bytes) = fs::read(debug)
            && let Ok(debug) = ElfFile64::parse(&*bytes)
        {
            symbols.add(&debug, &elf, shown);
        }
        symbols.functions.sort();
        symbols.functions.dedup_by_key(|(address, ..)| *address);
        symbols.globals.sort_by(|a, b| (&a.name, a.address).cmp(&(&b.name, b.address)));
        symbols.globals.dedup_by(|a, b| a.name == b.name && a.address == b.address);
        let mut asked = elf.dynamic_symbols().filter(|symbol| symbol.is_undefined());
        let has = |section| elf.section_by_name(section).is_some();
        symbols.saying = match asked.any(|symbol| symbol.name_bytes() == Ok(HOOK)) {
            true => Some(Saying::Hooks),
            false if !has(ENTRIES_SECTION) => None,
            false if has(RETURN_SECTION) => Some(Saying::EntriesAndReturns),
            false => Some(Saying::Entries),
        };
        symbols.has_tags = elf.section_by_name("elfen_tags").is_some();
        for segment in elf.segments() {
            if let Ok(data) = segment.data() {
                symbols.segments.push((segment.address(), data.to_owned()));
            }
        }
        Some(symbols)
    }

    /// Takes over the names that a file has for the addresses of `elf`.
    fn add(&mut self, file: &ElfFile64<'_>, elf: &ElfFile64<'_>, shown: &Path) {
        let mut add = |symbol: object::read::elf::ElfSymbol64<'_, '_, Endianness>| {
            let Ok(name) = symbol.name() else { return };
            if symbol.is_undefined() || name.is_empty() {
                return;
            }
            let (address, size) = (symbol.address(), symbol.size());
            if symbol.kind() == object::SymbolKind::Text {
                self.functions.push((address, size, demangled(name)));
                return;
            }
            let is_tls = matches!(symbol.flags(), SymbolFlags::Elf { st_info, .. }
                if st_info & 0xf == STT_TLS);
            let kind = match is_tls {
                true => GlobalKind::ThreadLocal,
                false if is_writable(elf, address) => GlobalKind::Writable,
                false => GlobalKind::ReadOnly,
            };
            if size > 0 {
                let (name, path) = (demangled(name), shown.to_owned());
                self.globals.push(Global { name, path, address, size, kind });
            }
        };
        file.symbols().for_each(&mut add);
        file.dynamic_symbols().for_each(&mut add);
    }

    /// The function that an address lies in.
    pub fn function_at(&self, address: u64) -> Option<&str> {
        let after = self.functions.partition_point(|(start, ..)| *start <= address);
        let (start, length, name) = self.functions.get(after.checked_sub(1)?)?;
        (address - start <= (*length).max(1)).then_some(name)
    }

    /// A name that ends in a NUL and can be printed.
    fn text_at(&self, address: u64) -> Option<String> {
        let (start, bytes) = self.segments.iter().find(|(start, bytes)| {
            address.checked_sub(*start).is_some_and(|offset| offset < bytes.len() as u64)
        })?;
        let rest = bytes.get(usize::try_from(address - start).ok()?..)?;
        let name = rest.iter().take(NAME_BYTES).position(|&byte| byte == 0)?;
        let name = std::str::from_utf8(&rest[..name]).ok().filter(|name| !name.is_empty())?;
        name.chars().all(|c| !c.is_control()).then(|| name.to_owned())
    }
}

/// Where a distribution keeps the names of a stripped file.
fn debug_file(build_id: &[u8], folder: &Path) -> Option<PathBuf> {
    let (first, rest) = build_id.split_first()?;
    let rest: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(folder.join(format!("{first:02x}/{rest}.debug")))
}

/// Whether the program can still write there once it runs.
fn is_writable(elf: &ElfFile64<'_>, address: u64) -> bool {
    let endian = elf.endian();
    let lies_in = |kind: u32, flags: u32| {
        elf.elf_program_headers().iter().any(|header| {
            let start = header.p_vaddr(endian);
            header.p_type(endian) == kind
                && header.p_flags(endian) & flags == flags
                && (start..start.saturating_add(header.p_memsz(endian))).contains(&address)
        })
    };
    lies_in(PT_LOAD, PF_W) && !lies_in(PT_GNU_RELRO, 0)
}

fn demangled(name: &str) -> String {
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

/// What the addresses of a process are called.
#[derive(Debug)]
pub struct Names {
    layout: Layout,
    files: HashMap<u64, Option<Symbols>>,
}

impl Names {
    pub fn of(layout: Layout) -> Self {
        Self { layout, files: HashMap::new() }
    }

    /// Adds what the process has mapped by now.
    pub fn look(&mut self, process: u32) {
        self.layout.look(process);
    }

    /// The file of an address of which the lower half is known, and the address in that file.
    fn lies_in(&mut self, half: u64) -> Option<(&Loaded, &Symbols, u64)> {
        let index = self.layout.objects.iter().position(|loaded| {
            (half.wrapping_sub(loaded.start) & 0xffff_ffff) < loaded.end - loaded.start
        })?;
        let loaded = &self.layout.objects[index];
        let layout = &self.layout;
        let symbols = self
            .files
            .entry(loaded.start)
            .or_insert_with(|| Symbols::read(&layout.file_of(loaded), &loaded.path));
        let offset = half.wrapping_sub(loaded.start) & 0xffff_ffff;
        let symbols = symbols.as_ref()?;
        Some((loaded, symbols, symbols.base.wrapping_add(offset)))
    }

    /// The function of an address, by its lower half; the file and the address if it has no name.
    pub fn function(&mut self, half: u64) -> String {
        if half == 0 {
            return NO_NAME.to_owned();
        }
        let Some((loaded, symbols, address)) = self.lies_in(half) else {
            return format!("{half:#x}");
        };
        match symbols.function_at(address) {
            Some(name) => name.to_owned(),
            None => {
                let file = loaded.path.file_name().map(|name| name.to_string_lossy().into_owned());
                format!("{}+{address:#x}", file.unwrap_or_default())
            }
        }
    }

    pub fn tag(&mut self, half: u64) -> String {
        if half == 0 {
            return NO_NAME.to_owned();
        }
        let text = self.lies_in(half).and_then(|(_, symbols, at)| symbols.text_at(at));
        text.unwrap_or_else(|| format!("{half:#x}"))
    }
}

/// What a thread does that says nothing.
pub const NO_NAME: &str = "(none)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_languages_are_as_their_programmers_know_them() {
        assert_eq!(demangled("main"), "main");
        assert_eq!(demangled("_ZN2ns5countE"), "ns::count");
        assert_eq!(demangled("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(demangled("_Znonsense"), "_Znonsense");
    }

    /// Goal: a stripped program has the names that its distribution keeps elsewhere. Method: one
    /// that is split in two, as distributions do it.
    #[test]
    fn names_of_a_stripped_program_are_found_by_its_build_id() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let source = "long hits = 1; int main(void) { return hits++ == 0; }";
        fs::write(at("p.c"), source).unwrap();
        let run = |words: &[&str]| {
            let done = std::process::Command::new(words[0]).args(&words[1..]).status().unwrap();
            assert!(done.success(), "{words:?}");
        };
        run(&["cc", "-g", "-Wl,--build-id=0xabcdef", "-o", &at("p"), &at("p.c")]);
        fs::create_dir(at("ab")).unwrap();
        run(&["objcopy", "--only-keep-debug", &at("p"), &at("ab/cdef.debug")]);
        run(&["objcopy", "--strip-all", &at("p")]);
        let hits = |names: &Path| {
            let symbols = Symbols::read_with(at("p").as_ref(), at("p").as_ref(), names).unwrap();
            let named = symbols.globals.iter().find(|one| one.name == "hits").cloned();
            (named.map(|one| (one.size, one.kind)), symbols.functions.len() > 1)
        };
        let kept = (Some((8, GlobalKind::Writable)), true);
        assert_eq!((hits(folder.path()), hits(Path::new("/nonexistent"))), (kept, (None, false)));
    }

    static HERE: [u8; 11] = *b"a tag here\0";
    static mut COUNTER: u64 = 5;

    /// Goal: an address of this very process has its name. Method: a function, a text and a global
    /// of this test, by the lower halves of their addresses.
    #[test]
    fn this_process_knows_its_own_names() {
        let mut layout = Layout::default();
        layout.look(std::process::id());
        let program = layout.program().expect("a program has a file").clone();
        let symbols = Symbols::read(&layout.file_of(&program), &program.path).unwrap();
        let global = symbols.globals.iter().find(|one| one.name.ends_with("tests::COUNTER"));
        let global = global.expect("it has symbols");
        assert_eq!((global.size, global.kind), (8, GlobalKind::Writable));
        let at = (&raw const COUNTER).addr() as u64;
        assert_eq!(program.start + global.address - symbols.base, at);
        let mut names = Names::of(layout);
        let function = this_process_knows_its_own_names as fn() as usize as u64 & 0xffff_ffff;
        assert!(names.function(function).ends_with("this_process_knows_its_own_names"));
        assert_eq!(names.tag(HERE.as_ptr().addr() as u64 & 0xffff_ffff), "a tag here");
        assert_eq!((names.tag(0).as_str(), names.tag(1).as_str()), (NO_NAME, "0x1"));
    }
}
