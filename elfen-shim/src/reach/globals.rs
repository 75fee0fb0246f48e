//! Finds globals of a program by name, and shares their pages with a program from its start.
//!
//! Before the program runs, the preload library copies the pages to a memory file and maps the file
//! at the pages' own addresses. The file is sealed, so no process can shrink it. A forked child
//! gets its own copy: see `elfen-instrument/preload/src/shared.rs`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use object::elf::PT_INTERP;
use object::read::elf::{ElfFile64, ProgramHeader};

use super::location::{NumberLocation, ReachError};
use super::mapped;
use crate::recording::Source;
use crate::signal_spec::Width;
use crate::symbols::{Global, GlobalKind, Symbols};

const PAGE: u64 = 4096;
/// The maximum number of shared pages. Eight numbers need fewer.
const PAGES_MAX: u64 = 16;
/// An additional last page has a word for each shared page. The word is 0 until its page contains
/// the program's data.
const BYTES: u64 = (PAGES_MAX + 1) * PAGE;

/// Seals by which no process can change the size of a memory file.
pub(super) const SIZE_SEALS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// Finds a global by its name, and the type with which to read it.
pub fn find<'a>(
    all: &'a [Global],
    name: &str,
    offset: u64,
    width: Width,
) -> Result<(&'a Global, Width), ReachError> {
    let wrong = |why: String| Err(ReachError::Invalid(why));
    let short = |global: &Global| {
        // The name without its namespaces, which must be unambiguous.
        global.name.rsplit("::").next() == Some(name)
    };
    let named: Vec<&Global> = all.iter().filter(|global| global.name == name).collect();
    let found: Vec<&Global> =
        if named.is_empty() { all.iter().filter(|global| short(global)).collect() } else { named };
    let places = |found: &[&Global]| {
        let place = |one: &&Global| format!("{} ({:#x})", one.path.display(), one.address);
        found.iter().map(place).collect::<Vec<_>>().join(", ")
    };
    let global = match found[..] {
        [] => {
            let like = match &names_like(all, name)[..] {
                [] => String::new(),
                names => format!("; did you mean {}?", names.join(" or ")),
            };
            return wrong(format!("no object of the program has a global {name:?}{like}"));
        }
        [one] => one,
        _ => return wrong(format!("{name:?} is ambiguous: {}", places(&found))),
    };
    match global.kind {
        GlobalKind::Writable => {}
        GlobalKind::ReadOnly => return wrong(format!("{name:?} lies in read-only data")),
        GlobalKind::ThreadLocal => {
            return wrong(format!("{name:?} is thread-local: each thread has its own"));
        }
    }
    let width = match Width::of_size(global.size.saturating_sub(offset)) {
        _ if width.is_said() => width,
        Some(width) => width,
        None => {
            return wrong(format!(
                "{name:?} has {} bytes and is not one number: name one, as in {name}+8:u64",
                global.size
            ));
        }
    };
    if offset.saturating_add(width.bytes) > global.size {
        return wrong(format!(
            "{name:?} has {} bytes, so a number at offset {offset} does not fit",
            global.size
        ));
    }
    crate::signal_spec::aligned(global.address + offset, width).map_err(ReachError::Invalid)?;
    Ok((global, width))
}

/// Similar names, most similar first.
fn names_like<'a>(all: &'a [Global], name: &str) -> Vec<&'a str> {
    const NEAR: f64 = 0.85;
    const SUGGESTED: usize = 3;
    let writable = all.iter().filter(|one| one.kind == GlobalKind::Writable);
    let near = writable.map(|one| (strsim::jaro_winkler(name, &one.name), one.name.as_str()));
    let mut near: Vec<(f64, &str)> = near.filter(|(near, _)| *near >= NEAR).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    near.dedup_by(|a, b| a.1 == b.1);
    near.into_iter().take(SUGGESTED).map(|(_, name)| name).collect()
}

/// Lists the globals of a program file and of the libraries that it is linked with.
pub fn of_program(program: &Path) -> Vec<Global> {
    let mut files = vec![program.to_owned()];
    files.extend(libraries(program));
    let symbols = files.iter().filter_map(|file| Symbols::read(file, file));
    symbols.flat_map(|symbols| symbols.globals).collect()
}

/// The libraries of a program, as its loader lists them. The loader is executed with `--list`. The
/// program itself is not: if it is static, or uses another C library, it would run.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let Some(interpreter) = interpreter(program) else { return Vec::new() };
    let mut loader = Command::new(interpreter);
    loader.arg("--list").arg(program).stdin(Stdio::null()).stderr(Stdio::null());
    let Ok(output) = loader.output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    let path = |line: &str| {
        let path = line.split_once(" => ")?.1.split(" (0x").next()?.trim();
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    text.lines().filter_map(path).collect()
}

