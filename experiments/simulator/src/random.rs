//! Random streams that do not depend on the order in which cores draw.
//!
//! Every core has one stream for each purpose, derived only from the seed. So a simulation gives
//! the same bits with any number of threads. The arrivals stay the same when the demand or the
//! policy changes.

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

pub type Random = Xoshiro256PlusPlus;

/// What a stream is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// The rate of arrivals over time, which all cores of a service share.
    Load = 1,
    Arrivals = 2,
    Demand = 3,
    /// The core of each request of a trace.
    Routing = 4,
}

/// Returns stream number `index` for `purpose`.
pub fn stream(seed: u64, purpose: Purpose, index: u64) -> Random {
    Random::seed_from_u64(mix(mix(seed, purpose as u64), index))
}

/// One step of splitmix64 over two words: each input bit changes about half of the output bits.
pub fn mix(one: u64, other: u64) -> u64 {
    let mut z = one.wrapping_add(other.wrapping_mul(0x9e37_79b9_7f4a_7c15)) ^ other.rotate_left(32);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
