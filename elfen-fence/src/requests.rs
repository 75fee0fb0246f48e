//! Answers the requests that come over the daemon's socket: status, entering a fence, lane pages,
//! the task map, and other settings.

use std::os::fd::RawFd;

use elfen_rt::bpf::Descriptor;
use elfen_rt::signal::account::Claim;

use super::Daemon;
use super::log::{Level, report};
use super::managed_fence::ManagedFence;
use super::socket::{Peer, ReceivedRequest};
use elfen_machine::fence::status::{Answer, Asker, Request, Status, WantedSettings};
use elfen_machine::process::descends;
use elfen_run::channels::is_dead;

fn refused(why: impl Into<String>, fix: &str) -> Answer {
    Answer::Refused { why: why.into(), fix: fix.to_owned() }
}

impl Daemon {
    pub(super) fn answer_requests(&mut self) {
        for request in self.listener.requests() {
            let mut shared_files = Vec::new();
            let answer = match &request.request {
                Ok((peer, Request::Status)) => {
                    self.update_accounts();
                    Answer::Status(self.status(*peer))
                }
                Ok((peer, Request::Resume)) => self.resume(&request, *peer),
                Ok((peer, Request::Enter { fence })) => self.enter(&request, *peer, fence),
                Ok((peer, Request::Pages)) => self.pages(*peer, &mut shared_files),
                Ok((peer, Request::Tasks)) => self.tasks(*peer, &mut shared_files),
                Ok((peer, Request::Count { pairs, front })) => {
                    self.count(&request, *peer, pairs, *front)
                }
                Ok((peer, Request::Set { page, wanted })) => {
                    self.set(&request, *peer, page, *wanted)
                }
                Err(why) => refused(why, "see `elfend --help`"),
            };
            request.answer(&answer, &shared_files);
        }
    }

