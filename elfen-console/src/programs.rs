//! Finds Elfen's other programs.
//!
//! `cargo build` puts all programs into one folder; a package puts them into `bin` or `lib/elfen`.
//! If the programs are elsewhere, `ELFEN_LIB` names the folder.

use std::path::{Path, PathBuf};
use std::{env, fmt, io};

/// The variable with a further folder of Elfen's programs and libraries.
const VARIABLE: &str = "ELFEN_LIB";

#[derive(Debug)]
pub enum ProgramError {
    NotFound { name: &'static str, tried: Vec<PathBuf> },
    Running(io::Error),
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { name, tried } => {
                let tried: Vec<String> =
                    tried.iter().map(|path| path.display().to_string()).collect();
                write!(f, "no {name} at {}", tried.join(", "))
            }
            Self::Running(error) => write!(f, "finding the running command: {error}"),
        }
    }
}

impl std::error::Error for ProgramError {}

/// Finds one of Elfen's programs. Looks in the folder of the running command, then where a package
/// puts programs, then in `ELFEN_LIB`.
pub fn find_program(name: &'static str) -> Result<PathBuf, ProgramError> {
    let command = env::current_exe().map_err(ProgramError::Running)?;
    let named = env::var_os(VARIABLE).map(PathBuf::from);
    let tried: Vec<PathBuf> =
        folders(&command, named.as_deref()).into_iter().map(|folder| folder.join(name)).collect();
    match tried.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(ProgramError::NotFound { name, tried }),
    }
}

/// The folders to search, in this order.
fn folders(command: &Path, named: Option<&Path>) -> Vec<PathBuf> {
    let own = command.parent().map(Path::to_owned);
    let packaged = own.as_deref().and_then(Path::parent).map(|prefix| prefix.join("lib/elfen"));
    [own, packaged, named.map(Path::to_owned)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_the_command_comes_first_and_that_of_the_user_last() {
        let found = folders(Path::new("/usr/bin/elfen"), Some(Path::new("/elsewhere")));
        assert_eq!(found, ["/usr/bin", "/usr/lib/elfen", "/elsewhere"].map(PathBuf::from));
    }
}
