//! Finds Java methods that HotSpot has compiled, by the virtual machine's own description.
//!
//! `libjvm.so` exports tables of the fields of its structures for external debuggers
//! (`gHotSpotVMStructs`). With these tables, the code around an address is found in the code cache.
//! No agent is loaded, and the virtual machine does not take part:
//!
//! ```text
//! CodeCache::_heaps --> CodeHeap: memory      segments of 128 bytes: code, or free
//!                                 segment map how far before a segment its block begins
//!                       HeapBlock, CodeBlob, nmethod: name, code, state, number
//! ```
//!
//! The process runs meanwhile, and its memory is untrusted input. So all sizes are bounded, and a
//! change is written only if the method still has the same number at that moment.

use std::collections::HashMap;
use std::ops::Range;

use elfen_rewrite::MAX_BYTES;

use super::object::{Loaded, u64_at};
use super::symbols::{Symbols, u32_at};
use crate::remote::{Mapping, Memory};

const LIBRARY: &str = "/libjvm.so";
/// HotSpot has about two thousand.
const FIELDS_MAX: u64 = 1 << 14;
const NAME_MAX: usize = 96;
const HEAPS_MAX: u32 = 16;
/// Entry of a segment map for a free segment.
const FREE: u8 = 0xff;
/// The start of a block is at most this many steps away. Code of one mebibyte takes 33 steps.
const STEPS_MAX: u32 = 1024;
/// The name that the code cache gives to compiled methods.
const METHOD: &[u8] = b"nmethod\0";
/// State of a method that callers may enter.
const IN_USE: u8 = 0;

/// One virtual machine.
#[derive(Clone, Debug)]
pub(super) struct HotSpot {
    /// Address of the list of the code cache's heaps.
    heaps: u64,
    fields: Fields,
}

/// The code of one Java method.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct CompiledMethod {
    pub(super) code: Range<u64>,
    pub(super) entry: u64,
    /// Address of the number of this compilation, and that number, which is unique.
    pub(super) number_at: u64,
    pub(super) number: u32,
    blob: u64,
}

/// Offsets of the fields that are read.
#[derive(Clone, Debug)]
struct Fields {
    array_length: u64,
    array_data: u64,
    heap_memory: u64,
    heap_segments: u64,
    heap_shift: u64,
    space_low: u64,
    space_high: u64,
    block_bytes: u64,
    blob_name: u64,
    code: Code,
    stubs: u64,
    state: u64,
    number: u64,
    names: Option<Names>,
}

/// Offsets for the name of a method. Only reports use names.
#[derive(Clone, Debug)]
struct Names {
    method: u64,
    constant: u64,
    pool: u64,
    name_index: u64,
    pool_bytes: u64,
    holder: u64,
    holder_name: u64,
    text_length: u64,
    text: u64,
}

/// How a blob describes where its code begins, and a method where it is entered.
#[derive(Clone, Copy, Debug)]
enum Code {
    /// By addresses, up to JDK 22.
    Addresses { begin: u64, entry: u64 },
    /// By offsets: the code's from the blob, the entry's from the code.
    Offsets { begin: u64, entry: u64 },
}

impl HotSpot {
    /// The virtual machine of a process, if it has one that describes itself.
    pub(super) fn of(memory: &Memory, mapped: &[Mapping]) -> Option<Self> {
        let code = mapped.iter().find(|one| one.executable && one.name.ends_with(LIBRARY))?;
        let loaded = Loaded::of(memory, mapped, code)?;
        let symbols = Symbols::of(memory, &loaded)?;
        let (offsets, addresses) = read_field_tables(memory, &symbols)?;
        let heaps = *addresses.get("CodeCache._heaps")?;
        let pool_bytes = size_of_type(memory, &symbols, "ConstantPool");
        let names = pool_bytes.and_then(|bytes| Names::of(&offsets, bytes));
        Some(Self { heaps, fields: Fields { names, ..Fields::of(&offsets)? } })
    }

    #[cfg(fuzzing)]
    pub(super) fn with(heaps: u64, offsets: &HashMap<String, u64>) -> Option<Self> {
        let names = Names::of(offsets, 64);
        Some(Self { heaps, fields: Fields { names, ..Fields::of(offsets)? } })
    }

