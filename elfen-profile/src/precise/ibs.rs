//! Samples of AMD's Instruction-Based Sampling.
//!
//! The kernel copies registers of the processor into the raw part of a sample: a word of 32 bits
//! with the capabilities, then registers of 64 bits in a fixed order. Two registers are there only
//! if the capabilities say so. The layout is that of AMD's Processor Programming Reference, in
//! "IBS Fetch Control" (MSRC001_1030) to "IBS Op Data 3" (MSRC001_1037).

use elfen_core_model::sample::{InstructionSample, Outcome, SampleEvents, SampleLatencies};

use super::bits::{bit, latency, number};

/// Bits of the capabilities.
const BRANCH_TARGET: u32 = 5;
const RIP_INVALID_CHECK: u32 = 7;
const FETCH_EXTENDED: u32 = 9;

struct Registers<'a> {
    capabilities: u64,
    bytes: &'a [u8],
}

impl<'a> Registers<'a> {
    fn new(raw: &'a [u8]) -> Option<Self> {
        let (capabilities, bytes) = raw.split_first_chunk::<4>()?;
        Some(Self { capabilities: u32::from_le_bytes(*capabilities).into(), bytes })
    }

    fn get(&self, index: usize) -> Option<u64> {
        let bytes = self.bytes.get(index * 8..)?.first_chunk::<8>()?;
        Some(u64::from_le_bytes(*bytes))
    }
}

/// Decodes a sample of `ibs_op`. `None` if it is not complete, or does not know its instruction.
pub(crate) fn decode_op(raw: &[u8], context: u32) -> Option<InstructionSample> {
    let registers = Registers::new(raw)?;
    let [control, pc, data, _, access, data_address] = read(&registers)?;
    let is_valid = bit(control, 18);
    let has_no_pc = bit(registers.capabilities, RIP_INVALID_CHECK) && bit(data, 38);
    if !is_valid || has_no_pc {
        return None;
    }
    let is_branch = bit(data, 37);
    let (is_load, is_store) = (bit(access, 0), bit(access, 1));
    let is_uncached = bit(access, 14);
    let is_cached = (is_load || is_store) && !is_uncached;
    let has_address = (is_load || is_store) && bit(access, 17);
    let (misses_first_tlb, misses_second_tlb) = (bit(access, 2), bit(access, 3));
    let target = registers
        .get(7)
        .filter(|&target| is_branch && target != 0 && bit(registers.capabilities, BRANCH_TARGET));
    let dcache_miss = is_cached.then_some(bit(access, 7));
    Some(InstructionSample {
        context: Some(context),
        pc,
        instruction: None,
        address: if has_address { Some(data_address) } else { target },
        events: SampleEvents {
            dcache_miss,
            dtlb_miss: has_address.then_some(misses_first_tlb && misses_second_tlb),
            taken: is_branch.then_some(bit(data, 35)),
            mispredicted: is_branch.then_some(bit(data, 36)),
            ..SampleEvents::default()
        },
        // An operation that aborts gives no sample.
        outcome: Some(Outcome::Retired),
        history: None,
        latencies: SampleLatencies {
            retire_ready_to_retire: Some(number(data, 0, 16)),
            map_to_retire: Some(number(data, 16, 16)),
            dcache_refill: latency(access, 32, is_load && dcache_miss == Some(true)),
            translation: latency(access, 48, has_address && misses_first_tlb),
            ..SampleLatencies::default()
        },
    })
}

/// Decodes a sample of `ibs_fetch`.
pub(crate) fn decode_fetch(raw: &[u8], context: u32) -> Option<InstructionSample> {
    let registers = Registers::new(raw)?;
    let [control, pc] = read(&registers)?;
    if !bit(control, 49) {
        return None;
    }
    let is_complete = bit(control, 50);
    // An abandoned fetch may not have come to its miss.
    let event = |event: bool| (is_complete || event).then_some(event);
    let misses_first_tlb = bit(control, 55);
    let extended =
        registers.get(3).filter(|_| bit(registers.capabilities, FETCH_EXTENDED)).unwrap_or(0);
    let time = number(control, 32, 16);
    Some(InstructionSample {
        context: Some(context),
        pc,
        instruction: None,
        address: None,
        events: SampleEvents {
            icache_miss: event(bit(control, 51)),
            itlb_miss: event(misses_first_tlb && bit(control, 56)),
            ..SampleEvents::default()
        },
        outcome: Some(if is_complete { Outcome::Fetched } else { Outcome::Aborted(None) }),
        history: None,
        latencies: SampleLatencies {
            fetch: is_complete.then_some(time),
            fetch_to_abort: (!is_complete).then_some(time),
            translation: latency(extended, 0, misses_first_tlb),
            ..SampleLatencies::default()
        },
    })
}

