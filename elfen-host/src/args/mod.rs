//! Options that several commands share, and what their user can do where the machine refuses them.

pub mod lanes;
pub mod looks;
pub mod nap;
pub mod signals;
