//! The hooks that compilers call where a function starts. All assembly that a
//! program's functions come by is here.
//!
//! `mcount` (`-pg`), `__fentry__` (`-pg -mfentry`) and the calls out of patched functions are no
//! calls that the function's code knows of: its arguments are still in their registers, and
//! everything but `%r11` and the flags must come back as it was. So the fast path uses `%r11`, and
//! `%rax`, which it puts back; the slow path saves the other registers that C may change, and the
//! vector registers with XSAVE, because what runs below it may use any of them.
//!
//! That takes 100 bytes of stack and the vector state, which is 2.7 KB with AVX-512 and 0.9 KB with
//! AVX: as much as the dynamic linker takes at the first call of any function.

use core::arch::naked_asm;
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use elfen_rt::check::{Thread, check, elfen_look_1};
use elfen_rt::tag;

/// Which vector state XSAVE is asked for, as bits of XCR0; 0 before the first slow path has asked
/// the CPU, and [`FXSAVE`] where there is no XSAVE.
static STATE: AtomicU32 = AtomicU32::new(0);

/// SSE, AVX, and the three of AVX-512. Not x87: nothing below computes with it. Not AMX: its tiles
/// are 8 KB, and no compiler uses them unasked.
const VECTORS: u32 = 0xe6;
/// The part of that which needs the larger area.
const AVX512: u32 = 0xe0;
/// In [`STATE`]: the x87 bit, which `VECTORS` leaves out.
const FXSAVE: u32 = 1;

/// The standard format has AVX up to byte 832; AVX-512 up to 2688 on Intel and to
/// 2432 on AMD. And 63 to align.
const AVX_BYTES: u32 = 832 + 64;
const AVX512_BYTES: u32 = 2688 + 64;

/// CPUID leaf 1, ECX: the system has turned XSAVE on.
const OSXSAVE: u32 = 27;

/// Defines a hook: a check that changes `%r11` and the flags alone.
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
    /// `-pg`: called behind the function's prologue.
    #[unsafe(no_mangle)]
    mcount
}

hook! {
    /// `-pg -mfentry`: called before it.
    #[unsafe(no_mangle)]
    __fentry__
}

hook! {
    /// Where a check that was written into a function goes when there is a reason to.
    patched
}

/// The rest of a hook: calls `elfen_look_1` for the thread's block in `%rax`,
/// and returns from the hook.
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
        // The slow path was left a moment ago: its answer still holds, and saving the vectors would
        // be all the cost.
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
        // Once in a process: what does this CPU have, and what has the system turned on of it?
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
        // XSAVE leaves the rest of its header as it finds it, and XRSTOR wants zeroes there.
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

/// Whether an `elfen shim` looks at this process.
static OBSERVED: AtomicBool = AtomicBool::new(false);

/// From now on functions that call the two below say that they are entered and left.
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

/// The way out needs no check: the next way in is not far. What is returned to is an address in
/// the caller, and so names it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn __cyg_profile_func_exit(_function: *const c_void, from: *const c_void) {
    if OBSERVED.load(Relaxed) {
        tag::function(from.addr());
    }
}
