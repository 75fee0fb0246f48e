//! What a command prints: its result, and warnings.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

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

/// Whether [`replace_private`] can write a file. Nothing of an existing file changes.
pub fn check_replaceable(path: &Path) -> io::Result<()> {
    check_link(path)?;
    match Beside::create(path)? {
        Some(_unused) => Ok(()),
        // Opening a pipe would wait for its reader.
        None => {
            let options = libc::O_NONBLOCK;
            File::options().write(true).custom_flags(options).open(path).map(drop)
        }
    }
}

/// Writes a file that other users cannot read. An existing file is replaced once all is written, so
/// it is not lost if that fails. Links are followed as by [`create_private`].
pub fn replace_private(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
) -> io::Result<()> {
    check_link(path)?;
    let Some(beside) = Beside::create(path)? else {
        let file = create_private(path)?;
        let mut buffer = BufWriter::new(&file);
        write(&mut buffer)?;
        return buffer.flush();
    };
    let mut buffer = BufWriter::new(&beside.file);
    write(&mut buffer)?;
    buffer.flush()?;
    drop(buffer);
    fs::rename(&beside.path, &beside.target)
}

/// A new file in the folder of the one that it will replace. It is removed if it does not.
struct Beside {
    file: File,
    path: PathBuf,
    target: PathBuf,
}

impl Beside {
    /// `None` if the file can only be written in place: a device, or one in a folder of others.
    fn create(path: &Path) -> io::Result<Option<Self>> {
        let (exists, target) = match path.canonicalize() {
            Ok(target) => (true, target),
            Err(_) => match path.read_link() {
                // A link to a file that is not there yet.
                Ok(link) => (false, path.with_file_name(link)),
                Err(_) => (false, path.to_owned()),
            },
        };
        let name = target.file_name().unwrap_or_default();
        if exists && !target.is_file() {
            return Ok(None);
        }
        let mut new = OsString::from(".");
        new.push(name);
        new.push(format!(".{}.new", std::process::id()));
        let new = target.with_file_name(new);
        let created = File::options().write(true).create_new(true).mode(0o600).open(&new);
        match created {
            Ok(file) => Ok(Some(Self { file, path: new, target })),
            Err(_) if exists => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _renamed = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a file that cannot be written as a whole keeps what it has, and nothing is left beside
    /// it. Method: a writer that fails, and one that does not, with a file and a link to it.
    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        replace_private(&file, |to| to.write_all(b"first")).unwrap();
        let failed = replace_private(&file, |to| {
            to.write_all(b"second")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        check_replaceable(&file).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"first");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        replace_private(&link, |to| to.write_all(b"third")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"third");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        for wrong in [folder.path().to_owned(), folder.path().join("no/file")] {
            assert!(check_replaceable(&wrong).is_err(), "{wrong:?}");
        }
        check_replaceable(Path::new("/dev/null")).unwrap();
        replace_private(Path::new("/dev/null"), |to| to.write_all(b"fourth")).unwrap();
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
