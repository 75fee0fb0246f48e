//! The part of Elfen that lives inside other people's processes.
//!
//! A batch thread samples the channels in [`signal`]; a latency-critical service publishes its
//! queue and its running request through [`service`]; any thread says what it does
//! through [`tag`]. The crate is `no_std` and needs libc alone, because it must cost its hosts
//! nothing: no allocation, no lock, no panic, no output, and no system call once a channel is open.
//!
//! `include/elfen.h` says the same in C.

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
mod own_thread;
pub mod pages;
pub mod policy;
pub mod process;
pub mod sealed;
pub mod service;
pub mod signal;
pub mod tag;

pub use check::critical;
