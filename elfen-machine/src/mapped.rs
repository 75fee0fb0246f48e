//! Opens files that other processes have mapped.
//!
//! Any user can map a file and choose its name. Opening a FIFO by name would block the reader, and
//! reading a device might never end. So this module opens the file through the mapping itself, only
//! if it is a regular file. It reads up to a limit.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elfen_instrument::remote::Mapping;

/// Opens the file behind a mapping of a process.
pub fn open(process: u32, mapping: &Mapping) -> io::Result<File> {
    let path_only = |path: &Path| {
        File::options().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)
    };
    let folder = Path::new("/proc").join(process.to_string());
    let range = format!("{:x}-{:x}", mapping.range.start, mapping.range.end);
    // The entries of `map_files` are links that the kernel resolves to the mapped file itself.
    let by_range = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(folder.join("map_files").join(range));
    let inside = mapping.name.trim_start_matches('/');
    // Opening these links requires CAP_SYS_ADMIN. Without it, the name is used.
    let found = by_range.or_else(|_| path_only(&folder.join("root").join(inside)))?;
    if !found.metadata()?.is_file() {
        return Err(io::Error::other(format!("{:?} is not a regular file", mapping.name)));
    }
    let again = Path::new("/proc/self/fd").join(found.as_raw_fd().to_string());
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(again)
}

/// Reads the beginning of the file, at most this many bytes.
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

    /// The mapping of our own program, under another name.
    fn own_mapping(name: &str) -> Mapping {
        let all = mappings(std::process::id()).unwrap();
        let program = std::env::current_exe().unwrap();
        let own = all.into_iter().find(|mapping| Path::new(&mapping.name) == program).unwrap();
        Mapping { name: name.to_owned(), ..own }
    }

    /// Goal: the name of a mapping is not trusted. Method: a mapping with the name of a FIFO, a
    /// device and a link. Each is opened by its range, where that is permitted, and by its name
    /// only.
    #[test]
    fn the_mapped_file_is_opened_not_the_file_with_its_name() {
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
                Err(error) => assert!(error.to_string().contains("not a regular file"), "{error}"),
            }
            let nowhere = Mapping { range: 1..2, ..mapping };
            assert!(open(std::process::id(), &nowhere).is_err(), "{name}");
        }
        let by_name = Mapping { range: 1..2, ..own_mapping(&at("file")) };
        let file = open(std::process::id(), &by_name).unwrap();
        assert_eq!(read(&file, 3).unwrap(), b"123");
    }
}
