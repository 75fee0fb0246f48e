//! The metrics of this machine, and the samples of latencies that tails need.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::pages;

use super::server::Scraped;
use super::{ScrapeInput, scrape};
use elfen_machine::fence::status::{Answer, Request, ask};
use elfen_run::batches;
use elfen_run::services::{Tails, services};
use elfen_run::watches::watches;

#[derive(Debug)]
pub struct Machine {
    tails: Mutex<Tails>,
    /// The socket of elfend.
    socket: PathBuf,
}

impl Machine {
    pub fn new(socket: PathBuf) -> Self {
        Self { tails: Mutex::default(), socket }
    }
}

impl Scraped for Machine {
    fn scrape(&self) -> io::Result<String> {
        let batches = batches::batches(&self.socket)?;
        let services = services()?;
        let tasks = pages::request_task_map(self.socket.as_os_str().as_bytes()).ok();
        let fences = match ask(&self.socket, &Request::Status) {
            Ok(Answer::Status(status)) => Some(status),
            // Other answers are not part of a scrape; `elfen status` prints them.
            Ok(_) | Err(_) => None,
        };
        let tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(scrape(&ScrapeInput {
            batches: &batches,
            services: &services,
            tails: &tails,
            tasks: tasks.as_ref(),
            fences: fences.as_ref(),
            watches: &watches()?,
        }))
    }

    fn observe(&self) {
        // If this fails, the next scrape reports the error.
        let Ok(services) = services() else { return };
        let mut tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        tails.observe(&services, monotonic_ns());
    }
}
