//! One shadow: a copy of a program, from its first instruction in the cache to its end.

use std::io;
use std::time::{Duration, Instant};

use elfen_instrument::remote::{Change, Mapping, Resume, Tracee};
use elfen_machine::pidfd::PidFd;
use elfen_stream::{Stop, Trap, layout};

use super::calls::{Answer, Call, World, answer};
use super::filter;
use crate::engine::space::Space;
use crate::engine::tally::{OnWay, Tally};
use crate::engine::thread::{Borrowed, borrow_thread};
use crate::engine::trace::{EVENTS, Noted};
use crate::engine::unwind::StackCopy;
use crate::engine::walk::Burst;
use crate::signals;

/// A shadow that gets no CPU for so long ends.
const NO_CPU: Duration = Duration::from_secs(2);
/// How often it is looked whether the recording is to end.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes of the stack that callers are looked for in.
const STACK_BYTES: usize = 1 << 18;
/// Why a shadow ends when its time is over.
pub(super) const COMPLETE: &str = "complete";

/// What came of a shadow.
#[derive(Debug)]
pub(super) struct Ended {
    /// [`COMPLETE`], or what it could not go on with.
    pub(super) why: String,
    /// System calls by their kinds.
    pub(super) calls: [u64; 5],
    /// Code near this address has no room in the cache yet.
    pub(super) needs_room: Option<u64>,
}

/// For how long a shadow may still run when the program has ended.
const AFTER_PROGRAM: Duration = Duration::from_millis(300);

/// How long a shadow may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length<'a> {
    pub(super) instructions: u64,
    pub(super) until: Instant,
    /// The program: once it has ended, its user does not want to wait for the shadow.
    pub(super) program: Option<&'a PidFd>,
}

impl Length<'_> {
    fn is_over(&mut self) -> bool {
        let now = Instant::now();
        if self.program.is_some_and(PidFd::has_ended) {
            self.until = self.until.min(now + AFTER_PROGRAM);
            self.program = None;
        }
        now > self.until || signals::is_stopped()
    }
}

#[derive(Debug)]
pub(super) struct Shadow<'a> {
    pub(super) thread: Tracee,
    pub(super) space: &'a mut Space,
    pub(super) tally: &'a mut Tally,
    pub(super) world: World,
    /// The registers of the thread that it is a copy of.
    pub(super) registers: libc::user_regs_struct,
    pub(super) vectors: Vec<u8>,
    /// The base of `%gs` as the program has set it.
    pub(super) gs_base: u64,
    pub(super) context: u32,
}

