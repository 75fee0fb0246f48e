//! A traced child process that executes given code from given registers.

#![allow(dead_code, reason = "two tests share this file, and each uses a part")]

use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr;

use elfen_rewrite::BLOCK_BYTES;

use super::object::Object;

const PAGE: u64 = 4096;
pub(super) const SCRATCH: u64 = 0x30_0000_0000;
pub(super) const SCRATCH_BYTES: u64 = 0x4000;
/// Far from the scratch memory, so that pointers in registers do not hit the stack.
const STACK: u64 = 0x38_0000_0000;
const STACK_BYTES: u64 = 0x4000;

/// Addresses near the object's code: trampolines, the doorbell routine, words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    pub(super) arena: u64,
    pub(super) ring: u64,
    /// One block of words for each CPU.
    pub(super) words: u64,
}

impl Near {
    fn of(object: &Object) -> Self {
        let arena = object.near;
        Self { arena, ring: arena + PAGE, words: arena + 2 * PAGE }
    }

    fn bytes() -> u64 {
        2 * PAGE + cpus() * BLOCK_BYTES + SPACE_BYTES
    }

    /// Further memory, of [`SPACE_BYTES`] bytes.
    pub(super) fn space(self) -> u64 {
        self.words + cpus() * BLOCK_BYTES
    }
}

/// The number of CPUs that a thread may run on.
pub(super) fn cpus() -> u64 {
    // SAFETY: takes a number.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }).unwrap()
}

pub(super) const SPACE_BYTES: u64 = 1 << 24;
/// More steps than a site, its check and its moved instructions take.
const MOST_STEPS: usize = 60;
/// Enough for loops that end soon or come round a few times.
const LOOP_STEPS: usize = 300;
/// From linux/elf.h.
const NT_X86_XSTATE: i32 = 0x202;
/// Room for every state that a CPU saves.
const VECTOR_BYTES: usize = 1 << 14;
const ARITHMETIC: u64 = 0x8d5;

#[derive(Debug)]
pub(super) struct Puppet {
    pub(super) near: Near,
    child: i32,
    memory: File,
    /// Contents of the scratch memory before each run.
    scratch: Vec<u8>,
    /// The stack pointer before each run: the middle of the stack.
    stack: u64,
    /// The run ends with a return, below whose return address the copy may have written a word.
    pub(super) returns: bool,
    /// Vector registers and other extended state before each run.
    vectors: Vec<u8>,
}

/// The state after a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Outcome {
    /// The signal that ended the run, if a step faulted.
    pub(super) fault: Option<i32>,
    pub(super) registers: [u64; 16],
    pub(super) rip: u64,
    pub(super) flags: u64,
    /// Hash of the scratch memory, the memory that the code accesses, and the vector registers.
    memory: u64,
}

impl Outcome {
    /// The address of a fault is ignored, because it differs by design.
    pub(super) fn whole(&self) -> (Option<i32>, [u64; 16], u64, u64, u64) {
        let rip = if self.fault.is_some() { 0 } else { self.rip };
        (self.fault, self.registers, rip, self.flags, self.memory)
    }

    pub(super) fn without_flags(&self) -> (Option<i32>, [u64; 16], u64, u64, u64) {
        let (fault, registers, rip, _, memory) = self.whole();
        (fault, registers, rip, 0, memory)
    }

    /// The address reached, and whether all registers are as `words_that_are_not_0_ring` set them,
    /// except the stack pointer and the saved registers.
    pub(super) fn at_ring(&self, saved: &[usize]) -> (u64, bool) {
        let kept = |(number, &value): (usize, &u64)| {
            saved.contains(&number) || number == RSP || value == number as u64 * 3 + 1
        };
        (self.rip, self.registers.iter().enumerate().all(kept))
    }
}

pub(super) const RAX: usize = 0;
pub(super) const RCX: usize = 1;
const RSP: usize = 4;

fn check(result: i64, what: &str) -> i64 {
    assert!(result != -1, "{what}: {}", std::io::Error::last_os_error());
    result
}

