//! `elfen-hedge`: an HTTP/1.1 proxy in front of two equivalent servers. While the first server
//! stands still, the proxy sends its requests to the second server as well.
//!
//! | file | what it does |
//! | --- | --- |
//! | `proxy` | serves clients' connections |
//! | `settings` | the settings, as the command line gives them |
//! | `shared` | counts, and servers that are down or were restarted |
//! | `clients` | limits of clients: how many, and how long each may take |
//! | `request` | checks requests, and rewrites them for servers |
//! | `exchange` | one request: which servers receive it, and which answer is used |
//! | `upstream` | sends a request to a server |
//! | `replay` | recorded requests that warm a server |
//! | `flights` | the policy's view of the requests without an answer |
//! | [`policy`] | decides when a request is sent again; its simulator |
//! | `policy_driver` | calls the policy when it is due |
//! | `observation` | how servers are observed: by CPU clocks, or by events from the kernel |
//! | `watch` | whether a server runs, by its CPU clocks |
//! | `processes` | finds the processes of a server |
//! | `test_server` | a server for tests |
//! | [`cmd`] | the command |
//!
//! hyper reads and writes messages, on one thread. A connection to a server carries one request at
//! a time. The answer goes to the client of that request, or is discarded.

mod clients;
pub mod cmd;
mod exchange;
mod flights;
#[cfg(fuzzing)]
pub mod fuzzed;
mod observation;
pub mod policy;
mod policy_driver;
mod processes;
mod proxy;
mod replay;
mod request;
mod settings;
mod shared;
mod test_server;
mod upstream;
mod watch;
