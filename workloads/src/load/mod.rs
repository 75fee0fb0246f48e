//! `elfen-load`: an open-loop load generator.
//!
//! A [`arrivals::Plan`] says when each request is due; the [`engine`] decides, without a clock or a
//! socket, what is sent where and what an answer means; the [`driver`] gives it both; a
//! [`record::Recorder`] keeps what was measured; [`report`] says it. [`reference`] is a service
//! whose response times are known, for this generator and others to be held against.

mod args;
mod arrivals;
pub mod command;
mod csv;
mod driver;
mod engine;
mod link;
mod outcome;
mod protocol;
mod queries;
pub(crate) mod record;
mod reference;
pub(crate) mod report;
mod run;
mod slo;
pub(crate) mod stats;
mod table;
mod trace;

pub(crate) use queries::task_query;
pub(crate) use record::Distribution;
