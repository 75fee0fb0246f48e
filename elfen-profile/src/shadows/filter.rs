//! The seccomp filter of a shadow: the second lock behind the traps of the cache.

/// System calls that a shadow may execute itself: they change its own memory only, or nothing.
pub(super) const EXECUTED: &[libc::c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_brk,
    libc::SYS_chdir,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcpu,
    libc::SYS_getcwd,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_lstat,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    libc::SYS_stat,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_time,
    libc::SYS_times,
    libc::SYS_umask,
    libc::SYS_uname,
];

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const ARCHITECTURE: u32 = 0xc000_003e;
/// Where `struct seccomp_data` has the number of the call and the architecture.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;

/// The filter, as an array of `struct sock_filter`.
pub(super) fn program() -> Vec<u8> {
    // Operations of the kernel's filter language: load a word, jump if equal, return.
    const LOAD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let mut bytes = Vec::new();
    let mut push = |operation: u16, if_true: u8, if_false: u8, operand: u32| {
        bytes.extend(operation.to_ne_bytes());
        bytes.extend([if_true, if_false]);
        bytes.extend(operand.to_ne_bytes());
    };
    push(LOAD, 0, 0, ARCHITECTURE_AT);
    push(JUMP_IF_EQUAL, 1, 0, ARCHITECTURE);
    push(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS);
    push(LOAD, 0, 0, NUMBER_AT);
    for &call in EXECUTED {
        push(JUMP_IF_EQUAL, 0, 1, u32::try_from(call).unwrap_or(u32::MAX));
        push(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW);
    }
    push(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS);
    bytes
}

/// Bytes of one instruction of a filter.
pub(super) const INSTRUCTION_BYTES: usize = 8;
