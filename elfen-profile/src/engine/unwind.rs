//! Callers of an interrupted thread, from a copy of its registers and stack and from the unwind
//! tables of its files (`.eh_frame`).

use std::fs::{File, Metadata};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use elfen_instrument::remote::Memory;
use elfen_stream::layout;
use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, FrameDescriptionEntry, LittleEndian,
    Reader, Register, RegisterRule, UnwindContext, UnwindSection, X86_64,
};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSegment, ReadCache, ReadRef};
use rustc_hash::{FxHashMap, FxHashSet};

use super::objects::{Image, Objects};

const PAGE: u64 = 4096;
/// More callers than these are left out.
const CALLERS_MAX: usize = 512;
/// Registers by their DWARF numbers: the general ones.
const REGISTERS: usize = 16;
const RSP: usize = 7;
/// The DWARF numbers of the registers of a frame of the kernel, but for the last, which is the
/// address of the instruction.
const IN_FRAME: [usize; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 5, 4, 6, 3, 1, 0, 2, 7];
/// Where the frame of a signal has these registers.
const SIGNAL_REGISTERS: u64 = 40;
const INSTRUCTION_IN_FRAME: usize = 16;
/// `DW_OP_breg0` and `DW_OP_deref`.
const FIRST_SUM: u8 = 0x70;
const DEREFERENCE: u8 = 0x06;
/// The code of a procedure linkage table pushes a number 11 bytes behind its start.
const LINKAGE_ENTRY: u64 = 16;
const LINKAGE_PUSHED: u64 = 11;

/// Registers and stack of a thread when a burst began.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct StackCopy {
    /// In the order of a frame of the kernel.
    pub(crate) registers: Vec<u64>,
    /// From the red zone below the stack pointer on.
    pub(crate) bytes: Vec<u8>,
}

impl StackCopy {
    /// Copies registers and up to `bytes` of the stack of a stopped thread.
    pub(crate) fn of(one: &libc::user_regs_struct, memory: &Memory, bytes: usize) -> Option<Self> {
        let from = one.rsp.saturating_sub(layout::STACK_BELOW.unsigned_abs().into());
        // In the order of `IN_FRAME`.
        let registers = vec![
            one.r8, one.r9, one.r10, one.r11, one.r12, one.r13, one.r14, one.r15, one.rdi, one.rsi,
            one.rbp, one.rbx, one.rdx, one.rax, one.rcx, one.rsp, one.rip,
        ];
        Some(Self { registers, bytes: memory.read_up_to(from, bytes).ok()? })
    }

    pub(crate) fn pointer(&self) -> u64 {
        self.registers.get(INSTRUCTION_IN_FRAME - 1).copied().unwrap_or(0)
    }
}

/// A call that has not returned: where it returns to, and the image of that address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct CallSite {
    /// The byte in front of it belongs to the call, or is an interrupted instruction's first.
    pub(crate) returns_to: u64,
    pub(crate) image: u32,
}

/// How the caller of one address is found.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Rule {
    /// A thread begins here.
    First,
    /// A handler of a signal returns here.
    Signal,
    Call {
        /// The end of the frame.
        end: FrameEnd,
        /// Where the caller's registers are.
        saved: Vec<(usize, Saved)>,
    },
}

/// What the end of a frame is computed from: a register and a distance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameEnd {
    At(usize, i64),
    /// In a linkage table, whose entries push a word on their way.
    Linkage,
    /// The word there is the end, in functions that align their stack.
    StoredAt(usize, i64),
}

/// Where a register of the caller is: at a distance from the end of the frame or from a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Saved {
    FromEnd(i64),
    From(usize, i64),
}

/// Whether all callers were found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Depth {
    Whole,
    Cut,
}

/// The unwind tables of a process.
#[derive(Debug, Default)]
pub(crate) struct Unwinder {
    tables: FxHashMap<String, Option<UnwindTables>>,
    /// By image and offset in its file.
    rules: FxHashMap<(u32, u64), Option<Rule>>,
    /// Pages that have no code of a file.
    foreign: FxHashSet<u64>,
}

impl Unwinder {
    /// The program has loaded or unloaded libraries.
    pub(crate) fn forget_foreign(&mut self) {
        self.foreign.clear();
    }

