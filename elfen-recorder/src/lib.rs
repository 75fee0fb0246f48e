//! Records what the kernel does around a service's requests, for `elfen-tailor` to explain.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`service`] | finds the processes behind a port |
//! | [`marks`] | reads what a service reports about its requests itself |
//! | [`recorder`] | collects the events of a service |
//! | [`duty`] | records only a part of the time |
//! | [`jvm`] | collects what a JVM reports about itself |
//! | [`last_minute`] | sums up the tail of the last minute, for `elfen top` |
//! | [`signals`] | ends a recording in good order |
//! | [`check`] | injects faults into a test service and compares the explanation |
//! | [`cmd`] | the commands of `elfen tailor` |

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
