//! The user that an option names, or who asked `sudo`.

use elfen_console::failure::{Failure, Status};
use elfen_run::User;

pub(super) fn user_of(name: &str) -> Result<User, Failure> {
    let fix = "give a name or a number that `id` knows";
    match User::find(name) {
        Ok(Some(user)) => Ok(user),
        Ok(None) => {
            Err(Failure::new(Status::Usage, format!("user {name:?}"), "there is none", fix))
        }
        Err(error) => Err(Failure::new(Status::Failed, format!("user {name:?}"), error, fix)),
    }
}

/// Whom a program is started as, if not as who asks: whoever root names, or who asked `sudo`.
pub(super) fn chosen(named: Option<&str>) -> Result<Option<User>, Failure> {
    if !nix::unistd::geteuid().is_root() {
        let (why, fix) = ("only root can become another", "use sudo, or leave --user out");
        return match named {
            Some(_) => Err(Failure::new(Status::Usage, "--user", why, fix)),
            None => Ok(None),
        };
    }
    if named.is_some() {
        return named.map(user_of).transpose();
    }
    let Some(uid) = std::env::var("SUDO_UID").ok().filter(|uid| uid != "0") else {
        return Ok(None);
    };
    user_of(&uid).map(Some).map_err(|_| {
        let (why, fix) = ("there is no such user", "name one with --user; or --user root");
        Failure::new(Status::Usage, format!("who asked sudo, {uid:?}"), why, fix)
    })
}
