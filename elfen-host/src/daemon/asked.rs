//! What is asked over the socket, and by whom: the daemon answers, puts a process into a fence,
//! hands pages over, takes other settings.

use std::os::fd::RawFd;

use elfen_rt::bpf::Descriptor;

use super::Daemon;
use super::held::Held;
use super::log::{Level, say};
use super::socket::{Asked, Peer};
use crate::fence::status::{Answer, Asker, Request, Status, Wanted};

fn refused(why: impl Into<String>, fix: &str) -> Answer {
    Answer::Refused { why: why.into(), fix: fix.to_owned() }
}

impl Daemon {
    pub(super) fn serve(&mut self) {
        for asked in self.listener.asked() {
            let mut handed = Vec::new();
            let answer = match &asked.request {
                Ok((peer, Request::Status)) => {
                    self.add_up();
                    Answer::Status(self.status(*peer))
                }
                Ok((peer, Request::Resume)) => self.resume(*peer),
                Ok((peer, Request::Enter { fence })) => self.enter(&asked, *peer, fence),
                Ok((peer, Request::Pages)) => self.pages(*peer, &mut handed),
                Ok((peer, Request::Tasks)) => self.tasks(*peer, &mut handed),
                Ok((peer, Request::Set { page, wanted })) => self.set(*peer, page, *wanted),
                Err(why) => refused(why, "see `elfend --help`"),
            };
            asked.answer(&answer, &handed);
        }
    }

    fn status(&self, peer: Peer) -> Status {
        let inside = self.around(peer).map(|held| held.name.clone());
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
            asker: Asker { may_enter: peer.may_enter, inside },
        }
    }

    /// The fence that a process is in. Where the kernel does not say, it is in none.
    fn around(&self, peer: Peer) -> Option<&Held> {
        self.held.iter().find(|held| held.group.holds(peer.pid).unwrap_or(false))
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
        Answer::Status(self.status(peer))
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
        if asked.is_gone() {
            return refused("the process that asked is gone", "ask again");
        }
        let inside = |held: &&Held| held.group.holds(peer.pid).unwrap_or(true);
        if let Some(already) = self.held.iter().find(inside) {
            let why = format!("this process is in fence {:?} already", already.name);
            return refused(why, "run the program without --fence");
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
        if !peer.may_enter && self.around(peer).is_none() {
            let why = "only processes in a fence, root and members of group elfen are given pages";
            return refused(why, "put the process into a fence");
        }
        *handed = self.opened.handed();
        Answer::Pages { services: shares_segments(peer.pid) }
    }

    /// The machine's task map for users without privileges. The leases are writable, and all they
    /// can do is to have switches timed and tasks counted.
    fn tasks(&self, peer: Peer, handed: &mut Vec<RawFd>) -> Answer {
        if !peer.may_enter {
            let why = "only root and members of group elfen are given the task map";
            return refused(why, "have root add this user to the group (`usermod -aG elfen USER`)");
        }
        let Some(tasks) = self.opened.tasks() else {
            let fix = "see what elfend has written; `elfen doctor` as root says what it takes";
            return refused("elfend has no task map: it lends no lanes, or goes by pages", fix);
        };
        *handed = [&tasks.tasks, &tasks.watch, &tasks.link].map(Descriptor::raw).to_vec();
        Answer::Tasks
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
        let line = format_args!("lanes of page {page:?} are lent by other settings until a reload");
        say(Level::Notice, line);
        Answer::Set
    }
}

/// Whether ids of System V segments mean the same to a process as to this one.
fn shares_segments(process: u32) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    let ours = namespace("self");
    ours.is_some() && namespace(&process.to_string()) == ours
}
