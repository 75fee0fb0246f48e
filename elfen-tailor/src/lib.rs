//! Explains why the slowest requests of a service were slow, and predicts the tail without each
//! cause.
//!
//! The crate is pure: it turns a recorded [`trace`] into a [`report`], without a clock and without
//! access to the machine. `elfen-recorder` has those.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`trace`] | recorded events, in memory or in a `.tale` file |
//! | [`timeline`] | the state of each thread and the thread on each CPU, over time |
//! | [`runtime`] | when a JVM halted its threads, as the JVM reports it |
//! | [`stalls`] | when the kernel made a thread wait for kernel locks or memory |
//! | [`calls`] | what a thread that sleeps in a system call waits for |
//! | [`request`] | requests, from socket events or from the service's marks |
//! | [`segment`] | kinds of time, and causes by name |
//! | [`walk`] | one request as segments, which sum up to its latency to the nanosecond |
//! | [`neighbours`] | what ran on the other lanes of the core, and what that cost |
//! | [`account`] | all requests of a trace, explained |
//! | `queues` | the queue that each request stood in, and whether it is a queue |
//! | `service_slots` | which request the server of a queue served when |
//! | [`replay`] | the same requests without a cause |
//! | [`rank`] | the causes of the tail, the largest first |
//! | [`report`] | the results as text and as JSON |
//! | [`draw`] | the results as pictures |

#![forbid(unsafe_code)]

pub mod account;
pub mod calls;
mod causes;
pub mod draw;
mod marked;
pub mod neighbours;
mod queues;
pub mod rank;
pub mod replay;
pub mod report;
pub mod request;
pub mod runtime;
pub mod segment;
mod service_slots;
pub mod stalls;
pub mod timeline;
pub mod trace;
pub mod walk;
