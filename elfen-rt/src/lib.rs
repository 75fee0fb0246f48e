//! The part of Elfen that lives inside other people's processes.
//!
//! A batch thread samples the channels in [`signal`]. A latency-critical service publishes its
//! queue and its running request through [`service`]. Any thread can publish its current activity
//! through [`tag`].
//!
//! The crate is `no_std` and depends on libc only. It must not disturb its host process: it never
//! allocates, locks, panics or prints. Once a channel is open, it makes no system call, except to
//! sleep in a nap.
//!
//! `include/elfen.h` is the same interface in C.

#![no_std]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

#[cfg(test)]
extern crate std;

pub mod bpf;
pub mod check;
pub mod clock;
pub mod count;
pub mod inherit;
pub mod lane;
pub mod memory;
pub mod nanonap;
pub mod nap;
pub mod pages;
pub mod policy;
pub mod process;
pub mod sealed;
pub mod service;
pub mod signal;
pub mod tag;

pub use check::critical;
