//! The proxy of `elfen hedge`: HTTP/1.1 between clients and two servers that answer alike, with
//! requests sent again where a policy of `elfen_hedge_policy` says so.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`proxy`] | the loop: waits, and says who is to do something |
//! | `exchange` | requests to servers, answers to clients, and what becomes of those that fail |
//! | `client` | requests out of a client's connection |
//! | `link` | a request into a server's connection, and its answer out of it |
//! | `head`, `body` | HTTP/1.1, as much of it as a proxy has to understand |
//! | [`watch`] | whether a server runs |
//! | [`hazard`] | what brings a server to a halt, told as it happens |
//! | `serving` | which processes a server is, as they come and go |
//! | `lookout` | that, in a thread of its own |
//! | `warm` | requests for a server that was started anew |
//! | [`served`] | a server to try it on |
//!
//! A client has one request at a time, a connection to a server works for one request, and an
//! answer goes to the client whose request that connection was given: the first whose head is
//! whole, and no other.

mod body;
mod client;
mod exchange;
pub mod hazard;
mod head;
mod link;
mod lookout;
mod places;
pub mod proxy;
pub mod served;
mod serving;
mod warm;
pub mod watch;

pub use exchange::Counts;
