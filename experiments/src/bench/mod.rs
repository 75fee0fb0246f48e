//! Measurements of Elfen's own parts on this machine, each with a baseline from the same run.
//!
//! A benchmark pins its threads, measures in batches that alternate with their baseline, and
//! returns distributions; what is printed is the subcommand's business.

pub(crate) mod batch;
pub(crate) mod borrower;
pub(crate) mod check;
pub(crate) mod distribution;
pub(crate) mod guard;
pub(crate) mod hedge;
pub(crate) mod nap;
pub(crate) mod outside;
pub(crate) mod service;
pub(crate) mod shim;
pub(crate) mod signal;
pub(crate) mod tailor;
pub(crate) mod trace;
