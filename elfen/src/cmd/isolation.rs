//! Cuts a program in a fence off from who would do its work outside, or take it out.
//!
//! A service manager starts what its user asks for, and the system's moves a process into a unit of
//! its user's. They listen in folders under /run, which are empty for a fenced program. A process
//! of the same user outside would lend it another view of those folders, by `/proc/PID/root`: so
//! the program begins a domain of Landlock's, from which nobody looks into processes beside it.

use std::ffi::CStr;
use std::fs;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;
use elfen_run::User;
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};

/// Where the service managers of users listen who are logged in, or linger.
const MANAGERS: &CStr = c"/run/user";
/// The system's bus, by which its service manager is asked.
const BUS: &CStr = c"/run/dbus";

/// For this process and all that come from it, which takes root.
pub(super) fn cut_off(user: &User) -> Result<(), Failure> {
    let failed = |what: &str, error: Errno| {
        Failure::new(Status::Failed, what, error, "run it as root, with all of root's capabilities")
    };
    let has_manager = path(MANAGERS).join(user.uid.to_string()).exists();
    hide(&[MANAGERS, BUS]).map_err(|error| failed("hiding service managers", error))?;
    match begin_domain() {
        Ok(()) => Ok(()),
        // A kernel before 6.12, or one without Landlock.
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
        Err(error) => Err(failed("a domain of Landlock's", error)),
    }
}

fn path(folder: &'static CStr) -> &'static Path {
    Path::new(folder.to_str().unwrap_or_else(|_| unreachable!("ASCII")))
}

/// Has empty folders there, in mounts of this process's own.
fn hide(folders: &[&'static CStr]) -> nix::Result<()> {
    let is_folder =
        |folder: &&&'static CStr| fs::symlink_metadata(path(folder)).is_ok_and(|it| it.is_dir());
    unshare(CloneFlags::CLONE_NEWNS)?;
    // What is mounted elsewhere later is seen here, and not the other way around.
    mount(c"/", c"", libc::MS_REC | libc::MS_SLAVE, c"")?;
    folders
        .iter()
        .filter(is_folder)
        .try_for_each(|folder| mount(folder, c"tmpfs", libc::MS_RDONLY, c"mode=0,size=4k"))
}

fn mount(on: &CStr, kind: &CStr, flags: libc::c_ulong, options: &CStr) -> nix::Result<()> {
    let (on, kind, options) = (on.as_ptr(), kind.as_ptr(), options.as_ptr().cast());
    // SAFETY: the kernel reads four strings, which the caller's literals are for as long.
    Errno::result(unsafe { libc::mount(kind, on, kind, flags, options) }).map(drop)
}

/// `landlock_ruleset_attr` of the kernel's.
#[repr(C)]
struct Rules {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

/// Sockets without a file are of the domain, too: the one restriction that begins a domain, and
/// leaves files, mounts, the network and signals as they are.
const ABSTRACT_SOCKETS: u64 = 1;

fn begin_domain() -> nix::Result<()> {
    let rules = Rules { handled_access_fs: 0, handled_access_net: 0, scoped: ABSTRACT_SOCKETS };
    let (call, size) = (libc::SYS_landlock_create_ruleset, size_of::<Rules>());
    // SAFETY: the kernel reads `size` bytes of `rules`.
    let made = Errno::result(unsafe { libc::syscall(call, &raw const rules, size, 0) })?;
    let number = i32::try_from(made).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just given us this descriptor, which closes with this.
    let _rules = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: takes numbers.
    let begun = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, number, 0) };
    Errno::result(begun).map(drop)
}
