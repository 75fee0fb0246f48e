//! What a command prints: its result, and warnings.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::failure::{Failure, to_stderr};

/// Prints a result: as one JSON object for scripts, or as text.
pub fn print(
    out: &mut dyn Write,
    json: bool,
    result: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if json {
        print_json(out, result)
    } else {
        out.write_all(text().as_bytes()).map_err(Failure::output)
    }
}

/// Prints one JSON object and a line break, as `--json` does. The object's first key is `schema`.
pub fn print_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, &Versioned::of(value))
        .map_err(|e| Failure::output(e.into()))?;
    writeln!(out).map_err(Failure::output)
}

/// The version of all JSON output. It increases when a key is removed or changes its meaning, but
/// not when a key is added.
pub const SCHEMA: u32 = 1;

/// An object with the version of its schema.
#[derive(serde::Serialize, Debug)]
pub struct Versioned<'a, T> {
    schema: u32,
    #[serde(flatten)]
    value: &'a T,
}

impl<'a, T> Versioned<'a, T> {
    pub fn of(value: &'a T) -> Self {
        Self { schema: SCHEMA, value }
    }
}

/// Prints a warning as one line on stderr. The command continues.
pub fn warn(warning: &str) {
    to_stderr(&format!("warning: {warning}"));
}

/// Whether to use colours: on a terminal, unless the user or the terminal opts out.
pub fn colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !unwanted && !dumb
}

/// Creates a file that other users cannot read, or truncates an existing file. As root, it follows
/// no symbolic link of another user. Otherwise any user with write access to the folder could
/// choose the file that root writes.
pub fn create_private(path: &Path) -> io::Result<File> {
    check_link(path)?;
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    // The file may exist already, and other users may be able to read it.
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

fn check_link(path: &Path) -> io::Result<()> {
    let link = path.symlink_metadata().ok().filter(|found| found.file_type().is_symlink());
    if nix::unistd::geteuid().is_root() && link.is_some_and(|link| link.uid() != 0) {
        return Err(io::Error::other("it is a symbolic link of another user"));
    }
    Ok(())
}

/// A file for the result of a command, which other users cannot read. An existing file keeps what
/// it has until all is written. Links are followed as by [`create_private`].
#[derive(Debug)]
pub struct ResultFile {
    path: PathBuf,
    /// Devices, pipes, and files in a folder that this user may not change are written in place.
    in_place: Option<File>,
}

impl ResultFile {
    /// Finds out whether the file can be written, and changes nothing of it.
    pub fn open(path: &Path) -> io::Result<Self> {
        check_link(path)?;
        let found = path.metadata();
        let beside = match &found {
            Ok(found) if !found.is_file() => None,
            Ok(_) => Beside::create(path).ok(),
            Err(_) => Some(Beside::create(path)?),
        };
        let in_place = if beside.is_some() { None } else { Some(open_in_place(path)?) };
        Ok(Self { path: path.to_owned(), in_place })
    }

    /// Writes the file.
    pub fn write(
        self,
        write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
    ) -> io::Result<()> {
        let all = |file: &File| {
            let mut buffer = BufWriter::new(file);
            write(&mut buffer)?;
            buffer.flush()
        };
        if let Some(file) = self.in_place {
            if file.metadata()?.is_file() {
                file.set_len(0)?;
                file.set_permissions(Permissions::from_mode(0o600))?;
            }
            return all(&file);
        }
        check_link(&self.path)?;
        let beside = Beside::create(&self.path)?;
        all(&beside.file)?;
        fs::rename(&beside.path, &beside.target)
    }
}

/// Opens a file for writing. A pipe needs a reader by now: waiting for one could last for ever.
fn open_in_place(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok(file)
}

/// A new file in the folder of the one that it will replace. It is removed if it does not.
struct Beside {
    file: File,
    path: PathBuf,
    target: PathBuf,
}

impl Beside {
    fn create(path: &Path) -> io::Result<Self> {
        let target = path.canonicalize().unwrap_or_else(|_| match path.read_link() {
            // A link to a file that is not there yet.
            Ok(link) => path.with_file_name(link),
            Err(_) => path.to_owned(),
        });
        let mut name = OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(format!(".{}.new", std::process::id()));
        let path = target.with_file_name(name);
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self { file, path, target })
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _renamed = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use super::*;

    /// Goal: a file that cannot be written as a whole keeps what it has, and nothing is left beside
    /// it. Method: a writer that fails, and one that does not, with a file and a link to it.
    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let write = |file: &Path, text: &[u8]| {
            ResultFile::open(file).unwrap().write(|to| to.write_all(text)).unwrap();
        };
        write(&file, b"first");
        let failed = ResultFile::open(&file).unwrap().write(|to| {
            to.write_all(b"second")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&file).unwrap(), b"first");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, b"third");
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"third");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        for wrong in [folder.path().to_owned(), folder.path().join("no/file")] {
            ResultFile::open(&wrong).unwrap_err();
        }
        write(Path::new("/dev/null"), b"fourth");
    }

    /// Goal: a reader of a pipe gets all of it, and its end only then. Method: a pipe by the path
    /// of its descriptor, as that of `>(command)`.
    #[test]
    fn a_pipe_is_written_once() {
        let (mut reader, writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let opened = ResultFile::open(Path::new(&path)).unwrap();
        drop(writer);
        opened.write(|to| to.write_all(b"all")).unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "all");
    }

    /// Goal: root writes only to the given file, not to a file that another user chooses. Method: a
    /// file, our own link to it, and another user's link if this user may create one.
    #[test]
    fn links_of_others_are_not_followed() {
        let folder = std::env::temp_dir().join(format!("elfen-private-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.join(name));
        fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        create_private(&link).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&file, "again").unwrap();
        let is_foreign = std::os::unix::fs::lchown(&link, Some(65534), Some(65534)).is_ok();
        assert_eq!(
            create_private(&link).is_err(),
            is_foreign,
            "only root can give a link to another user"
        );
        if is_foreign {
            assert_eq!(fs::read(&file).unwrap(), b"again");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