    /// The method around an address, if callers may enter it.
    pub(super) fn method_around(&self, memory: &Memory, ip: u64) -> Option<CompiledMethod> {
        let fields = &self.fields;
        let list = u64_of(memory, self.heaps)?;
        let count = u32_of(memory, list.checked_add(fields.array_length)?)?.min(HEAPS_MAX);
        let data = u64_of(memory, list.checked_add(fields.array_data)?)?;
        let heaps =
            (0..count).filter_map(|index| u64_of(memory, data.checked_add(u64::from(index) * 8)?));
        let blob = heaps.filter_map(|heap| self.blob(memory, heap, ip)).next()?;
        let at = |field: u64| blob.checked_add(field);
        let name = u64_of(memory, at(fields.blob_name)?)?;
        if memory.read_vec(name, METHOD.len()).ok()? != METHOD {
            return None;
        }
        let (begin, entry) = match fields.code {
            Code::Addresses { begin, entry } => {
                (u64_of(memory, at(begin)?)?, u64_of(memory, at(entry)?)?)
            }
            Code::Offsets { begin, entry } => {
                let begin = at(u32_of(memory, at(begin)?)?.into())?;
                let entry = u16_of(memory, at(entry)?)?;
                (begin, begin.checked_add(entry.into())?)
            }
        };
        let code = begin..at(u32_of(memory, at(fields.stubs)?)?.into())?;
        let is_in_use = memory.read_vec(at(fields.state)?, 1).ok()? == [IN_USE];
        let number_at = at(fields.number)?;
        let number = u32_of(memory, number_at)?;
        let is_short = code.end.saturating_sub(code.start) <= MAX_BYTES as u64;
        let is_sound = is_short && code.contains(&ip) && code.contains(&entry) && blob < begin;
        let found = CompiledMethod { code, entry, number_at, number, blob };
        (is_in_use && is_sound).then_some(found)
    }

    /// The name of a method, such as `java/util/HashMap.putVal`.
    pub(super) fn name(&self, memory: &Memory, method: &CompiledMethod) -> Option<String> {
        let names = self.fields.names.as_ref()?;
        let word = |at: u64, field: u64| u64_of(memory, at.checked_add(field)?);
        let symbol = |at: u64| {
            let bytes = u16_of(memory, at.checked_add(names.text_length)?)?;
            let length = usize::from(bytes).min(NAME_MAX);
            String::from_utf8(memory.read_vec(at.checked_add(names.text)?, length).ok()?).ok()
        };
        let constant = word(word(method.blob, names.method)?, names.constant)?;
        let pool = word(constant, names.pool)?;
        let index = u16_of(memory, constant.checked_add(names.name_index)?)?;
        let name = word(pool.checked_add(names.pool_bytes)?, u64::from(index) * 8)?;
        let holder = word(word(pool, names.holder)?, names.holder_name)?;
        Some(format!("{}.{}", symbol(holder)?, symbol(name)?))
    }

    /// The blob around an address of a heap.
    fn blob(&self, memory: &Memory, heap: u64, ip: u64) -> Option<u64> {
        let fields = &self.fields;
        let space = heap.checked_add(fields.heap_memory)?;
        let low = u64_of(memory, space.checked_add(fields.space_low)?)?;
        let high = u64_of(memory, space.checked_add(fields.space_high)?)?;
        if !(low..high).contains(&ip) {
            return None;
        }
        let map = heap.checked_add(fields.heap_segments)?.checked_add(fields.space_low)?;
        let map = u64_of(memory, map)?;
        let shift = u32_of(memory, heap.checked_add(fields.heap_shift)?)?;
        let mut segment = (ip - low).checked_shr(shift)?;
        for _ in 0..STEPS_MAX {
            match memory.read_vec(map.checked_add(segment)?, 1).ok()?[..] {
                [0] => {
                    let block = low.checked_add(segment.checked_shl(shift)?)?;
                    return block.checked_add(fields.block_bytes);
                }
                [FREE] | [] => return None,
                [back, ..] => segment = segment.checked_sub(back.into())?,
            }
        }
        None
    }
}

impl Fields {
    fn of(offsets: &HashMap<String, u64>) -> Option<Self> {
        let field = |name: &str| offsets.get(name).copied();
        let code = match (field("CodeBlob._code_begin"), field("CodeBlob._code_offset")) {
            (Some(begin), _) => {
                Code::Addresses { begin, entry: field("nmethod._verified_entry_point")? }
            }
            (_, Some(begin)) => {
                Code::Offsets { begin, entry: field("nmethod._verified_entry_offset")? }
            }
            _ => return None,
        };
        Some(Self {
            array_length: field("GrowableArrayBase._len")?,
            array_data: field("GrowableArray<int>._data")?,
            heap_memory: field("CodeHeap._memory")?,
            heap_segments: field("CodeHeap._segmap")?,
            heap_shift: field("CodeHeap._log2_segment_size")?,
            space_low: field("VirtualSpace._low")?,
            space_high: field("VirtualSpace._high")?,
            // A length, followed by a flag that is padded to the same size.
            block_bytes: field("HeapBlock::Header._used")?.checked_mul(2)?,
            blob_name: field("CodeBlob._name")?,
            code,
            stubs: field("nmethod._stub_offset")?,
            state: field("nmethod._state")?,
            number: field("nmethod._compile_id")?,
            names: None,
        })
    }
}

