//! What keys of `elfen top` do: they select a batch, and request another policy or budget for it in
//! its control page, as `elfen set` does.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_run::batches::Batch;

use super::picture::BatchView;
use super::watch::Watch;

/// The first budget of a policy whose predecessor had none.
const FIRST_BUDGET_NS: u64 = 1_000_000;

/// A supervisor reads requested settings ten times a second. After this time the settings in force
/// count, and not the requested ones.
const TAKEN_OVER_WITHIN: Duration = Duration::from_millis(500);

/// The number of updates for which a note stays.
const NOTE_UPDATES: u32 = 3;

/// Latency in nanoseconds and millionths of requests, as in a control page.
type SloWords = (u64, u64);

#[derive(Debug, Default)]
pub(super) struct Changes {
    /// The pid of the selected batch: it stays selected when other batches start or end.
    pid: Option<u32>,
    note: Option<(String, u32)>,
    /// The pid of a batch, and the settings that keys requested for it last. Keys may come faster
    /// than supervisors read requests.
    requested: Option<(u32, Settings, Instant)>,
    /// The SLOs of batches that had one, for their return to slo-budget.
    slos: BTreeMap<u32, SloWords>,
}

impl Changes {
    pub(super) fn note(&self) -> Option<String> {
        self.note.as_ref().map(|(note, _)| note.clone())
    }

    /// Counts an update; after `NOTE_UPDATES` of them the note goes.
    pub(super) fn age_note(&mut self) {
        self.note = self.note.take().and_then(|(note, left)| Some((note, left.checked_sub(1)?)));
    }

    /// The row of the selected batch; the first row if that batch has ended.
    pub(super) fn selected_row(&self, batches: &[BatchView]) -> usize {
        batches.iter().position(|batch| Some(batch.pid) == self.pid).unwrap_or(0)
    }

    pub(super) fn select_previous(&mut self, batches: &[BatchView]) {
        let row = self.selected_row(batches).saturating_sub(1);
        self.pid = batches.get(row).map(|batch| batch.pid);
    }

    pub(super) fn select_next(&mut self, batches: &[BatchView]) {
        let row = (self.selected_row(batches) + 1).min(batches.len().saturating_sub(1));
        self.pid = batches.get(row).map(|batch| batch.pid);
    }

    /// Requests the next policy for the selected batch.
    pub(super) fn change_policy(&mut self, watch: &Watch) {
        self.request(watch, |changes, batch, now| {
            if !watch.is_published(batch) {
                return Err("no service publishes on its request lanes: only borrow-idle".into());
            }
            Ok(next_policy(now, changes.slos.get(&batch.pid).copied()))
        });
    }

    /// Requests a larger or smaller budget for the selected batch.
    pub(super) fn change_budget(&mut self, watch: &Watch, more: bool) {
        self.request(watch, |_, _, now| match now.policy {
            PolicyKind::BorrowIdle => Err("borrow-idle has no budget".into()),
            PolicyKind::SloBudget => Err("slo-budget sets its budget itself".into()),
            _ => Ok(Settings { budget_ns: next_budget_ns(now.budget_ns, more), ..*now }),
        });
    }

    /// Requests other settings for the selected batch, and notes the outcome.
    fn request(
        &mut self,
        watch: &Watch,
        next_settings: impl FnOnce(&Self, &Batch, &Settings) -> Result<Settings, String>,
    ) {
        let selected = watch.batches.iter().find(|batch| Some(batch.pid) == self.pid);
        let Some(batch) = selected.or(watch.batches.first()) else {
            return self.set_note("no batch runs".to_owned());
        };
        let requested = self
            .requested
            .filter(|(pid, _, at)| *pid == batch.pid && at.elapsed() < TAKEN_OVER_WITHIN);
        let requested = requested.map(|(_, settings, _)| settings);
        let Some(now) = requested.or_else(|| batch.settings()) else {
            return self.set_note(format!("{}: its settings are being changed", batch.pid));
        };
        if now.slo_latency_ns != 0 {
            self.slos.insert(batch.pid, (now.slo_latency_ns, now.slo_per_million));
        }
        let outcome = match next_settings(self, batch, &now) {
            Ok(settings) => {
                self.requested = Some((batch.pid, settings, Instant::now()));
                request_settings(batch, &settings)
            }
            Err(why) => why,
        };
        self.set_note(format!("{} {}: {outcome}", batch.pid, batch.program));
    }

