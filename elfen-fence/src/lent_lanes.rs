//! The channels of lent lanes. The daemon opens them once, so that they outlive every guard
//! process.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status};
use elfen_instrument::CheckMethod;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::Nap;
use elfen_rt::pages::ENTRIES_MAX;
use elfen_rt::process::Identity;
use elfen_rt::signal::control::Settings;
use elfen_rt::signal::task::{Descriptors, TaskMap};

use super::log::{Level, report};
use super::settings::{Lent, Settings as File};
use elfen_machine::accounts::Account;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::status::RequestLane;
use elfen_run::Order;
use elfen_run::args::signals::refuse;
use elfen_run::batches::lent_page_name;
use elfen_run::channels::{Channels, Error, Service, Signals, SourceChoice};

/// Lanes with one policy, and their channels.
#[derive(Debug)]
pub(super) struct LaneGroup {
    pub(super) order: Order,
    pub(super) channels: Arc<Channels>,
    /// Whether its service has not published a page yet.
    pub(super) awaits_service: bool,
}

/// All lent lanes that could be opened.
#[derive(Debug, Default)]
pub(super) struct LentLanes {
    pub(super) lanes: Vec<LaneGroup>,
    /// Whether some lanes lack the page of their service, or are not open for that reason.
    pub(super) some_await_service: bool,
}

impl LentLanes {
    /// The descriptors that a process with checks gets, in the order of [`elfen_rt::pages`]: the
    /// pages with at least one of these batch lanes, or all pages.
    pub(super) fn shared_files(&self, of: Option<&CpuSet>) -> Vec<RawFd> {
        let concerns = |lanes: &&LaneGroup| {
            let mut batches = lanes.channels.assigned().iter().map(|&(batch, _)| batch);
            of.is_none_or(|own| batches.any(|batch| own.contains(batch)))
        };
        let own = self.lanes.iter().filter(concerns);
        let pages = own.filter_map(|lanes| lanes.channels.shared_files()).take(ENTRIES_MAX);
        let tasks = self.tasks().map(|tasks| [tasks.tasks.raw(), tasks.link.raw()]);
        pages.flatten().chain(tasks.into_iter().flatten()).collect()
    }

    /// The descriptors of the eBPF program's maps. All lanes use the same program, or equal ones.
    pub(super) fn tasks(&self) -> Option<&Descriptors> {
        self.map().and_then(TaskMap::descriptors)
    }

    pub(super) fn map(&self) -> Option<&TaskMap> {
        let tasks = self.lanes.iter().find_map(|lanes| lanes.channels.tasks.as_ref());
        tasks.map(|(map, _)| map)
    }

    /// (batch, request) of every batch lane that is lent.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.lanes.iter().flat_map(|lanes| lanes.channels.assigned()).copied()
    }

    /// Requests other settings for the lanes with this page; `false` if there are none.
    pub(super) fn request_settings(&self, page: &str, settings: &Settings) -> bool {
        let named = |lanes: &&LaneGroup| lanes.channels.name() == page;
        let lanes = self.lanes.iter().find(named);
        lanes.is_some_and(|lanes| {
            lanes.channels.requested().publish(settings);
            true
        })
    }

    /// The busy time of request lanes so far.
    pub(super) fn requests(&self) -> Vec<RequestLane> {
        let now_ns = monotonic_ns();
        let of = |lanes: &LaneGroup| {
            let channels = &lanes.channels;
            let busy = channels.requests().into_iter().filter_map(|lane| {
                Some(RequestLane { lane, busy_ns: channels.busy_ns(lane, now_ns)? })
            });
            busy.collect::<Vec<_>>()
        };
        self.lanes.iter().flat_map(of).collect()
    }
}

pub(super) fn open_all(settings: &File, nap: &Arc<Nap>) -> Result<LentLanes, Failure> {
    let mut all = LentLanes::default();
    for lent in &settings.lent {
        let opened = open_group(lent, settings, nap)?;
        all.some_await_service |= opened.as_ref().is_none_or(|lanes| lanes.awaits_service);
        all.lanes.extend(opened);
    }
    Ok(all)
}

/// `None` without a source of signals: the service does not publish yet, and the kernel has no
/// task map.
fn open_group(lent: &Lent, settings: &File, nap: &Arc<Nap>) -> Result<Option<LaneGroup>, Failure> {
    let service = match service_page(lent)? {
        Some(Err(why)) => {
            report(
                Level::Notice,
                format_args!("{why}; until then, its lanes are lent without its page"),
            );
            None
        }
        Some(Ok(service)) => Some(service),
        None => None,
    };
    let awaits_service = service.is_none() && lent.service.is_some();
    if service.is_none() && settings.source == SourceChoice::Service {
        return Ok(None);
    }
    let signals = Signals::open(settings.source, service).map_err(|error| refuse(&error))?;
    let order = order(lent, settings, nap);
    let channels = Channels::open_shared(&order, signals).map_err(|error| refuse(&error))?;
    let own = Identity::own().map_or(0, Identity::word);
    channels.control().batch.store(own, Relaxed);
    Ok(Some(LaneGroup { order, channels: Arc::new(channels), awaits_service }))
}

/// The service's page, or why it is not available; `None` if no service is named.
pub(super) fn service_page(lent: &Lent) -> Result<Option<Result<Service, Error>>, Failure> {
    let Some(name) = &lent.service else { return Ok(None) };
    let trusted = lent.user.as_deref().map(uid_of).transpose()?;
    Ok(Some(Service::open(name, trusted)))
}

fn uid_of(name: &str) -> Result<u32, Failure> {
    match Account::find(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        _ => {
            let what = format!("user {name:?}");
            Err(Failure::new(
                Status::Usage,
                what,
                "there is no such user",
                "correct it in the settings",
            ))
        }
    }
}

/// A run without a program: the batch are all processes in the fences.
fn order(lent: &Lent, settings: &File, nap: &Arc<Nap>) -> Order {
    let name = lent.service.as_ref().map_or("elfend".to_owned(), |name| lent_page_name(name));
    Order {
        pairs: lent.pairs.clone(),
        settings: lent.policy,
        slo: lent.slo,
        checks: CheckMethod::Guard,
        library: None,
        notes: None,
        nap: nap.clone(),
        alarm: None,
        poll_timing: settings.poll_timing,
        user: None,
        program: name.into(),
        arguments: Vec::new(),
    }
}
