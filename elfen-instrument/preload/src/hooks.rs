//! The hooks that compilers call at function entries. All assembly that runs on every call is here.
//!
//! Functions call `mcount` (`-pg`), `__fentry__` (`-pg -mfentry`) and the hook of patched entries
//! without preparation: their arguments are still in registers. So a hook preserves everything
//! except `%r11` and the flags. The fast path uses `%r11`, and `%rax`, which it restores. The slow
//! path calls code that may use any register. It saves the registers that C may change, and the
//! vector registers with XSAVE.
//!
//! That takes 100 bytes of stack and the vector state: 2.7 KB with AVX-512, 0.9 KB with AVX. The
//! dynamic linker takes as much at the first call of any function.

use core::arch::naked_asm;
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use elfen_rt::check::{Thread, check, elfen_look_1};
use elfen_rt::tag;

/// The vector state to save with XSAVE, as bits of XCR0. It is 0 until the first slow path has
/// asked the CPU, and [`FXSAVE`] if the CPU lacks XSAVE.
static STATE: AtomicU32 = AtomicU32::new(0);

/// SSE, AVX, and the three components of AVX-512. Not x87, because the code below does not compute
/// with it. Not AMX: its tiles take 8 KB, and compilers use them only on request.
const VECTORS: u32 = 0xe6;
/// The components that need the larger area.
const AVX512: u32 = 0xe0;
/// A value of [`STATE`]: the x87 bit, which `VECTORS` leaves out.
const FXSAVE: u32 = 1;

/// In the standard format AVX ends at byte 832, and AVX-512 at 2688 on Intel and at 2432 on AMD. 63
/// bytes are for alignment.
const AVX_BYTES: u32 = 832 + 64;
const AVX512_BYTES: u32 = 2688 + 64;

/// CPUID leaf 1, ECX: the operating system has enabled XSAVE.
const OSXSAVE: u32 = 27;

/// Defines a hook: a check that changes only `%r11` and the flags.
///
/// ```text
///     |                            |
///     | return into the function   |  <- %rsp on entry, and on return one above
///     | the caller's %rax          |
/// ```
macro_rules! hook {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            naked_asm!(
                ".cfi_startproc",
                "push rax",
                ".cfi_adjust_cfa_offset 8",
                "mov rax, qword ptr fs:[0]",
                "add rax, qword ptr [rip + elfen_thread_block@GOTTPOFF]",
                "mov r11, qword ptr [rax + {word}]",
                "cmp qword ptr [r11], 0",
                "jne {slow}",
                "mov r11, qword ptr [rax + {cpu}]",
                "mov r11d, dword ptr [r11]",
                "cmp r11d, dword ptr [rax + {chosen_on}]",
                "jne {slow}",
                "pop rax",
                ".cfi_adjust_cfa_offset -8",
                "ret",
                ".cfi_endproc",
                word = const Thread::WORD_AT,
                cpu = const Thread::CPU_AT,
                chosen_on = const Thread::CHOSEN_ON_AT,
                slow = sym slow,
            );
        }
    };
}

hook! {
    /// `-pg`: called after the function's prologue.
    #[unsafe(no_mangle)]
    mcount
}

hook! {
    /// `-pg -mfentry`: called before the prologue.
    #[unsafe(no_mangle)]
    __fentry__
}

hook! {
    /// Called from patched entries when a test of their check fails.
    patched
}