    fn status(&self, peer: Peer) -> Status {
        let inside = self.fence_of(peer).map(|fence| fence.name.clone());
        let fences = self.fences.iter().map(|fence| fence.status(fence.count()));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            guard_process: self.guards.pid(),
            guard_processes_lost: self.guards.lost,
            home: self.home.clone(),
            paused: self.folder.paused().unwrap_or_else(|error| Some(error.to_string())),
            fences: fences.collect(),
            confined: self.confinement.status(),
            requests: self.lent_lanes.requests(),
            waiting: self.pending.lines().to_vec(),
            asker: Asker { may_enter: peer.may_enter, inside },
        }
    }

    /// The fence that a process is in; `None` also where the kernel does not say.
    fn fence_of(&self, peer: Peer) -> Option<&ManagedFence> {
        self.fences.iter().find(|fence| fence.group.holds(peer.pid).unwrap_or(false))
    }

    /// Why a process may not command fences; `None` if it may. Its user id is not enough: root in a
    /// container has the same id, and the container may be in a fence.
    fn refuse_command(&self, request: &ReceivedRequest, peer: Peer) -> Option<Answer> {
        let inside = |fence: &&ManagedFence| fence.group.holds(peer.pid).unwrap_or(true);
        if let Some(fence) = self.fences.iter().find(inside) {
            let why = format!(
                "this process is in fence {:?}, so it may not control the fence",
                fence.name
            );
            return Some(refused(why, "run the command outside of the fence"));
        }
        // If the process has not ended by now, what was read by its id is its own.
        let may = peer.is_administrator() && !request.is_gone();
        let why = "only root may do that: it requires CAP_SYS_ADMIN in elfend's user namespace";
        (!may).then(|| refused(why, "run it as root, and not in a container"))
    }

    fn resume(&mut self, request: &ReceivedRequest, peer: Peer) -> Answer {
        if let Some(refusal) = self.refuse_command(request, peer) {
            return refusal;
        }
        for fence in &mut self.fences {
            if let Err(error) = fence.resume() {
                report(Level::Error, format_args!("fence {:?}: {error}", fence.name));
            }
        }
        self.check_all();
        self.freeze_or_thaw();
        Answer::Status(self.status(peer))
    }

    /// Puts the process that asks into a fence. A process in a frozen fence cannot ask.
    fn enter(&self, request: &ReceivedRequest, peer: Peer, name: &str) -> Answer {
        if !peer.may_enter {
            let why = "only root and members of group elfen may put processes into a fence";
            return refused(why, "have root add this user to the group");
        }
        let Some(fence) = self.fences.iter().find(|fence| fence.name == name) else {
            let known: Vec<&str> = self.fences.iter().map(|fence| fence.name.as_str()).collect();
            let fix = format!("name one of: {}", known.join(", "));
            return refused(format!("there is no fence {name:?}"), &fix);
        };
        if request.is_gone() {
            return refused("the requesting process has ended", "try again");
        }
        let inside = |fence: &&ManagedFence| fence.group.holds(peer.pid).unwrap_or(true);
        if let Some(already) = self.fences.iter().find(inside) {
            let why = format!("this process is in fence {:?} already", already.name);
            return refused(why, "run the program without --fence");
        }
        match fence.enter(peer.pid) {
            Ok(()) => Answer::Entered(fence.status(fence.count())),
            Err(why) => refused(why, "see elfend's log"),
        }
    }

    /// Gives a process in a fence the pages of the lanes of its fence, and a process that may enter
    /// fences the pages of all lanes. The receiver can pass the pages on, and can write the lane
    /// pages. Guards decide by none of these words, but other threads with checks on the lanes do.
    fn pages(&self, peer: Peer, shared_files: &mut Vec<RawFd>) -> Answer {
        let inside_of = self.fence_of(peer);
        if !peer.may_enter && inside_of.is_none() {
            let why = "only processes in a fence, root and members of group elfen get pages";
            return refused(why, "put the process into a fence");
        }
        *shared_files = self.lent_lanes.shared_files(inside_of.map(ManagedFence::lanes));
        Answer::Pages { services: shares_segments(peer.pid) }
    }

    /// Gives the machine's task map to unprivileged users. The leases in it are writable; they only
    /// switch the timing of a lane on.
    fn tasks(&self, peer: Peer, shared_files: &mut Vec<RawFd>) -> Answer {
        if !peer.may_enter {
            let why = "only root and members of group elfen get the task map";
            return refused(why, "have root add this user to the group (`usermod -aG elfen USER`)");
        }
        let Some(tasks) = self.lent_lanes.tasks() else {
            let fix = "see elfend's log; `elfen doctor` as root shows what the task map requires";
            return refused(
                "elfend has no task map: it lends no lanes, or only reads services' pages",
                fix,
            );
        };
        *shared_files = [&tasks.tasks, &tasks.watch, &tasks.link].map(Descriptor::raw).to_vec();
        Answer::Tasks
    }

    /// Claims accounts for a run of an unprivileged user. The kernel names the process whose tasks
    /// are counted. A batch lane is counted next to one request lane only.
    fn count(
        &self,
        request: &ReceivedRequest,
        peer: Peer,
        pairs: &[(u32, u32)],
        front: u32,
    ) -> Answer {
        if !peer.may_enter {
            let why = "elfend counts batches only for root and members of group elfen";
            return refused(why, "have root add this user to the group");
        }
        let Some(map) = self.lent_lanes.map() else {
            return refused("elfend has no task map", "see elfend's log");
        };
        let front = if descends(peer.pid, front) { front } else { 0 };
        if request.is_gone() {
            return refused("the requesting process has ended", "try again");
        }
        let claim = Claim::of_run(front, peer.pid);
        let lent: Vec<(u32, u32)> = self.lent_lanes.pairs().collect();
        let account = |&(batch, request): &(u32, u32)| {
            let others = lent.iter().any(|&(lane, beside)| lane == batch && beside != request);
            let counted = map.counted_request_lane(batch).is_none_or(|beside| beside == request);
            let index = (counted && !others).then(|| map.claim(batch, request, claim, is_dead))?;
            index.map(|index| index as u64)
        };
        Answer::Counted { claim: claim.word(), accounts: pairs.iter().map(account).collect() }
    }

    fn set(
        &self,
        request: &ReceivedRequest,
        peer: Peer,
        page: &str,
        wanted: WantedSettings,
    ) -> Answer {
        if let Some(refusal) = self.refuse_command(request, peer) {
            return refusal;
        }
        let Some(settings) = wanted.settings() else {
            let why = format!("there is no policy {}", wanted.policy);
            return refused(why, "use elfen and elfend of the same version");
        };
        if !self.lent_lanes.request_settings(page, &settings) {
            return refused(format!("no lanes have page {page:?}"), "see `elfen status`");
        }
        let line = format_args!("lanes of page {page:?} have other settings until the next reload");
        report(Level::Notice, line);
        Answer::Set
    }
}

/// Whether a process shares our namespace of System V segments.
fn shares_segments(process: u32) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    let ours = namespace("self");
    ours.is_some() && namespace(&process.to_string()) == ours
}
