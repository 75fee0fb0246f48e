//! What is asked over the socket, and by whom: the daemon answers, puts a process into a fence,
//! hands pages over, takes other settings.

use std::os::fd::RawFd;

use elfen_rt::bpf::Descriptor;
use elfen_rt::signal::account::Claim;

use super::Daemon;
use super::held::Held;
use super::log::{Level, say};
use super::socket::{Asked, Peer};
use crate::fence::status::{Answer, Asker, Request, Status, Wanted};
use crate::process::descends;
use crate::run::channels::is_dead;

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
                Ok((peer, Request::Resume)) => self.resume(&asked, *peer),
                Ok((peer, Request::Enter { fence })) => self.enter(&asked, *peer, fence),
                Ok((peer, Request::Pages)) => self.pages(*peer, &mut handed),
                Ok((peer, Request::Tasks)) => self.tasks(*peer, &mut handed),
                Ok((peer, Request::Count { pairs, front })) => {
                    self.count(&asked, *peer, pairs, *front)
                }
                Ok((peer, Request::Set { page, wanted })) => self.set(&asked, *peer, page, *wanted),
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

    /// Why a process may not change what holds for fences. Its user says little: root in a
    /// container has the same number, and the container may be in a fence.
    fn refuse_command(&self, asked: &Asked, peer: Peer) -> Option<Answer> {
        let inside = |held: &&Held| held.group.holds(peer.pid).unwrap_or(true);
        if let Some(held) = self.held.iter().find(inside) {
            let why = format!("this process is in fence {:?}, and must not command it", held.name);
            return Some(refused(why, "ask from outside of the fence"));
        }
        // If it has not ended by now, the id was its own while it was looked at.
        let may = peer.is_administrator() && !asked.is_gone();
        let why = "only root may do that: it takes CAP_SYS_ADMIN in elfend's user namespace";
        (!may).then(|| refused(why, "run it as root, and not in a container"))
    }

    fn resume(&mut self, asked: &Asked, peer: Peer) -> Answer {
        if let Some(refusal) = self.refuse_command(asked, peer) {
            return refusal;
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

    /// The pages of its fence's lanes for a process in a fence, and of all lanes for one that may
    /// put itself into one. It can hand on what it gets, and write into the lane pages. Guards
    /// decide by nothing in these; other threads with checks on the same lanes do.
    fn pages(&self, peer: Peer, handed: &mut Vec<RawFd>) -> Answer {
        let around = self.around(peer);
        if !peer.may_enter && around.is_none() {
            let why = "only processes in a fence, root and members of group elfen are given pages";
            return refused(why, "put the process into a fence");
        }
        *handed = self.opened.handed(around.map(Held::lanes));
        Answer::Pages { services: shares_segments(peer.pid) }
    }

    /// The machine's task map for users without privileges. The leases are writable, and all they
    /// can do is to have switches timed.
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

    /// Claims accounts for a run of such a user. Whose tasks are counted is the kernel's word, and
    /// a lane keeps the request lane that it is counted beside.
    fn count(&self, asked: &Asked, peer: Peer, pairs: &[(u32, u32)], front: u32) -> Answer {
        if !peer.may_enter {
            let why = "only root and members of group elfen have their batches counted";
            return refused(why, "have root add this user to the group");
        }
        let Some(map) = self.opened.map() else {
            return refused("elfend has no task map", "see what elfend has written");
        };
        let front = if descends(peer.pid, front) { front } else { 0 };
        if asked.is_gone() {
            return refused("the process that asked is gone", "ask again");
        }
        let claim = Claim::of_run(front, peer.pid);
        let lent: Vec<(u32, u32)> = self.opened.pairs().collect();
        let account = |&(batch, request): &(u32, u32)| {
            let others = lent.iter().any(|&(lane, beside)| lane == batch && beside != request);
            let counted = map.counted_request_lane(batch).is_none_or(|beside| beside == request);
            let index = (counted && !others).then(|| map.claim(batch, request, claim, is_dead))?;
            index.map(|index| index as u64)
        };
        Answer::Counted { claim: claim.word(), accounts: pairs.iter().map(account).collect() }
    }

    fn set(&self, asked: &Asked, peer: Peer, page: &str, wanted: Wanted) -> Answer {
        if let Some(refusal) = self.refuse_command(asked, peer) {
            return refusal;
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
