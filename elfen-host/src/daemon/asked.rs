//! What is asked over the socket, and by whom: the daemon answers, puts a process into a fence,
//! hands pages over, takes other settings.

use std::os::fd::RawFd;

use super::Daemon;
use super::held::Held;
use super::log::{Level, say};
use super::socket::{Asked, Peer};
use crate::fence::status::{Answer, Request, Status, Wanted};

fn refused(why: impl Into<String>, fix: &str) -> Answer {
    Answer::Refused { why: why.into(), fix: fix.to_owned() }
}

impl Daemon {
    pub(super) fn serve(&mut self) {
        for asked in self.listener.asked() {
            let mut handed = Vec::new();
            let answer = match &asked.request {
                Ok((_, Request::Status)) => {
                    self.add_up();
                    Answer::Status(self.status())
                }
                Ok((peer, Request::Resume)) => self.resume(*peer),
                Ok((peer, Request::Enter { fence })) => self.enter(&asked, *peer, fence),
                Ok((peer, Request::Pages)) => self.pages(*peer, &mut handed),
                Ok((peer, Request::Set { page, wanted })) => self.set(*peer, page, *wanted),
                Err(why) => refused(why, "see `elfend --help`"),
            };
            asked.answer(&answer, &handed);
        }
    }

    fn status(&self) -> Status {
        let fences = self.held.iter().map(|held| held.status(held.count()));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            keeper: self.guarding.pid(),
            keepers_lost: self.guarding.lost,
            home: self.home.clone(),
            paused: self.folder.paused().unwrap_or_else(|error| Some(error.to_string())),
            fences: fences.collect(),
            confined: self.confining.status(),
            requests: self.opened.requests(),
            waiting: self.waiting.lines().to_vec(),
        }
    }

    fn resume(&mut self, peer: Peer) -> Answer {
        if !peer.is_root {
            return refused("only root resumes", "run it as root");
        }
        for held in &mut self.held {
            if let Err(error) = held.resume() {
                say(Level::Error, format_args!("fence {:?}: {error}", held.name));
            }
        }
        self.look();
        self.settle();
        Answer::Status(self.status())
    }

    /// Puts the process that asks into a fence. From a fence that is frozen, it asks no more.
    fn enter(&self, asked: &Asked, peer: Peer, name: &str) -> Answer {
        if !peer.may_enter {
            let why = "only root and members of group elfen may put processes into a fence";
            return refused(why, "have root add this user to the group");
        }
        let Some(held) = self.held.iter().find(|held| held.name == name) else {
            let known: Vec<&str> = self.held.iter().map(|held| held.name.as_str()).collect();
            let fix = format!("name one of: {}", known.join(", "));
            return refused(format!("there is no fence {name:?}"), &fix);
        };
        let inside = |held: &&Held| held.group.holds(peer.pid).unwrap_or(true);
        if let Some(already) = self.held.iter().find(inside) {
            let why = format!("this process is in fence {:?} already", already.name);
            return refused(why, "run the program without --fence");
        }
        if asked.is_alone() {
            return refused("the process that asked is gone", "ask again");
        }
        match held.enter(peer.pid) {
            Ok(()) => Answer::Entered(held.status(held.count())),
            Err(why) => refused(why, "see what elfend has written"),
        }
    }

    /// The pages of all lanes for a process that is in a fence, or may put itself into one. What it
    /// gets it can hand on, and who shares a fence can falsify the accounts of its lanes; nobody
    /// gets what would set its own budget.
    fn pages(&self, peer: Peer, handed: &mut Vec<RawFd>) -> Answer {
        // Where the kernel does not say, it is not inside.
        let inside = |held: &Held| held.group.holds(peer.pid).unwrap_or(false);
        if !peer.may_enter && !self.held.iter().any(inside) {
            let why = "only processes in a fence, root and members of group elfen are given pages";
            return refused(why, "put the process into a fence");
        }
        *handed = self.opened.handed();
        Answer::Pages { services: shares_segments(peer.pid) }
    }

    fn set(&self, peer: Peer, page: &str, wanted: Wanted) -> Answer {
        if !peer.is_root {
            return refused("only root changes what elfend's settings say", "run it as root");
        }
        let Some(settings) = wanted.settings() else {
            let why = format!("there is no policy {}", wanted.policy);
            return refused(why, "use elfen and elfend of the same version");
        };
        if !self.opened.want(page, &settings) {
            return refused(format!("no lanes have page {page:?}"), "see `elfen status`");
        }
        say(Level::Notice, format_args!("{page}: other settings, until elfend reads its own anew"));
        Answer::Set
    }
}

/// Whether ids of System V segments mean the same to a process as to this one.
fn shares_segments(process: u32) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    let ours = namespace("self");
    ours.is_some() && namespace(&process.to_string()) == ours
}
