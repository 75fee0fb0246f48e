//! The CPUs that a thread may run on, and keeping it on some of them.
//!
//! `cpu_set_t` stops at 1024 CPUs, so this asks the kernel itself, with a mask that grows until it
//! fits.

use std::ffi::c_ulong;
use std::io;
use std::mem::size_of_val;

use super::cpulist::{CpuSet, MAX_CPU};

/// What the kernel takes for the calling thread.
const CALLER: u32 = 0;

/// The affinity mask of the calling thread.
pub(crate) fn allowed() -> io::Result<CpuSet> {
    of(CALLER)
}

/// The affinity mask of a thread.
pub(crate) fn of(thread: u32) -> io::Result<CpuSet> {
    let mut words = 16;
    loop {
        let mut mask: Vec<c_ulong> = vec![0; words];
        match read_mask(thread, &mut mask) {
            Ok(()) => return Ok(cpus_of(&mask)),
            // EINVAL says that the kernel's mask is longer than ours.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && bits(words) <= MAX_CPU => {
                words *= 2;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Moves the calling thread to one CPU and keeps it there.
pub(crate) fn pin(cpu: u32) -> io::Result<()> {
    set(CALLER, &[cpu].into_iter().collect())
}

/// Moves a thread to these CPUs and keeps it there, until it or somebody else decides otherwise.
pub(crate) fn set(thread: u32, cpus: &CpuSet) -> io::Result<()> {
    let mask = mask_of(cpus);
    let size = size_of_val(mask.as_slice());
    // SAFETY: the kernel reads `size` bytes of `mask`, which is ours.
    let result = unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, size, mask.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn read_mask(thread: u32, mask: &mut [c_ulong]) -> io::Result<()> {
    // SAFETY: the kernel writes at most `size_of_val(mask)` bytes into `mask`, which is ours.
    let written = unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, thread, size_of_val(mask), mask.as_mut_ptr())
    };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn mask_of(cpus: &CpuSet) -> Vec<c_ulong> {
    let mut mask: Vec<c_ulong> = Vec::new();
    for cpu in cpus.iter() {
        let word = usize::try_from(cpu / c_ulong::BITS).unwrap_or(usize::MAX);
        mask.resize(mask.len().max(word + 1), 0);
        mask[word] |= 1 << (cpu % c_ulong::BITS);
    }
    mask
}

fn bits(words: usize) -> u32 {
    u32::try_from(words).map_or(u32::MAX, |words| words.saturating_mul(c_ulong::BITS))
}

fn cpus_of(mask: &[c_ulong]) -> CpuSet {
    let set = |cpu: &u32| {
        let word = usize::try_from(cpu / c_ulong::BITS).ok().and_then(|word| mask.get(word));
        word.is_some_and(|word| word >> (cpu % c_ulong::BITS) & 1 == 1)
    };
    (0..bits(mask.len())).filter(set).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: we read what the kernel says. Method: /proc/self/status prints the same mask.
    #[test]
    fn agrees_with_proc() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(allowed().unwrap(), list.trim().parse().unwrap());
    }

    /// Goal: CPUs beyond cpu_set_t's 1024 are seen and set. Method: a mask with bits on both sides
    /// of word boundaries, there and back.
    #[test]
    fn masks_have_every_bit() {
        let mut mask = vec![0; 32];
        mask[0] = 1 | 1 << 63;
        mask[1] = 1;
        mask[31] = 1 << 63;
        let cpus: CpuSet = "0,63-64,2047".parse().unwrap();
        assert_eq!((cpus_of(&mask), mask_of(&cpus)), (cpus, mask));
    }
}