impl Names {
    fn of(offsets: &HashMap<String, u64>, pool_bytes: u64) -> Option<Self> {
        let field = |name: &str| offsets.get(name).copied();
        Some(Self {
            method: field("CompiledMethod._method").or_else(|| field("nmethod._method"))?,
            constant: field("Method._constMethod")?,
            pool: field("ConstMethod._constants")?,
            name_index: field("ConstMethod._name_index")?,
            pool_bytes,
            holder: field("ConstantPool._pool_holder")?,
            holder_name: field("Klass._name")?,
            text_length: field("Symbol._length")?,
            text: field("Symbol._body")?,
        })
    }
}

type Described = (HashMap<String, u64>, HashMap<String, u64>);

/// Reads the offset of each instance field and the address of each static field, by `Type.field`.
fn read_field_tables(memory: &Memory, symbols: &Symbols<'_>) -> Option<Described> {
    let word = |name: &str| u64_of(memory, symbols.address(name)?);
    let of_entry = |name: &str| word(&format!("gHotSpotVMStructEntry{name}"));
    let table = word("gHotSpotVMStructs")?;
    let bytes = of_entry("ArrayStride")?.min(4096);
    let length = usize::try_from(bytes).ok()?;
    let index = |name: &str| of_entry(name).and_then(|offset| usize::try_from(offset).ok());
    let (of_type, of_name) = (index("TypeNameOffset")?, index("FieldNameOffset")?);
    let (of_static, of_offset) = (index("IsStaticOffset")?, index("OffsetOffset")?);
    let of_address = index("AddressOffset")?;
    let (mut offsets, mut addresses) = (HashMap::new(), HashMap::new());
    for number in 0..FIELDS_MAX {
        let at = table.checked_add(number.checked_mul(bytes)?)?;
        let entry = memory.read_vec(at, length).ok()?;
        let kind = u64_at(&entry, of_type)?;
        if kind == 0 {
            break;
        }
        let (Some(kind), Some(name)) = (text(memory, kind), text(memory, u64_at(&entry, of_name)?))
        else {
            continue;
        };
        let name = format!("{kind}.{name}");
        match u32_at(&entry, of_static)? {
            0 => offsets.insert(name, u64_at(&entry, of_offset)?),
            _ => addresses.insert(name, u64_at(&entry, of_address)?),
        };
    }
    Some((offsets, addresses))
}

/// The size of a structure type.
fn size_of_type(memory: &Memory, symbols: &Symbols<'_>, name: &str) -> Option<u64> {
    let word = |name: &str| u64_of(memory, symbols.address(name)?);
    let of_entry = |name: &str| word(&format!("gHotSpotVMTypeEntry{name}"));
    let table = word("gHotSpotVMTypes")?;
    let (bytes, of_name) = (of_entry("ArrayStride")?, of_entry("TypeNameOffset")?);
    let of_size = of_entry("SizeOffset")?;
    for number in 0..FIELDS_MAX {
        let entry = table.checked_add(number.checked_mul(bytes)?)?;
        let found = u64_of(memory, entry.checked_add(of_name)?).filter(|&at| at != 0)?;
        if text(memory, found).as_deref() == Some(name) {
            return u64_of(memory, entry.checked_add(of_size)?);
        }
    }
    None
}