/// Maps memory at a fixed address, so that code finds its data.
fn map(address: u64, bytes: u64) {
    let start = address / PAGE * PAGE;
    let length = usize::try_from((address + bytes).next_multiple_of(PAGE) - start).unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let at = ptr::without_provenance_mut(usize::try_from(start).unwrap());
    // SAFETY: runs only in the child, at addresses where the child has no mappings.
    let mapped = unsafe { libc::mmap(at, length, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        // SAFETY: ends the child.
        unsafe { libc::_exit(1) };
    }
}

impl Puppet {
    pub(super) fn start(object: &Object) -> Self {
        // SAFETY: the child only makes system calls, and waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            run_child(object);
        }
        let mut puppet = Self {
            near: Near::of(object),
            child,
            memory: OpenOptions::new()
                .read(true)
                .write(true)
                .open(format!("/proc/{child}/mem"))
                .unwrap(),
            scratch: (0..SCRATCH_BYTES).map(|at| (at % 251).to_le_bytes()[0]).collect(),
            stack: STACK + STACK_BYTES / 2,
            returns: false,
            vectors: Vec::new(),
        };
        assert!(libc::WIFSTOPPED(puppet.wait()));
        puppet.vectors = puppet.vectors();
        for segment in &object.segments {
            puppet.write(segment.address, &segment.bytes);
        }
        puppet
    }

    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).unwrap();
    }

    /// Restores memory that [`Puppet::named`] has read.
    pub(super) fn write_all(&mut self, named: &[(u64, usize)], contents: &[Vec<u8>]) {
        for (&(at, _), bytes) in named.iter().zip(contents) {
            self.write(at, bytes);
        }
    }

    pub(super) fn code(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut code = vec![0; bytes];
        self.memory.read_exact_at(&mut code, at).unwrap();
        code
    }

    /// The memory that the code accesses at an address; empty if it is not mapped.
    pub(super) fn named(&self, (at, size): (u64, usize)) -> Vec<u8> {
        let mut bytes = vec![0; size];
        let read = self.memory.read_at(&mut bytes, at).unwrap_or(0);
        bytes.truncate(read);
        bytes
    }

    fn wait(&self) -> i32 {
        let mut status = 0;
        // SAFETY: `status` is a local variable.
        check(unsafe { libc::waitpid(self.child, &mut status, libc::__WALL) }.into(), "waitpid");
        status
    }

    fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: plain numbers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let data = &raw mut registers;
        // SAFETY: the child is stopped, and `registers` is a local variable.
        let got = unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.child, 0, data) };
        check(got, "GETREGS");
        registers
    }

    fn vectors(&self) -> Vec<u8> {
        let mut state = vec![0u8; VECTOR_BYTES];
        let mut area = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
        let data = &raw mut area;
        // SAFETY: the child is stopped, and `area` describes `state`.
        let got = unsafe { libc::ptrace(libc::PTRACE_GETREGSET, self.child, NT_X86_XSTATE, data) };
        check(got, "GETREGSET");
        state.truncate(area.iov_len);
        state
    }

    fn set_vectors(&mut self) {
        let vectors = &mut self.vectors;
        let mut area =
            libc::iovec { iov_base: vectors.as_mut_ptr().cast(), iov_len: vectors.len() };
        let data = &raw mut area;
        // SAFETY: the child is stopped, and `area` describes `vectors`.
        let set = unsafe { libc::ptrace(libc::PTRACE_SETREGSET, self.child, NT_X86_XSTATE, data) };
        check(set, "SETREGSET");
    }

    /// Sets the registers, in the order of their numbers in machine code. The stack pointer's is
    /// ignored.
    pub(super) fn prepare(&mut self, registers: &[u64; 16], flags: u64, rip: u64) {
        let scratch = std::mem::take(&mut self.scratch);
        self.write(SCRATCH, &scratch);
        self.write(STACK, &scratch);
        self.scratch = scratch;
        self.set_vectors();
        let [rax, rcx, rdx, rbx, _, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] =
            *registers;
        let all = libc::user_regs_struct {
            rax,
            rcx,
            rdx,
            rbx,
            rsp: self.stack,
            rbp,
            rsi,
            rdi,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
            rip,
            eflags: 0x202 | flags & ARITHMETIC,
            orig_rax: u64::MAX,
            ..self.registers()
        };
        let data = &raw const all;
        // SAFETY: the child is stopped, and `all` is a local variable.
        check(unsafe { libc::ptrace(libc::PTRACE_SETREGS, self.child, 0, data) }, "SETREGS");
    }

    /// Fills the stack with copies of a word, such as a return address, and clears the memory
    /// around that address.
    pub(super) fn fill_stack(&mut self, word: u64) {
        let words = usize::try_from(STACK_BYTES / 8).unwrap();
        self.write(STACK, &word.to_le_bytes().repeat(words));
        self.write(word - PAGE / 2, &[0; 4096]);
    }

    pub(super) fn set_gs_base(&mut self, gs_base: u64) {
        let all = libc::user_regs_struct { gs_base, ..self.registers() };
        let data = &raw const all;
        // SAFETY: the child is stopped, and `all` is a local variable.
        check(unsafe { libc::ptrace(libc::PTRACE_SETREGS, self.child, 0, data) }, "SETREGS");
    }

    /// The stack pointer before each run.
    pub(super) fn stack_pointer(&self) -> u64 {
        self.stack
    }

    /// The thread pointer of the child.
    pub(super) fn thread_pointer(&self) -> u64 {
        self.registers().fs_base
    }

    /// Steps until the child leaves both ranges or faults. `named` is memory to compare as well.
    pub(super) fn run(
        &mut self,
        site: &Range<u64>,
        arena: Option<&Range<u64>>,
        named: &[(u64, usize)],
    ) -> Outcome {
        self.run_until(site, site.start, 1, MOST_STEPS, arena, named).0
    }

    /// Steps through a loop until the child reaches `site` for the given number of times. `None`
    /// if that takes too many steps.
    pub(super) fn run_loop(
        &mut self,
        around: &Range<u64>,
        (site, times): (u64, usize),
        arena: Option<&Range<u64>>,
        named: &[(u64, usize)],
    ) -> Option<Outcome> {
        let (outcome, is_over) = self.run_until(around, site, times, LOOP_STEPS, arena, named);
        is_over.then_some(outcome)
    }

    /// Returns the outcome, and whether the run ended within `steps`.
    fn run_until(
        &mut self,
        range: &Range<u64>,
        site: u64,
        times: usize,
        steps: usize,
        arena: Option<&Range<u64>>,
        named: &[(u64, usize)],
    ) -> (Outcome, bool) {
        let mut rounds = 0;
        let inside = |rip: u64| {
            // The site counts by its first address, so a jump back to it ends a round.
            rounds += usize::from(rip == site);
            let inside = range.contains(&rip) || arena.is_some_and(|arena| arena.contains(&rip));
            inside && rounds < times
        };
        self.run_while(inside, steps, named)
    }

    /// Steps while the child is inside. Returns the outcome, and whether the run ended within
    /// `steps`.
    pub(super) fn run_while(
        &mut self,
        mut inside: impl FnMut(u64) -> bool,
        steps: usize,
        named: &[(u64, usize)],
    ) -> (Outcome, bool) {
        let mut fault = None;
        let mut is_over = false;
        for _ in 0..steps {
            // SAFETY: the child is stopped; takes numbers.
            let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.child, 0, 0) };
            check(stepped, "SINGLESTEP");
            let status = self.wait();
            assert!(libc::WIFSTOPPED(status), "the child ended: {status:x}");
            let signal = libc::WSTOPSIG(status);
            let rip = self.registers().rip;
            if signal != libc::SIGTRAP || !inside(rip) {
                fault = (signal != libc::SIGTRAP).then_some(signal);
                is_over = true;
                break;
            }
        }
        let all = self.registers();
        let scratch = self.code(SCRATCH, usize::try_from(SCRATCH_BYTES).unwrap());
        let mut stack = self.code(STACK, usize::try_from(STACK_BYTES).unwrap());
        // Below the red zone the stack has no defined contents.
        let below = usize::try_from(self.stack - STACK).unwrap();
        stack[below - 256..below - 128].fill(0);
        let written = all.rsp.checked_sub(STACK + 16).filter(|_| self.returns);
        let written = written.and_then(|at| usize::try_from(at).ok());
        if let Some(word) = written.and_then(|at| stack.get_mut(at..at + 8)) {
            word.fill(0);
        }
        let mut hasher = DefaultHasher::new();
        (scratch, stack).hash(&mut hasher);
        let mut vectors = self.vectors();
        // The address of the last x87 instruction differs by design.
        vectors[8..16].fill(0);
        // A bitmap of the components in use. A processor may report a component of zeros either
        // way.
        vectors[512..576].fill(0);
        vectors.hash(&mut hasher);
        for &named in named {
            self.named(named).hash(&mut hasher);
        }
        let registers = [
            all.rax, all.rcx, all.rdx, all.rbx, all.rsp, all.rbp, all.rsi, all.rdi, all.r8, all.r9,
            all.r10, all.r11, all.r12, all.r13, all.r14, all.r15,
        ];
        let (rip, flags) = (all.rip, all.eflags & ARITHMETIC);
        let memory = hasher.finish();
        (Outcome { fault, registers, rip, flags, memory }, is_over)
    }
}

/// The child: maps the memory that the object needs, and stops.
fn run_child(object: &Object) -> ! {
    // SAFETY: takes numbers.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
    for segment in &object.segments {
        map(segment.address, segment.size);
    }
    map(Near::of(object).arena, Near::bytes());
    map(SCRATCH, SCRATCH_BYTES);
    map(STACK, STACK_BYTES);
    // SAFETY: takes a number. The tracer controls the child from here on.
    unsafe { libc::raise(libc::SIGSTOP) };
    // SAFETY: ends the child.
    unsafe { libc::_exit(0) }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        // SAFETY: takes numbers. The child is not reaped yet, so the id is still its own.
        unsafe { libc::kill(self.child, libc::SIGKILL) };
        self.wait();
    }
}
