//! The machine code of a block in the cache.

use iced_x86::{
    Code as Opcode, ConditionCode, Decoder, DecoderOptions, Encoder, Instruction, OpKind, Register,
};

use elfen_rewrite::Code;

use crate::addresses::{ACCESSES_MAX, Accesses, push_room_check};
use crate::assembly::{
    Gs, INT3, Leaving, Noting, Word, push_leave, push_link, push_restore_flags, push_save_flags,
};
use crate::block::{Block, Exit, INSTRUCTIONS_MAX, Indirect};
use crate::layout::{
    ADDRESSES_ROOM, CALLS, CODE_RANGES, HOST_CALLS, RANGE_CALLS, RETURNS, SAVED_RAX, SAVED_RCX,
    SAVED_RDX,
};
use crate::lookup::UnexpectedReturn;
use crate::results::Outcome;

/// There is room for the addresses of any block.
const _: () = assert!(INSTRUCTIONS_MAX * ACCESSES_MAX < ADDRESSES_ROOM as usize);

/// The two parts of the cache that code is appended to, and what was noted on the way.
#[derive(Debug)]
pub(crate) struct Emission {
    /// Code that runs often.
    pub(crate) hot: Code,
    /// The rest: counters of branches that are taken, exits, constants.
    pub(crate) cold: Code,
    pub(crate) noting: Noting,
    /// What is appended besides.
    pub(crate) operands: Operands,
}

/// What a copy appends for each instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operands {
    Nothing,
    /// The addresses of its memory operands.
    Addresses,
    Results,
}

/// A point of the hot code at which the registers are those of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Point {
    /// Distance from the start of the block in the cache.
    pub(crate) code: u32,
    /// Distance from the start of the block in the program.
    pub(crate) original: u32,
    pub(crate) kind: PointKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PointKind {
    Plain,
    /// `%rcx` is in the thread's words.
    RcxSaved,
    /// The same, at an instruction that writes below the stack, which the original does not.
    Returns,
    /// The thread is in a system call, or has just left it. `%rcx` is that of the kernel.
    InCall,
}

/// What a block refers to once it is emitted.
#[derive(Debug, Default)]
pub(crate) struct Emitted {
    pub(crate) points: Vec<Point>,
    /// Addresses of distances of jumps, and the blocks of the program that they go to.
    pub(crate) links: Vec<(u64, u64)>,
    /// The distance of the jump that a computed branch ends with.
    pub(crate) site: Option<u64>,
    /// The trap in front of a system call that needs the host.
    pub(crate) host_call: Option<u64>,
    /// The trap for addresses that do not fit.
    pub(crate) addresses_full: Option<u64>,
}

/// Counters of the edges of a block; `None` where the count follows from others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counter {
    pub(crate) number: Option<u32>,
    pub(crate) flags_are_dead: bool,
}

/// The counters of a block, and of the returns of its call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) branch: Counter,
    pub(crate) returns: Returns,
}

/// What the return of a call needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Returns {
    pub(crate) counter: Counter,
    pub(crate) unexpected: UnexpectedReturn,
}

impl Emission {
    /// Appends a block without the way to its end: where it goes on there, the caller appends the
    /// next block or a jump. `None` if something is out of reach.
    pub(crate) fn push_block(&mut self, block: &Block, counters: Counters) -> Option<Emitted> {
        let start = self.hot.end()?;
        let mut emitted = Emitted::default();
        let (body, last) = match block.exit {
            Exit::Falls | Exit::Native => (&block.code[..], None),
            _ => {
                let (last, body) = block.code.split_last()?;
                (body, Some(last))
            }
        };
        let accesses = match self.operands {
            Operands::Addresses => block.accesses(),
            _ => Vec::new(),
        };
        let results = match self.operands {
            Operands::Results => block.results(),
            _ => Vec::new(),
        };
        if !results.is_empty() || accesses.iter().any(|one| !one.known.is_empty()) {
            self.push_point(&mut emitted, block, start, block.start, PointKind::Plain)?;
            emitted.addresses_full = push_room_check(&mut self.hot, self.noting, block.start)?;
        }
        let mut accesses = accesses.iter();
        let mut results = results.iter().peekable();
        for instruction in body {
            self.push_point(&mut emitted, block, start, instruction.ip(), PointKind::Plain)?;
            self.push_addresses(&mut emitted, block, start, instruction, accesses.next())?;
            self.push_copy(block, instruction)?;
            let is_its_own =
                |one: &&Outcome| block.start + u64::from(one.offset) == instruction.ip();
            if let Some(result) = results.next_if(is_its_own) {
                result.push_note(&mut self.hot)?;
            }
        }
        if let Some(last) = last {
            self.push_point(&mut emitted, block, start, last.ip(), PointKind::Plain)?;
            self.push_addresses(&mut emitted, block, start, last, accesses.next())?;
            self.push_exit(&mut emitted, block, start, last, counters)?;
        }
        Some(emitted)
    }

