//! Waits for a write to a cache line, with the instructions that CPUs offer to programs: UMWAIT,
//! MWAITX and PAUSE.
//!
//! An interrupt also ends the monitoring, so a wait may end although nothing was written. Only
//! `protocol::nap` calls these waits: it re-checks after each of them.
//!
//! A value of [`Waitpkg`] or [`Monitorx`] proves that this CPU has the instructions. On other CPUs
//! they are undefined, and the program would die of SIGILL.

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count, _rdtsc};
use core::sync::atomic::AtomicU64;

use super::protocol::Wait;

const EXTENDED: u32 = 0x8000_0000;

/// UMONITOR and UMWAIT: CPUID 7, ECX bit 5.
#[derive(Clone, Copy, Debug)]
pub struct Waitpkg(());

impl Waitpkg {
    pub fn detect() -> Option<Self> {
        // A leaf above the CPU's highest returns arbitrary values.
        let shown = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx >> 5 & 1 == 1;
        shown.then_some(Self(()))
    }

    pub fn on(self, line: &AtomicU64) -> Umwait<'_> {
        Umwait { line, _has: self }
    }
}

/// MONITORX and MWAITX: CPUID 8000_0001, ECX bit 29.
#[derive(Clone, Copy, Debug)]
pub struct Monitorx(());

impl Monitorx {
    pub fn detect() -> Option<Self> {
        let shown = __cpuid(EXTENDED).eax > EXTENDED && __cpuid(EXTENDED + 1).ecx >> 29 & 1 == 1;
        shown.then_some(Self(()))
    }

    pub fn on(self, line: &AtomicU64) -> Mwaitx<'_> {
        Mwaitx { line, _has: self }
    }
}

/// A number of ticks that takes at most `left_ns`. All CPUs with these instructions have time stamp
/// counters of 1 GHz or more. If the wait ends too early, the next round waits for the rest.
fn ticks_at_most(left_ns: u64) -> u64 {
    left_ns
}

#[derive(Clone, Copy, Debug)]
pub struct Umwait<'a> {
    line: &'a AtomicU64,
    _has: Waitpkg,
}

/// C0.2 and not C0.1, because only C0.2 gives the core's resources to the sibling.
const C0_2: u32 = 0;

impl Wait for Umwait<'_> {
    #[inline]
    fn arm(&self) {
        // SAFETY: `Waitpkg` proves that the CPU has the instruction, which only reads the line that
        // this value borrows.
        unsafe {
            asm!("umonitor {0}", in(reg) self.line, options(nostack, preserves_flags));
        }
    }

    #[inline]
    fn wait(&self, left_ns: u64) {
        // SAFETY: every x86-64 has a time stamp counter, and Linux lets programs read it.
        let deadline = unsafe { _rdtsc() }.saturating_add(ticks_at_most(left_ns));
        let (low, high) = halves(deadline);
        // SAFETY: `Waitpkg` proves that the CPU has the instruction, which accesses no memory.
        // There is no `nomem`, because the line must be read again afterwards.
        unsafe {
            asm!("umwait {0:e}", in(reg) C0_2, in("eax") low, in("edx") high, options(nostack));
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Mwaitx<'a> {
    line: &'a AtomicU64,
    _has: Monitorx,
}

/// EAX: C1, the shallowest state that gives resources to the sibling.
const C1: u32 = 0;
/// ECX bit 1: EBX holds a limit in ticks of the time stamp counter.
const TIMED: u32 = 2;

impl Wait for Mwaitx<'_> {
    #[inline]
    fn arm(&self) {
        // SAFETY: `Monitorx` proves that the CPU has the instruction, which only reads the line
        // that this value borrows. ECX and EDX hold extensions and hints, of which there are none.
        unsafe {
            asm!(
                "monitorx",
                in("rax") self.line,
                in("ecx") 0,
                in("edx") 0,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline]
    fn wait(&self, left_ns: u64) {
        let limit = u32::try_from(ticks_at_most(left_ns)).unwrap_or(u32::MAX);
        // SAFETY: `Monitorx` proves that the CPU has the instruction, which accesses no memory.
        // LLVM reserves RBX, so its value is swapped out and restored.
        unsafe {
            asm!(
                "xchg rbx, {limit:r}",
                "mwaitx",
                "xchg rbx, {limit:r}",
                limit = inout(reg) u64::from(limit) => _,
                in("eax") C1,
                in("ecx") TIMED,
                options(nostack, preserves_flags),
            );
        }
    }
}

fn halves(word: u64) -> (u32, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
    let halves = (word as u32, (word >> 32) as u32);
    halves
}

/// PAUSE: waits for a short fixed time. There is nothing to arm, and a write does not end the wait.
#[derive(Clone, Copy, Debug)]
pub struct Pause;

/// PAUSEs between two checks. Each check reads a clock for the bound, which costs as much as
/// several PAUSEs.
const PAUSES: u32 = 16;

impl Wait for Pause {
    #[inline]
    fn arm(&self) {}

    #[inline]
    fn wait(&self, _left_ns: u64) {
        for _ in 0..PAUSES {
            core::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the CPUID bits are read from the right words. Method: compare with the flags that the
    /// kernel lists in `/proc/cpuinfo`.
    #[test]
    fn detection_agrees_with_the_kernel() {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap();
        let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
        assert_eq!(Waitpkg::detect().is_some(), has("waitpkg"));
        assert_eq!(Monitorx::detect().is_some(), has("mwaitx"));
    }

    #[test]
    fn a_word_is_split_into_its_halves() {
        assert_eq!(halves(0x1122_3344_5566_7788), (0x5566_7788, 0x1122_3344));
    }
}
