//! What both ways to use the code cache need: memory that host and program share, and the code of
//! a program's files.

pub(crate) mod near;
pub(crate) mod objects;
pub(crate) mod region;
