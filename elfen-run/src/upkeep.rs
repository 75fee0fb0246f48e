//! Periodic upkeep of the channels of lanes: it renews leases, applies requested settings, and
//! steers the budget of slo-budget.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::policy::slo::{Controller, Slo, Window};
use elfen_rt::process::Identity;
use elfen_rt::signal::histogram::BUCKETS;
use elfen_rt::signal::task::LEASE_NS;

use super::Order;
use super::channels::Channels;

/// The interval of the slow upkeep: a quarter of a lease, so that leases do not expire.
const UPKEEP_INTERVAL_NS: u64 = LEASE_NS / 4;

#[derive(Debug)]
pub struct LaneUpkeep {
    channels: Arc<Channels>,
    steering: Option<SloSteering>,
    upkeep_at_ns: u64,
    requested: u64,
}

impl LaneUpkeep {
    /// Records this process in the control page as the supervisor of these lanes.
    pub fn start(order: &Order, channels: &Arc<Channels>) -> Self {
        channels.renew_leases();
        let supervisor = Identity::own().map_or(0, Identity::word);
        channels.control().supervisor.store(supervisor, Relaxed);
        // A supervisor that died in the middle of a change left no valid settings.
        if channels.settings().is_none() {
            channels.control().publish(&order.settings);
        }
        Self {
            channels: channels.clone(),
            steering: order.slo.map(SloSteering::new),
            upkeep_at_ns: 0,
            requested: channels.requested().generation.load(Relaxed),
        }
    }

    /// To be called ten times a second. Returns whether the slow upkeep ran.
    pub fn tick(&mut self, at_once: bool) -> bool {
        self.apply_requested_settings();
        let now_ns = monotonic_ns();
        if now_ns < self.upkeep_at_ns && !at_once {
            return false;
        }
        self.upkeep_at_ns = now_ns + UPKEEP_INTERVAL_NS;
        self.channels.renew_leases();
        if let Some(steering) = &mut self.steering {
            steering.window(&self.channels, now_ns);
        }
        true
    }

    /// Applies the settings that `elfen set` has written next to those in force.
    fn apply_requested_settings(&mut self) {
        let Some((generation, settings)) = self.channels.requested().settings() else { return };
        if generation == self.requested {
            return;
        }
        self.requested = generation;
        let slo = Slo {
            per_million: u32::try_from(settings.slo_per_million).unwrap_or(u32::MAX),
            latency_ns: settings.slo_latency_ns,
        };
        self.steering = (settings.slo_latency_ns != 0).then(|| SloSteering::new(slo));
        self.channels.control().publish(&settings);
    }
}

/// slo-budget: derives the budget of the next window from the latencies of the last one.
#[derive(Debug)]
struct SloSteering {
    controller: Box<Controller>,
    /// The request counts at the end of the last window. Pages outlive restarts of a service: their
    /// first counts are its past and make no window.
    before: Option<Box<Window>>,
}

impl SloSteering {
    fn new(slo: Slo) -> Self {
        Self { controller: Box::new(Controller::new(slo)), before: None }
    }

    fn window(&mut self, channels: &Channels, now_ns: u64) {
        let Some(mut settings) = channels.settings() else { return };
        settings.budget_ns = self.budget_ns(latencies(channels));
        // After the death of the supervisor the budget expires at this time.
        settings.budget_until_ns = now_ns + 2 * UPKEEP_INTERVAL_NS;
        channels.control().publish(&settings);
    }

    /// The budget after a window that ends with these counts; they are `None` if no service
    /// publishes.
    fn budget_ns(&mut self, counts: Option<Window>) -> u64 {
        let before = std::mem::replace(&mut self.before, counts.map(Box::new));
        let window = counts.zip(before).map(|(counts, before)| {
            let mut window = [0; BUCKETS];
            for (at, (count, before)) in counts.iter().zip(before.iter()).enumerate() {
                window[at] = count.saturating_sub(*before);
            }
            window
        });
        self.controller.window(window.as_ref())
    }
}

/// Finished requests by latency, over the slots of these request lanes. `None` if no service
/// publishes.
fn latencies(channels: &Channels) -> Option<Window> {
    let mut all = [0; BUCKETS];
    let mut published = false;
    let service = channels.service.as_ref()?;
    for slot in service.living_slots(&channels.requests()) {
        published = true;
        for (sum, count) in all.iter_mut().zip(slot.latency.counts()) {
            *sum += count;
        }
    }
    published.then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::histogram::bucket_top_ns;

    fn window(latency_ns: u64, count: u64) -> Window {
        let at = (0..BUCKETS).find(|&at| bucket_top_ns(at) >= latency_ns).unwrap();
        std::array::from_fn(|bucket| if bucket == at { count } else { 0 })
    }

    /// Goal: a budget derives only from what is measured from now on. Method: a service with a
    /// million good requests in its past.
    #[test]
    fn the_past_of_a_service_makes_no_window() {
        let slo = Slo { per_million: 990_000, latency_ns: 100_000_000 };
        let mut steering = SloSteering::new(slo);
        assert_eq!(steering.budget_ns(Some(window(1_000_000, 1_000_000))), 0);
        let good = steering.budget_ns(Some(window(1_000_000, 1_002_000)));
        assert!(good > 0, "two thousand good requests since");
        assert_eq!(steering.budget_ns(None), 0, "no service publishes");
        assert_eq!(
            steering.budget_ns(Some(window(1_000_000, 9_000_000))),
            0,
            "it is its past again"
        );
    }
}