    /// The calls that had not returned, from the innermost.
    pub(crate) fn callers(
        &mut self,
        objects: &mut Objects,
        copy: &StackCopy,
        calls: &mut Vec<CallSite>,
    ) -> Depth {
        let Some(mut thread) = Registers::of(copy) else { return Depth::Cut };
        // Whether the instruction is one that a call returns to; a signal's handler returns to the
        // instruction that it has interrupted.
        let mut is_call = false;
        let mut is_first = true;
        while calls.len() < CALLERS_MAX {
            // Behind a call that never returns another function may begin.
            let at = thread.instruction - u64::from(is_call);
            if self.foreign.contains(&(at / PAGE)) {
                return Depth::Cut;
            }
            let Some(number) = objects.image_at(at) else {
                self.foreign.insert(at / PAGE);
                return Depth::Cut;
            };
            let Some(image) = objects.images().get(number) else { return Depth::Cut };
            let Ok(image_id) = u32::try_from(number) else { return Depth::Cut };
            if !is_first {
                calls.push(CallSite { returns_to: at + 1, image: image_id });
            }
            is_first = false;
            let offset = image.offset + (at - image.range.start);
            let rule = match self.rules.get(&(image_id, offset)) {
                Some(rule) => rule,
                None => {
                    let process = objects.process();
                    let found = self.tables.entry(image.path.clone());
                    let tables = found.or_insert_with(|| UnwindTables::read(process, image));
                    let rule = tables.as_ref().and_then(|tables| tables.rule(offset));
                    self.rules.entry((image_id, offset)).or_insert(rule)
                }
            };
            match rule {
                None => return Depth::Cut,
                Some(Rule::First) => return Depth::Whole,
                Some(rule) => {
                    is_call = *rule != Rule::Signal;
                    if !is_call && let Some(last) = calls.last_mut() {
                        // The kernel's return address is the first of the code that ends a handler.
                        last.returns_to = at + 2;
                    }
                    if thread.go_to_caller(rule, copy).is_none() {
                        return Depth::Cut;
                    }
                }
            }
            if thread.instruction == 0 {
                return Depth::Whole;
            }
        }
        Depth::Cut
    }
}

/// Registers of a function, as far as they are known.
struct Registers {
    instruction: u64,
    known: [Option<u64>; REGISTERS],
}

impl Registers {
    fn of(copy: &StackCopy) -> Option<Self> {
        let mut registers = Self { instruction: 0, known: [None; REGISTERS] };
        registers.instruction = *copy.registers.get(INSTRUCTION_IN_FRAME)?;
        for (&number, &value) in IN_FRAME.iter().zip(&copy.registers) {
            registers.known[number] = Some(value);
        }
        Some(registers)
    }

    /// Goes on to the caller, whose frame lies above.
    fn go_to_caller(&mut self, rule: &Rule, copy: &StackCopy) -> Option<()> {
        let first = *copy.registers.get(INSTRUCTION_IN_FRAME - 1)?;
        let first = first.checked_sub(layout::STACK_BELOW.unsigned_abs().into())?;
        let word = |at: u64| {
            let from = usize::try_from(at.checked_sub(first)?).ok()?;
            let bytes = copy.bytes.get(from..)?.first_chunk::<8>()?;
            Some(u64::from_le_bytes(*bytes))
        };
        let sp = self.known[RSP]?;
        match rule {
            Rule::First => return None,
            Rule::Signal => {
                let frame = sp.checked_add(SIGNAL_REGISTERS)?;
                for (index, &number) in (0..).zip(&IN_FRAME) {
                    self.known[number] = word(frame.checked_add(8 * index)?);
                }
                self.instruction = word(frame.checked_add(8 * INSTRUCTION_IN_FRAME as u64)?)?;
            }
            Rule::Call { end, saved } => {
                let from = |number: usize, distance| {
                    self.known.get(number).copied()??.checked_add_signed(distance)
                };
                let end = match *end {
                    FrameEnd::At(number, distance) => from(number, distance)?,
                    FrameEnd::StoredAt(number, distance) => word(from(number, distance)?)?,
                    FrameEnd::Linkage => {
                        let has_pushed = self.instruction % LINKAGE_ENTRY >= LINKAGE_PUSHED;
                        from(RSP, if has_pushed { 16 } else { 8 })?
                    }
                };
                let returns_to = word(end.checked_sub(8)?)?;
                let mut caller = self.known;
                for &(number, place) in saved {
                    let at = match place {
                        Saved::FromEnd(distance) => end.checked_add_signed(distance),
                        Saved::From(number, distance) => from(number, distance),
                    };
                    caller[number] = at.and_then(word);
                }
                caller[RSP] = Some(end);
                (self.known, self.instruction) = (caller, returns_to);
            }
        }
        // Frames above only: else a damaged stack has no end.
        (self.known[RSP]? > sp).then_some(())
    }
}

