//! Records which instructions a thread executes, and the addresses that they use.
//!
//! A thread of a cache with addresses leaves events and addresses. The events tell the blocks, as
//! for profiles, and each block says how many addresses belong to it. A block that was left inside
//! becomes a block of its own in the trace, which ends there.

use std::path::Path;

use elfen_core_model::instruction::Instruction;
use elfen_core_model::trace::{Block, BlockNumber, CodeFile, Trace};
use elfen_instrument::symbols::build_id_of;
use elfen_stream::{Accesses, BlockId, Cache, Exit, Translated};
use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory};
use rustc_hash::FxHashMap;

use super::objects::{Image, Objects};
use super::walk::{Burst, Step, Ways};
use crate::classes::classify;

/// Which instructions of a program are recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceLimits {
    /// Instructions before the first one.
    pub skip: u64,
    pub instructions: u64,
}

/// A part of a block in the cache: all of it, mostly.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Part {
    block: BlockId,
    from: u64,
    to: u64,
}

/// What a part is in the trace.
#[derive(Debug)]
struct Known {
    number: BlockNumber,
    instructions: u64,
    addresses: usize,
    /// Those of its addresses that the base of `%fs` is added to.
    local: Vec<usize>,
    /// Executions that use memory at other addresses, too.
    untraced: u64,
}

/// What a thread has executed between entering and leaving the cache.
#[derive(Clone, Copy)]
struct Way<'a> {
    /// Blocks, and where in them it began.
    parts: &'a [(BlockId, u64)],
    /// It has left inside of the last one.
    is_inside: bool,
    burst: &'a Burst,
}

#[derive(Debug)]
pub(crate) struct TraceRecorder {
    limits: TraceLimits,
    trace: Trace,
    known: Vec<Known>,
    /// Where the known parts are in that list.
    numbers: FxHashMap<Part, usize>,
    ways: Ways,
    factory: InstructionInfoFactory,
    parts: Vec<(BlockId, u64)>,
    /// The files of images, by the numbers of these.
    files: Vec<Option<u32>>,
    executed: u64,
    recorded: u64,
    /// Stretches that are missing, because code has changed or addresses did not fit.
    pub(crate) lost: u64,
}

