//! What this CPU can wait with, as CPUID tells it.

use std::arch::x86_64::__cpuid;

use serde::{Deserialize, Serialize};

/// The instructions that wait for a store to a line of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct CpuFeatures {
    /// MONITOR and MWAIT, in the kernel.
    pub(crate) monitor: bool,
    /// MONITORX and MWAITX, of AMD.
    pub(crate) mwaitx: bool,
    /// UMONITOR and UMWAIT, of Intel.
    pub(crate) waitpkg: bool,
}

const EXTENDED: u32 = 0x8000_0000;

impl CpuFeatures {
    pub(crate) fn of_this_cpu() -> Self {
        let bit = |word: u32, bit: u32| word >> bit & 1 == 1;
        // A CPU answers a leaf above its last with anything.
        let (last, last_extended) = (__cpuid(0).eax, __cpuid(EXTENDED).eax);
        Self {
            monitor: last >= 1 && bit(__cpuid(1).ecx, 3),
            waitpkg: last >= 7 && bit(__cpuid(7).ecx, 5),
            mwaitx: last_extended > EXTENDED && bit(__cpuid(EXTENDED + 1).ecx, 29),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: bits are read from the right words. Method: the kernel reads the same ones, and lists
    /// them.
    #[test]
    fn agrees_with_the_kernel() {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap();
        let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
        let features = CpuFeatures::of_this_cpu();
        assert_eq!(features.waitpkg, has("waitpkg"));
        assert_eq!(features.mwaitx, has("mwaitx"));
        // The kernel takes MONITOR off its list where it has errata; it never adds it.
        assert!(features.monitor || !has("monitor"));
    }
}
