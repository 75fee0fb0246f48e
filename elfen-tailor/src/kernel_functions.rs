//! Finds the names of the kernel functions in which threads slept, in /proc/kallsyms. The list is
//! read once, when the first name is needed. Users without permission to see kernel addresses read
//! zeros, and get no names.

use std::collections::BTreeSet;
use std::fs;

use crate::trace::KernelFunction;

const LIST: &str = "/proc/kallsyms";
/// A limit on addresses: the kernel has fewer call sites that sleep for a disk.
const ADDRESSES_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct FunctionNames {
    /// `None` until the first name is needed.
    list: Option<SymbolList>,
    /// All addresses seen so far, and the addresses that are not reported yet.
    seen: BTreeSet<u32>,
    new: BTreeSet<u32>,
}

impl FunctionNames {
    pub(crate) fn note(&mut self, frames: [u32; 4]) {
        for address in frames {
            if address != 0 && self.seen.len() < ADDRESSES_MAX && self.seen.insert(address) {
                self.new.insert(address);
            }
        }
    }

    /// The names of addresses that are new since the last call.
    pub(crate) fn take_new(&mut self) -> Vec<KernelFunction> {
        if self.new.is_empty() {
            return Vec::new();
        }
        // Without the list, functions have no names. Everything else works.
        let list = self
            .list
            .get_or_insert_with(|| SymbolList::of(fs::read_to_string(LIST).unwrap_or_default()));
        let named = |address: u32| {
            let name = list.name(address)?.to_owned();
            Some(KernelFunction { address, name })
        };
        std::mem::take(&mut self.new).into_iter().filter_map(named).collect()
    }
}

#[derive(Debug)]
struct SymbolList {
    text: String,
    /// The lower half of the address at which each function begins, and the offset of its name in
    /// the text. Sorted by address.
    begins: Vec<(u32, usize)>,
}

impl SymbolList {
    fn of(text: String) -> Self {
        let mut begins = Vec::new();
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            let begin = at;
            at += line.len();
            let mut fields = line.splitn(3, ' ');
            let (Some(address), Some(sort), Some(name)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let Ok(address) = u64::from_str_radix(address, 16) else { continue };
            if address != 0 && matches!(sort, "t" | "T" | "w" | "W") {
                begins.push((lower(address), begin + line.len() - name.len()));
            }
        }
        begins.sort_unstable();
        Self { text, begins }
    }

    /// The function that contains a return address: the last function that begins before the
    /// address.
    fn name(&self, address: u32) -> Option<&str> {
        let after = self.begins.partition_point(|(begin, _)| *begin < address);
        let (_, at) = self.begins.get(after.checked_sub(1)?)?;
        self.text[*at..].split(|c: char| c.is_whitespace()).next()
    }
}

/// The lower half of an address.
#[expect(clippy::cast_possible_truncation, reason = "only the lower half is stored")]
fn lower(address: u64) -> u32 {
    address as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an address gets the name of its function, and no name if the kernel hides addresses.
    /// Method: lists as the kernel writes them.
    #[test]
    fn addresses_have_the_names_of_their_functions() {
        let text = "ffffffff81000010 T filemap_fault\nffffffff81000000 t io_schedule\n\
                    ffffffff81000020 D a_variable\nffffffffc0000000 t ext4_read\t[ext4]\n";
        let list = SymbolList::of(text.to_owned());
        let name = |address| list.name(address);
        assert_eq!(name(0x8100_0008), Some("io_schedule"));
        assert_eq!(name(0x8100_0030), Some("filemap_fault"), "data is no function");
        assert_eq!(name(0xc000_0001), Some("ext4_read"));
        assert_eq!(name(0x8100_0000), None, "nothing was called before it");
        let hidden = SymbolList::of("0000000000000000 T filemap_fault\n".to_owned());
        assert_eq!(hidden.name(0x8100_0030), None);
        let mut functions = FunctionNames { list: Some(list), ..FunctionNames::default() };
        functions.note([0x8100_0008, 0, 0x8100_0030, 0x8100_0008]);
        let names =
            |of: Vec<KernelFunction>| of.into_iter().map(|f| f.name).collect::<Vec<String>>();
        assert_eq!(names(functions.take_new()), ["io_schedule", "filemap_fault"]);
        functions.note([0x8100_0008, 0xc000_0001, 0, 0]);
        assert_eq!(names(functions.take_new()), ["ext4_read"], "each is reported once");
    }
}
