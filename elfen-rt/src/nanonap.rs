//! `/dev/nanonap`, as its file is spoken to: the Rust twin of `kernel/nanonap/nanonap.h`.
//!
//! The module checks every argument; what it answers is checked here. Napping by it is
//! `nap::device`, reading its task map is `signal::task`.

use core::ffi::{CStr, c_int, c_ulong};
use core::fmt;
use core::mem::{offset_of, size_of};

use crate::bpf::Descriptor;
use crate::memory::{Access, Memory, MemoryError};
use crate::process::errno;
use crate::signal::page::PageError;

pub const PATH: &CStr = c"/dev/nanonap";

/// The version that this build speaks: NANONAP_ABI.
pub const ABI: u32 = 1;

/// The longest nap that the module grants.
pub const BOUND_MAX_NS: u64 = 100_000_000;

/// How a nap waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitKind {
    /// It cannot: the CPU has no MONITOR/MWAIT that works.
    None,
    Mwait,
    /// The stand-in for tests, which gives nothing to the sibling.
    Spin,
    /// A way that this build does not know.
    Other(u32),
}

/// `struct nanonap_version`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct Version {
    version: u32,
    wait: u32,
    hint: u32,
    cpus: u32,
    map_bytes: u64,
    ties: u32,
    reserved: u32,
}

/// `struct nanonap_nap`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct NapRequest {
    request_cpu: u32,
    reserved: u32,
    seen_switches: u64,
    bound_ns: u64,
}

/// `struct nanonap_watch`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct WatchRequest {
    cpu: u32,
    on: u32,
}

const WOKE_IDLE: c_int = 1;
const WOKE_BOUND: c_int = 4;

const _: () = assert!(size_of::<Version>() == 32 && offset_of!(Version, map_bytes) == 16);
const _: () = assert!(size_of::<NapRequest>() == 24 && offset_of!(NapRequest, bound_ns) == 16);
const _: () = assert!(size_of::<WatchRequest>() == 8);

const READ: c_ulong = 2;
const WRITE: c_ulong = 1;

/// `_IOC(direction, 0xE1, number, sizeof(T))`.
const fn command<T>(direction: c_ulong, number: c_ulong) -> c_ulong {
    direction << 30 | (size_of::<T>() as c_ulong) << 16 | 0xE1 << 8 | number
}

const VERSION: c_ulong = command::<Version>(READ | WRITE, 0);
const NAP: c_ulong = command::<NapRequest>(WRITE, 1);
const WATCH: c_ulong = command::<WatchRequest>(WRITE, 2);