/// The rest of a hook: calls `elfen_look_1` with the thread's block in `%rax`, and returns from the
/// hook.
///
/// ```text
///     |                            |
///     | return into the function   |
///     | the caller's %rax          |  <- %rsp on entry
///     | %rcx %rdx %rsi %rdi        |
///     | %r8 %r9 %r10               |
///     | the caller's %rbp          |  <- %rbp
///     | 0 to 63 bytes              |
///     | vector state, 64-aligned   |  <- %rsp at the call
/// ```
#[unsafe(naked)]
unsafe extern "C" fn slow() {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_def_cfa_offset 16",
        "push rcx",
        ".cfi_adjust_cfa_offset 8",
        "push rdx",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push r8",
        ".cfi_adjust_cfa_offset 8",
        "push r9",
        ".cfi_adjust_cfa_offset 8",
        "push r10",
        ".cfi_adjust_cfa_offset 8",
        "mov rdi, rax",
        // Returns early if the last answer of the slow path still holds: saving the vectors would
        // be the whole cost.
        "rdtsc",
        "shl rdx, 32",
        "or rax, rdx",
        "cmp rax, qword ptr [rdi + {quiet_until}]",
        "jb 9f",
        "push rbp",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_offset rbp, -80",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov eax, dword ptr [rip + {state}]",
        "test eax, eax",
        "jnz 3f",
        // Once per process: which vector state the CPU has and the operating system has enabled.
        "push rbx",
        "mov eax, 1",
        "xor ecx, ecx",
        "cpuid",
        "pop rbx",
        "mov eax, {fxsave}",
        "bt ecx, {osxsave}",
        "jnc 2f",
        "xor ecx, ecx",
        "xgetbv",
        "and eax, {vectors}",
        "2:",
        "mov dword ptr [rip + {state}], eax",
        "3:",
        "mov ecx, {avx_bytes}",
        "mov edx, {avx512_bytes}",
        "test eax, {avx512}",
        "cmovnz ecx, edx",
        "sub rsp, rcx",
        "and rsp, -64",
        "cmp eax, {fxsave}",
        "je 4f",
        // XSAVE does not write the rest of its header, and XRSTOR requires zeros there.
        "xor edx, edx",
        "mov qword ptr [rsp + 512], rdx",
        "mov qword ptr [rsp + 520], rdx",
        "mov qword ptr [rsp + 528], rdx",
        "mov qword ptr [rsp + 536], rdx",
        "mov qword ptr [rsp + 544], rdx",
        "mov qword ptr [rsp + 552], rdx",
        "mov qword ptr [rsp + 560], rdx",
        "mov qword ptr [rsp + 568], rdx",
        "xsave64 [rsp]",
        "call {look}",
        "mov eax, dword ptr [rip + {state}]",
        "xor edx, edx",
        "xrstor64 [rsp]",
        "jmp 5f",
        "4:",
        "fxsave64 [rsp]",
        "call {look}",
        "fxrstor64 [rsp]",
        "5:",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_restore rbp",
        ".cfi_def_cfa rsp, 72",
        "9:",
        "pop r10",
        ".cfi_adjust_cfa_offset -8",
        "pop r9",
        ".cfi_adjust_cfa_offset -8",
        "pop r8",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdx",
        ".cfi_adjust_cfa_offset -8",
        "pop rcx",
        ".cfi_adjust_cfa_offset -8",
        "pop rax",
        ".cfi_adjust_cfa_offset -8",
        "ret",
        ".cfi_endproc",
        quiet_until = const Thread::QUIET_UNTIL_AT,
        state = sym STATE,
        fxsave = const FXSAVE,
        osxsave = const OSXSAVE,
        vectors = const VECTORS,
        avx512 = const AVX512,
        avx_bytes = const AVX_BYTES,
        avx512_bytes = const AVX512_BYTES,
        look = sym elfen_look_1,
    );
}

/// Whether an `elfen shim` observes this process.
static OBSERVED: AtomicBool = AtomicBool::new(false);

/// Makes the two hooks below tag their thread from now on.
pub(crate) fn tag_functions() {
    OBSERVED.store(true, Relaxed);
}

/// `-finstrument-functions`: an ordinary call.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn __cyg_profile_func_enter(function: *const c_void, _from: *const c_void) {
    check();
    if OBSERVED.load(Relaxed) {
        tag::function(function.addr());
        tag::called();
    }
}

/// A return needs no check, because the next entry is not far. The return address lies in the
/// caller and so identifies it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn __cyg_profile_func_exit(_function: *const c_void, from: *const c_void) {
    if OBSERVED.load(Relaxed) {
        tag::function(from.addr());
    }
}
