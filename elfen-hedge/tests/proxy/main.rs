//! `elfen-hedge` from outside: the program, servers behind it, and clients.

mod failures;
mod framing;
mod honest;
mod limits;
mod rig;
