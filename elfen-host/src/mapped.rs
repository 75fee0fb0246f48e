//! Files that other processes have mapped, opened as those processes have them.
//!
//! Any user can map a file, and choose its name: a name that leads to a FIFO would hang its reader,
//! one that leads to a device would never end. So the file is opened by the mapping itself, only a
//! regular file is read, and only so much of it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elfen_instrument::remote::Mapping;

/// The file behind a mapping of a process.
pub fn open(process: u32, mapping: &Mapping) -> io::Result<File> {
    let path_only = |path: &Path| {
        File::options().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)
    };
    let folder = Path::new("/proc").join(process.to_string());
    let range = format!("{:x}-{:x}", mapping.range.start, mapping.range.end);
    // What `map_files` has are links that the kernel follows to the file itself.
    let by_range = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(folder.join("map_files").join(range));
    let inside = mapping.name.trim_start_matches('/');
    // Those links take CAP_SYS_ADMIN. Without it the name must do.
    let found = by_range.or_else(|_| path_only(&folder.join("root").join(inside)))?;
    if !found.metadata()?.is_file() {
        return Err(io::Error::other(format!("{:?} is no regular file", mapping.name)));
    }
    let again = Path::new("/proc/self/fd").join(found.as_raw_fd().to_string());
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(again)
}

/// What the file begins with, at most so many bytes.
pub fn read(file: &File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_instrument::remote::mappings;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    /// Our own program, under another name.
    fn own_mapping(name: &str) -> Mapping {
        let all = mappings(std::process::id()).unwrap();
        let program = std::env::current_exe().unwrap();
        let own = all.into_iter().find(|mapping| Path::new(&mapping.name) == program).unwrap();
        Mapping { name: name.to_owned(), ..own }
    }

    /// Goal: a name that leads elsewhere is not followed. Method: a mapping whose name is a FIFO's,
    /// a device's and a link's, by its range, where that is allowed, and by the name only.
    #[test]
    fn a_mapping_is_opened_and_not_what_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| -> String { folder.path().join(name).to_str().unwrap().to_owned() };
        mkfifo(Path::new(&at("fifo")), Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("link")).unwrap();
        std::fs::write(at("file"), "12345").unwrap();
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for name in [at("fifo"), "/dev/zero".to_owned(), at("link")] {
            let mapping = own_mapping(&name);
            match open(std::process::id(), &mapping) {
                Ok(file) => assert_eq!(read(&file, 64).unwrap(), program[..64]),
                Err(error) => assert!(error.to_string().contains("no regular file"), "{error}"),
            }
            let nowhere = Mapping { range: 1..2, ..mapping };
            assert!(open(std::process::id(), &nowhere).is_err(), "{name}");
        }
        let by_name = Mapping { range: 1..2, ..own_mapping(&at("file")) };
        let file = open(std::process::id(), &by_name).unwrap();
        assert_eq!(read(&file, 3).unwrap(), b"123");
    }
}
