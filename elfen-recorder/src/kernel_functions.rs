//! Names of the kernel's functions that threads slept in, by the list that the kernel keeps of
//! them. It is read once, when the first is asked for; to who may not see addresses there it lists
//! zeros, and then there are no names.

use std::collections::BTreeSet;
use std::fs;

use elfen_tailor::trace::KernelFunction;

const LIST: &str = "/proc/kallsyms";
/// Places in the kernel from which somebody can sleep for a disk are fewer.
const MOST: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Functions {
    /// `None` until one is asked for.
    list: Option<List>,
    /// Those that were asked for, ever, and since they were told.
    met: BTreeSet<u32>,
    new: BTreeSet<u32>,
}

impl Functions {
    pub(crate) fn meet(&mut self, frames: [u32; 4]) {
        for address in frames {
            if address != 0 && self.met.len() < MOST && self.met.insert(address) {
                self.new.insert(address);
            }
        }
    }

    /// The names of those that were met since the last call.
    pub(crate) fn learned(&mut self) -> Vec<KernelFunction> {
        if self.new.is_empty() {
            return Vec::new();
        }
        // Without the list nothing has a name, and all else stands.
        let list =
            self.list.get_or_insert_with(|| List::of(fs::read_to_string(LIST).unwrap_or_default()));
        let named = |address: u32| {
            let name = list.name(address)?.to_owned();
            Some(KernelFunction { address, name })
        };
        std::mem::take(&mut self.new).into_iter().filter_map(named).collect()
    }
}

#[derive(Debug)]
struct List {
    text: String,
    /// The lower halves of where functions begin, in their order, and where in the text their
    /// names are.
    begins: Vec<(u32, usize)>,
}

impl List {
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

    /// Of the function that an address lies in: the last one that begins before it, as a call that
    /// was made is behind a beginning.
    fn name(&self, address: u32) -> Option<&str> {
        let after = self.begins.partition_point(|(begin, _)| *begin < address);
        let (_, at) = self.begins.get(after.checked_sub(1)?)?;
        self.text[*at..].split(|c: char| c.is_whitespace()).next()
    }
}

/// The lower half of an address.
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
fn lower(address: u64) -> u32 {
    address as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an address has the name of the function that it lies in, and none where the kernel
    /// hides them. Method: lists as the kernel writes them.
    #[test]
    fn addresses_have_the_names_of_their_functions() {
        let text = "ffffffff81000010 T filemap_fault\nffffffff81000000 t io_schedule\n\
                    ffffffff81000020 D a_variable\nffffffffc0000000 t ext4_read\t[ext4]\n";
        let list = List::of(text.to_owned());
        let name = |address| list.name(address);
        assert_eq!(name(0x8100_0008), Some("io_schedule"));
        assert_eq!(name(0x8100_0030), Some("filemap_fault"), "data is no function");
        assert_eq!(name(0xc000_0001), Some("ext4_read"));
        assert_eq!(name(0x8100_0000), None, "nothing was called before it");
        let hidden = List::of("0000000000000000 T filemap_fault\n".to_owned());
        assert_eq!(hidden.name(0x8100_0030), None);
        let mut functions = Functions { list: Some(list), ..Functions::default() };
        functions.meet([0x8100_0008, 0, 0x8100_0030, 0x8100_0008]);
        let names =
            |of: Vec<KernelFunction>| of.into_iter().map(|f| f.name).collect::<Vec<String>>();
        assert_eq!(names(functions.learned()), ["io_schedule", "filemap_fault"]);
        functions.meet([0x8100_0008, 0xc000_0001, 0, 0]);
        assert_eq!(names(functions.learned()), ["ext4_read"], "each is told once");
    }
}
