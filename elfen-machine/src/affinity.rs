//! Reads and sets the CPUs that a thread may run on.
//!
//! `cpu_set_t` ends at 1024 CPUs. So this module calls the kernel directly, with a mask that grows
//! until the kernel accepts its length.

use std::ffi::c_ulong;
use std::io;
use std::mem::size_of_val;

use super::cpulist::{CpuSet, MAX_CPU};

/// The thread id that means the calling thread.
const CALLER: u32 = 0;

/// The affinity mask of the calling thread.
pub fn allowed() -> io::Result<CpuSet> {
    of(CALLER)
}

/// The affinity mask of a thread.
pub fn of(thread: u32) -> io::Result<CpuSet> {
    Mask::read(thread).map(|mask| mask.cpus())
}

/// Moves the calling thread to one CPU and keeps it there.
pub fn pin(cpu: u32) -> io::Result<()> {
    set(CALLER, &[cpu].into_iter().collect())
}

/// Restricts a thread to these CPUs, until any thread sets other CPUs for it.
pub fn set(thread: u32, cpus: &CpuSet) -> io::Result<()> {
    Mask::of(cpus).impose_on(thread)
}

/// CPUs as the kernel's bit mask.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mask(Vec<c_ulong>);

impl Mask {
    pub fn of(cpus: &CpuSet) -> Self {
        let mut mask: Vec<c_ulong> = Vec::new();
        for cpu in cpus.iter() {
            let word = usize::try_from(cpu / c_ulong::BITS).unwrap_or(usize::MAX);
            mask.resize(mask.len().max(word + 1), 0);
            mask[word] |= 1 << (cpu % c_ulong::BITS);
        }
        Self(mask)
    }

    /// The mask of a thread, from the kernel.
    pub fn read(thread: u32) -> io::Result<Self> {
        let mut words = 16;
        loop {
            let mut mask = Self(vec![0; words]);
            match mask.fill(thread) {
                Ok(()) => return Ok(mask),
                // EINVAL means that the kernel's mask is longer than ours.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) && mask.bits() <= MAX_CPU => {
                    words *= 2;
                }
                Err(e) => return Err(e),
            }
        }
    }

    fn fill(&mut self, thread: u32) -> io::Result<()> {
        let size = size_of_val(self.0.as_slice());
        // SAFETY: the kernel writes at most `size` bytes into the mask, which we own.
        let written = unsafe {
            libc::syscall(libc::SYS_sched_getaffinity, thread, size, self.0.as_mut_ptr())
        };
        if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Restricts a thread to these CPUs. Makes one system call and nothing else, so it may be
    /// called between fork and exec.
    pub fn impose_on(&self, thread: u32) -> io::Result<()> {
        let size = size_of_val(self.0.as_slice());
        // SAFETY: the kernel reads `size` bytes of the mask, which we own.
        let moved =
            unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, size, self.0.as_ptr()) };
        if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub fn is_within(&self, other: &Self) -> bool {
        let others = other.0.iter().copied().chain(std::iter::repeat(0));
        self.0.iter().zip(others).all(|(word, allowed)| word & !allowed == 0)
    }

    fn bits(&self) -> u32 {
        u32::try_from(self.0.len()).map_or(u32::MAX, |words| words.saturating_mul(c_ulong::BITS))
    }

    fn cpus(&self) -> CpuSet {
        let set = |cpu: &u32| {
            let word = usize::try_from(cpu / c_ulong::BITS).ok().and_then(|word| self.0.get(word));
            word.is_some_and(|word| word >> (cpu % c_ulong::BITS) & 1 == 1)
        };
        (0..self.bits()).filter(set).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: `Mask` reads the same CPUs as the kernel prints. Method: compare with
    /// /proc/thread-self/status.
    #[test]
    fn agrees_with_proc() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(allowed().unwrap(), list.trim().parse().unwrap());
    }

    /// Goal: CPUs beyond the 1024 of cpu_set_t are read and set. Method: convert a mask with bits
    /// on both sides of word boundaries into a CPU set and back.
    #[test]
    fn masks_hold_every_bit() {
        let mut mask = Mask(vec![0; 32]);
        mask.0[0] = 1 | 1 << 63;
        mask.0[1] = 1;
        mask.0[31] = 1 << 63;
        let cpus: CpuSet = "0,63-64,2047".parse().unwrap();
        assert_eq!((mask.cpus(), Mask::of(&cpus)), (cpus, mask));
    }

    #[test]
    fn a_mask_is_within_another_with_all_its_bits() {
        let mask = |list: &str| Mask::of(&list.parse().unwrap());
        assert!(mask("1,70").is_within(&mask("0-1,70")) && mask("1").is_within(&mask("1,70")));
        assert!(!mask("1,70").is_within(&mask("1")) && !mask("2").is_within(&mask("1,70")));
    }
}