impl TraceRecorder {
    pub(crate) fn new(limits: TraceLimits) -> Self {
        Self {
            limits,
            trace: Trace { skipped: limits.skip, ..Trace::default() },
            known: Vec::new(),
            numbers: FxHashMap::default(),
            ways: Ways::default(),
            factory: InstructionInfoFactory::new(),
            parts: Vec::new(),
            files: Vec::new(),
            executed: 0,
            recorded: 0,
            lost: 0,
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.recorded >= self.limits.instructions
    }

    /// Adds what a thread has done between entering and leaving the cache. `thread_pointer` is the
    /// base of `%fs`.
    pub(crate) fn add(
        &mut self,
        cache: &Cache,
        objects: &Objects,
        burst: &Burst,
        addresses: &[u64],
        thread_pointer: u64,
    ) {
        if self.is_complete() {
            return;
        }
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        let mut is_inside = false;
        let walked = self.ways.walk(cache, burst, |step, node, _| {
            is_inside = true;
            match step {
                Step::Block(id) => parts.push((id, node.start)),
                Step::Part(id, from) => parts.push((id, from)),
                // The last block was executed to its end.
                _ => is_inside = false,
            }
        });
        let added = walked.ok().and_then(|()| {
            let way = Way { parts: &parts, is_inside, burst };
            self.add_parts(cache, objects, &way, addresses, thread_pointer)
        });
        self.lost += u64::from(added.is_none());
        self.parts = parts;
    }

    /// `None` if the code of a block is gone, or there are not enough addresses.
    fn add_parts(
        &mut self,
        cache: &Cache,
        objects: &Objects,
        way: &Way<'_>,
        mut addresses: &[u64],
        thread_pointer: u64,
    ) -> Option<()> {
        let Way { parts, is_inside, burst } = *way;
        let last = parts.len().saturating_sub(1);
        for (index, &(block, from)) in parts.iter().enumerate() {
            let translated = cache.blocks().get(usize::try_from(block).ok()?)?;
            let mut to = translated.end;
            if index == last && is_inside {
                if burst.is_cut {
                    break;
                }
                to = burst.left_at;
            }
            let mut part = Part { block, from, to };
            let mut number = self.part(translated, objects, part)?;
            let known = self.known.get(number)?;
            let before = self.executed;
            self.executed += known.instructions;
            if self.executed <= self.limits.skip {
                addresses = addresses.get(known.addresses..)?;
                continue;
            }
            if before < self.limits.skip {
                // The first instructions of the block are skipped.
                let skip = usize::try_from(self.limits.skip - before).ok()?;
                let whole = known.addresses;
                part.from = address_of(translated, from, skip)?;
                number = self.part(translated, objects, part)?;
                addresses = addresses.get(whole - self.known.get(number)?.addresses..)?;
            }
            let left = self.limits.instructions - self.recorded;
            if self.known.get(number)?.instructions > left {
                part.to = address_of(translated, part.from, usize::try_from(left).ok()?)?;
                number = self.part(translated, objects, part)?;
            }
            let known = self.known.get(number)?;
            let (own, rest) = addresses.split_at_checked(known.addresses)?;
            addresses = rest;
            let first = self.trace.addresses.len();
            self.trace.addresses.extend_from_slice(own);
            for &local in &known.local {
                let address = self.trace.addresses.get_mut(first + local)?;
                *address = address.wrapping_add(thread_pointer);
            }
            self.trace.runs.push(known.number);
            self.trace.untraced_accesses += known.untraced;
            self.recorded += known.instructions;
            if self.is_complete() {
                break;
            }
        }
        Some(())
    }

    /// The number of a part in the list of known parts.
    fn part(&mut self, block: &Translated, objects: &Objects, part: Part) -> Option<usize> {
        if let Some(&number) = self.numbers.get(&part) {
            return Some(number);
        }
        let image = objects.images().get(usize::try_from(block.object).ok()?)?;
        let (code, accesses) = decode(&mut self.factory, image, part.from, part.to)?;
        let first = u32::try_from(self.trace.instructions.len()).ok()?;
        let number = BlockNumber::try_from(self.trace.blocks.len()).ok()?;
        let known = Known {
            number,
            instructions: code.len() as u64,
            addresses: code.iter().map(Instruction::addresses).sum(),
            local: local(&accesses),
            untraced: code.iter().filter(|one| one.has_unknown_addresses).count() as u64,
        };
        self.trace.instructions.extend(code);
        let instructions = first..u32::try_from(self.trace.instructions.len()).ok()?;
        let target = match block.exit {
            _ if part.to != block.end => None,
            Exit::Branch { to } | Exit::Jump { to } | Exit::Call { to } => Some(to),
            _ => None,
        };
        let file = self.file(block.object, image);
        let offset = part.from - image.range.start + image.offset;
        let place = file.map(|file| (file, offset));
        self.trace.blocks.push(Block { start: part.from, place, instructions, target });
        self.numbers.insert(part, self.known.len());
        self.known.push(known);
        Some(self.known.len() - 1)
    }

    fn file(&mut self, object: u32, image: &Image) -> Option<u32> {
        let object = object as usize;
        if object >= self.files.len() {
            self.files.resize(object + 1, None);
        }
        if self.files[object].is_none() {
            let files = &mut self.trace.files;
            let known = files.iter().position(|file| file.path == image.path);
            let number = known.unwrap_or_else(|| {
                let build_id = build_id_of(Path::new(&image.path)).unwrap_or_default();
                let build_id = build_id.iter().map(|byte| format!("{byte:02x}")).collect();
                files.push(CodeFile { path: image.path.clone(), build_id });
                files.len() - 1
            });
            self.files[object] = u32::try_from(number).ok();
        }
        self.files[object]
    }

    /// The trace, with the blocks that did not run: fetch goes there after wrong predictions.
    pub(crate) fn finish(
        mut self,
        cache: &Cache,
        objects: &Objects,
        program: Vec<String>,
    ) -> Trace {
        for (id, block) in (0..).zip(cache.blocks()) {
            if !block.is_retired && !block.offsets.is_empty() {
                let part = Part { block: id, from: block.start, to: block.end };
                // The code of some is gone.
                let _known = self.part(block, objects, part);
            }
        }
        self.trace.program = program;
        self.trace
    }
}

/// The address of an instruction of a block, by its distance from the one at `from`.
fn address_of(block: &Translated, from: u64, distance: usize) -> Option<u64> {
    let mut offsets = block.offsets.iter().map(|&offset| block.start + u64::from(offset));
    let first = offsets.position(|at| at == from)?;
    let offset = block.offsets.get(first + distance)?;
    Some(block.start + u64::from(*offset))
}

fn decode(
    factory: &mut InstructionInfoFactory,
    image: &Image,
    from: u64,
    to: u64,
) -> Option<(Vec<Instruction>, Vec<Accesses>)> {
    let at = |address: u64| usize::try_from(address.checked_sub(image.range.start)?).ok();
    let bytes = image.bytes().get(at(from)?..at(to)?)?;
    let mut code = Vec::new();
    let mut all = Vec::new();
    for decoded in Decoder::with_ip(64, bytes, from, DecoderOptions::NONE).iter() {
        if decoded.is_invalid() {
            return None;
        }
        let accesses = Accesses::of(factory, &decoded);
        code.push(classify(factory, &decoded, &accesses));
        all.push(accesses);
    }
    (!code.is_empty()).then_some((code, all))
}

/// The numbers of the addresses of a block that are relative to the thread pointer.
fn local(accesses: &[Accesses]) -> Vec<usize> {
    let all = accesses.iter().flat_map(|one| &one.known);
    all.enumerate().filter(|(_, one)| one.is_thread_local).map(|(number, _)| number).collect()
}
