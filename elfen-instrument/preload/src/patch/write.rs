//! Writes code: maps memory for stubs near an object, and makes the object's text writable for a
//! short time.
//!
//! A writable text cannot be executed, and it may be that of the C library. So this code calls
//! nothing outside of this library meanwhile: system calls are inline, and copies go byte by byte.

use core::arch::asm;
use core::mem::size_of;
use core::ptr;

use elfen_rt::count::publish;

use super::object::MemoryRange;
use crate::hooks::patched;

const PAGE: u64 = 4096;
/// The two addresses before the stubs.
const HEAD_BYTES: usize = 2 * size_of::<u64>();
/// The reach of a 32-bit distance, less room for a text and its stubs.
const REACH: u64 = (1 << 31) - (1 << 28);
/// Number of candidate addresses for the stubs, and the distance between them.
const CANDIDATES: u64 = 48;
const STEP: u64 = 32 << 20;

/// Counts the threads of the process; `None` if `/proc` is missing. A directory has one link for
/// each subdirectory, and two more.
pub(super) fn threads() -> Option<u64> {
    // SAFETY: an all-zero stat is a valid value of that plain C structure.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: the path is NUL-terminated, and `stat` is a local variable.
    let failed = unsafe { libc::stat(c"/proc/self/task".as_ptr(), &mut stat) } != 0;
    if failed { None } else { stat.st_nlink.checked_sub(2) }
}

/// Memory with the addresses of the hook and of the routine that publishes counters, and then
/// stubs.
pub(super) struct Stubs {
    at: MemoryRange,
    stub_bytes: usize,
}

impl Stubs {
    /// Maps room for `count` stubs within reach of a text.
    pub(super) fn near(text: MemoryRange, count: usize, stub_bytes: usize) -> Option<Self> {
        let bytes = stub_bytes.checked_mul(count)?.checked_add(HEAD_BYTES)?;
        let len = u64::try_from(bytes).ok()?.checked_next_multiple_of(PAGE)?;
        let text_end = text.address.checked_add(text.len as u64)?;
        // First below the text, because the heap of a program is above it.
        let below = (0..CANDIDATES).map(|n| text.address.checked_sub(len + PAGE + n * STEP));
        let above = (1..CANDIDATES).map(|n| text_end.checked_add(n * STEP));
        let wanted = below.chain(above).flatten();
        let address =
            wanted.into_iter().find_map(|wanted| map_near(wanted & !(PAGE - 1), len, text))?;
        let stubs =
            Self { at: MemoryRange { address, len: usize::try_from(len).ok()? }, stub_bytes };
        stubs.write(stubs.hook(), &hook_address().to_le_bytes());
        stubs.write(stubs.publish(), &publish_address().to_le_bytes());
        Some(stubs)
    }

    /// Where the address of the hook is stored.
    pub(super) fn hook(&self) -> u64 {
        self.at.address
    }

    /// Where the address of the routine that publishes counters is stored.
    pub(super) fn publish(&self) -> u64 {
        self.at.address + size_of::<u64>() as u64
    }

    pub(super) fn address(&self, index: usize) -> u64 {
        self.at.address + (HEAD_BYTES + self.stub_bytes * index) as u64
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        write_within(self.at, address, bytes);
    }

    /// Makes the stubs executable and read-only.
    pub(super) fn finish(self) -> Option<Self> {
        protect(self.at, libc::PROT_READ | libc::PROT_EXEC).then_some(self)
    }
}

/// The addresses of the routines that stubs call.
fn hook_address() -> u64 {
    (patched as *const ()).addr() as u64
}

fn publish_address() -> u64 {
    (publish as *const ()).addr() as u64
}

/// Maps memory at `wanted`; `None` if the address is taken or too far from the text.
fn map_near(wanted: u64, len: u64, text: MemoryRange) -> Option<u64> {
    if wanted.abs_diff(text.address) > REACH || text.len as u64 > REACH {
        return None;
    }
    let hint = ptr::without_provenance_mut(usize::try_from(wanted).ok()?);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let len = usize::try_from(len).ok()?;
    // SAFETY: with NOREPLACE the program's mappings stay. Kernels before 4.17 treat the address as
    // a hint.
    let at = unsafe { libc::mmap(hint, len, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return None;
    }
    if at != hint {
        // SAFETY: mapped just now, and not used yet.
        unsafe { libc::munmap(at, len) };
        return None;
    }
    Some(at.expose_provenance() as u64)
}

/// A text that is writable and not executable until this value drops.
pub(super) struct WritableText {
    text: MemoryRange,
}

impl WritableText {
    pub(super) fn open(text: MemoryRange) -> Option<Self> {
        let end = text.address.checked_add(text.len as u64)?;
        let address = text.address & !(PAGE - 1);
        let text = MemoryRange { address, len: usize::try_from(end - address).ok()? };
        protect(text, libc::PROT_READ | libc::PROT_WRITE).then_some(Self { text })
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        write_within(self.text, address, bytes);
    }
}

impl Drop for WritableText {
    fn drop(&mut self) {
        // A text that could be made writable can also be made executable again.
        protect(self.text, libc::PROT_READ | libc::PROT_EXEC);
    }
}

/// Copies byte by byte, because a longer copy would call `memcpy`.
fn write_within(range: MemoryRange, address: u64, bytes: &[u8]) {
    let offset = address.wrapping_sub(range.address);
    let end = offset.saturating_add(bytes.len() as u64);
    if end > range.len as u64 {
        return;
    }
    let Ok(address) = usize::try_from(address) else { return };
    let start: *mut u8 = ptr::with_exposed_provenance_mut(address);
    for (index, &byte) in bytes.iter().enumerate() {
        let to = start.wrapping_add(index);
        // SAFETY: `Stubs` or `WritableText` made `range` mapped and writable, and these bytes lie
        // in it.
        unsafe { to.write_volatile(byte) };
    }
}

/// Calls mprotect(2) without the C library.
fn protect(range: MemoryRange, protection: i32) -> bool {
    let mut result = libc::SYS_mprotect;
    // SAFETY: the range is our own, or a text that only this thread could execute. A system call
    // changes rax, rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") range.address,
            in("rsi") range.len,
            in("rdx") i64::from(protection),
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}
