//! Options that several commands share, and how a user can solve what the machine refuses.

pub mod nap;
pub mod poll_timing;
pub mod signals;