/// The first registers; `None` if there are fewer.
fn read<const COUNT: usize>(registers: &Registers<'_>) -> Option<[u64; COUNT]> {
    let mut found = [0; COUNT];
    for (index, register) in found.iter_mut().enumerate() {
        *register = registers.get(index)?;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(capabilities: u32, registers: &[u64]) -> Vec<u8> {
        let mut bytes = capabilities.to_le_bytes().to_vec();
        bytes.extend(registers.iter().flat_map(|one| one.to_le_bytes()));
        bytes
    }

    const VALID: u64 = 1 << 18;
    const ALL: u32 = 0x7ff;

    /// Goal: a load that misses has its address and latencies, and nothing of a branch.
    #[test]
    fn a_load_that_misses() {
        let data = 120 << 16 | 7;
        // A load; both TLBs and the cache miss; the address is valid; 90 and 30 cycles.
        let access = 0b1101 | 1 << 7 | 1 << 17 | 90 << 32 | 30 << 48;
        let bytes = raw(ALL, &[VALID, 0x40_1000, data, 0, access, 0x7fff_1234, 0, 0, 0]);
        let sample = decode_op(&bytes, 17).unwrap();
        assert_eq!((sample.context, sample.pc), (Some(17), 0x40_1000));
        assert_eq!((sample.address, sample.outcome), (Some(0x7fff_1234), Some(Outcome::Retired)));
        let events = SampleEvents {
            dcache_miss: Some(true),
            dtlb_miss: Some(true),
            ..SampleEvents::default()
        };
        assert_eq!(sample.events, events);
        let latencies = SampleLatencies {
            retire_ready_to_retire: Some(7),
            map_to_retire: Some(120),
            dcache_refill: Some(90),
            translation: Some(30),
            ..SampleLatencies::default()
        };
        assert_eq!(sample.latencies, latencies);
    }

    /// Goal: what does not belong to an operation is absent, whatever its bits are. Method: a
    /// branch whose register of accesses holds the latencies of another operation, an uncached
    /// load, and an operation of neither kind.
    #[test]
    fn fields_of_other_operations_are_absent() {
        let stale = 1 << 7 | 90 << 32 | 30 << 48;
        let branch = raw(ALL, &[VALID, 0x10, 0b1011 << 34, 0, stale, 5, 6, 0x40_2000, 0]);
        let sample = decode_op(&branch, 1).unwrap();
        assert_eq!(sample.address, Some(0x40_2000));
        assert_eq!((sample.events.taken, sample.events.mispredicted), (Some(true), Some(false)));
        assert_eq!((sample.events.dcache_miss, sample.events.dtlb_miss), (None, None));
        assert_eq!((sample.latencies.dcache_refill, sample.latencies.translation), (None, None));
        // Without the register of targets, the next one is another register.
        let without = raw(ALL & !(1 << BRANCH_TARGET), &[VALID, 0, 1 << 37, 0, 0, 0, 0, 9]);
        assert_eq!(decode_op(&without, 1).unwrap().address, None);
        let uncached = raw(ALL, &[VALID, 0x10, 0, 0, 1 | 1 << 14 | stale, 0, 0]);
        assert_eq!(decode_op(&uncached, 1).unwrap().events, SampleEvents::default());
        let other = raw(ALL, &[VALID, 0x10, 3 << 16, 0, 0, 0, 0]);
        let sample = decode_op(&other, 1).unwrap();
        assert_eq!((sample.events, sample.address), (SampleEvents::default(), None));
    }

    #[test]
    fn operations_without_an_instruction_are_left_out() {
        let lost = [VALID, 0x10, 1 << 38, 0, 0, 0, 0];
        assert_eq!(decode_op(&raw(ALL, &lost), 1), None);
        // This processor does not have the bit.
        assert!(decode_op(&raw(ALL & !(1 << RIP_INVALID_CHECK), &lost), 1).is_some());
        assert_eq!(decode_op(&raw(ALL, &[0, 0x10, 0, 0, 0, 0, 0]), 1), None);
    }

    #[test]
    fn fetches_complete_or_abort() {
        let misses = 1 << 51 | 1 << 55 | 1 << 56;
        let control = 1 << 49 | 1 << 50 | misses | 44 << 32;
        let sample = decode_fetch(&raw(ALL, &[control, 0x40_1000, 0, 25]), 3).unwrap();
        assert_eq!((sample.pc, sample.outcome), (0x40_1000, Some(Outcome::Fetched)));
        let both = (sample.events.icache_miss, sample.events.itlb_miss);
        assert_eq!(both, (Some(true), Some(true)));
        let latencies = &sample.latencies;
        assert_eq!((latencies.fetch, latencies.fetch_to_abort), (Some(44), None));
        assert_eq!(latencies.translation, Some(25));
        let aborted = 1 << 49 | 9 << 32;
        let sample = decode_fetch(&raw(ALL, &[aborted, 0x40_1000, 0, 0]), 3).unwrap();
        assert_eq!(sample.outcome, Some(Outcome::Aborted(None)));
        assert_eq!((sample.events.icache_miss, sample.events.itlb_miss), (None, None));
        assert_eq!((sample.latencies.fetch, sample.latencies.fetch_to_abort), (None, Some(9)));
        assert_eq!(decode_fetch(&raw(ALL, &[1 << 50, 0, 0]), 3), None, "it is not valid");
    }

    #[test]
    fn samples_that_are_cut_are_left_out() {
        let op = raw(ALL, &[VALID, 1, 2, 3, 4, 5]);
        let fetch = raw(ALL, &[1 << 49, 1]);
        assert!(decode_op(&op, 1).is_some() && decode_fetch(&fetch, 1).is_some());
        assert!((0..op.len()).all(|length| decode_op(&op[..length], 1).is_none()));
        assert!((0..fetch.len()).all(|length| decode_fetch(&fetch[..length], 1).is_none()));
    }
}