    /// Appends the addresses that an instruction uses. It may fault after that, so the registers
    /// are those of the program there, too.
    fn push_addresses(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        start: u64,
        instruction: &Instruction,
        accesses: Option<&Accesses>,
    ) -> Option<()> {
        let Some(accesses) = accesses.filter(|accesses| !accesses.known.is_empty()) else {
            return Some(());
        };
        for access in &accesses.known {
            access.push_note(&mut self.hot)?;
        }
        self.push_point(emitted, block, start, instruction.ip(), PointKind::Plain)
    }

    fn push_point(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        start: u64,
        original: u64,
        kind: PointKind,
    ) -> Option<()> {
        let code = u32::try_from(self.hot.end()?.checked_sub(start)?).ok()?;
        let original = u32::try_from(original.checked_sub(block.start)?).ok()?;
        emitted.points.push(Point { code, original, kind });
        Some(())
    }

    /// Appends an instruction, with the distance to its operand adapted to its new address.
    fn push_copy(&mut self, block: &Block, instruction: &Instruction) -> Option<()> {
        let bytes = block.bytes_of(instruction)?;
        if !instruction.is_ip_rel_memory_operand() {
            self.hot.push(bytes);
            return Some(());
        }
        let is_short = instruction.memory_base() == Register::EIP;
        let mut decoder = Decoder::with_ip(64, bytes, instruction.ip(), DecoderOptions::NONE);
        let again = decoder.decode();
        let at = decoder.get_constant_offsets(&again);
        if is_short || !at.has_displacement() || at.displacement_size() != 4 {
            return None;
        }
        let (before, rest) = bytes.split_at_checked(at.displacement_offset())?;
        self.hot.push_relative(before, instruction.ip_rel_memory_address(), rest.get(4..)?)
    }

    fn push_exit(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        start: u64,
        last: &Instruction,
        Counters { branch: counter, returns }: Counters,
    ) -> Option<()> {
        match block.exit {
            Exit::Falls | Exit::Native => {}
            Exit::Jump { to } => {
                if let Some(number) = counter.number {
                    self.noting.push(&mut self.hot, number, counter.flags_are_dead, to)?;
                }
            }
            Exit::Branch { to } => self.push_branch(emitted, block, last, to, counter)?,
            Exit::Call { to } => {
                self.push_call(block.end, &returns)?;
                if let Some(number) = counter.number {
                    self.noting.push(&mut self.cold, number, counter.flags_are_dead, to)?;
                }
                emitted.links.push((push_link(&mut self.cold)?, to));
            }
            Exit::Indirect(Indirect::Return { pops: 0 }) => {
                self.push_return(emitted, block, start, last)?;
            }
            Exit::Indirect(kind) => {
                self.push_indirect(emitted, block, start, last, kind, &returns)?;
            }
            Exit::Syscall => self.push_syscall(emitted, block, start, last)?,
        }
        Some(())
    }

    /// A conditional branch. The way of a branch that is taken leads through the cold part, unless
    /// the branch closes a loop: then it is mostly taken.
    fn push_branch(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        last: &Instruction,
        to: u64,
        counter: Counter,
    ) -> Option<()> {
        let taken = self.cold.end()?;
        match last.condition_code() {
            ConditionCode::None => {
                // Branches on %rcx have only short distances: taken, they jump over a jump.
                let (_, opcode) = block.bytes_of(last)?.split_last()?;
                self.hot.push(opcode);
                self.hot.push(&[2, 0xeb, 5]);
                self.hot.push_relative(&[0xe9], taken, &[])?;
            }
            // The numbers of conditions follow the opcodes from 0x80 on.
            _ if last.is_jcc_short_or_near() => {
                let at = if last.is_jcc_short() { 1 } else { 4 };
                let condition = *block.bytes_of(last)?.iter().rev().nth(at)? & 0xf;
                if to <= last.ip() {
                    // The opposite condition jumps over the counter.
                    let over = self.hot.push_forward_jump(&[0x0f, 0x80 | condition ^ 1]);
                    let dead = counter.flags_are_dead;
                    self.noting.push(&mut self.hot, counter.number?, dead, to)?;
                    emitted.links.push((push_link(&mut self.hot)?, to));
                    return self.hot.end_jump(over);
                }
                self.hot.push_relative(&[0x0f, 0x80 | condition], taken, &[])?;
            }
            _ => return None,
        }
        self.noting.push(&mut self.cold, counter.number?, counter.flags_are_dead, to)?;
        emitted.links.push((push_link(&mut self.cold)?, to));
        Some(())
    }

