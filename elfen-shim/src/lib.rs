//! `elfen shim`: what a running thread does, tens of nanoseconds at a time, without stopping it.
//!
//! An observer on a lane of its own reads memory that others write anyway, again and again
//! ([`observe`]), and makes a time series of it ([`recording`]). What can be read is found by
//! [`reach`]; a [`session`] is one such run, and [`summary`] and [`text`] say what was seen.
//! Nothing of the observed is stopped or interrupted; what it pays is the transfer of a line of
//! memory for a sample.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

pub mod clock;
pub mod cmd;
pub mod cost;
pub mod export;
pub mod filter;
pub mod fold;
pub mod histogram;
pub mod live;
pub mod naming;
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
