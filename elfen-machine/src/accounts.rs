//! Users and groups of this machine, by name or number.
//!
//! Accounts may come from LDAP or SSSD, by plugins of the machine's C library. A static program
//! has a C library of its own, and may crash when it loads these plugins. So it asks the machine's
//! `getent` and `id`, if they exist.

use std::ffi::CString;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

const GETENT: &str = "/usr/bin/getent";
const ID: &str = "/usr/bin/id";

/// A user that a program can run as.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Account {
    pub name: String,
    pub uid: Uid,
    pub gid: Gid,
    pub groups: Vec<Gid>,
    pub home: PathBuf,
}

impl Account {
    /// Finds a user by name or number; `None` if the user does not exist.
    pub fn find(name: &str) -> io::Result<Option<Self>> {
        match ask_if_static(|| user_of_getent(name)) {
            Some(found) => found,
            None => user_of_library(name),
        }
    }
}

/// The number of a group; `None` if the group does not exist.
pub fn group_id(name: &str) -> io::Result<Option<Gid>> {
    let found = ask_if_static(|| {
        let line = output(GETENT, &["group", name])?;
        line.as_deref().map(|line| field(line, 2).map(Gid::from_raw)).transpose()
    });
    match found {
        Some(found) => found,
        None => Ok(Group::from_name(name)?.map(|group| group.gid)),
    }
}

/// The answer in a static program; `None` in others, and where the programs do not exist.
fn ask_if_static<T>(ask: impl FnOnce() -> io::Result<T>) -> Option<io::Result<T>> {
    if !cfg!(target_feature = "crt-static") {
        return None;
    }
    Some(ask())
        .filter(|answer| !matches!(answer, Err(error) if error.kind() == io::ErrorKind::NotFound))
}

fn user_of_library(name: &str) -> io::Result<Option<Account>> {
    let entry = match name.parse() {
        Ok(uid) => User::from_uid(Uid::from_raw(uid))?,
        Err(_) => User::from_name(name)?,
    };
    let Some(User { name, uid, gid, dir: home, .. }) = entry else { return Ok(None) };
    let groups = getgrouplist(&CString::new(name.as_str())?, gid)?;
    Ok(Some(Account { name, uid, gid, groups, home }))
}

fn user_of_getent(name: &str) -> io::Result<Option<Account>> {
    let Some(line) = output(GETENT, &["passwd", name])? else { return Ok(None) };
    let words: Vec<&str> = line.split(':').collect();
    let [name, _, _, _, _, home, ..] = words.as_slice() else { return Err(unreadable(&line)) };
    let groups = output(ID, &["-G", name])?.ok_or_else(|| unreadable(name))?;
    let groups = groups.split_whitespace().map(|word| word.parse().map(Gid::from_raw));
    let groups: Result<Vec<Gid>, _> = groups.collect();
    Ok(Some(Account {
        name: (*name).to_owned(),
        uid: Uid::from_raw(field(&line, 2)?),
        gid: Gid::from_raw(field(&line, 3)?),
        groups: groups.map_err(|_| unreadable(name))?,
        home: PathBuf::from(home),
    }))
}

fn field(line: &str, at: usize) -> io::Result<u32> {
    line.split(':').nth(at).and_then(|word| word.parse().ok()).ok_or_else(|| unreadable(line))
}

fn unreadable(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("getent printed {what:?}"))
}

/// The first line that a program prints; `None` if it fails, as for an unknown name.
fn output(program: &str, words: &[&str]) -> io::Result<Option<String>> {
    let output = Command::new(program).args(words).stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(output.status.success().then(|| text.lines().next().unwrap_or_default().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a static program finds the accounts that other programs find. Method: both ways, for
    /// a name, a number, and names that do not exist.
    #[test]
    fn getent_finds_the_accounts_of_the_library() {
        for name in ["root", "0", "daemon", "nosuchuser", "4294967290", "-x"] {
            let by_getent = user_of_getent(name).unwrap();
            let by_library = user_of_library(name).unwrap();
            let sorted = |account: Option<Account>| {
                account.map(|mut account| {
                    account.groups.sort_by_key(|group| group.as_raw());
                    account.groups.dedup();
                    account
                })
            };
            assert_eq!(sorted(by_getent), sorted(by_library), "{name}");
        }
        assert_eq!(group_id("root").unwrap(), Some(Gid::from_raw(0)));
        assert_eq!(group_id("nosuchgroup").unwrap(), None);
    }

    #[test]
    fn a_line_without_numbers_is_an_error() {
        assert!(field("root:x:none:0", 2).is_err());
        assert!(field("root", 2).is_err());
    }

    #[test]
    fn a_missing_program_is_not_an_unknown_user() {
        let error = output("/no/such/program", &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