    /// Appends a constant, and returns its address.
    fn push_constant(&mut self, value: u64) -> Option<u64> {
        let padding = self.cold.end()?.wrapping_neg() % 8;
        self.cold.push(&[INT3; 8][..usize::try_from(padding).ok()?]);
        let at = self.cold.end()?;
        self.cold.push(&value.to_le_bytes());
        Some(at)
    }

    /// The call itself, and where it returns to; what follows in the cold part goes to the callee.
    ///
    /// The processor predicts returns by its own stack of calls, so the cache executes a `call` for
    /// each call. Its return address is that of the cache: it is moved from the program's stack to
    /// the table of returns, and the original one is pushed instead.
    fn push_call(&mut self, returns: u64, Returns { counter, unexpected }: &Returns) -> Option<()> {
        let number = counter.number?;
        let constant = self.push_constant(returns)?;
        let negated = self.push_constant(returns.wrapping_neg())?;
        let callee = self.cold.end()?;
        let [low, high, ..] = returns.to_le_bytes();
        let entry = RETURNS + 8 * i32::from(u16::from_le_bytes([low, high]));
        // pop %gs:entry; push constant(%rip)
        self.cold.push(&[0x65, 0x8f, 0x04, 0x25]);
        self.cold.push(&entry.to_le_bytes());
        self.cold.push_relative(&[0xff, 0x35], constant, &[])?;
        let (hot, noting) = (&mut self.hot, self.noting);
        hot.push_relative(&[0xe8], callee, &[])?;
        // A return comes here with the original address on the stack, and %rcx saved.
        if counter.flags_are_dead {
            // pop %rcx; cmp constant(%rip),%rcx; jne unexpected
            hot.push(&[0x59]);
            hot.push_relative(&[0x48, 0x3b, 0x0d], constant, &[])?;
            hot.push_relative(&[0x0f, 0x85], unexpected.popped, &[])?;
            match noting {
                Noting::Counters => noting.push(hot, number, true, returns)?,
                Noting::Events { .. } => noting.push_by_rcx(hot, number, returns, false)?,
            }
        } else {
            hot.store(SAVED_RDX, Word::Rdx);
            // mov (%rsp),%rdx; mov negated(%rip),%rcx; lea (%rcx,%rdx),%rcx
            hot.push(&[0x48, 0x8b, 0x14, 0x24]);
            hot.push_relative(&[0x48, 0x8b, 0x0d], negated, &[])?;
            hot.push(&[0x48, 0x8d, 0x0c, 0x11]);
            hot.load(Word::Rdx, SAVED_RDX);
            // jrcxz over; jmp unexpected
            hot.push(&[0xe3, 5]);
            hot.push_relative(&[0xe9], unexpected.on_stack, &[])?;
            // lea 8(%rsp),%rsp
            hot.push(&[0x48, 0x8d, 0x64, 0x24, 8]);
            noting.push_by_rcx(hot, number, returns, false)?;
        }
        hot.load(Word::Rcx, SAVED_RCX);
        Some(())
    }

    /// A return: to where the last call with these 16 bits of the return address was. The code
    /// there compares all of it.
    fn push_return(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        start: u64,
        last: &Instruction,
    ) -> Option<()> {
        self.hot.store(SAVED_RCX, Word::Rcx);
        self.push_point(emitted, block, start, last.ip(), PointKind::Plain)?;
        // movzwl (%rsp),%ecx; mov %gs:RETURNS(,%rcx,8),%rcx
        self.hot.push(&[0x0f, 0xb7, 0x0c, 0x24]);
        self.hot.push(&[0x65, 0x48, 0x8b, 0x0c, 0xcd]);
        self.hot.push(&RETURNS.to_le_bytes());
        self.push_point(emitted, block, start, last.ip(), PointKind::Returns)?;
        // push %rcx; ret
        self.hot.push(&[0x51, 0xc3]);
        Some(())
    }

    /// Leaves the target in `%rcx`, and jumps to the code of the site.
    fn push_indirect(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        start: u64,
        last: &Instruction,
        kind: Indirect,
        returns: &Returns,
    ) -> Option<()> {
        self.hot.store(SAVED_RCX, Word::Rcx);
        self.hot.store(SAVED_RDX, Word::Rdx);
        // This instruction faults as the original does.
        self.push_point(emitted, block, start, last.ip(), PointKind::Plain)?;
        match kind {
            Indirect::Return { pops } => {
                // pop %rcx
                self.hot.push(&[0x59]);
                if pops > 0 {
                    // lea pops(%rsp),%rsp
                    self.hot.push(&[0x48, 0x8d, 0xa4, 0x24]);
                    self.hot.push(&u32::from(pops).to_le_bytes());
                }
            }
            Indirect::Jump | Indirect::Call => self.push_load_target(last)?,
        }
        if kind == Indirect::Call {
            self.push_point(emitted, block, start, last.ip(), PointKind::RcxSaved)?;
            self.push_call(block.end, returns)?;
            emitted.site = Some(push_link(&mut self.cold)?);
        } else {
            emitted.site = Some(push_link(&mut self.hot)?);
        }
        Some(())
    }