impl Shadow<'_> {
    /// Makes the copy fit to run: it can change nothing that others see. `shared` is the memory
    /// that they would.
    pub(super) fn lock(&mut self, shared: &[Mapping]) -> io::Result<()> {
        self.thread.set_signal_mask(u64::MAX)?;
        self.thread.set_registers(&self.registers)?;
        self.thread.set_vectors(&self.vectors)?;
        borrow_thread(self.thread, |borrowed| {
            let syscall = self.space.syscall();
            let read = u64::from(libc::PROT_READ.unsigned_abs());
            let parts = self.space.region.parts();
            let is_ours = |one: &&Mapping| parts.iter().any(|(range, _)| *range == one.range);
            for one in shared.iter().filter(|one| one.writable && !is_ours(one)) {
                let length = one.range.end - one.range.start;
                let arguments = [one.range.start, length, read, 0, 0, 0];
                borrowed.call(syscall, libc::SYS_mprotect, arguments)?;
            }
            self.filter(borrowed, syscall)
        })
    }

    fn filter(&self, borrowed: &Borrowed, syscall: u64) -> io::Result<()> {
        let program = filter::program();
        let at = self.space.word_at(self.context, layout::VECTORS);
        let (program_at, mut words) = (at + 16, Vec::new());
        words.extend((program.len() / filter::INSTRUCTION_BYTES).to_ne_bytes());
        words.extend(program_at.to_ne_bytes());
        words.extend(program);
        for (number, word) in (0..).zip(words.chunks_exact(8)) {
            let word = word.try_into().map_or(0, u64::from_ne_bytes);
            self.space.region.set_word(at + 8 * number, word);
        }
        let set = i64::from(libc::PR_SET_NO_NEW_PRIVS).cast_unsigned();
        borrowed.call(syscall, libc::SYS_prctl, [set, 1, 0, 0, 0, 0])?;
        let mode = u64::from(libc::SECCOMP_SET_MODE_FILTER);
        borrowed.call(syscall, libc::SYS_seccomp, [mode, 0, at, 0, 0, 0]).map(drop)
    }

    /// Runs the shadow until it is as long as it may be, or cannot go on.
    pub(super) fn run(&mut self, mut length: Length<'_>, on: &mut OnWay) -> io::Result<Ended> {
        let mut ended = Ended { why: String::new(), calls: [0; 5], needs_room: None };
        let from = self.tally.instructions;
        let mut given = EVENTS;
        self.space.give_events(self.context, given);
        let mut at = self.registers.rip;
        let mut registers = self.registers;
        loop {
            let code = match self.space.code_within(at) {
                Ok(code) => code,
                Err(stop) => {
                    if stop == Stop::OutOfReach {
                        ended.needs_room = Some(at);
                    }
                    ended.why = match stop {
                        Stop::OutOfReach => "its code was new",
                        Stop::NoCode => "code of no file, which the program generated",
                        Stop::Native => "an instruction that cannot be copied",
                        Stop::Full => "its code fills the cache",
                    }
                    .to_owned();
                    return Ok(ended);
                }
            };
            registers.rip = code;
            registers.gs_base = self.space.base(self.context);
            registers.orig_rax = u64::MAX;
            self.thread.set_registers(&registers)?;
            self.thread.resume(Resume::Run, 0)?;
            match self.wait(&mut registers)? {
                Ok(trap) => {
                    let (site, saved) = (registers.rcx, |word| self.space.word(self.context, word));
                    at = match trap {
                        Trap::Enter { target } => target,
                        Trap::EventsFull => {
                            registers.rcx = saved(layout::SAVED_RCX);
                            site
                        }
                        Trap::Unknown => {
                            registers.rcx = saved(layout::SAVED_RCX);
                            registers.rdx = saved(layout::SAVED_RDX);
                            self.note_target(site);
                            site
                        }
                        Trap::HostCall { at, .. } => at,
                        Trap::LogFull | Trap::AddressesFull => {
                            return Err(io::ErrorKind::InvalidData.into());
                        }
                    };
                    self.add(at, given, on);
                    registers.rip = at;
                    if let Trap::HostCall { .. } = trap
                        && let Some(why) = self.call(&mut registers, &mut ended.calls)?
                    {
                        ended.why = why;
                        return Ok(ended);
                    }
                    at = registers.rip;
                }
                Err(why) => {
                    ended.why = why;
                    return Ok(ended);
                }
            }
            let ran = self.tally.instructions - from;
            if ran >= length.instructions {
                COMPLETE.clone_into(&mut ended.why);
                return Ok(ended);
            }
            if length.is_over() {
                "there was no time for it".clone_into(&mut ended.why);
                return Ok(ended);
            }
            given = self.events_for(length.instructions - ran);
            self.space.give_events(self.context, given);
        }
    }

    /// How many events some instructions have, about.
    fn events_for(&self, instructions: u64) -> u64 {
        const INSTRUCTIONS_PER_EVENT: u64 = 8;
        (instructions / INSTRUCTIONS_PER_EVENT).clamp(64, EVENTS)
    }

    /// Adds the way since the last stop to the tally.
    fn add(&mut self, left_at: u64, given: u64, on: &mut OnWay) {
        let Noted { events, addresses } = self.space.take_noted(self.context, given);
        let (began_at, process) = (self.registers.rip, self.world.id);
        let mut burst = Burst { began_at, left_at, events, process, ..Burst::default() };
        match self.tally.needs_addresses() {
            true => burst.addresses = addresses,
            false => burst.results = addresses,
        }
        if self.tally.add(&self.space.cache, &burst, on).is_err() {
            self.tally.lost += 1;
        }
        self.registers.rip = left_at;
    }

    fn note_target(&mut self, target: u64) {
        if self.space.code_within(target).is_ok() {
            self.space.cache.enter_table(target, &mut self.space.region);
        }
    }

    /// Waits for a stop; `None` if it comes too late, or the recording is to end.
    fn wait_while_wanted(&self) -> io::Result<Option<Change>> {
        let began = Instant::now();
        while began.elapsed() < NO_CPU && !signals::is_stopped() {
            let change = self.thread.wait_within(LOOK)?;
            if change.is_some() {
                return Ok(change);
            }
        }
        Ok(None)
    }

    /// Waits until the shadow stops at a trap of the cache; otherwise tells why it cannot go on.
    fn wait(&mut self, registers: &mut libc::user_regs_struct) -> io::Result<Result<Trap, String>> {
        let why = match self.wait_while_wanted()? {
            None => "it got no CPU".to_owned(),
            Some(Change::Signal(libc::SIGTRAP)) => {
                *registers = self.thread.registers()?;
                match self.space.cache.trap(registers.rip.wrapping_sub(1)) {
                    Some(Trap::AddressesFull) => {
                        self.space.take_addresses(self.context);
                        self.thread.resume(Resume::Run, 0)?;
                        return self.wait(registers);
                    }
                    Some(trap) => return Ok(Ok(trap)),
                    None => "a trap of the program".to_owned(),
                }
            }
            Some(Change::Signal(libc::SIGSEGV | libc::SIGBUS)) => {
                let info = self.thread.signal_info()?;
                // SAFETY: the kernel sets the address for these signals.
                let at = unsafe { info.si_addr() }.expose_provenance() as u64;
                match self.world.shared.iter().any(|range| range.contains(&at)) {
                    true => "it writes to shared memory".to_owned(),
                    false => "a fault".to_owned(),
                }
            }
            Some(Change::Signal(signal)) => format!("signal {signal}"),
            Some(Change::Killed(libc::SIGSYS)) => "the filter of system calls".to_owned(),
            Some(Change::Killed(signal)) => format!("killed by signal {signal}"),
            Some(_) => "it was stopped".to_owned(),
        };
        Ok(Err(why))
    }

    /// A system call. Returns why the shadow ends there, if it does.
    fn call(
        &mut self,
        registers: &mut libc::user_regs_struct,
        calls: &mut [u64; 5],
    ) -> io::Result<Option<String>> {
        const CALL_BYTES: u64 = 2;
        let call = Call {
            number: registers.rax.cast_signed(),
            arguments: [
                registers.rdi,
                registers.rsi,
                registers.rdx,
                registers.r10,
                registers.r8,
                registers.r9,
            ],
        };
        let (kind, answer) = answer(call, &mut self.world, self.space.objects.memory());
        calls[kind as usize] += 1;
        match answer {
            Answer::End(why) => return Ok(Some(why)),
            Answer::Result(value) => {
                registers.rax = value.cast_unsigned();
                // As the instruction leaves them.
                registers.rcx = registers.rip + CALL_BYTES;
                registers.r11 = registers.eflags;
                registers.rip += CALL_BYTES;
            }
            Answer::Execute => {
                registers.gs_base = self.gs_base;
                registers.orig_rax = u64::MAX;
                self.thread.set_registers(registers)?;
                self.thread.resume(Resume::Step, 0)?;
                match self.wait_while_wanted()? {
                    Some(Change::Exited(_) | Change::Killed(_)) => {
                        return Ok(Some("it was killed".to_owned()));
                    }
                    Some(_) => {}
                    None => return Ok(Some("it got no CPU".to_owned())),
                }
                *registers = self.thread.registers()?;
                self.gs_base = registers.gs_base;
                registers.eflags &= !(1 << 8);
            }
        }
        self.registers.rip = registers.rip;
        Ok(None)
    }

    /// Where its thread is: under which callers.
    pub(super) fn begin(&mut self) -> OnWay {
        let stack = StackCopy::of(&self.registers, self.space.objects.memory(), STACK_BYTES);
        let stack = stack.unwrap_or_default();
        self.tally.begin(&mut self.space.objects, &stack)
    }
}
