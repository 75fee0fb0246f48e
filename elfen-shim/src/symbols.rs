//! Finds names of addresses and addresses of names, in the files that a process has mapped.
//!
//! Threads store only the lower half of an address, so mapped files are identified by that half.
//! The process's maps are read while it runs. Files are read only when names are needed.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use elfen_instrument::process::name_of;
use elfen_instrument::remote::{Mapping, mappings};
use elfen_instrument::symbols::{DEBUG_SYMBOLS, debug_file, demangled};
use elfen_instrument::{ENTRIES_SECTION, RETURN_SECTION};
use elfen_rt::signal::task::Running;
use object::elf::{PF_W, PT_GNU_RELRO, PT_LOAD, STT_TLS};
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSegment, ObjectSymbol, SymbolFlags};

pub use crate::recording::NO_NAME;
use crate::recording::{Kind, Recording, Source, State};

/// The hook that functions built with -finstrument-functions call.
const HOOK: &[u8] = b"__cyg_profile_func_enter";
/// The maximum number of bytes of a tag's name.
const NAME_BYTES: usize = 200;

/// A file that a process has mapped, and its addresses there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loaded {
    pub path: PathBuf,
    pub inode: u64,
    /// The address of the file's first byte.
    pub start: u64,
    pub end: u64,
}

/// The files with code that a process has mapped.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    pub process: u32,
    pub objects: Vec<Loaded>,
    /// The number of pages of globals that the program has mapped from the command's memory file.
    pub shared_pages: u64,
}

impl Layout {
    /// Reads the maps of the process again and adds new files.
    pub fn update(&mut self, process: u32) {
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

    /// The file of the program itself.
    pub fn program(&self) -> Option<&Loaded> {
        self.objects.first()
    }

    /// The path by which a mapped file can be opened, even if it was replaced or the process has
    /// another root.
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
        let Some((_, inode)) = &mapping.file else { continue };
        let is_file = mapping.name.starts_with('/') && !mapping.name.starts_with("/SYSV");
        if !is_file || !mapping.private {
            continue;
        }
        let last = found.last_mut().filter(|last| last.inode == *inode && mapping.offset > 0);
        match last {
            Some(last) => last.end = mapping.range.end,
            None if mapping.offset == 0 => found.push(Loaded {
                path: mapping.name.trim_end_matches(" (deleted)").into(),
                inode: *inode,
                start: mapping.range.start,
                end: mapping.range.end,
            }),
            None => {}
        }
    }
    found
}

/// A global variable of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Global {
    pub name: String,
    pub path: PathBuf,
    /// The address in the file, before it is mapped.
    pub address: u64,
    pub size: u64,
    pub kind: GlobalKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GlobalKind {
    Writable,
    /// The variable cannot change after the program's start.
    ReadOnly,
    /// Each thread has its own copy.
    ThreadLocal,
}

/// How the functions of a program can report that they run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FunctionReporting {
    /// Functions call hooks when they are entered and when they return.
    Hooks,
    /// Functions have room for code at their entries. They do not report returns.
    Entries,
    /// Functions have room for code at their entries, and return through `libelfen_return.a`.
    EntriesAndReturns,
}

impl From<FunctionReporting> for Source {
    fn from(reporting: FunctionReporting) -> Self {
        match reporting {
            FunctionReporting::Hooks | FunctionReporting::EntriesAndReturns => {
                Self::EntriesAndReturns
            }
            FunctionReporting::Entries => Self::Entries,
        }
    }
}

/// The symbols of one file.
#[derive(Debug, Default)]
pub struct Symbols {
    pub globals: Vec<Global>,
    /// The start, length and name of each function, sorted by address.
    pub functions: Vec<(u64, u64, String)>,
    /// The address of the first loaded segment.
    pub base: u64,
    /// The bytes that the loader maps, with their addresses. They contain the names of tags.
    segments: Vec<(u64, Vec<u8>)>,
    pub reporting: Option<FunctionReporting>,
    pub has_tags: bool,
}

impl Symbols {
    /// Reads the symbols of `file`. The user knows it as `shown`. Returns `None` if it is not a
    /// 64-bit ELF file.
    pub fn read(file: &Path, shown: &Path) -> Option<Self> {
        Self::read_with(file, shown, Path::new(DEBUG_SYMBOLS))
    }

    fn read_with(file: &Path, shown: &Path, names: &Path) -> Option<Self> {
        let bytes = fs::read(file).ok()?;
        let elf: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
        let base = elf.segments().map(|segment| segment.address()).min()? & !0xfff;
        let mut symbols = Self { base, ..Self::default() };
        symbols.add(&elf, &elf, shown);
        // The file is stripped. Its symbols may be installed separately.
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
        let mut imported = elf.dynamic_symbols().filter(|symbol| symbol.is_undefined());
        let has = |section| elf.section_by_name(section).is_some();
        symbols.reporting = if imported.any(|symbol| symbol.name_bytes() == Ok(HOOK)) {
            Some(FunctionReporting::Hooks)
        } else if !has(ENTRIES_SECTION) {
            None
        } else if has(RETURN_SECTION) {
            Some(FunctionReporting::EntriesAndReturns)
        } else {
            Some(FunctionReporting::Entries)
        };
        symbols.has_tags = elf.section_by_name("elfen_tags").is_some();
        for segment in elf.segments() {
            if let Ok(data) = segment.data() {
                symbols.segments.push((segment.address(), data.to_owned()));
            }
        }
        Some(symbols)
    }

