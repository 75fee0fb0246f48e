//! Goal: the preload library is small, needs only the C library, and cannot panic. Method: the
//! symbols and sections of its file.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use object::elf::DT_NEEDED;
use object::read::elf::{Dyn, ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol};

/// Limits the loader's time and the memory of every process.
const BYTES_MAX: usize = 80 * 1024;

/// The symbols that programs may find in it.
const EXPORTED: [&str; 7] = [
    "__cyg_profile_func_enter",
    "__cyg_profile_func_exit",
    "__fentry__",
    "elfen_hold_1",
    "elfen_look_1",
    "mcount",
    "pthread_create",
];

#[test]
fn the_library_is_small_needs_only_the_c_library_and_cannot_panic() {
    let bytes = fs::read(crate::stage::library()).unwrap();
    assert!(bytes.len() <= BYTES_MAX, "{} bytes", bytes.len());
    let file = ElfFile64::<Endianness>::parse(bytes.as_slice()).unwrap();
    let endian = file.endian();
    let dynamic = file
        .elf_program_headers()
        .iter()
        .find_map(|header| header.dynamic(endian, bytes.as_slice()).unwrap());
    let needed = dynamic.unwrap().iter().filter(|entry| entry.d_tag(endian) == DT_NEEDED);
    assert_eq!(needed.count(), 1, "the C library and no other");

    let names = |undefined: bool| -> BTreeSet<String> {
        let symbols = file.dynamic_symbols().filter(|symbol| symbol.is_undefined() == undefined);
        symbols.map(|symbol| symbol.name().unwrap().to_owned()).collect()
    };
    assert_eq!(names(false), EXPORTED.map(str::to_owned).into());
    let wanted = names(true);
    assert!(wanted.contains("shmat"), "the list is of what it calls: {wanted:?}");
    // See the panic handler and the allocator of elfen-preload.
    assert!(!wanted.contains("elfen_preload_can_panic"), "something in it can panic");
    assert!(!wanted.contains("elfen_preload_can_allocate"), "something in it can allocate");
    // Functions that allocate, lock, print or unwind.
    for name in ["malloc", "free", "pthread_mutex_lock", "write", "printf", "_Unwind_Resume"] {
        assert!(!wanted.contains(name), "it calls {name}");
    }
}

/// Goal: the debug build of `cargo build` can be loaded into programs, although it is neither small
/// nor free of panics.
#[test]
fn a_debug_build_can_be_loaded() {
    let library = crate::stage::build_library("dev", "debug");
    let loaded = Command::new("true").env("LD_PRELOAD", library).output().unwrap();
    assert_eq!((loaded.status.code(), loaded.stderr.as_slice()), (Some(0), &b""[..]));
}
