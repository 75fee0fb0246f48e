//! Makes words of the observed process readable: by mapping memory that it shares, or by copying
//! values with a system call.
//!
//! Mappings are never removed, because the process ends with its command. So words are `'static`,
//! and the sampling loop needs no owner for them.

mod globals;
mod location;
mod mapped;
mod page_supervisor;
mod proc_state;
mod shared_pages;
mod vm_read;

use elfen_instrument::remote::{Mapping, mappings};

use crate::recording::Source;
use crate::signal_spec::Width;

pub use globals::{SharedGlobals, find as find_global, of_program as globals_of, program_file};
pub use location::{NumberLocation, ReachError};
pub use mapped::saw_truncated_file;
pub use page_supervisor::{PageSupervisor, StopTimes};
pub use proc_state::ProcState;
pub use vm_read::VmReader;

/// Locates the number at an address of a process. It is mapped if the process shares that memory,
/// and otherwise read with a system call.
pub fn locate_address(
    process: u32,
    at: u64,
    width: Width,
    reader: &mut VmReader,
) -> Result<NumberLocation, ReachError> {
    crate::signal_spec::aligned(at, width).map_err(ReachError::Invalid)?;
    let mappings = mappings(process)?;
    let mapping = mappings.iter().find(|mapping| mapping.range.contains(&at));
    let mapping = mapping.ok_or_else(|| {
        ReachError::Failed(format!("process {process} has nothing mapped at {at:#x}"))
    })?;
    let in_word =
        |word, source| NumberLocation { word, offset: at % 8, width, source, ready: None };
    if !mapping.private
        && let Some(word) = mapped::map_word(process, mapping, at - mapping.range.start)?
    {
        return Ok(in_word(word, Source::Mapped));
    }
    Ok(in_word(reader.add(process, at & !7)?, Source::Read))
}

/// Locates a counter of a Java virtual machine by its name. The name of a garbage collector stands
/// for the counter of its collections.
pub fn locate_jvm_counter(process: u32, name: &str) -> Result<NumberLocation, ReachError> {
    let (file, counters) = elfen_machine::hsperf::counters(process)
        .map_err(|error| ReachError::Failed(error.to_string()))?;
    let collections = format!("{name}.invocations");
    let counter =
        counters.iter().find(|counter| counter.name == name || counter.name == collections);
    let counter =
        counter.ok_or_else(|| ReachError::Invalid(format!("there is no counter {name:?}")))?;
    let word = mapped::map_file_word(&file, counter.offset)?;
    Ok(NumberLocation { word, offset: 0, width: Width::U64, source: Source::Mapped, ready: None })
}

/// Locates the number at an offset in a mapping. The mapping is named by its address or by the end
/// of its file's name.
pub fn locate_in_mapping(
    process: u32,
    of: &str,
    offset: u64,
    width: Width,
    reader: &mut VmReader,
) -> Result<NumberLocation, ReachError> {
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
    // Consecutive mappings of one file count as one.
    found.dedup_by(|next, first| next.file == first.file && next.name == first.name);
    match found[..] {
        [] => Err(ReachError::Invalid(format!("process {process} has no mapping {of:?}"))),
        [one] => locate_address(process, one.range.start.saturating_add(offset), width, reader),
        _ => {
            let places = found.iter().map(|one| format!("{:#x}", one.range.start));
            let places = places.collect::<Vec<_>>().join(", ");
            Err(ReachError::Invalid(format!("{of:?} is mapped at {places}; name one of these")))
        }
    }
}