/// Why the device could not be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceError {
    /// Absent, or not for us.
    Open(MemoryError),
    /// Something else has the device's name.
    NotNanonap,
    /// The module speaks another version.
    Version {
        found: u32,
    },
    /// Its task map cannot be mapped.
    Map(MemoryError),
    Page(PageError),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(error) => write!(f, "cannot open /dev/nanonap: {error}"),
            Self::NotNanonap => f.write_str("/dev/nanonap is not the nanonap module's"),
            Self::Version { found } => {
                write!(f, "the nanonap module speaks version {found}, this build {ABI}")
            }
            Self::Map(error) => write!(f, "cannot map the nanonap module's task map: {error}"),
            Self::Page(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for DeviceError {}

impl From<PageError> for DeviceError {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

/// The open device. The module cannot go while this is held.
#[derive(Debug)]
pub struct Nanonap {
    file: Descriptor,
    version: Version,
    /// The device's number, by which its descriptor is known again.
    device: libc::dev_t,
}

impl Nanonap {
    pub fn open() -> Result<Self, DeviceError> {
        let flags = libc::O_RDWR | libc::O_CLOEXEC;
        // By the number and not by the C library's open, which is a cancellation point:
        // checks come here in any thread.
        // SAFETY: the path is a NUL-terminated literal.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, PATH.as_ptr(), flags) };
        match c_int::try_from(fd) {
            // SAFETY: opened above, and no other code knows it.
            Ok(fd) if fd >= 0 => Self::from_descriptor(unsafe { Descriptor::from_raw(fd) }),
            _ => Err(DeviceError::Open(MemoryError::last())),
        }
    }

    /// Takes a descriptor of the device; refuses any other.
    pub fn from_descriptor(file: Descriptor) -> Result<Self, DeviceError> {
        let mut version = Version { version: ABI, ..Version::default() };
        match call(&file, VERSION, &mut version) {
            Ok(_) => {}
            Err(libc::EPROTO) => return Err(DeviceError::Version { found: version.version }),
            Err(_) => return Err(DeviceError::NotNanonap),
        }
        let device = device_of(&file).ok_or(DeviceError::NotNanonap)?;
        Ok(Self { file, version, device })
    }

    /// Maps the module's task map. Like that of an eBPF program it never shrinks: it lives as
    /// long as its last mapping.
    pub fn map(&self) -> Result<Memory, DeviceError> {
        let len = usize::try_from(self.version.map_bytes).unwrap_or(0);
        // SAFETY: the device answered as the module does when this was made.
        let memory = unsafe { Memory::map_descriptor(self.file.raw(), len, Access::Read) };
        memory.map_err(DeviceError::Map)
    }

    pub fn wait_kind(&self) -> WaitKind {
        match self.version.wait {
            0 => WaitKind::None,
            1 => WaitKind::Mwait,
            2 => WaitKind::Spin,
            other => WaitKind::Other(other),
        }
    }

    /// How many (request lane, batch lane) wake each other. 0: the machine hides its SMT.
    pub fn ties(&self) -> u32 {
        self.version.ties
    }

    /// Has a CPU's switches timed, or no longer; at the latest until this is dropped.
    pub fn watch(&self, cpu: u32, on: bool) -> Result<(), MemoryError> {
        let mut request = WatchRequest { cpu, on: on.into() };
        match call(&self.file, WATCH, &mut request) {
            Ok(_) => Ok(()),
            Err(libc::EINVAL) => Err(MemoryError::Absent),
            Err(errno) => Err(MemoryError::Other(errno)),
        }
    }

    /// Naps until `request_cpu` has been idle at any time after `seen_switches`; returns the
    /// module's answer.
    pub(crate) fn nap(&self, request_cpu: u32, seen_switches: u64, bound_ns: u64) -> Ended {
        let bound_ns = bound_ns.clamp(1, BOUND_MAX_NS);
        let mut request = NapRequest { request_cpu, seen_switches, bound_ns, reserved: 0 };
        match call(&self.file, NAP, &mut request) {
            Ok(WOKE_IDLE) => Ended::Idle,
            Ok(WOKE_BOUND) => Ended::Bound,
            // A reason that this build does not know is the kernel's, too.
            Ok(_) => Ended::Wanted,
            Err(_) => Ended::Refused,
        }
    }

    /// Whether the descriptor is still the device's. A program owns its descriptors, and may have
    /// closed this one and opened something else in its place.
    pub(crate) fn is_still_open(&self) -> bool {
        device_of(&self.file) == Some(self.device)
    }
}

/// Why the module ended a nap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    Idle,
    Bound,
    Wanted,
    /// There was none: the caller is not on a lane that the request lane wakes.
    Refused,
}

/// The number of the device that a descriptor is open on; `None` if it is no device.
fn device_of(file: &Descriptor) -> Option<libc::dev_t> {
    // SAFETY: an all-zero stat is a valid value of that plain C structure.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is ours.
    let failed = unsafe { libc::fstat(file.raw(), &mut stat) } != 0;
    (!failed && stat.st_mode & libc::S_IFMT == libc::S_IFCHR).then_some(stat.st_rdev)
}

/// An ioctl(2) on a structure of ours; errno if it failed.
fn call<T>(file: &Descriptor, command: c_ulong, argument: &mut T) -> Result<c_int, c_int> {
    // SAFETY: `command` carries the size of `T`, which is what the module reads and writes.
    let result = unsafe { libc::ioctl(file.raw(), command, core::ptr::from_mut(argument)) };
    if result < 0 { Err(errno()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::Command;
    use std::string::{String, ToString};
    use std::vec::Vec;

    const PROGRAM: &str = r#"
#include <stddef.h>
#include <stdio.h>
#include "nanonap.h"
int main(void)
{
	printf("%d %llu ", NANONAP_ABI, NANONAP_BOUND_MAX_NS);
	printf("%lu %lu ", (unsigned long)NANONAP_VERSION, (unsigned long)NANONAP_NAP);
	printf("%lu ", (unsigned long)NANONAP_WATCH);
	printf("%d %d ", NANONAP_WOKE_IDLE, NANONAP_WOKE_BOUND);
	printf("%zu ", offsetof(struct nanonap_version, wait));
	printf("%zu %zu ", offsetof(struct nanonap_version, map_bytes),
	       offsetof(struct nanonap_version, ties));
	printf("%zu %zu ", offsetof(struct nanonap_nap, seen_switches),
	       offsetof(struct nanonap_nap, bound_ns));
	printf("%zu\n", offsetof(struct nanonap_watch, on));
	return 0;
}
"#;

    /// Goal: this file and nanonap.h are one ABI. Method: a C program that prints every number of
    /// the header.
    #[test]
    fn agrees_with_the_header_in_c() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let base = std::env::temp_dir().join(std::format!("nanonap-abi-{}", std::process::id()));
        let (source, program) = (base.with_extension("c"), base.with_extension("out"));
        std::fs::write(&source, PROGRAM).unwrap();
        let compiled = Command::new("cc")
            .arg("-I")
            .arg(root.join("../kernel/nanonap"))
            .args([&source, Path::new("-o"), &program])
            .output()
            .expect("building Rust needs a C compiler too");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let printed = Command::new(&program).output().unwrap().stdout;
        for file in [&source, &program] {
            std::fs::remove_file(file).unwrap();
        }
        let offsets = [
            offset_of!(Version, wait),
            offset_of!(Version, map_bytes),
            offset_of!(Version, ties),
            offset_of!(NapRequest, seen_switches),
            offset_of!(NapRequest, bound_ns),
            offset_of!(WatchRequest, on),
        ];
        let ours: Vec<u64> = [u64::from(ABI), BOUND_MAX_NS, VERSION, NAP, WATCH]
            .into_iter()
            .chain([WOKE_IDLE, WOKE_BOUND].map(|n| n.try_into().unwrap()))
            .chain(offsets.map(|offset| offset as u64))
            .collect();
        let ours: Vec<String> = ours.iter().map(u64::to_string).collect();
        assert_eq!(String::from_utf8_lossy(&printed).trim(), ours.join(" "));
    }

    /// Goal: a file that is no device is refused, not used. Method: /dev/null.
    #[test]
    fn another_device_is_refused() {
        // SAFETY: the path is a NUL-terminated literal.
        let fd = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: opened above, and no other code knows it.
        let file = unsafe { Descriptor::from_raw(fd) };
        assert_eq!(Nanonap::from_descriptor(file).unwrap_err(), DeviceError::NotNanonap);
    }
}
