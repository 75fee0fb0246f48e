//! Why the slowest requests of a service were slow, and what the tail would be without that.
//!
//! Pure: what was recorded comes in as a [`tale`], what is found goes out as a [`report`]. There is
//! no clock here and no machine; `elfen-recorder` has those.
//!
//! | module | what it makes of what |
//! | --- | --- |
//! | [`tale`] | events in memory or in a `.tale` file |
//! | [`timeline`] | events, put together to what each thread and each CPU did when |
//! | [`runtime`] | a JVM's own word on what halted its threads |
//! | [`stalls`] | when the kernel let a thread wait for its own locks or memory |
//! | [`request`] | what went through sockets, or was marked, put together to requests |
//! | [`walk`] | a request, as [`segment`]s that sum up to its latency to the nanosecond |
//! | [`explained`] | a request with its account |
//! | [`beside`] | who ran on the other lanes of its core, and what that cost |
//! | [`account`] | all requests so |
//! | `queues` | which queue each of them stood in, and whether it is one |
//! | `turns` | who had the server of a queue, from when to when |
//! | [`replay`] | the same requests without a cause |
//! | [`rank`] | the causes of the tail, the largest first |
//! | [`report`] | all of this for people and for scripts |
//! | [`draw`] | and as pictures |

#![forbid(unsafe_code)]

pub mod account;
pub mod calls;
mod causes;
pub mod draw;
pub mod explained;
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
pub mod stages;
pub mod stalls;
pub mod timeline;
pub mod trace;
pub mod walk;
