//! The control page: the settings of a batch (policy, budget, SLO). `elfen run` writes it, and slow
//! paths read it.
//!
//! Settings are read as a whole through a snapshot, so a policy is never seen with another policy's
//! budget. If the writer dies in the middle of a change, its readers use [`Settings::BORROW_IDLE`]
//! until its successor publishes.
//!
//! Slot 0 holds the current settings. Slot 1 holds the settings that `elfen set` requests; `elfen
//! run` copies them to slot 0, so that each slot has one writer.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::page::Slot;
use super::snapshot;
use crate::policy::Policy;

/// A kind of policy. The discriminants are part of the ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum PolicyKind {
    BorrowIdle = 1,
    FixedBudget = 2,
    RefreshBudget = 3,
    DynamicBudget = 4,
    SloBudget = 5,
}

impl PolicyKind {
    pub const ALL: [Self; 5] = [
        Self::BorrowIdle,
        Self::FixedBudget,
        Self::RefreshBudget,
        Self::DynamicBudget,
        Self::SloBudget,
    ];

    pub fn from_word(word: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u64 == word)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::BorrowIdle => "borrow-idle",
            Self::FixedBudget => "fixed-budget",
            Self::RefreshBudget => "refresh-budget",
            Self::DynamicBudget => "dynamic-budget",
            Self::SloBudget => "slo-budget",
        }
    }
}

/// A policy and all its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    pub policy: PolicyKind,
    pub budget_ns: u64,
    /// For slo-budget: the budget is 0 from this time on, because the supervisor, which sets it,
    /// may die.
    pub budget_until_ns: u64,
    /// The latency that `slo_per_million` of a million requests must not exceed; 0 for no SLO.
    pub slo_latency_ns: u64,
    pub slo_per_million: u64,
    /// Instructions per 1,000 cycles of the service with the core to itself; 0 if unknown.
    pub ref_ipc_milli: u64,
}

impl Settings {
    /// The settings until `elfen run` publishes its own.
    pub const BORROW_IDLE: Self = Self {
        policy: PolicyKind::BorrowIdle,
        budget_ns: 0,
        budget_until_ns: 0,
        slo_latency_ns: 0,
        slo_per_million: 0,
        ref_ipc_milli: 0,
    };

    /// The policy with its parameters.
    pub fn policy(&self) -> Policy {
        let budget_ns = self.budget_ns;
        match self.policy {
            PolicyKind::BorrowIdle => Policy::BorrowIdle,
            PolicyKind::FixedBudget => Policy::FixedBudget { budget_ns },
            PolicyKind::RefreshBudget => Policy::RefreshBudget { budget_ns },
            PolicyKind::DynamicBudget => {
                Policy::DynamicBudget { budget_ns, ref_ipc_milli: self.ref_ipc_milli }
            }
            PolicyKind::SloBudget => {
                Policy::SloBudget { budget_ns, until_ns: self.budget_until_ns }
            }
        }
    }
}

/// One slot of the control page. Its writer is `elfen run`, or `elfen set` for slot 1.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ControlSlot {
    /// Counts changes; stored after the settings.
    pub generation: AtomicU64,
    /// The same count, stored before the settings.
    pub generation_begun: AtomicU64,
    pub policy: AtomicU64,
    pub budget_ns: AtomicU64,
    pub budget_until_ns: AtomicU64,
    pub slo_latency_ns: AtomicU64,
    pub slo_per_million: AtomicU64,
    pub ref_ipc_milli: AtomicU64,
    reserved_settings: [AtomicU64; 2],
    /// The id of the lane page's segment. This and the words below describe the run.
    pub lanes_segment: AtomicU64,
    /// The [`crate::process::Identity`] of the process that supervises the lanes.
    pub supervisor: AtomicU64,
    /// The identity of the program that the supervisor started; 0 before.
    pub batch: AtomicU64,
    /// How to nap: a [`crate::nap::NapKind`], or 0 for the first that works.
    pub nap: AtomicU64,
    /// When the batch was last asked to terminate, CLOCK_MONOTONIC; 0 if never. The batch needs CPU
    /// time to terminate.
    pub termination_requested_ns: AtomicU64,
    /// The segment id of the service's page plus 1; 0 without a service.
    pub service_segment: AtomicU64,
}

const _: () = assert!(size_of::<ControlSlot>() == 128);
const _: () = assert!(offset_of!(ControlSlot, generation) == 0);
const _: () = assert!(offset_of!(ControlSlot, generation_begun) == 8);
const _: () = assert!(offset_of!(ControlSlot, policy) == 16);
const _: () = assert!(offset_of!(ControlSlot, budget_ns) == 24);
const _: () = assert!(offset_of!(ControlSlot, budget_until_ns) == 32);
const _: () = assert!(offset_of!(ControlSlot, slo_latency_ns) == 40);
const _: () = assert!(offset_of!(ControlSlot, slo_per_million) == 48);
const _: () = assert!(offset_of!(ControlSlot, ref_ipc_milli) == 56);
const _: () = assert!(offset_of!(ControlSlot, lanes_segment) == 80);
const _: () = assert!(offset_of!(ControlSlot, supervisor) == 88);
const _: () = assert!(offset_of!(ControlSlot, batch) == 96);
const _: () = assert!(offset_of!(ControlSlot, nap) == 104);
const _: () = assert!(offset_of!(ControlSlot, termination_requested_ns) == 112);
const _: () = assert!(offset_of!(ControlSlot, service_segment) == 120);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNCTRL" is used nowhere else.
unsafe impl Slot for ControlSlot {
    const MAGIC: [u8; 8] = *b"ELFNCTRL";
    const CHANNEL: &'static str = "control";
}

impl ControlSlot {
    /// Replaces all settings. Only the slot's one writer calls this.
    pub fn publish(&self, settings: &Settings) {
        snapshot::publish(&self.generation_begun, &self.generation, || {
            // Relaxed: `publish` orders these between the two counters.
            self.policy.store(settings.policy as u64, Relaxed);
            self.budget_ns.store(settings.budget_ns, Relaxed);
            self.budget_until_ns.store(settings.budget_until_ns, Relaxed);
            self.slo_latency_ns.store(settings.slo_latency_ns, Relaxed);
            self.slo_per_million.store(settings.slo_per_million, Relaxed);
            self.ref_ipc_milli.store(settings.ref_ipc_milli, Relaxed);
        });
    }

    /// The settings and their generation; `None` if the writer died in the middle of a change, or
    /// wrote invalid words.
    pub fn settings(&self) -> Option<(u64, Settings)> {
        snapshot::read(&self.generation_begun, &self.generation, || {
            let policy = PolicyKind::from_word(self.policy.load(Relaxed))?;
            let settings = Settings {
                policy,
                budget_ns: self.budget_ns.load(Relaxed),
                budget_until_ns: self.budget_until_ns.load(Relaxed),
                slo_latency_ns: self.slo_latency_ns.load(Relaxed),
                slo_per_million: self.slo_per_million.load(Relaxed),
                ref_ipc_milli: self.ref_ipc_milli.load(Relaxed),
            };
            Some((self.generation.load(Relaxed), settings))
        })
        .flatten()
    }
}
