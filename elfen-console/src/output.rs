//! What a command prints: its result, and warnings.

use std::fs::{File, Permissions};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

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
    let link = path.symlink_metadata().ok().filter(|found| found.file_type().is_symlink());
    if nix::unistd::geteuid().is_root() && link.is_some_and(|link| link.uid() != 0) {
        return Err(io::Error::other("it is a symbolic link of another user"));
    }
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    // The file may exist already, and other users may be able to read it.
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: root writes only to the given file, not to a file that another user chooses. Method: a
    /// file, our own link to it, and another user's link if this user may create one.
    #[test]
    fn links_of_others_are_not_followed() {
        let folder = std::env::temp_dir().join(format!("elfen-private-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.join(name));
        std::fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        create_private(&link).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&file, "again").unwrap();
        let is_foreign = std::os::unix::fs::lchown(&link, Some(65534), Some(65534)).is_ok();
        assert_eq!(
            create_private(&link).is_err(),
            is_foreign,
            "only root can give a link to another user"
        );
        if is_foreign {
            assert_eq!(std::fs::read(&file).unwrap(), b"again");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
