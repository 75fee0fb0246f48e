//! Tests `elfen-hedge` from outside: the program, its servers, and its clients.

mod failures;
mod framing;
mod honest;
mod limits;
mod rig;
