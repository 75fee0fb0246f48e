//! Isolates a program in a fence from services that could run its work outside of the fence.
//!
//! The service manager of a user starts programs when the user asks for it. The manager of the
//! system moves processes into units of the user. Both listen in folders under /run, and a fenced
//! program sees these folders empty. `/proc/PID/root` of a process outside of the fence would still
//! show them. So the program also runs in a Landlock domain, which forbids inspecting processes
//! outside of it.

use std::ffi::CStr;
use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;
use elfen_machine::accounts::Account;
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};

/// The folder in which the service managers of logged-in or lingering users listen.
const MANAGERS: &CStr = c"/run/user";
/// The system bus, which passes requests to the service manager of the system.
const BUS: &CStr = c"/run/dbus";

/// Isolates this process and all its descendants. Requires root.
pub(super) fn isolate_user(user: &Account) -> Result<(), Failure> {
    let failed = |what: &str, error: Errno| {
        Failure::new(Status::Failed, what, error, "run it as root, with all of root's capabilities")
    };
    let has_manager = path(MANAGERS).join(user.uid.to_string()).exists();
    hide(&[MANAGERS, BUS]).map_err(|error| failed("hiding service managers", error))?;
    match begin_domain() {
        Ok(()) => Ok(()),
        // The kernel is older than 6.12, or lacks Landlock.
        Err(Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::E2BIG | Errno::EINVAL) => {
            if has_manager {
                let name = &user.name;
                warn(&format!(
                    "user {name} has a service manager, which this kernel lets the program reach: \
                     it can leave its fence"
                ));
            }
            Ok(())
        }
        Err(error) => Err(failed("beginning a Landlock domain", error)),
    }
}

fn path(folder: &'static CStr) -> &'static Path {
    Path::new(folder.to_str().unwrap_or_else(|_| unreachable!("ASCII")))
}

/// Mounts empty folders over these folders, in a mount namespace of this process only.
fn hide(folders: &[&'static CStr]) -> nix::Result<()> {
    let is_folder =
        |folder: &&&'static CStr| fs::symlink_metadata(path(folder)).is_ok_and(|it| it.is_dir());
    unshare(CloneFlags::CLONE_NEWNS)?;
    // Mounts that are made later in other namespaces still appear here. Mounts made here appear
    // nowhere else.
    mount(c"/", c"", libc::MS_REC | libc::MS_SLAVE, c"")?;
    folders
        .iter()
        .filter(is_folder)
        .try_for_each(|folder| mount(folder, c"tmpfs", libc::MS_RDONLY, c"mode=0,size=4k"))
}

fn mount(on: &CStr, kind: &CStr, flags: libc::c_ulong, options: &CStr) -> nix::Result<()> {
    let (on, kind, options) = (on.as_ptr(), kind.as_ptr(), options.as_ptr().cast());
    // SAFETY: the kernel reads four strings during the call; the callers pass C string literals.
    Errno::result(unsafe { libc::mount(kind, on, kind, flags, options) }).map(drop)
}

/// The kernel's `landlock_ruleset_attr`.
#[repr(C)]
struct Rules {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

/// `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET`. A domain must have at least one restriction. This
/// restriction does not affect files, mounts, the network or signals.
const ABSTRACT_SOCKETS: u64 = 1;

fn begin_domain() -> nix::Result<()> {
    let rules = Rules { handled_access_fs: 0, handled_access_net: 0, scoped: ABSTRACT_SOCKETS };
    let (call, size) = (libc::SYS_landlock_create_ruleset, size_of::<Rules>());
    // SAFETY: the kernel reads `size` bytes of `rules`.
    let made = Errno::result(unsafe { libc::syscall(call, &raw const rules, size, 0) })?;
    let number = i32::try_from(made).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else closes it.
    let _rules = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: landlock_restrict_self takes numbers.
    let begun = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, number, 0) };
    Errno::result(begun).map(drop)
}
