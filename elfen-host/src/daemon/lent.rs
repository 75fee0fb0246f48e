//! The channels of lent lanes: opened once, in the daemon itself, so that neither the death of the
//! guards' process nor a new one tears anything down.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status};
use elfen_instrument::Inject;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::Nap;
use elfen_rt::pages::ENTRIES_MAX;
use elfen_rt::process::Identity;
use elfen_rt::signal::control::Settings;
use elfen_rt::signal::task::{Descriptors, TaskMap};

use super::log::{Level, say};
use super::settings::{Lent, Settings as File};
use crate::args::signals::refuse;
use crate::cpulist::CpuSet;
use crate::fence::status::RequestLane;
use crate::run::channels::{Channels, Error, Service, Signals, Wanted};
use crate::run::find::lent_beside;
use crate::run::{Order, User};

/// Lanes with one policy, and their channels.
#[derive(Debug)]
pub(super) struct Lanes {
    pub(super) order: Order,
    pub(super) channels: Arc<Channels>,
    /// Whether a service is named that does not publish yet.
    pub(super) awaits_service: bool,
}

/// All that are lent, as far as they can be opened.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) lanes: Vec<Lanes>,
    /// Whether some go without the page of their service, or are not open at all.
    pub(super) awaited: bool,
}

impl Opened {
    /// What a process is given to check itself by, in the order of [`elfen_rt::pages`]: pages that
    /// have one of these batch lanes, or all.
    pub(super) fn handed(&self, of: Option<&CpuSet>) -> Vec<RawFd> {
        let concerns = |lanes: &&Lanes| {
            let mut batches = lanes.channels.assigned().iter().map(|&(batch, _)| batch);
            of.is_none_or(|own| batches.any(|batch| own.contains(batch)))
        };
        let own = self.lanes.iter().filter(concerns);
        let pages = own.filter_map(|lanes| lanes.channels.handed()).take(ENTRIES_MAX);
        let tasks = self.tasks().map(|tasks| [tasks.tasks.raw(), tasks.link.raw()]);
        pages.flatten().chain(tasks.into_iter().flatten()).collect()
    }

    /// The program that the first has attached or found: all of them have the same, or its like.
    pub(super) fn tasks(&self) -> Option<&Descriptors> {
        self.map().and_then(TaskMap::descriptors)
    }

    pub(super) fn map(&self) -> Option<&TaskMap> {
        let tasks = self.lanes.iter().find_map(|lanes| lanes.channels.tasks.as_ref());
        tasks.map(|(map, _)| map)
    }

    /// Every batch lane that is lent, with its request lane.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.lanes.iter().flat_map(|lanes| lanes.channels.assigned()).copied()
    }

    /// Has the lanes with this page take over other settings; `false` if there are none.
    pub(super) fn want(&self, page: &str, settings: &Settings) -> bool {
        let named = |lanes: &&Lanes| lanes.channels.name() == page;
        let lanes = self.lanes.iter().find(named);
        lanes.is_some_and(|lanes| {
            lanes.channels.wanted().publish(settings);
            true
        })
    }

    /// How long request lanes have been busy.
    pub(super) fn requests(&self) -> Vec<RequestLane> {
        let now_ns = monotonic_ns();
        let of = |lanes: &Lanes| {
            let channels = &lanes.channels;
            let busy = channels.requests().into_iter().filter_map(|lane| {
                Some(RequestLane { lane, busy_ns: channels.busy_ns(lane, now_ns)? })
            });
            busy.collect::<Vec<_>>()
        };
        self.lanes.iter().flat_map(of).collect()
    }
}

pub(super) fn open_all(settings: &File, nap: &Arc<Nap>) -> Result<Opened, Failure> {
    let mut all = Opened::default();
    for lent in &settings.lent {
        let opened = open(lent, settings, nap)?;
        all.awaited |= opened.as_ref().is_none_or(|lanes| lanes.awaits_service);
        all.lanes.extend(opened);
    }
    Ok(all)
}

/// `None` while there is nothing to go by: a service that does not publish yet, without a task map.
fn open(lent: &Lent, settings: &File, nap: &Arc<Nap>) -> Result<Option<Lanes>, Failure> {
    let service = match published(lent)? {
        Some(Err(why)) => {
            say(Level::Notice, format_args!("{why}; until then its lanes go without its page"));
            None
        }
        Some(Ok(service)) => Some(service),
        None => None,
    };
    let awaits_service = service.is_none() && lent.service.is_some();
    if service.is_none() && settings.signal == Wanted::Service {
        return Ok(None);
    }
    let signals = Signals::open(settings.signal, service).map_err(|error| refuse(&error))?;
    let order = order(lent, settings, nap);
    let channels = Channels::open_to_hand_on(&order, signals).map_err(|error| refuse(&error))?;
    let own = Identity::own().map_or(0, Identity::word);
    channels.control().batch.store(own, Relaxed);
    Ok(Some(Lanes { order, channels: Arc::new(channels), awaits_service }))
}

/// The service's page, or why it is not to be had; `None` where no service is named.
pub(super) fn published(lent: &Lent) -> Result<Option<Result<Service, Error>>, Failure> {
    let Some(name) = &lent.service else { return Ok(None) };
    let trusted = lent.user.as_deref().map(uid_of).transpose()?;
    Ok(Some(Service::open(name, trusted)))
}

fn uid_of(name: &str) -> Result<u32, Failure> {
    match User::find(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        _ => {
            let what = format!("user {name:?}");
            Err(Failure::new(Status::Usage, what, "there is none", "correct it in the settings"))
        }
    }
}

/// A batch without a program: whoever is in a fence is the batch.
fn order(lent: &Lent, settings: &File, nap: &Arc<Nap>) -> Order {
    let name = lent.service.as_ref().map_or("elfend".to_owned(), |name| lent_beside(name));
    Order {
        pairs: lent.pairs.clone(),
        settings: lent.policy,
        slo: lent.slo,
        inject: Inject::Guard,
        library: None,
        notes: None,
        nap: nap.clone(),
        alarm: None,
        looks: settings.looks,
        user: None,
        program: name.into(),
        arguments: Vec::new(),
    }
}
