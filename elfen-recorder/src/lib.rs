//! Tailor on a machine: records what the kernel does around a service's requests, hurts a service
//! on purpose to see whether the account is right, and prints what `elfen-tailor` makes of it.
//!
//! [`service`] finds the processes behind a port, [`marks`] a service by its page, [`recorder`]
//! keeps their events, all the time or by [`turns`], [`jvm`] has what a JVM says of itself,
//! [`last_minute`] sums up what a watch sees, [`signals`] ends that in good order.
//! [`check`] is a service of our own with injected causes. [`cmd`] are the commands.

pub mod check;
pub mod cmd;
pub mod duty;
pub mod jvm;
mod kernel_functions;
pub mod last_minute;
pub mod marks;
pub mod recorder;
pub mod service;
pub mod signals;
