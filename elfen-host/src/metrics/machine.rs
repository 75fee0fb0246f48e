//! This machine as a scrape sees it, with the memory that tails need.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::pages;

use super::server::Scraped;
use super::{Seen, scrape};
use crate::fence::status::{Answer, Request, ask};
use crate::run::find;
use crate::services::{Tails, services};
use crate::watches::watches;

#[derive(Debug)]
pub struct Machine {
    tails: Mutex<Tails>,
    /// elfend's.
    socket: PathBuf,
}

impl Machine {
    pub fn new(socket: PathBuf) -> Self {
        Self { tails: Mutex::default(), socket }
    }
}

impl Scraped for Machine {
    fn scrape(&self) -> io::Result<String> {
        let (batches, services) = (find::batches(&self.socket)?, services()?);
        let tasks = pages::request_task_map(self.socket.as_os_str().as_bytes()).ok();
        let fences = match ask(&self.socket, &Request::Status) {
            Ok(Answer::Status(status)) => Some(status),
            // What it says else is not for a scrape: `elfen status` has it.
            Ok(_) | Err(_) => None,
        };
        let tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(scrape(&Seen {
            batches: &batches,
            services: &services,
            tails: &tails,
            tasks: tasks.as_ref(),
            fences: fences.as_ref(),
            watches: &watches()?,
        }))
    }

    fn observe(&self) {
        // Without the list, the scrape says what is wrong with it.
        let Ok(services) = services() else { return };
        let mut tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        tails.observe(&services, monotonic_ns());
    }
}
