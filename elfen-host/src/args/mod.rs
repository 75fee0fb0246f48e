//! Options that several commands share, and what their user can do where the machine refuses them.

pub mod lanes;
pub mod nap;
pub mod poll_timing;
pub mod signals;
