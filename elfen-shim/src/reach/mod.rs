//! How the observer gets at a word: memory that both have mapped, or a reading of the other's.
//!
//! What is mapped stays mapped until this process ends, which is when the command that looked at it
//! is done: so words are `'static`, and the loop needs no owner.

mod globals;
mod page_supervisor;
mod mapped;
mod place;
mod proc_state;
mod shared_pages;
mod vm_read;

use elfen_instrument::remote::{Mapping, mappings};

use crate::recording::Source;
use crate::signal_spec::Width;

pub use globals::{SharedGlobals, find as find_global, of_program as globals_of, program_file};
pub use page_supervisor::{Keeper, Stopped};
pub use mapped::CutFile;
pub use place::{Place, Unreached};
pub use proc_state::ProcState;
pub use vm_read::Reader;

/// The number at an address of a process: mapped if it lies in memory that the process shares, and
/// read otherwise.
pub fn address(
    process: u32,
    at: u64,
    width: Width,
    reader: &mut Reader,
) -> Result<Place, Unreached> {
    crate::signal_spec::aligned(at, width).map_err(Unreached::Wrong)?;
    let mappings = mappings(process)?;
    let mapping = mappings.iter().find(|mapping| mapping.range.contains(&at));
    let mapping = mapping.ok_or_else(|| {
        Unreached::Failed(format!("process {process} has nothing mapped at {at:#x}"))
    })?;
    let in_word = |word, source| Place { word, offset: at % 8, width, source, ready: None };
    if !mapping.private
        && let Some(word) = mapped::word(process, mapping, at - mapping.range.start)?
    {
        return Ok(in_word(word, Source::Mapped));
    }
    Ok(in_word(reader.add(process, at & !7)?, Source::Read))
}

/// A counter of a Java virtual machine: by its name, or that of a collector for its collections.
pub fn jvm(process: u32, name: &str) -> Result<Place, Unreached> {
    let (file, counters) = elfen_host::hsperf::counters(process)
        .map_err(|error| Unreached::Failed(error.to_string()))?;
    let collections = format!("{name}.invocations");
    let counter =
        counters.iter().find(|counter| counter.name == name || counter.name == collections);
    let counter =
        counter.ok_or_else(|| Unreached::Wrong(format!("there is no counter {name:?}")))?;
    let word = mapped::file_word(&file, counter.offset)?;
    Ok(Place { word, offset: 0, width: Width::U64, source: Source::Mapped, ready: None })
}

/// The number at an offset into a mapping, by the mapping's address or the end of its name.
pub fn mapping(
    process: u32,
    of: &str,
    offset: u64,
    width: Width,
    reader: &mut Reader,
) -> Result<Place, Unreached> {
    let at = of.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let all = mappings(process)?;
    let is_it = |mapping: &&Mapping| match at {
        Some(at) => mapping.range.contains(&at),
        None => {
            let name = mapping.name.trim_end_matches(" (deleted)");
            name == of || name.ends_with(&format!("/{of}"))
        }
    };
    let mut found: Vec<&Mapping> = all.iter().filter(is_it).collect();
    // Parts of one file that lie behind each other are one thing to the user.
    found.dedup_by(|next, first| next.file == first.file && next.name == first.name);
    match found[..] {
        [] => Err(Unreached::Wrong(format!("process {process} has no mapping {of:?}"))),
        [one] => address(process, one.range.start.saturating_add(offset), width, reader),
        _ => {
            let places = found.iter().map(|one| format!("{:#x}", one.range.start));
            let places = places.collect::<Vec<_>>().join(", ");
            Err(Unreached::Wrong(format!("{of:?} is mapped at {places}; name one of these")))
        }
    }
}
