//! `elfen-hedge`: an HTTP/1.1 proxy in front of two servers that answer alike. It sends a request
//! to the second one as well while the first stands still.
//!
//! | file | what it does |
//! | --- | --- |
//! | `proxy` | serves clients' connections |
//! | `shared` | what is to be done, what was done, and servers that are down or were restarted |
//! | `clients` | limits of clients: how many, and how long each may take |
//! | `request` | checks requests, and makes of them what servers get |
//! | `exchange` | one request: which servers get it, whose answer counts |
//! | `pool` | connections to a server |
//! | `answer` | bodies on their way to clients |
//! | `replay` | recorded requests that warm a server |
//! | `flights`, `policy_driver` | requests as the policy knows them; when it is asked |
//! | `watch`, `hazard` | whether a server runs; what halts it, as it happens |
//! | `processes`, `lookout` | which processes a server is; that, in a thread of its own |
//! | `test_server` | a server to try it on |
//! | [`cmd`] | the command |
//!
//! Messages are read and written by hyper, on one thread. When a request is sent again decides the
//! crate `elfen-hedge-policy`. A connection to a server works for one request at a time, and its
//! answer goes to the client of that request or nowhere.

mod answer;
mod clients;
pub mod cmd;
mod descriptor;
mod exchange;
mod flights;
#[cfg(fuzzing)]
pub mod fuzzed;
mod hazard;
mod lock;
mod lookout;
mod policy_driver;
mod pool;
mod processes;
mod proxy;
mod replay;
mod request;
mod shared;
mod test_server;
mod watch;
