//! `elfen-load`: an open-loop load generator.
//!
//! - [`plan::Plan`] says when each request is due.
//! - [`engine`] decides, without clock and sockets, what is sent where and how answers count.
//! - [`driver`] provides the engine with clock and sockets.
//! - [`record::Recorder`] stores what was measured, and [`report`] prints it.
//! - [`reference`] is a service with known response times, to test load generators.

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