    /// Adds the symbols that `file` contains for addresses of `elf`. The two files differ if `elf`
    /// is stripped.
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
            let kind = if is_tls {
                GlobalKind::ThreadLocal
            } else if is_writable(elf, address) {
                GlobalKind::Writable
            } else {
                GlobalKind::ReadOnly
            };
            if size > 0 {
                let (name, path) = (demangled(name), shown.to_owned());
                self.globals.push(Global { name, path, address, size, kind });
            }
        };
        file.symbols().for_each(&mut add);
        file.dynamic_symbols().for_each(&mut add);
    }

    /// The name of the function that contains an address.
    pub fn function_at(&self, address: u64) -> Option<&str> {
        let after = self.functions.partition_point(|(start, ..)| *start <= address);
        let (start, length, name) = self.functions.get(after.checked_sub(1)?)?;
        (address - start <= (*length).max(1)).then_some(name)
    }

    /// Reads a NUL-terminated, printable name.
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

/// Returns whether the running program can write to this address.
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

/// Finds the names of a process's addresses and of tasks. It reads each file once.
#[derive(Debug)]
pub struct Names {
    layout: Layout,
    /// The name of the observed process.
    program: String,
    files: HashMap<u64, Option<Symbols>>,
}

impl Names {
    pub fn of(layout: Layout, program: &str) -> Self {
        Self { layout, program: program.to_owned(), files: HashMap::new() }
    }

    /// See [`Layout::update`].
    pub fn update(&mut self) {
        self.layout.update(self.layout.process);
    }

    /// Names all tags of a recording.
    pub fn name_values(&mut self, recording: &mut Recording) {
        for (signal, runs) in recording.head.signals.iter_mut().zip(&recording.runs) {
            if signal.kind != Kind::Tags || !signal.names.is_empty() {
                continue;
            }
            let values = runs.iter().filter_map(|run| match run.state {
                State::Value(value) => Some(value),
                State::Gap | State::NotRunning | State::Other => None,
            });
            let values: BTreeSet<u64> = values.collect();
            let named = values.into_iter().map(|value| (value, self.value(signal.source, value)));
            signal.names = named.collect();
        }
    }

    /// Names a value of a signal from this source.
    pub fn value(&mut self, source: Source, value: u64) -> String {
        match source {
            Source::Entries | Source::EntriesAndReturns => self.function(value),
            Source::SourceTags => self.tag(value),
            Source::TaskMap => match Running::from_word(value) {
                Running::Idle => "(idle)".to_owned(),
                Running::Unknown => "(not known yet)".to_owned(),
                Running::Task(task) => {
                    // For other processes, the name of the thread is used, which often differs from
                    // the name of its process.
                    let name = if task.process == self.layout.process {
                        self.program.clone()
                    } else {
                        name_of(task.thread).unwrap_or_else(|| "(ended)".to_owned())
                    };
                    if task.thread == task.process {
                        format!("{name} {}", task.process)
                    } else {
                        format!("{name} {}/{}", task.process, task.thread)
                    }
                }
            },
            Source::ServicePage
            | Source::Mapped
            | Source::SharedAtStart
            | Source::Shared
            | Source::Read
            | Source::Proc => format!("{value}"),
        }
    }

    /// Finds the file that contains an address, by the address's lower half. Also returns the
    /// address in that file.
    fn find_symbols(&mut self, half: u64) -> Option<(&Loaded, &Symbols, u64)> {
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

    /// Names the function at an address, by the address's lower half. If the function has no name,
    /// returns the file and the address.
    pub fn function(&mut self, half: u64) -> String {
        if half == 0 {
            return NO_NAME.to_owned();
        }
        let Some((loaded, symbols, address)) = self.find_symbols(half) else {
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

    /// Reads the name of a tag at an address, by the address's lower half.
    pub fn tag(&mut self, half: u64) -> String {
        if half == 0 {
            return NO_NAME.to_owned();
        }
        let text = self.find_symbols(half).and_then(|(_, symbols, at)| symbols.text_at(at));
        text.unwrap_or_else(|| format!("{half:#x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_and_cpp_names_are_demangled() {
        assert_eq!(demangled("main"), "main");
        assert_eq!(demangled("_ZN2ns5countE"), "ns::count");
        assert_eq!(demangled("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(demangled("_Znonsense"), "_Znonsense");
    }

    /// Goal: the symbols of a stripped program are found in its debug file. Method: a program that
    /// is split into two files, as distributions do it.
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

    /// Goal: addresses of the test process get their names. Method: a function, a text and a global
    /// of this test, by the lower halves of their addresses.
    #[test]
    fn addresses_of_this_process_have_their_names() {
        let mut layout = Layout::default();
        layout.update(std::process::id());
        let program = layout.program().expect("a program has a file").clone();
        let symbols = Symbols::read(&layout.file_of(&program), &program.path).unwrap();
        let global = symbols.globals.iter().find(|one| one.name.ends_with("tests::COUNTER"));
        let global = global.expect("it has symbols");
        assert_eq!((global.size, global.kind), (8, GlobalKind::Writable));
        let at = (&raw const COUNTER).addr() as u64;
        assert_eq!(program.start + global.address - symbols.base, at);
        let mut names = Names::of(layout, "this");
        let function =
            addresses_of_this_process_have_their_names as fn() as usize as u64 & 0xffff_ffff;
        assert!(names.function(function).ends_with("addresses_of_this_process_have_their_names"));
        assert_eq!(names.tag(HERE.as_ptr().addr() as u64 & 0xffff_ffff), "a tag here");
        assert_eq!((names.tag(0).as_str(), names.tag(1).as_str()), (NO_NAME, "0x1"));
    }
}
