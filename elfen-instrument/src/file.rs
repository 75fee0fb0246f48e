//! Looks at files as execve(2) does: which file a name stands for, which interpreter a script
//! names, and which rights a program gains.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The kernel reads only this much of a file when it looks for a `#!` line.
const SCRIPT_LINE_BYTES: u64 = 256;

/// Finds the file for a program's name by the rules of execvp(3): it searches `path` for names
/// without a slash.
pub(crate) fn find(name: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(name.into());
    }
    let folders = std::env::split_paths(path?);
    folders.map(|folder| folder.join(name)).find(|file| is_executable(file))
}

/// Whether the path is a regular file with an execute bit.
pub(crate) fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// The interpreter that a script names, and the argument that follows on the same line. `None` if
/// the file is not a script.
pub(crate) fn script(file: &Path) -> io::Result<Option<(PathBuf, Option<OsString>)>> {
    let mut start = Vec::new();
    File::open(file)?.take(SCRIPT_LINE_BYTES).read_to_end(&mut start)?;
    Ok(start.strip_prefix(b"#!").and_then(|rest| {
        let line = rest.split(|&byte| byte == b'\n').next()?.trim_ascii();
        let end = line.iter().position(|&byte| byte == b' ' || byte == b'\t').unwrap_or(line.len());
        let (interpreter, argument) = line.split_at(end);
        let argument = argument.trim_ascii();
        let argument = (!argument.is_empty()).then(|| OsString::from_vec(argument.to_owned()));
        let interpreter = PathBuf::from(OsString::from_vec(interpreter.to_owned()));
        (!interpreter.as_os_str().is_empty()).then_some((interpreter, argument))
    }))
}

/// The rights that the program gains when it starts. The loader ignores `LD_PRELOAD` for such
/// programs.
pub(crate) fn gains_rights(file: &Path) -> io::Result<Option<Rights>> {
    let found = file.metadata()?;
    // SAFETY: neither call takes arguments or can fail.
    let (user, group) = (unsafe { libc::geteuid() }, unsafe { libc::getegid() });
    let mode = found.mode();
    // Set-group-ID without the group's execute bit does not change the group of the process.
    if (mode & libc::S_ISUID != 0 && found.uid() != user)
        || (mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID | libc::S_IXGRP
            && found.gid() != group)
    {
        return Ok(Some(Rights::SetId));
    }
    Ok(has_capabilities(file)?.then_some(Rights::Capabilities))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rights {
    SetId,
    Capabilities,
}

fn has_capabilities(file: &Path) -> io::Result<bool> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    let name = c"security.capability".as_ptr();
    // SAFETY: both strings are NUL-terminated. A null buffer of size 0 asks only for the length.
    Ok(unsafe { libc::getxattr(path.as_ptr(), name, std::ptr::null_mut(), 0) } > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script_of(text: &str) -> Option<(PathBuf, Option<OsString>)> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        script(file.path()).unwrap()
    }

    #[test]
    fn first_lines_are_parsed_as_by_the_kernel() {
        let sh = PathBuf::from("/bin/sh");
        assert_eq!(script_of("#!/bin/sh\necho"), Some((sh.clone(), None)));
        assert_eq!(script_of("#! /bin/sh -e  -x \n"), Some((sh.clone(), Some("-e  -x".into()))));
        assert_eq!(script_of("#!/bin/sh"), Some((sh, None)));
        for text in ["", "#", "#!", "#!\n/bin/sh", "echo", "\u{7f}ELF"] {
            assert_eq!(script_of(text), None, "{text:?}");
        }
    }

    /// Goal: a name resolves to the file that a shell would start. Method: two folders in the path;
    /// the file in the first is not executable.
    #[test]
    fn names_are_searched_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        for (at, mode) in [(&first, 0o644), (&second, 0o755)] {
            std::fs::create_dir(at).unwrap();
            std::fs::write(at.join("tool"), "").unwrap();
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(at.join("tool"), permissions).unwrap();
        }
        let path = std::env::join_paths([&first, &second]).unwrap();
        assert_eq!(find("tool".as_ref(), Some(&path)), Some(second.join("tool")));
        assert_eq!(find("none".as_ref(), Some(&path)), None);
        assert_eq!(find("./tool".as_ref(), Some(&path)), Some("./tool".into()));
        assert_eq!(find("tool".as_ref(), None), None);
    }
}
