//! What keys do: which batch is selected, and its next policy or budget, by way of its control
//! page as `elfen set` has it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_run::batches::Batch;

use super::picture::BatchView;
use super::seen::Watch;

/// The budget that a policy begins with if there was none.
const FIRST_BUDGET_NS: u64 = 1_000_000;

/// A keeper looks ten times a second; afterwards the settings that hold count, and no wish.
const TAKEN_OVER_WITHIN: Duration = Duration::from_millis(500);

/// Pictures for which a note stays.
const NOTE_STAYS: u32 = 3;

/// Latency and millionths of requests, as a control page has them.
type SloWords = (u64, u64);

#[derive(Debug, Default)]
pub(super) struct Changes {
    /// The selected batch, by its pid, so that it stays selected when others come and go.
    pid: Option<u32>,
    note: Option<(String, u32)>,
    /// The settings that keys wished for last, by the batch's pid: keys come faster than keepers
    /// look.
    wished: Option<(u32, Settings, Instant)>,
    /// SLOs of batches that had one, for the way back.
    slos: BTreeMap<u32, SloWords>,
}

impl Changes {
    pub(super) fn note(&self) -> Option<String> {
        self.note.as_ref().map(|(note, _)| note.clone())
    }

    /// A picture has passed.
    pub(super) fn forget(&mut self) {
        self.note = self.note.take().and_then(|(note, left)| Some((note, left.checked_sub(1)?)));
    }

    /// The row of the selected batch; the first if it is gone.
    pub(super) fn select(&self, batches: &[BatchView]) -> usize {
        batches.iter().position(|batch| Some(batch.pid) == self.pid).unwrap_or(0)
    }

    pub(super) fn up(&mut self, batches: &[BatchView]) {
        let row = self.select(batches).saturating_sub(1);
        self.pid = batches.get(row).map(|batch| batch.pid);
    }

    pub(super) fn down(&mut self, batches: &[BatchView]) {
        let row = (self.select(batches) + 1).min(batches.len().saturating_sub(1));
        self.pid = batches.get(row).map(|batch| batch.pid);
    }

    pub(super) fn policy(&mut self, watch: &Watch) {
        self.change(watch, |changes, batch, now| {
            if !watch.is_published(batch) {
                return Err("no service publishes on its request lanes: borrow-idle alone".into());
            }
            Ok(next_policy(now, changes.slos.get(&batch.pid).copied()))
        });
    }

    pub(super) fn budget(&mut self, watch: &Watch, more: bool) {
        self.change(watch, |_, _, now| match now.policy {
            PolicyKind::BorrowIdle => Err("borrow-idle has no budget".into()),
            PolicyKind::SloBudget => Err("slo-budget sets its budget itself".into()),
            _ => Ok(Settings { budget_ns: step(now.budget_ns, more), ..*now }),
        });
    }

    /// Wishes for other settings of the selected batch, and says so.
    fn change(
        &mut self,
        watch: &Watch,
        wanted: impl FnOnce(&Self, &Batch, &Settings) -> Result<Settings, String>,
    ) {
        let selected = watch.batches.iter().find(|batch| Some(batch.pid) == self.pid);
        let Some(batch) = selected.or(watch.batches.first()) else {
            return self.say("no batch runs".to_owned());
        };
        let wished = self
            .wished
            .filter(|(pid, _, at)| *pid == batch.pid && at.elapsed() < TAKEN_OVER_WITHIN);
        let Some(now) = wished.map(|(_, wish, _)| wish).or_else(|| batch.settings()) else {
            return self.say(format!("{}: its settings are being changed", batch.pid));
        };
        if now.slo_latency_ns != 0 {
            self.slos.insert(batch.pid, (now.slo_latency_ns, now.slo_per_million));
        }
        let said = match wanted(self, batch, &now) {
            Ok(settings) => {
                self.wished = Some((batch.pid, settings, Instant::now()));
                wish(batch, &settings)
            }
            Err(why) => why,
        };
        self.say(format!("{} {}: {said}", batch.pid, batch.program));
    }

    fn say(&mut self, note: String) {
        self.note = Some((note, NOTE_STAYS));
    }
}

fn wish(batch: &Batch, settings: &Settings) -> String {
    if batch.request_settings(settings).is_err() {
        return "it is another user's".to_owned();
    }
    let policy = settings.policy.name();
    match settings.policy {
        PolicyKind::BorrowIdle | PolicyKind::SloBudget => policy.to_owned(),
        _ => format!("{policy}, budget {}", duration::show(settings.budget_ns)),
    }
}

/// The next policy of those that this batch can have: slo-budget if it had an SLO,
/// dynamic-budget if its IPC is known.
fn next_policy(now: &Settings, slo: Option<SloWords>) -> Settings {
    use PolicyKind::{BorrowIdle, DynamicBudget, FixedBudget, RefreshBudget, SloBudget};
    let next = match now.policy {
        BorrowIdle => FixedBudget,
        FixedBudget => RefreshBudget,
        RefreshBudget if now.ref_ipc_milli != 0 => DynamicBudget,
        RefreshBudget | DynamicBudget if slo.is_some() => SloBudget,
        RefreshBudget | DynamicBudget | SloBudget => BorrowIdle,
    };
    // The keeper steers the budget of every batch that has an SLO, so only slo-budget may have one.
    let (slo_latency_ns, slo_per_million) = slo.filter(|_| next == SloBudget).unwrap_or((0, 0));
    let budget_ns = match next {
        BorrowIdle | SloBudget => 0,
        _ if now.budget_ns == 0 || now.policy == SloBudget => FIRST_BUDGET_NS,
        _ => now.budget_ns,
    };
    let budget_until_ns = 0;
    Settings { policy: next, budget_ns, budget_until_ns, slo_latency_ns, slo_per_million, ..*now }
}

/// The next of 1, 2 and 5 of every power of ten, from 1 us to 10 s.
fn step(budget_ns: u64, more: bool) -> u64 {
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

    /// Goal: p goes through all policies that a batch can have and comes back, and an SLO is only
    /// ever slo-budget's. Method: once around, with and without an SLO and an IPC.
    #[test]
    fn policies_come_round() {
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
    fn budgets_go_in_steps_and_end_somewhere() {
        let up = [0, 999, 1_000, 1_500_000, 5_000_000, u64::MAX].map(|ns| step(ns, true));
        assert_eq!(up, [1_000, 1_000, 2_000, 2_000_000, 10_000_000, 10_000_000_000]);
        let down = [0, 1_000, 1_500_000, 2_000_000, u64::MAX].map(|ns| step(ns, false));
        assert_eq!(down, [1_000, 1_000, 1_000_000, 1_000_000, 10_000_000_000]);
    }
}
