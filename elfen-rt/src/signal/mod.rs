//! The channels: shared memory that one writer overwrites in place and any reader can sample.
//!
//! | channel | writer | readers |
//! | --- | --- | --- |
//! | [`task`] | the kernel, on every context switch | checks, the `elfen` command, `elfen.h` |
//! | [`service`] | the latency-critical service | checks, the `elfen` command |
//! | [`lane`] | guards and batch threads | the `elfen` command |
//! | [`control`] | `elfen run`, or elfend | checks |
//! | [`thread`] | threads that publish what they do | `elfen shim` |
//!
//! [`event`] is not a page: while a recording runs, the kernel writes events into rings, and
//! readers copy them. [`mark`] holds the events of a service, in a ring that is part of its slot.
//!
//! Every page is a [`page::PageHeader`] followed by slots of one type. All fields are atomic,
//! because other processes write them. A value from a page is never used as an index, a length or a
//! pointer.

pub mod account;
pub mod control;
pub mod event;
pub mod histogram;
pub mod lane;
pub mod mark;
pub mod page;
pub mod service;
pub mod snapshot;
pub mod task;
pub mod thread;

/// Goes up when the meaning or the position of any field changes. `ELFEN_ABI_VERSION` in
/// `elfen_abi.h`.
pub const ABI_VERSION: u32 = 7;
