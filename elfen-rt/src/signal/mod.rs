//! The channels: memory that one writer overwrites in place and anyone may sample.
//!
//! | channel | writer | readers |
//! | --- | --- | --- |
//! | [`task`] | the kernel, on every context switch | checks, the `elfen` command, `elfen.h` |
//! | [`service`] | the latency-critical service | checks, the `elfen` command |
//! | [`lane`] | batch threads | the `elfen` command |
//! | [`control`] | the `elfen` parent of a batch | checks |
//! | [`thread`] | threads that say what they do | `elfen shim` |
//!
//! [`event`] is no page: the kernel writes it into rings while somebody records, and readers copy.
//! [`mark`] is the same by the service, in a ring that is part of its slot.
//!
//! Every page starts with a [`page::PageHeader`] and goes on in slots of one type. All fields are
//! atomic, because another process writes them, and nothing read from a page is ever used as an
//! index, a length or a pointer.

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

/// Goes up when the meaning or the place of any field changes. `ELFEN_ABI_VERSION` in `elfen.h`.
pub const ABI_VERSION: u32 = 7;
