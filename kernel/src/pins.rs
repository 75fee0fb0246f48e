//! `elfen signals up` and `down`: the task map pinned, so that a group of users
//! without privileges can read it.
//!
//! The pins live in an eBPF file system of our own, mounted for this and unmounted with it: the
//! machine's `/sys/fs/bpf` is closed to all but root on most distributions, and is not ours to
//! open. The map is frozen, so its group can write none of it; the leases are writable, and all
//! they can do is to have switches timed.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use elfen_rt::signal::task::{LINK_PIN, MAP_PIN, PIN_DIR, WATCH_PIN};

use crate::bpf_call;
use crate::error::Error;
use crate::task_map;

const PINS: [&CStr; 3] = [MAP_PIN, WATCH_PIN, LINK_PIN];

/// The outcome of `up`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Up {
    Pinned,
    /// It was up already; the group is the one asked for now.
    Already,
}

/// Whether the task map is pinned here.
pub fn are_up() -> bool {
    PINS.iter().all(|pin| path(pin).exists())
}

/// The group that may read the pinned task map; `None` if nothing is pinned or we may not see it.
pub fn group() -> Option<u32> {
    fs::metadata(path(MAP_PIN)).ok().map(|pin| pin.gid())
}

/// Attaches the program, or takes the one that runs, and pins it for `group`. Needs CAP_SYS_ADMIN.
pub fn up(group: u32) -> Result<Up, Error> {
    let result = if are_up() { Up::Already } else { Up::Pinned };
    if result == Up::Pinned {
        mount()?;
        if let Err(error) = pin_all() {
            // No process could use half of the pins, and they would stay for ever.
            let _unmounted = unmount();
            return Err(error);
        }
    }
    for pin in PINS {
        give(path(pin), group, 0o660)?;
    }
    give(Path::new(PIN_DIR), group, 0o750)?;
    Ok(result)
}

fn pin_all() -> Result<(), Error> {
    let parts = match task_map::running()? {
        Some(parts) => parts,
        None => task_map::attach()?,
    };
    for (object, pin) in
        [(&parts.tasks, MAP_PIN), (&parts.watch, WATCH_PIN), (&parts.link, LINK_PIN)]
    {
        bpf_call::pin(object, pin).map_err(Error::call("pinning"))?;
    }
    Ok(())
}

/// Removes the pins; says whether there were any. The program stays until its last reader has gone.
pub fn down() -> Result<bool, Error> {
    let mounted = is_mounted();
    for pin in PINS {
        match fs::remove_file(path(pin)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::call("removing the pins")(error));
            }
            _ => {}
        }
    }
    if mounted {
        unmount().map_err(Error::call("unmounting"))?;
    }
    Ok(mounted)
}

fn path(pin: &CStr) -> &Path {
    Path::new(pin.to_str().unwrap_or_default())
}

fn give(path: &Path, group: u32, mode: u32) -> Result<(), Error> {
    chown(path, None, Some(group)).map_err(Error::call("setting the group of the pins"))?;
    let permissions = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, permissions).map_err(Error::call("setting the mode of the pins"))
}

/// `struct statfs` says that a file system is eBPF's by this number.
const BPF_FS_MAGIC: libc::c_long = 0xcafe_4a11;

fn is_mounted() -> bool {
    // SAFETY: an all-zero statfs is a valid value of that plain C structure.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    let Ok(directory) = CString::new(PIN_DIR) else { return false };
    // SAFETY: the path is NUL-terminated and `stat` is ours.
    let found = unsafe { libc::statfs(directory.as_ptr(), &mut stat) } == 0;
    found && stat.f_type == BPF_FS_MAGIC
}

fn mount() -> Result<(), Error> {
    fs::create_dir_all(PIN_DIR).map_err(Error::call("making /run/elfen"))?;
    if is_mounted() {
        return Ok(());
    }
    let directory = CString::new(PIN_DIR).map_err(|error| Error::call("mounting")(error.into()))?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: all strings are NUL-terminated and outlive the call.
    let result = unsafe {
        libc::mount(
            c"elfen".as_ptr(),
            directory.as_ptr(),
            c"bpf".as_ptr(),
            flags,
            c"mode=0750".as_ptr().cast(),
        )
    };
    if result == 0 { Ok(()) } else { Err(Error::call("mounting")(io::Error::last_os_error())) }
}

fn unmount() -> io::Result<()> {
    let directory = CString::new(PIN_DIR)?;
    // SAFETY: the path is NUL-terminated. Detached at once: a user's shell may stand in it.
    if unsafe { libc::umount2(directory.as_ptr(), libc::MNT_DETACH) } != 0 {
        return Err(io::Error::last_os_error());
    }
    fs::remove_dir(PIN_DIR)?;
    match fs::remove_dir(Path::new(PIN_DIR).parent().unwrap_or(Path::new(PIN_DIR))) {
        // Something else of ours is in /run/elfen.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        result => result,
    }
}
