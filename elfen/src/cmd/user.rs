//! Chooses the user that runs a program: `--user`, or the user that called `sudo`.

use elfen_console::failure::{Failure, Status};
use elfen_machine::accounts::Account;

pub(super) fn find_user(name: &str) -> Result<Account, Failure> {
    let fix = "use a name or a number that `id` accepts";
    match Account::find(name) {
        Ok(Some(user)) => Ok(user),
        Ok(None) => {
            Err(Failure::new(Status::Usage, format!("user {name:?}"), "it does not exist", fix))
        }
        Err(error) => Err(Failure::new(Status::Failed, format!("user {name:?}"), error, fix)),
    }
}

/// The user to start a program as; `None` means the user of this process.
pub(super) fn choose_user(named: Option<&str>) -> Result<Option<Account>, Failure> {
    if !nix::unistd::geteuid().is_root() {
        let (why, fix) = ("only root can become another user", "use sudo, or omit --user");
        return match named {
            Some(_) => Err(Failure::new(Status::Usage, "--user", why, fix)),
            None => Ok(None),
        };
    }
    if named.is_some() {
        return named.map(find_user).transpose();
    }
    let Some(uid) = std::env::var("SUDO_UID").ok().filter(|uid| uid != "0") else {
        return Ok(None);
    };
    find_user(&uid).map(Some).map_err(|_| {
        let (why, fix) = ("this user does not exist", "name one with --user; or --user root");
        Failure::new(Status::Usage, format!("SUDO_UID {uid:?}"), why, fix)
    })
}
