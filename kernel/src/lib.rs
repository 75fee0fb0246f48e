//! Loads, finds and maps what Elfen runs in the kernel, and says what is missing where it can't.
//!
//! Everything that needs a capability is here, so that `elfen-rt`, which lives in other people's
//! processes, needs none. The task map has three ways to its readers, tried in this order by
//! [`task_map::open`]: a program that another process of ours has attached; what elfend hands over;
//! one that we attach ourselves.

#![cfg(target_os = "linux")]

mod bpf_call;
pub mod counters;
pub mod device;
mod error;
pub mod events;
pub mod hazard;
pub mod holders;
mod mapped;
mod object;
pub mod preempted;
pub mod sleep;
pub mod task_map;