/// Reads a string up to its NUL. Reading past it is fine, as other constants follow.
fn text(memory: &Memory, at: u64) -> Option<String> {
    let bytes = memory.read_vec(at, NAME_MAX).ok()?;
    let text = bytes.split(|&byte| byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

fn u64_of(memory: &Memory, at: u64) -> Option<u64> {
    u64_at(&memory.read_vec(at, 8).ok()?, 0)
}

fn u32_of(memory: &Memory, at: u64) -> Option<u32> {
    u32_at(&memory.read_vec(at, 4).ok()?, 0)
}

fn u16_of(memory: &Memory, at: u64) -> Option<u16> {
    let bytes = memory.read_vec(at, 2).ok()?;
    bytes.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use elfen_rewrite::{Function, HotSpot as Rule, Permitted};

    use super::*;
    use crate::remote::mappings;

    /// Compiles a method, prints a line, and waits until its input ends.
    const PROGRAM: &str = "public class Waits {
        static long work(long x) {
            for (long i = 0; i < 1000; i++) { x = x * 31 + (x >>> 7) + i; }
            return x;
        }
        public static void main(String[] none) throws Exception {
            long x = 1;
            for (int i = 0; i < 40000; i++) { x = work(x); }
            System.out.println(x == 0 ? \"zero\" : \"compiled\");
            System.in.read();
        }
    }";

    struct Java(Child);

    impl Drop for Java {
        fn drop(&mut self) {
            // Fails if the test passed, because the program has ended then.
            let _ended = self.0.kill();
            self.0.wait().unwrap();
        }
    }

    /// Starts the program and waits until its methods are compiled.
    #[track_caller]
    fn java() -> Java {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("Waits.java");
        std::fs::write(&source, PROGRAM).unwrap();
        let built = Command::new("javac").arg("-d").arg(folder.path()).arg(&source).status();
        assert!(built.expect("needs javac").success());
        let mut command = Command::new("java");
        command.args(["-Xcomp", "-cp"]).arg(folder.path()).arg("Waits");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut java = Java(child);
        let mut line = String::new();
        BufReader::new(java.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "compiled\n");
        java
    }

    /// Goal: each compiled method is found by any address in it, decodes as a whole, and has sites
    /// that HotSpot neither reads nor changes. Method: all code in the code cache of a real virtual
    /// machine.
    #[test]
    #[ignore = "needs a JDK"]
    fn compiled_methods_are_found_named_and_patchable() {
        let java = java();
        let memory = Memory::open(java.0.id()).unwrap();
        let mapped = mappings(java.0.id()).unwrap();
        let hotspot = HotSpot::of(&memory, &mapped).expect("it describes itself");
        let mut found: Vec<CompiledMethod> = Vec::new();
        let makes_code = |one: &&Mapping| one.executable && one.file.is_none();
        for one in mapped.iter().filter(makes_code).filter(|one| !one.name.starts_with('[')) {
            let mut at = one.range.start;
            while at < one.range.end {
                let method = hotspot.method_around(&memory, at);
                at = method.as_ref().map_or(at + 64, |method| method.code.end);
                found.extend(method);
            }
        }
        assert!(found.len() > 100, "{} methods", found.len());
        let mut sites = 0;
        for method in &found {
            let Range { start, end } = method.code;
            for ip in [start, method.entry, (start + end) / 2, end - 1] {
                assert_eq!(hotspot.method_around(&memory, ip).as_ref(), Some(method));
            }
            let bytes = memory.read_vec(start, usize::try_from(end - start).unwrap()).unwrap();
            let permitted =
                Permitted { hotspot: Some(Rule { entry: method.entry }), ..Permitted::default() };
            // Stubs after the code hold data where calls are not linked yet, and such methods do
            // not decode.
            let function = Function::decode(&bytes, start, Some(method.entry));
            let site = function.is_ok_and(|one| one.sites(&permitted).next().is_some());
            sites += usize::from(site);
        }
        assert!(sites * 2 > found.len(), "{sites} of {} have a place", found.len());
        let names: Vec<String> =
            found.iter().filter_map(|method| hotspot.name(&memory, method)).collect();
        assert_eq!(names.len(), found.len());
        assert!(names.iter().any(|name| name == "Waits.work"), "{names:?}");
        let mut numbers: Vec<u32> = found.iter().map(|method| method.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), found.len(), "each compilation has a number of its own");
        assert_eq!(
            hotspot.method_around(&memory, PROGRAM.as_ptr().expose_provenance() as u64),
            None
        );
    }

    #[test]
    fn other_processes_have_no_methods() {
        let memory = Memory::open(std::process::id()).unwrap();
        let mapped = mappings(std::process::id()).unwrap();
        assert!(HotSpot::of(&memory, &mapped).is_none());
    }

    /// Goal: hostile contents of the virtual machine's structures yield no method and no panic.
    /// Method: pages of this process filled by a seeded generator, with words that point back into
    /// them.
    #[test]
    fn hostile_memory_yields_no_method() {
        let memory = Memory::open(std::process::id()).unwrap();
        let mut words = vec![0_u64; 512];
        let base = words.as_ptr().expose_provenance() as u64;
        let mut seed = 7_u64;
        let mut next = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            seed >> 20
        };
        for _ in 0..2000 {
            for word in &mut words {
                *word = match next() % 4 {
                    0 => base + next() % 4096,
                    1 => next() % 64,
                    2 => u64::MAX - next() % 64,
                    _ => next() << 20 | next(),
                };
            }
            let offset = |next: &mut dyn FnMut() -> u64| next() % 256 * 8;
            let (begin, entry) = (offset(&mut next), offset(&mut next));
            let code = match next() % 2 {
                0 => Code::Addresses { begin, entry },
                _ => Code::Offsets { begin, entry },
            };
            let mut field = || offset(&mut next);
            let fields = Fields {
                array_length: field(),
                array_data: field(),
                heap_memory: field(),
                heap_segments: field(),
                heap_shift: field(),
                space_low: field(),
                space_high: field(),
                block_bytes: field(),
                blob_name: field(),
                code,
                stubs: field(),
                state: field(),
                number: field(),
                names: None,
            };
            let hotspot = HotSpot { heaps: base + next() % 4096, fields };
            assert_eq!(hotspot.method_around(&memory, base + next() % 8192), None);
        }
    }
}
