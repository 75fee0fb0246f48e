//! Finds exported symbols of an object, by the tables that the loader has mapped.

use super::object::{Loaded, u64_at};
use crate::remote::Memory;

const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DYNAMIC_MAX: usize = 4096;
const SYMBOL_BYTES: u64 = 24;
/// A bucket with more symbols than this means that the table is damaged.
const CHAIN_MAX: u64 = 4096;

/// The symbol tables of one object.
pub(super) struct Symbols<'m> {
    memory: &'m Memory,
    bias: u64,
    names: u64,
    symbols: u64,
    buckets: u64,
    bucket_count: u32,
    chains: u64,
    first: u32,
}

impl<'m> Symbols<'m> {
    pub(super) fn of(memory: &'m Memory, loaded: &Loaded) -> Option<Self> {
        let (at, bytes) = loaded.segment(PT_DYNAMIC)?;
        let length = usize::try_from(bytes).ok()?.min(DYNAMIC_MAX);
        let entries = memory.read_vec(at, length).ok()?;
        let entry = |tag: u64| {
            let entry = entries.chunks_exact(16).find(|entry| u64_at(entry, 0) == Some(tag))?;
            // Some loaders replace the offset by the address, others do not.
            u64_at(entry, 8).map(|value| {
                if value < loaded.bias { value.wrapping_add(loaded.bias) } else { value }
            })
        };
        let hash = entry(DT_GNU_HASH)?;
        let head = memory.read_vec(hash, 16).ok()?;
        let word = |index: usize| u32_at(&head, index * 4);
        let (bucket_count, first, bloom) = (word(0)?, word(1)?, word(2)?);
        let buckets = hash.checked_add(16 + u64::from(bloom) * 8)?;
        Some(Self {
            memory,
            bias: loaded.bias,
            names: entry(DT_STRTAB)?,
            symbols: entry(DT_SYMTAB)?,
            buckets,
            bucket_count: (bucket_count != 0).then_some(bucket_count)?,
            chains: buckets.checked_add(u64::from(bucket_count) * 4)?,
            first,
        })
    }

    /// The address of a symbol.
    pub(super) fn address(&self, name: &str) -> Option<u64> {
        let hash =
            name.bytes().fold(5381_u32, |h, byte| h.wrapping_mul(33).wrapping_add(byte.into()));
        let word = |at: u64| u32_at(&self.memory.read_vec(at, 4).ok()?, 0);
        let bucket = u64::from(hash % self.bucket_count);
        let start = word(self.buckets.checked_add(bucket * 4)?)?;
        for index in u64::from(start)..u64::from(start) + CHAIN_MAX {
            let chained =
                word(self.chains.checked_add(index.checked_sub(self.first.into())? * 4)?)?;
            if chained | 1 == hash | 1 {
                let symbol = self.symbols.checked_add(index * SYMBOL_BYTES)?;
                let symbol = self.memory.read_vec(symbol, 24).ok()?;
                let named = self.names.checked_add(u32_at(&symbol, 0)?.into())?;
                let found = self.memory.read_vec(named, name.len() + 1).ok()?;
                if found.strip_suffix(&[0]) == Some(name.as_bytes()) {
                    return self.bias.checked_add(u64_at(&symbol, 8)?);
                }
            }
            if chained & 1 == 1 {
                return None;
            }
        }
        None
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::mappings;

    /// Goal: a symbol has the address that the loader gave it. Method: the C library of this
    /// process.
    #[test]
    fn a_symbol_is_found_by_its_name() {
        let memory = Memory::open(std::process::id()).unwrap();
        let mapped = mappings(std::process::id()).unwrap();
        let here = libc::strtoul as *const () as usize as u64;
        let code = mapped.iter().find(|one| one.range.contains(&here)).unwrap();
        let loaded = Loaded::of(&memory, &mapped, code).unwrap();
        let symbols = Symbols::of(&memory, &loaded).unwrap();
        assert_eq!(symbols.address("strtoul"), Some(here));
        assert_eq!(symbols.address("elfen_is_no_part_of_the_c_library"), None);
    }
}
