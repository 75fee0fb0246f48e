//! Loads, finds and maps Elfen's eBPF programs and its kernel module, and explains what is missing.
//!
//! Everything that needs a capability is in this crate. `elfen-rt` lives in other people's
//! processes and needs none. [`task_map::open`] gets the task map in one of three ways, in this
//! order:
//! 1. from a program that another Elfen process has attached,
//! 2. from elfend, which hands over its map,
//! 3. by attaching the program itself.

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
