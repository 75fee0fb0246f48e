//! Random states, and what of a program's memory a piece of code accesses.

use std::path::PathBuf;

use iced_x86::{Decoder, DecoderOptions, Mnemonic, Register};

use super::puppet;

/// Pseudo-random numbers; each run draws the same sequence.
pub(super) struct Draw(pub(super) u64);

impl Draw {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next()).unwrap() % limit
    }

    /// The value for a register: a number, or the address of mapped memory.
    pub(super) fn word(&mut self) -> u64 {
        let number = self.next();
        match number & 3 {
            0 => number >> 4 & 0xff,
            1 => number,
            _ => puppet::SCRATCH + (number >> 8) % (puppet::SCRATCH_BYTES / 2),
        }
    }
}

/// Where the C library keeps the words in which the kernel stores a thread's CPU.
const KERNELS: std::ops::Range<u64> = 0x900..0x9c0;

/// Addresses and sizes of the object's and the thread's memory that some code accesses. `None` if
/// the result of the code differs from run to run.
pub(super) fn named(code: &[u8], at: u64, thread_pointer: u64) -> Option<Vec<(u64, usize)>> {
    use Mnemonic::{Cpuid, Lea, Rdpid, Rdpmc, Rdrand, Rdseed, Rdtsc, Rdtscp};
    let mut named = Vec::new();
    for instruction in Decoder::with_ip(64, code, at, DecoderOptions::NONE) {
        let address = match instruction.segment_prefix() {
            _ if instruction.mnemonic() == Lea => None,
            Register::FS => Some(thread_pointer.wrapping_add(instruction.memory_displacement64())),
            _ if instruction.is_ip_rel_memory_operand() => {
                Some(instruction.ip_rel_memory_address())
            }
            _ => None,
        };
        let changes =
            [Cpuid, Rdpid, Rdpmc, Rdrand, Rdseed, Rdtsc, Rdtscp].contains(&instruction.mnemonic());
        let displacement = instruction.memory_displacement64();
        let is_kernels =
            instruction.segment_prefix() == Register::FS && KERNELS.contains(&displacement);
        // An address in the thread's memory that depends on registers.
        let is_computed = instruction.segment_prefix() == Register::FS
            && (instruction.memory_base(), instruction.memory_index())
                != (Register::None, Register::None);
        if changes || is_kernels || is_computed {
            return None;
        }
        named.extend(address.map(|address| (address, instruction.memory_size().size())));
    }
    Some(named)
}

/// The file of an object of this process, by a part of its name.
pub(super) fn mapped(part: &str) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    path.into_iter().find(|path| path.contains(part)).unwrap().into()
}
