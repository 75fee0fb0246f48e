//! Samples of single instructions, as the processor takes them: IBS of AMD, PEBS of Intel, SPE of
//! Arm. Their ancestor is ProfileMe (MICRO 1997).
//!
//! ```text
//! sysfs: samplers.rs -> event.rs -> ring.rs -> records.rs -> ibs.rs, pebs.rs, spe.rs -> Profile
//!        devices        opens       bytes      samples       InstructionSample          by place
//! ```
//!
//! The decoders are pure functions of bytes. No machine with such a processor has run them yet:
//! their tests decode constructed records.

mod bits;
mod event;
mod ibs;
mod pebs;
mod recorder;
mod records;
mod ring;
mod spaces;
mod spe;

pub use recorder::{PreciseError, Sampling};

/// What reports say until machines with these processors have been tried.
pub(crate) const UNTRIED: &str =
    "not tried on such hardware yet: the decoders have seen constructed records only";

/// Decodes bytes as records and samples of each kind, for the fuzzer.
pub(crate) fn decode_any(bytes: &[u8], position: u64) {
    let _samples = (ibs::decode_op(bytes, 1), ibs::decode_fetch(bytes, 1));
    let _samples = spe::decode(bytes, position, 1);
    for decoding in [event::Decoding::IbsOp, event::Decoding::IbsFetch, event::Decoding::Pebs] {
        let (records, _) = records::parse(bytes, decoding.sample_type());
        for record in records {
            if let records::PerfRecord::Sample(sample) = record {
                let _sample = decoding.decode(&sample);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    /// Goal: no bytes make a decoder fail. Method: random bytes of each length, and records whose
    /// headers are right and whose contents are random.
    #[test]
    fn random_bytes_are_decoded_without_a_panic() {
        const ROUNDS: usize = 20_000;
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1997);
        for round in 0..ROUNDS {
            let mut bytes: Vec<u8> = (0..round % 200).map(|_| random.random()).collect();
            if round % 2 == 0
                && let Some(header) = bytes.first_chunk_mut::<8>()
            {
                let size = (round % 200).to_le_bytes();
                *header =
                    [random.random_range(0..16), 0, 0, 0, random.random(), 0, size[0], size[1]];
            }
            decode_any(&bytes, random.random());
        }
    }
}
