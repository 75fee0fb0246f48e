//! A user that an option names.

use elfen_console::failure::{Failure, Status};
use elfen_host::run::User;

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