    /// `mov operand,%rcx`.
    fn push_load_target(&mut self, last: &Instruction) -> Option<()> {
        let mut load = *last;
        match last.op0_kind() {
            OpKind::Register => {
                load = Instruction::with2(Opcode::Mov_r64_rm64, Register::RCX, last.op0_register())
                    .ok()?;
            }
            OpKind::Memory => {
                load.set_code(Opcode::Mov_r64_rm64);
                load.set_op0_kind(OpKind::Register);
                load.set_op0_register(Register::RCX);
                load.set_op1_kind(OpKind::Memory);
                if load.segment_prefix() == Register::DS {
                    // `notrack`.
                    load.set_segment_prefix(Register::None);
                }
            }
            _ => return None,
        }
        let mut encoder = Encoder::new(64);
        encoder.encode(&load, self.hot.end()?).ok()?;
        self.hot.push(&encoder.take_buffer());
        Some(())
    }

    /// A system call. `%rcx` and `%r11` are free, because the call overwrites them. Calls that
    /// change code or create threads trap before the call.
    fn push_syscall(
        &mut self,
        emitted: &mut Emitted,
        block: &Block,
        start: u64,
        last: &Instruction,
    ) -> Option<()> {
        let hot = &mut self.hot;
        if let Noting::Events { leave, by: Leaving::Frame } = self.noting {
            // A call may wait for a signal, and signals wait for the end of the burst.
            hot.store(SAVED_RCX, Word::Rcx);
            return push_leave(hot, last.ip(), leave);
        }
        hot.store(SAVED_RAX, Word::Rax);
        push_save_flags(hot);
        // mov %eax,%r11d
        hot.push(&[0x41, 0x89, 0xc3]);
        hot.load(Word::Rax, SAVED_RAX);
        // cmp $CALLS,%rax; jae host
        hot.push(&[0x48, 0x3d]);
        hot.push(&CALLS.to_le_bytes());
        let mut host = vec![hot.push_forward_jump(&[0x0f, 0x83])];
        // bt %eax,%gs:HOST_CALLS; jc host
        push_test_bit(hot, HOST_CALLS);
        host.push(hot.push_forward_jump(&[0x0f, 0x82]));
        // bt %eax,%gs:RANGE_CALLS; jnc go
        push_test_bit(hot, RANGE_CALLS);
        let go = hot.push_forward_jump(&[0x0f, 0x83]);
        for [first, end] in CODE_RANGES {
            // cmp %gs:end,%rdi; jae clear
            hot.push(&[0x65, 0x48, 0x3b, 0x3c, 0x25]);
            hot.push(&end.to_le_bytes());
            let above = hot.push_forward_jump(&[0x0f, 0x83]);
            // lea (%rdi,%rsi),%rcx; cmp %gs:first,%rcx; ja host
            hot.push(&[0x48, 0x8d, 0x0c, 0x37, 0x65, 0x48, 0x3b, 0x0c, 0x25]);
            hot.push(&first.to_le_bytes());
            host.push(hot.push_forward_jump(&[0x0f, 0x87]));
            hot.end_jump(above)?;
        }
        hot.end_jump(go)?;
        push_restore_call(hot);
        self.push_point(emitted, block, start, last.ip(), PointKind::Plain)?;
        self.hot.push(&[0x0f, 0x05]);
        self.push_point(emitted, block, start, block.end, PointKind::InCall)?;
        // movabs $end,%rcx
        self.hot.push(&[0x48, 0xb9]);
        self.hot.push(&block.end.to_le_bytes());
        // jmp over; host: ...; int3; over:
        let over = self.hot.push_forward_jump(&[0xe9]);
        for jump in host {
            self.hot.end_jump(jump)?;
        }
        push_restore_call(&mut self.hot);
        emitted.host_call = Some(self.hot.end()?);
        self.hot.push(&[INT3]);
        self.hot.end_jump(over)
    }
}

/// `bt %eax,%gs:at`.
fn push_test_bit(code: &mut Code, at: i32) {
    code.push(&[0x65, 0x0f, 0xa3, 0x04, 0x25]);
    code.push(&at.to_le_bytes());
}

/// Restores the flags from `%r11d`, and `%rax`.
fn push_restore_call(code: &mut Code) {
    // mov %r11d,%eax
    code.push(&[0x44, 0x89, 0xd8]);
    push_restore_flags(code);
    code.load(Word::Rax, SAVED_RAX);
}