/// The unwind tables of one file.
#[derive(Debug)]
struct UnwindTables {
    /// Offset, length and address of each segment.
    segments: Vec<[u64; 3]>,
    frames: (u64, Vec<u8>),
    /// The table of all functions; without one, all entries are looked through.
    index: Option<(u64, Vec<u8>)>,
}

type Slice<'a> = EndianSlice<'a, LittleEndian>;

impl UnwindTables {
    fn read(process: u32, image: &Image) -> Option<Self> {
        if !image.path.starts_with('/') {
            // The kernel's own code: all of its file is mapped.
            return Self::of(image.bytes());
        }
        // As the process sees it, which may be in a container.
        let path = PathBuf::from(format!("/proc/{process}/root{}", image.path));
        let file = open_regular(&path).or_else(|| open_regular(Path::new(&image.path)))?;
        Self::of(&ReadCache::new(file))
    }

    fn of<'a, R: ReadRef<'a>>(file: R) -> Option<Self> {
        let elf: ElfFile64<'a, object::Endianness, R> = ElfFile64::parse(file).ok()?;
        let segments = elf.segments().map(|segment| {
            let (offset, bytes) = segment.file_range();
            [offset, bytes, segment.address()]
        });
        let section = |name: &str| {
            let section = elf.section_by_name(name)?;
            Some((section.address(), section.data().ok()?.to_vec()))
        };
        let (frames, index) = (section(".eh_frame")?, section(".eh_frame_hdr"));
        Some(Self { segments: segments.collect(), frames, index })
    }

    fn rule(&self, offset: u64) -> Option<Rule> {
        let address = self.segments.iter().find_map(|&[start, bytes, address]| {
            let inside = offset.checked_sub(start).filter(|&inside| inside < bytes)?;
            address.checked_add(inside)
        })?;
        let (frames_at, frames) = &self.frames;
        let mut bases = BaseAddresses::default().set_eh_frame(*frames_at);
        let section = EhFrame::new(frames, LittleEndian);
        let entry: FrameDescriptionEntry<Slice<'_>> = if let Some((index_at, index)) = &self.index {
            bases = bases.set_eh_frame_hdr(*index_at);
            let index = EhFrameHdr::new(index, LittleEndian).parse(&bases, 8).ok()?;
            let find = EhFrame::cie_from_offset;
            index.table()?.fde_for_address(&section, &bases, address, find).ok()?
        } else {
            section.fde_for_address(&bases, address, EhFrame::cie_from_offset).ok()?
        };
        if entry.is_signal_trampoline() {
            return Some(Rule::Signal);
        }
        let mut context = UnwindContext::new();
        let row = entry.unwind_info_for_address(&section, &bases, &mut context, address).ok()?;
        if row.register(X86_64::RA) == Some(RegisterRule::Undefined) {
            return Some(Rule::First);
        }
        let end = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                FrameEnd::At(general(*register)?, *offset)
            }
            CfaRule::Expression(expression) => {
                let (number, distance, rest) = sum(expression.get(&section).ok()?.0)?;
                match rest {
                    [] => FrameEnd::At(number, distance),
                    [DEREFERENCE] => FrameEnd::StoredAt(number, distance),
                    _ if (number, distance) == (RSP, 8) => FrameEnd::Linkage,
                    _ => return None,
                }
            }
        };
        let saved = row.registers().filter_map(|(register, rule)| {
            let place = match rule {
                RegisterRule::Offset(distance) => Saved::FromEnd(*distance),
                RegisterRule::Expression(expression) => {
                    match sum(expression.get(&section).ok()?.0)? {
                        (number, distance, []) => Saved::From(number, distance),
                        _ => return None,
                    }
                }
                _ => return None,
            };
            Some((general(*register)?, place))
        });
        Some(Rule::Call { end, saved: saved.collect() })
    }
}

fn general(register: Register) -> Option<usize> {
    Some(usize::from(register.0)).filter(|&number| number < REGISTERS)
}

/// Opens a file that a program names, which may be anything by now.
fn open_regular(path: &Path) -> Option<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.metadata().ok().filter(Metadata::is_file)?;
    Some(file)
}

/// Reads an expression that begins with the sum of a register and a number. Returns them and the
/// rest of the expression.
fn sum(mut expression: Slice<'_>) -> Option<(usize, i64, &[u8])> {
    let number = expression.read_u8().ok()?.checked_sub(FIRST_SUM)?;
    let number = general(Register(number.into()))?;
    let distance = expression.read_sleb128().ok()?;
    Some((number, distance, expression.slice()))
}
