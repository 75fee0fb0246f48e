//! `elfen shim`: samples what a running thread does, every few tens of nanoseconds, without
//! stopping the thread.
//!
//! An observer thread on another CPU reads memory that the observed program writes anyway
//! ([`observe`]) and turns the samples into a time series ([`recording`]). [`reach`] finds
//! memory that can be read. A [`session`] is one run of an observer. [`summary`] and [`text`]
//! report the results. Sampling does not interrupt the observed program: each sample costs it at
//! most the transfer of one cache line per word. Only `--share` stops a process, twice.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

pub mod clock;
pub mod cmd;
pub mod cost;
pub mod export;
pub mod filter;
pub mod fold;
pub mod followed_lane;
pub mod histogram;
pub mod live;
pub mod observe;
pub mod observers;
pub mod pacing;
pub mod program;
pub mod random;
pub mod rates;
pub mod reach;
pub mod recorder;
pub mod recording;
pub mod round_trip;
pub mod session;
pub mod signal_spec;
pub mod summary;
pub mod symbols;
pub mod tags;
pub mod tally;
pub mod text;
