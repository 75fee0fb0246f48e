//! The interface of `/dev/nanonap`: the Rust version of `kernel/nanonap/nanonap.h`.
//!
//! The module checks every argument, and this code checks every result. `nap::device` naps through
//! it, and `signal::task` reads its task map.

use core::ffi::{CStr, c_int, c_ulong};
use core::fmt;
use core::mem::{offset_of, size_of};

use crate::bpf::Descriptor;
use crate::memory::{Access, Memory, MemoryError};
use crate::process::errno;
use crate::signal::page::PageError;

pub const PATH: &CStr = c"/dev/nanonap";

/// The interface version of this build: NANONAP_ABI.
pub const ABI: u32 = 1;

/// The longest nap that the module grants.
pub const BOUND_MAX_NS: u64 = 100_000_000;

/// How a nap waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitKind {
    /// The CPU has no MONITOR/MWAIT that works, so the module cannot nap.
    None,
    Mwait,
    /// For tests: a loop, which leaves no resources to the sibling.
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
    /// The device is absent, or this process may not open it.
    Open(MemoryError),
    /// The file is not the nanonap module's device.
    NotNanonap,
    /// The module has another interface version.
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
            Self::NotNanonap => f.write_str("/dev/nanonap is not the nanonap module's device"),
            Self::Version { found } => {
                write!(
                    f,
                    "the nanonap module has interface version {found}, this build needs {ABI}"
                )
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

/// The open device. The module cannot be unloaded while this exists.
#[derive(Debug)]
pub struct Nanonap {
    file: Descriptor,
    version: Version,
    /// The device's number, by which the descriptor is verified later.
    device: libc::dev_t,
}

impl Nanonap {
    pub fn open() -> Result<Self, DeviceError> {
        let flags = libc::O_RDWR | libc::O_CLOEXEC;
        // The system call by its number and not the C library's open, which is a cancellation
        // point: checks run in any thread.
        // SAFETY: the path is a NUL-terminated literal.
        let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, PATH.as_ptr(), flags) };
        match c_int::try_from(fd) {
            // SAFETY: the descriptor was opened above, and no other code knows it.
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

    /// Maps the module's task map. Like the map of an eBPF program, it never shrinks and lives as
    /// long as its last mapping.
    pub fn map(&self) -> Result<Memory, DeviceError> {
        let len = usize::try_from(self.version.map_bytes).unwrap_or(0);
        // SAFETY: `from_descriptor` checked that the descriptor is the module's device.
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

    /// How many (request lane, batch lane) pairs can wake each other. 0 if the machine hides its
    /// SMT.
    pub fn ties(&self) -> u32 {
        self.version.ties
    }

    /// Starts or stops the timing of a CPU's switches. Timing ends when this is dropped at the
    /// latest.
    pub fn watch(&self, cpu: u32, on: bool) -> Result<(), MemoryError> {
        let mut request = WatchRequest { cpu, on: on.into() };
        match call(&self.file, WATCH, &mut request) {
            Ok(_) => Ok(()),
            Err(libc::EINVAL) => Err(MemoryError::Absent),
            Err(errno) => Err(MemoryError::Other(errno)),
        }
    }

    /// Naps until `request_cpu` has been idle at any time after `seen_switches`. Returns why the
    /// nap ended.
    pub(crate) fn nap(&self, request_cpu: u32, seen_switches: u64, bound_ns: u64) -> Ended {
        let bound_ns = bound_ns.clamp(1, BOUND_MAX_NS);
        let mut request = NapRequest { request_cpu, seen_switches, bound_ns, reserved: 0 };
        match call(&self.file, NAP, &mut request) {
            Ok(WOKE_IDLE) => Ended::Idle,
            Ok(WOKE_BOUND) => Ended::Bound,
            // Other reasons, including ones that this build does not know, come from the kernel.
            Ok(_) => Ended::Wanted,
            Err(_) => Ended::Refused,
        }
    }

    /// Whether the descriptor still refers to the device. The program may have closed the
    /// descriptor, and opened another file with its number.
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
    /// There was no nap: the caller is not on a lane that the request lane wakes.
    Refused,
}

/// The device number of a descriptor; `None` if it is not a character device.
fn device_of(file: &Descriptor) -> Option<libc::dev_t> {
    // SAFETY: an all-zero stat is a valid value of that plain C structure.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is ours.
    let failed = unsafe { libc::fstat(file.raw(), &mut stat) } != 0;
    (!failed && stat.st_mode & libc::S_IFMT == libc::S_IFCHR).then_some(stat.st_rdev)
}

/// Makes an ioctl(2) call; returns errno if it failed.
fn call<T>(file: &Descriptor, command: c_ulong, argument: &mut T) -> Result<c_int, c_int> {
    // SAFETY: `command` contains the size of `T`, and the module reads and writes that many bytes.
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

    /// Goal: this file and nanonap.h define the same ABI. Method: a C program prints every number
    /// of the header.
    #[test]
    fn the_abi_agrees_with_the_c_header() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let base = std::env::temp_dir().join(std::format!("nanonap-abi-{}", std::process::id()));
        let (source, program) = (base.with_extension("c"), base.with_extension("out"));
        std::fs::write(&source, PROGRAM).unwrap();
        let compiled = Command::new("cc")
            .arg("-I")
            .arg(root.join("../kernel/nanonap"))
            .args([&source, Path::new("-o"), &program])
            .output()
            .expect("a C compiler, which building Rust needs as well");
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

    /// Goal: another device is refused. Method: /dev/null.
    #[test]
    fn another_device_is_refused() {
        // SAFETY: the path is a NUL-terminated literal.
        let fd = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor was opened above, and no other code knows it.
        let file = unsafe { Descriptor::from_raw(fd) };
        assert_eq!(Nanonap::from_descriptor(file).unwrap_err(), DeviceError::NotNanonap);
    }
}
