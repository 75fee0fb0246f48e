//! Records what the kernel does around a service's requests, explains why the slowest were slow,
//! and predicts the tail without each cause.
//!
//! The modules of the first table are pure: they turn a recorded [`trace`] into a [`report`]
//! without a clock and without access to the machine.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`trace`] | recorded events, in memory or in a `.trace` file |
//! | [`timeline`] | the state of each thread and the thread on each CPU, over time |
//! | [`runtime`] | when a JVM halted its threads, as the JVM reports it |
//! | [`stalls`] | when the kernel made a thread wait for a kernel lock or for memory |
//! | [`calls`] | what a thread that sleeps in a system call waits for |
//! | [`request`] | requests, from socket events or from the service's marks |
//! | [`segment`] | kinds of time, and causes by name |
//! | [`walk`] | one request as segments, which sum up to its latency to the nanosecond |
//! | [`neighbours`] | what ran on the other lanes of the core, and how much that slowed the work |
//! | [`account`] | all requests of a trace, explained |
//! | `queues` | the queue in which each request waited, and whether the service is a queue at all |
//! | `service_slots` | the times at which a server served each request of its queue |
//! | [`replay`] | predicts latencies of the same requests without a cause |
//! | [`long_code`] | the functions behind work beyond the usual |
//! | [`rank`] | the causes of the tail, the largest first |
//! | [`report`] | the results as text and as JSON |
//! | [`draw`] | the results as pictures |
//!
//! The other modules work on a machine:
//!
//! | module | what it does |
//! | --- | --- |
//! | [`service`] | finds the processes behind a port |
//! | [`marks`] | reads what a service reports about its requests itself |
//! | [`recorder`] | collects the events of a service |
//! | `code_names` | finds the names of the service's functions |
//! | [`duty`] | records only a part of the time |
//! | [`jvm`] | collects what a JVM reports about itself |
//! | [`last_minute`] | sums up the tail of the last minute, for `elfen top` |
//! | [`signals`] | ends a recording in good order |
//! | [`cmd`] | the commands of `elfen tailor` |

#![forbid(unsafe_code)]

pub mod account;
pub mod calls;
mod causes;
pub mod cmd;
mod code_names;
pub mod draw;
pub mod duty;
pub mod jvm;
mod kernel_functions;
pub mod last_minute;
pub mod long_code;
mod marked;
pub mod marks;
pub mod neighbours;
mod queues;
pub mod rank;
pub mod recorder;
pub mod replay;
pub mod report;
pub mod request;
pub mod runtime;
pub mod segment;
pub mod service;
mod service_slots;
pub mod signals;
pub mod stalls;
pub mod timeline;
pub mod trace;
pub mod walk;
