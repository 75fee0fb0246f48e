//! What a keeper owes the channels of its lanes, whoever the batch is: leases that are renewed,
//! settings that are taken over when somebody wants others, and the windows of slo-budget.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::policy::slo::{Controller, Slo, Window};
use elfen_rt::process::Identity;
use elfen_rt::signal::histogram::BUCKETS;
use elfen_rt::signal::task::LEASE_NS;

use super::Order;
use super::channels::Channels;

/// Leases are renewed four times as often as they run out, and so is everything else that is slow.
const CHORES_EVERY_NS: u64 = LEASE_NS / 4;

#[derive(Debug)]
pub(crate) struct Care {
    channels: Arc<Channels>,
    steering: Option<Steering>,
    chores_at_ns: u64,
    wanted: u64,
}

impl Care {
    /// Names this process in the control page as the one that keeps these lanes.
    pub(crate) fn begin(order: &Order, channels: &Arc<Channels>) -> Self {
        channels.renew_leases();
        let keeper = Identity::own().map_or(0, Identity::word);
        channels.control().supervisor.store(keeper, Relaxed);
        // A keeper that died in the middle of a change leaves no settings behind.
        if channels.settings().is_none() {
            channels.control().publish(&order.settings);
        }
        Self {
            channels: channels.clone(),
            steering: order.slo.map(Steering::new),
            chores_at_ns: 0,
            wanted: channels.wanted().generation.load(Relaxed),
        }
    }

    /// What has to be done ten times a second. Says whether what is slow was due.
    pub(crate) fn tick(&mut self, at_once: bool) -> bool {
        self.take_over_what_is_wanted();
        let now_ns = monotonic_ns();
        if now_ns < self.chores_at_ns && !at_once {
            return false;
        }
        self.chores_at_ns = now_ns + CHORES_EVERY_NS;
        self.channels.renew_leases();
        if let Some(steering) = &mut self.steering {
            steering.window(&self.channels, now_ns);
        }
        true
    }

    /// `elfen set` writes what it wants beside what holds, and the keeper, or the front in its
    /// place, takes it over.
    fn take_over_what_is_wanted(&mut self) {
        let Some((generation, settings)) = self.channels.wanted().settings() else { return };
        if generation == self.wanted {
            return;
        }
        self.wanted = generation;
        let slo = Slo {
            per_million: u32::try_from(settings.slo_per_million).unwrap_or(u32::MAX),
            latency_ns: settings.slo_latency_ns,
        };
        self.steering = (settings.slo_latency_ns != 0).then(|| Steering::new(slo));
        self.channels.control().publish(&settings);
    }
}

/// slo-budget: from the latencies of each window to the budget of the next.
#[derive(Debug)]
struct Steering {
    controller: Box<Controller>,
    /// The requests that the pages had counted at the end of the last window. Pages outlive
    /// restarts of a service: their first counts are its past, and no window.
    before: Option<Box<Window>>,
}

impl Steering {
    fn new(slo: Slo) -> Self {
        Self { controller: Box::new(Controller::new(slo)), before: None }
    }

    fn window(&mut self, channels: &Channels, now_ns: u64) {
        let Some(mut settings) = channels.settings() else { return };
        settings.budget_ns = self.budget_ns(latencies(channels));
        // A keeper that is killed leaves no budget behind for longer than this.
        settings.budget_until_ns = now_ns + 2 * CHORES_EVERY_NS;
        channels.control().publish(&settings);
    }

    /// The budget after a window that ends with these counts, which are `None` if no service
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

/// Finished requests by latency, over the slots of our request lanes; `None` if no service
/// publishes.
fn latencies(channels: &Channels) -> Option<Window> {
    let mut all = [0; BUCKETS];
    let mut published = false;
    let service = channels.service.as_ref()?;
    for slot in service.living(&channels.requests()) {
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

    /// Goal: a budget comes from what is measured from now on. Method: a service with a
    /// million good requests behind it.
    #[test]
    fn the_past_of_a_service_is_no_window() {
        let slo = Slo { per_million: 990_000, latency_ns: 100_000_000 };
        let mut steering = Steering::new(slo);
        assert_eq!(steering.budget_ns(Some(window(1_000_000, 1_000_000))), 0);
        let good = steering.budget_ns(Some(window(1_000_000, 1_002_000)));
        assert!(good > 0, "two thousand good ones since");
        assert_eq!(steering.budget_ns(None), 0, "nobody publishes");
        assert_eq!(
            steering.budget_ns(Some(window(1_000_000, 9_000_000))),
            0,
            "it is its past again"
        );
    }
}
