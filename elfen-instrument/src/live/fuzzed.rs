//! Fuzzing entry points of this module; see [`crate::fuzzed`].

use std::collections::HashMap;

use super::hotspot::HotSpot;
use super::object::Objects;
use crate::remote::{Mapping, Memory};

/// The fields that the lookup of a method needs.
pub(crate) const FIELDS: [&str; 16] = [
    "GrowableArrayBase._len",
    "GrowableArray<int>._data",
    "CodeHeap._memory",
    "CodeHeap._segmap",
    "CodeHeap._log2_segment_size",
    "VirtualSpace._low",
    "VirtualSpace._high",
    "HeapBlock::Header._used",
    "CodeBlob._name",
    "CodeBlob._code_begin",
    "nmethod._verified_entry_point",
    "nmethod._stub_offset",
    "nmethod._state",
    "nmethod._compile_id",
    "Method._constMethod",
    "Klass._name",
];

pub(crate) fn function(memory: &Memory, mapped: &[Mapping], ip: u64) {
    let own = std::process::id();
    let _found = Objects::default().function_around(own, memory, mapped, &mapped[0], ip);
}

/// Looks up the method around `ip`. The list of heaps is at the start of the image.
pub(crate) fn method(memory: &Memory, image: &Mapping, offsets: &HashMap<String, u64>, ip: u64) {
    let _described = HotSpot::of(memory, std::slice::from_ref(image));
    let Some(machine) = HotSpot::with(image.range.start, offsets) else { return };
    if let Some(found) = machine.method_around(memory, ip) {
        assert!(found.code.contains(&ip) && found.code.contains(&found.entry));
        let _name = machine.name(memory, &found);
    }
}
