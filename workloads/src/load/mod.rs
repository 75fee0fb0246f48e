//! `elfen-load`: an open-loop load generator.
//!
//! A [`plan::Plan`] says when each request is due; the [`engine`] decides, without a clock or a
//! socket, what is sent where and what an answer means; the [`driver`] gives it both; a
//! [`record::Recorder`] keeps what was measured; [`report`] says it. [`reference`] is a service
//! whose response times are known, for this generator and others to be held against.

mod args;
pub mod command;
mod driver;
mod engine;
mod plan;
mod protocol;
mod queries;
mod record;
mod reference;
pub(crate) mod report;

pub(crate) use queries::task_query;
pub(crate) use record::Distribution;