/// The program's loader, if it is glibc's.
fn interpreter(program: &Path) -> Option<PathBuf> {
    let bytes = fs::read(program).ok()?;
    let elf: ElfFile64<'_> = ElfFile64::parse(&*bytes).ok()?;
    let endian = elf.endian();
    let mut headers = elf.elf_program_headers().iter();
    let header = headers.find(|header| header.p_type(endian) == PT_INTERP)?;
    let name = header.data(endian, elf.data()).ok()?.split(|&byte| byte == 0).next()?;
    let path = PathBuf::from(std::str::from_utf8(name).ok()?);
    path.file_name()?.to_str()?.starts_with("ld-linux").then_some(path)
}

/// Pages of globals that are shared with a program from its start.
#[derive(Debug)]
pub struct SharedGlobals {
    file: File,
    pages: Vec<Page>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Page {
    device: u64,
    inode: u64,
    /// The address in the file.
    address: u64,
}

impl SharedGlobals {
    pub fn new() -> std::io::Result<Self> {
        // Not closed on exec: the preload library in the program uses it and closes it.
        let file = File::from(memfd_create(c"elfen-globals", MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len(BYTES)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SIZE_SEALS))?;
        Ok(Self { file, pages: Vec::new() })
    }

    /// Shares the page of a global. Returns where to read the number at `offset` in it.
    pub fn share(
        &mut self,
        global: &Global,
        offset: u64,
        width: Width,
    ) -> Result<NumberLocation, ReachError> {
        let about = fs::metadata(&global.path)?;
        let at = global.address + offset;
        let page = Page { device: about.dev(), inode: about.ino(), address: at & !(PAGE - 1) };
        let index = match self.pages.iter().position(|known| *known == page) {
            Some(index) => index,
            None if self.pages.len() as u64 >= PAGES_MAX => {
                return Err(ReachError::Invalid("too many pages of globals".to_owned()));
            }
            None => {
                self.pages.push(page);
                self.pages.len() - 1
            }
        };
        let in_file = index as u64 * PAGE + at % PAGE;
        let word: &'static AtomicU64 = mapped::map_file_word(&self.file, in_file)?;
        let ready = Some(mapped::map_file_word(&self.file, PAGES_MAX * PAGE + index as u64 * 8)?);
        Ok(NumberLocation { word, offset: at % 8, width, source: Source::SharedAtStart, ready })
    }

    pub fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The arguments for the preload library: the descriptor of the file, and the address of each
    /// page.
    pub fn preload_argument(&self) -> String {
        let pages = self.pages.iter();
        let page = |page: &Page| format!("{}:{}:{}", page.device, page.inode, page.address);
        let pages: Vec<String> = pages.map(page).collect();
        format!("{} {}", self.file.as_raw_fd(), pages.join(" "))
    }
}

/// Finds the file of a program, by its path or in PATH.
pub fn program_file(program: &OsStr) -> Option<PathBuf> {
    let name = Path::new(program);
    if program.as_encoded_bytes().contains(&b'/') {
        return fs::canonicalize(name).ok();
    }
    let path = std::env::var_os("PATH")?;
    let mut files = std::env::split_paths(&path).map(|folder| folder.join(name));
    let file = files.find(|file| {
        file.metadata().is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0)
    });
    fs::canonicalize(file?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn global(name: &str, path: &str, address: u64, kind: GlobalKind) -> Global {
        Global { name: name.into(), path: path.into(), address, size: 8, kind }
    }

    /// Goal: a global is found by name. A global that cannot be watched is refused with the reason.
    /// Method: a list with globals of each kind.
    #[test]
    fn globals_are_found_by_name() {
        use GlobalKind::{ReadOnly, ThreadLocal, Writable};
        let all = [
            global("hits", "/a", 0x1000, Writable),
            global("ns::count", "/a", 0x1008, Writable),
            global("twice", "/a", 0x1010, Writable),
            global("twice", "/a", 0x1018, Writable),
            global("constant", "/a", 0x2000, ReadOnly),
            global("mine", "/a", 0x8, ThreadLocal),
            Global { size: 4368, ..global("table", "/a", 0x3000, Writable) },
        ];
        assert_eq!(
            find(&all, "table", 16, Width::U64).map(|(_, width)| width).ok(),
            Some(Width::U64)
        );
        let unsaid = Width { bytes: 0, signed: false };
        let found = |name, offset, width| {
            find(&all, name, offset, width)
                .map(|(global, width)| (global.address, width.bytes))
                .map_err(|error| error.to_string())
        };
        assert_eq!(found("hits", 0, unsaid), Ok((0x1000, 8)));
        assert_eq!(found("hits", 4, unsaid), Ok((0x1000, 4)));
        assert_eq!(found("count", 0, Width { bytes: 2, signed: true }), Ok((0x1008, 2)));
        for (name, offset, why) in [
            ("none", 0, "no object"),
            ("hist", 0, "did you mean hits?"),
            ("twice", 0, "ambiguous: /a (0x1010), /a (0x1018)"),
            ("constant", 0, "read-only"),
            ("mine", 0, "thread-local"),
            ("hits", 8, "not one number"),
            ("table", 0, "has 4368 bytes and is not one number"),
        ] {
            let error = found(name, offset, unsaid).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
