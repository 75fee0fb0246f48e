//! `elfen-search`: a search service for measurements.
//!
//! The command builds an [`index`] from a [`corpus`] and serves it. A coordinator thread receives,
//! queues and sends. One worker thread per request lane searches. The service page publishes what
//! they do. [`tasks`] are queries for it, and [`bench`] measures one worker.

mod bench;
pub mod command;
mod corpus;
mod index;
mod query;
mod server;
mod tasks;
