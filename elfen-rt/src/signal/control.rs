//! What the operator wants of a batch: policy, budget, SLO. Written by the `elfen`
//! parent, read at slow paths.
//!
//! Settings are read as a whole through a snapshot: a policy is never seen with another policy's
//! budget. A writer that dies in the middle leaves its readers with [`Settings::BORROW_IDLE`],
//! until its successor publishes. Slot 0 has the settings in force; slot 1 those that `elfen set`
//! wants, which the parent takes over, so that each slot has one writer.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::*};

use super::page::Slot;
use super::snapshot;
use crate::policy::Policy;

/// Which policy decides. The discriminants are the ABI.
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

/// Everything a policy is set by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    pub policy: PolicyKind,
    pub budget_ns: u64,
    /// For slo-budget: the budget counts until then, and is 0 afterwards. The keeper, which sets
    /// it, may die.
    pub budget_until_ns: u64,
    /// The latency that `slo_per_million` of a million requests must not exceed; 0 for no SLO.
    pub slo_latency_ns: u64,
    pub slo_per_million: u64,
    /// Instructions per 1,000 cycles of the service alone; 0 if unknown.
    pub ref_ipc_milli: u64,
}

impl Settings {
    /// The settings in force until the parent has set any.
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

/// The channel. One writer: the `elfen` parent.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ControlSlot {
    /// Counts changes; stored after the settings.
    pub generation: AtomicU64,
    /// The same count, stored before them.
    pub generation_begun: AtomicU64,
    pub policy: AtomicU64,
    pub budget_ns: AtomicU64,
    pub budget_until_ns: AtomicU64,
    pub slo_latency_ns: AtomicU64,
    pub slo_per_million: AtomicU64,
    pub ref_ipc_milli: AtomicU64,
    reserved_settings: [AtomicU64; 2],
    /// About the run, written once: the id of the lane page's segment,
    pub lanes_segment: AtomicU64,
    /// the [`crate::process::Identity`] of the process that keeps the lanes,
    pub keeper: AtomicU64,
    /// and of the program that it started; 0 before.
    pub batch: AtomicU64,
    /// How to nap: a [`crate::nap::Kind`], or 0 for the first that works.
    pub nap: AtomicU64,
    /// When the batch was last told to end, CLOCK_MONOTONIC; 0 if never. It takes a CPU to die.
    pub told_to_end_ns: AtomicU64,
    /// One more than the id of the segment of its service's page; 0 without a service.
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
const _: () = assert!(offset_of!(ControlSlot, keeper) == 88);
const _: () = assert!(offset_of!(ControlSlot, batch) == 96);
const _: () = assert!(offset_of!(ControlSlot, nap) == 104);
const _: () = assert!(offset_of!(ControlSlot, told_to_end_ns) == 112);
const _: () = assert!(offset_of!(ControlSlot, service_segment) == 120);

// SAFETY: repr(C), aligned to 128, atomics only; "ELFNCTRL" is used nowhere else.
unsafe impl Slot for ControlSlot {
    const MAGIC: [u8; 8] = *b"ELFNCTRL";
    const CHANNEL: &'static str = "control";
}

impl ControlSlot {
    /// Replaces all settings. Only the parent calls this.
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
    /// wrote words that make no sense.
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
