//! `elfen-search`: a search service to protect.
//!
//! The command builds an [`index`] from a [`corpus`], and serves it: a coordinator thread receives,
//! queues and sends, one worker thread per request lane searches, and what they do is published on
//! the service page. [`tasks`] are queries for it; [`bench`] measures one worker.

mod bench;
pub mod command;
mod corpus;
mod index;
mod query;
mod server;
mod tasks;