    fn set_note(&mut self, note: String) {
        self.note = Some((note, NOTE_UPDATES));
    }
}

/// Requests settings for a batch. Returns the text of the note.
fn request_settings(batch: &Batch, settings: &Settings) -> String {
    if batch.request_settings(settings).is_err() {
        return "it belongs to another user".to_owned();
    }
    let policy = settings.policy.name();
    match settings.policy {
        PolicyKind::BorrowIdle | PolicyKind::SloBudget => policy.to_owned(),
        _ => format!("{policy}, budget {}", duration::show(settings.budget_ns)),
    }
}

/// The next policy that this batch can follow. slo-budget needs an earlier SLO; dynamic-budget
/// needs a reference IPC.
fn next_policy(now: &Settings, slo: Option<SloWords>) -> Settings {
    use PolicyKind::{BorrowIdle, DynamicBudget, FixedBudget, RefreshBudget, SloBudget};
    let next = match now.policy {
        BorrowIdle => FixedBudget,
        FixedBudget => RefreshBudget,
        RefreshBudget if now.ref_ipc_milli != 0 => DynamicBudget,
        RefreshBudget | DynamicBudget if slo.is_some() => SloBudget,
        RefreshBudget | DynamicBudget | SloBudget => BorrowIdle,
    };
    // The supervisor sets the budget of every batch with an SLO, so only slo-budget may have an
    // SLO.
    let (slo_latency_ns, slo_per_million) = slo.filter(|_| next == SloBudget).unwrap_or((0, 0));
    let budget_ns = match next {
        BorrowIdle | SloBudget => 0,
        _ if now.budget_ns == 0 || now.policy == SloBudget => FIRST_BUDGET_NS,
        _ => now.budget_ns,
    };
    let budget_until_ns = 0;
    Settings { policy: next, budget_ns, budget_until_ns, slo_latency_ns, slo_per_million, ..*now }
}

/// The next larger or smaller budget of 1, 2 and 5 times powers of ten, from 1 us to 10 s.
fn next_budget_ns(budget_ns: u64, more: bool) -> u64 {
    let decades = (3..10).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power)));
    let steps: Vec<u64> = decades.chain([10_000_000_000]).collect();
    let next = if more {
        steps.iter().find(|step| **step > budget_ns).or(steps.last())
    } else {
        steps.iter().rev().find(|step| **step < budget_ns).or(steps.first())
    };
    next.copied().unwrap_or(budget_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: key p cycles through all policies that a batch can follow, and only slo-budget has an
    /// SLO. Method: one cycle, with and without an SLO and an IPC.
    #[test]
    fn key_p_cycles_through_the_policies() {
        use PolicyKind::{BorrowIdle, DynamicBudget, FixedBudget, RefreshBudget, SloBudget};
        let slo = Some((100_000_000, 990_000));
        let rounds: [(u64, Option<SloWords>, &[PolicyKind]); 3] = [
            (0, None, &[FixedBudget, RefreshBudget, BorrowIdle]),
            (0, slo, &[FixedBudget, RefreshBudget, SloBudget, BorrowIdle]),
            (900, slo, &[FixedBudget, RefreshBudget, DynamicBudget, SloBudget, BorrowIdle]),
        ];
        for (ref_ipc_milli, slo, round) in rounds {
            let mut now = Settings { ref_ipc_milli, ..Settings::BORROW_IDLE };
            for &policy in round {
                now = next_policy(&now, slo);
                assert_eq!(now.policy, policy);
                assert_eq!(now.slo_latency_ns != 0, policy == SloBudget);
                assert_eq!(now.budget_ns == 0, matches!(policy, BorrowIdle | SloBudget));
            }
        }
    }

    #[test]
    fn budgets_change_in_steps_within_limits() {
        let up = [0, 999, 1_000, 1_500_000, 5_000_000, u64::MAX].map(|ns| next_budget_ns(ns, true));
        assert_eq!(up, [1_000, 1_000, 2_000, 2_000_000, 10_000_000, 10_000_000_000]);
        let down = [0, 1_000, 1_500_000, 2_000_000, u64::MAX].map(|ns| next_budget_ns(ns, false));
        assert_eq!(down, [1_000, 1_000, 1_000_000, 1_000_000, 10_000_000_000]);
    }
}
