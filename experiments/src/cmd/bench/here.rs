//! A run whose batch is the benchmark itself.

use std::ffi::OsString;
use std::sync::Arc;

use elfen_console::failure::Failure;
use elfen_instrument::Inject;
use elfen_machine::lane_args::LaneArgs;
use elfen_rt::signal::control::Settings;
use elfen_run::Order;
use elfen_run::args::nap::NapName;
use elfen_run::args::signals::refuse;
use elfen_run::channels::{Channels, Service, Signals};
use elfen_run::poll_timing::PollTiming;

/// The channels of a borrow-idle run whose batch is this process itself, by the page of a service.
pub(super) fn run_here(
    lanes: &LaneArgs,
    nap: NapName,
    looks: PollTiming,
    service: &str,
) -> Result<(Order, Arc<Channels>), Failure> {
    let (nap, alarm) = nap.open()?;
    let order = Order {
        pairs: vec![lanes.first_pair()?],
        settings: Settings::BORROW_IDLE,
        slo: None,
        inject: Inject::Guard,
        notes: None,
        library: None,
        nap: Arc::new(nap),
        alarm: alarm.map(Arc::new),
        poll_timing: looks,
        user: None,
        program: OsString::from("bench"),
        arguments: Vec::new(),
    };
    let service = Service::open(service, None).map_err(|error| refuse(&error))?;
    let signals = Signals { tasks: None, service: Some(service) };
    let channels = Channels::open(&order, signals).map_err(|error| refuse(&error))?;
    Ok((order, Arc::new(channels)))
}
