//! Applies keys: they select a batch, or change its policy or budget through its control page, as
//! `elfen set` does.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_rt::signal::control::{PolicyKind, Settings};
use elfen_run::batches::Batch;

use super::watch::Watch;

/// The budget of a policy if the batch had no budget before.
const FIRST_BUDGET_NS: u64 = 1_000_000;

/// How long a request by key counts as the current settings. A supervisor reads requests ten times
/// a second.
const TAKEN_OVER_WITHIN: Duration = Duration::from_millis(500);

/// The number of pictures in which a note stays visible.
const NOTE_STAYS: u32 = 3;

/// Latency limit, and millionths of requests, as in a control page.
type SloWords = (u64, u64);

#[derive(Debug, Default)]
pub(super) struct Keys {
    /// The pid of the selected batch, so that it stays selected when other batches start or end.
    pid: Option<u32>,
    /// The note about the last key, and the number of pictures in which it stays visible.
    note: Option<(String, u32)>,
    /// The latest settings that keys requested, with the batch's pid. Keys may come faster than the
    /// supervisor reads requests.
    requested: Option<(u32, Settings, Instant)>,
    /// SLOs of batches that had one, so that keys can select slo-budget again.
    slos: BTreeMap<u32, SloWords>,
}

impl Keys {
    pub(super) fn note(&self) -> Option<&str> {
        self.note.as_ref().map(|(note, _)| note.as_str())
    }

    /// Counts down the note's time. Called once for each picture.
    pub(super) fn age_note(&mut self) {
        self.note = self.note.take().and_then(|(note, left)| Some((note, left.checked_sub(1)?)));
    }

    /// The index of the selected batch, or 0 if that batch has ended.
    fn position(&self, watch: &Watch) -> usize {
        watch.batches.iter().position(|batch| Some(batch.pid) == self.pid).unwrap_or(0)
    }

    /// The pid of the selected batch.
    pub(super) fn selected(&self, watch: &Watch) -> Option<u32> {
        watch.batches.get(self.position(watch)).map(|batch| batch.pid)
    }

    pub(super) fn select_previous(&mut self, watch: &Watch) {
        let previous = self.position(watch).saturating_sub(1);
        self.pid = watch.batches.get(previous).map(|batch| batch.pid);
    }

    pub(super) fn select_next(&mut self, watch: &Watch) {
        let next = watch.batches.get(self.position(watch) + 1);
        self.pid = next.or(watch.batches.last()).map(|batch| batch.pid);
    }

    pub(super) fn change_policy(&mut self, watch: &Watch) {
        self.change(watch, |keys, batch, now| {
            if !watch.is_published(batch) {
                return Err("only borrow-idle: no service publishes on its request lanes".into());
            }
            Ok(next_policy(now, keys.slos.get(&batch.pid).copied()))
        });
    }

    pub(super) fn change_budget(&mut self, watch: &Watch, more: bool) {
        self.change(watch, |_, _, now| match now.policy {
            PolicyKind::BorrowIdle => Err("borrow-idle has no budget".into()),
            PolicyKind::SloBudget => Err("slo-budget sets its budget itself".into()),
            _ => Ok(Settings { budget_ns: step(now.budget_ns, more), ..*now }),
        });
    }

    /// Requests other settings for the selected batch, and sets a note with the result.
    fn change(
        &mut self,
        watch: &Watch,
        choose: impl FnOnce(&Self, &Batch, &Settings) -> Result<Settings, String>,
    ) {
        let Some(batch) = watch.batches.get(self.position(watch)) else {
            self.note = Some(("no batch runs".to_owned(), NOTE_STAYS));
            return;
        };
        let requested = self
            .requested
            .filter(|(pid, _, at)| *pid == batch.pid && at.elapsed() < TAKEN_OVER_WITHIN);
        let now = requested.map(|(_, settings, _)| settings).or_else(|| batch.settings());
        let result = match now {
            None => "its settings are being changed".to_owned(),
            Some(now) => {
                if now.slo_latency_ns != 0 {
                    self.slos.insert(batch.pid, (now.slo_latency_ns, now.slo_per_million));
                }
                choose(self, batch, &now).map_or_else(
                    |why| why,
                    |settings| {
                        self.requested = Some((batch.pid, settings, Instant::now()));
                        request(batch, &settings)
                    },
                )
            }
        };
        self.note = Some((format!("{} {}: {result}", batch.pid, batch.program), NOTE_STAYS));
    }
}

fn request(batch: &Batch, settings: &Settings) -> String {
    if batch.request_settings(settings).is_err() {
        return "it belongs to another user".to_owned();
    }
    let policy = settings.policy.name();
    match settings.policy {
        PolicyKind::BorrowIdle | PolicyKind::SloBudget => policy.to_owned(),
        _ => format!("{policy}, budget {}", duration::show(settings.budget_ns)),
    }
}

/// The next policy in a cycle of the policies that the batch can have. slo-budget requires an SLO,
/// and dynamic-budget requires a known IPC.
fn next_policy(now: &Settings, slo: Option<SloWords>) -> Settings {
    use PolicyKind::{BorrowIdle, DynamicBudget, FixedBudget, RefreshBudget, SloBudget};
    let next = match now.policy {
        BorrowIdle => FixedBudget,
        FixedBudget => RefreshBudget,
        RefreshBudget if now.ref_ipc_milli != 0 => DynamicBudget,
        RefreshBudget | DynamicBudget if slo.is_some() => SloBudget,
        RefreshBudget | DynamicBudget | SloBudget => BorrowIdle,
    };
    // The supervisor controls the budget of every batch with an SLO, so other policies have no SLO.
    let (slo_latency_ns, slo_per_million) = slo.filter(|_| next == SloBudget).unwrap_or((0, 0));
    let budget_ns = match next {
        BorrowIdle | SloBudget => 0,
        _ if now.budget_ns == 0 || now.policy == SloBudget => FIRST_BUDGET_NS,
        _ => now.budget_ns,
    };
    let budget_until_ns = 0;
    Settings { policy: next, budget_ns, budget_until_ns, slo_latency_ns, slo_per_million, ..*now }
}

/// The next budget in the series 1, 2, 5 of each power of ten, from 1 us to 10 s.
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

    /// Goal: the key p cycles through all policies that a batch can have, and only slo-budget has
    /// an SLO. Method: one cycle with and without an SLO and an IPC.
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
