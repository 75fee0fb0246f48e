//! `elfen-load`: an open-loop load generator.
//!
//! A [`arrivals::Plan`] says when each request is due; the [`engine`] decides, without a clock or a
//! socket, what is sent where and what an answer means; the [`driver`] gives it both; a
//! [`record::Recorder`] keeps what was measured; [`report`] says it. That the figures can be
//! trusted is shown by [`self_check`], against [`theory`] and a [`reference`] service.

mod args;
mod arrivals;
pub mod command;
mod disturbed;
mod driver;
mod engine;
mod link;
mod logs;
mod outcome;
mod pauses;
mod protocol;
mod queries;
pub(crate) mod record;
mod reference;
mod report;
mod run;
mod self_check;
mod slo;
pub(crate) mod stats;
mod table;
mod theory;
mod trace;
mod verdict;

pub(crate) use queries::task_query;
