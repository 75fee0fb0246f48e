//! Samples of Intel's Processor Event-Based Sampling.
//!
//! The kernel reads the processor's records, and translates them: where the data came from
//! (`union perf_mem_data_src`), and latencies (`union perf_sample_weight`), as in
//! linux/perf_event.h. A field that a record lacks is 0 there, or "not available".
//!
//! The second latency of the weights is left out: what it measures differs between processors.

use elfen_core_model::sample::{InstructionSample, Outcome, SampleEvents, SampleLatencies};

use super::bits::{bit, number};

/// Bits of the source of data: the operation, the level, and the TLB.
const LOAD: u32 = 1;
const STORE: u32 = 2;
const LEVEL: u32 = 5;
const LEVEL_UNKNOWN: u32 = 0;
const LEVEL_HIT: u32 = 1;
const LEVEL_MISS: u32 = 2;
const LEVEL_L1: u32 = 3;
const LEVEL_OTHERS: u32 = 0x3ff0;
const LEVEL_UNCACHED: u32 = 13;
const TLB: u32 = 26;
const TLB_UNKNOWN: u32 = 0;
const TLB_HIT: u32 = 1;
const TLB_MISS: u32 = 2;
/// Newer kernels may give the level only as a number.
const LEVEL_NUMBER: u32 = 33;
const NUMBER_L1: u32 = 1;
const NUMBER_UNKNOWN: [u32; 2] = [0, 15];

/// The fields of a sample that PEBS fills.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct PebsFields {
    pub(crate) pc: u64,
    pub(crate) address: u64,
    pub(crate) weight: u64,
    pub(crate) data_source: u64,
}

/// Decodes a sample. PEBS records instructions that retire.
pub(crate) fn decode(fields: PebsFields, context: u32) -> InstructionSample {
    let PebsFields { pc, address, weight, data_source } = fields;
    let (is_load, is_store) = (bit(data_source, LOAD), bit(data_source, STORE));
    let has_memory = is_load || is_store;
    let load_latency = number(weight, 0, 32);
    let between_retirements = number(weight, 48, 16);
    InstructionSample {
        context: Some(context),
        pc,
        instruction: None,
        address: (has_memory && address != 0).then_some(address),
        events: SampleEvents {
            dcache_miss: dcache_miss(data_source).filter(|_| has_memory),
            dtlb_miss: dtlb_miss(data_source).filter(|_| has_memory),
            ..SampleEvents::default()
        },
        outcome: Some(Outcome::Retired),
        history: None,
        latencies: SampleLatencies {
            load_issue_to_completion: (is_load && load_latency > 0).then_some(load_latency),
            between_retirements: (between_retirements > 0).then_some(between_retirements),
            ..SampleLatencies::default()
        },
    }
}

/// A line that was on its way already is a miss: the access had to wait for it.
fn dcache_miss(data_source: u64) -> Option<bool> {
    let level = |at| bit(data_source, LEVEL + at);
    let level_number = number(data_source, LEVEL_NUMBER, 4);
    let others = u64::from(LEVEL_OTHERS) << LEVEL;
    if level(LEVEL_UNCACHED) {
        None
    } else if level(LEVEL_L1) {
        match (level(LEVEL_HIT), level(LEVEL_MISS)) {
            (true, false) => Some(false),
            (false, true) => Some(true),
            _ => None,
        }
    } else if data_source & others != 0 {
        Some(true)
    } else if level(LEVEL_UNKNOWN) || NUMBER_UNKNOWN.contains(&level_number) {
        None
    } else {
        Some(level_number != NUMBER_L1)
    }
}

fn dtlb_miss(data_source: u64) -> Option<bool> {
    let tlb = |at| bit(data_source, TLB + at);
    match (tlb(TLB_HIT), tlb(TLB_MISS)) {
        (true, false) if !tlb(TLB_UNKNOWN) => Some(false),
        (false, true) if !tlb(TLB_UNKNOWN) => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOT_AVAILABLE: u64 = 1 | 1 << LEVEL | 1 << 19 | 1 << 24 | 1 << TLB;

    fn levels(bits: &[u32]) -> u64 {
        bits.iter().fold(0, |all, at| all | 1 << (LEVEL + at))
    }

    #[test]
    fn a_load_that_misses() {
        let fields = PebsFields {
            pc: 0x40_1000,
            address: 0x7fff_1234,
            weight: 5 << 48 | 300 << 32 | 230,
            // From L3, by a walk of the page tables.
            data_source: 1 << LOAD | levels(&[LEVEL_HIT, 6]) | 1 << (TLB + TLB_MISS) | 3 << 33,
        };
        let sample = decode(fields, 8);
        assert_eq!((sample.pc, sample.address), (0x40_1000, Some(0x7fff_1234)));
        assert_eq!((sample.context, sample.outcome), (Some(8), Some(Outcome::Retired)));
        let events = SampleEvents {
            dcache_miss: Some(true),
            dtlb_miss: Some(true),
            ..SampleEvents::default()
        };
        assert_eq!(sample.events, events);
        let latencies = SampleLatencies {
            load_issue_to_completion: Some(230),
            between_retirements: Some(5),
            ..SampleLatencies::default()
        };
        assert_eq!(sample.latencies, latencies);
    }

    #[test]
    fn an_instruction_without_memory_has_only_its_address() {
        let fields = PebsFields { pc: 0x10, address: 0, weight: 0, data_source: NOT_AVAILABLE };
        let sample = decode(fields, 8);
        assert_eq!((sample.pc, sample.address), (0x10, None));
        assert_eq!(sample.events, SampleEvents::default());
        assert_eq!(sample.latencies, SampleLatencies::default());
    }

    #[test]
    fn levels_tell_hits_from_misses() {
        let of = |bits: &[u32]| dcache_miss(levels(bits));
        assert_eq!(of(&[LEVEL_HIT, LEVEL_L1]), Some(false));
        assert_eq!(of(&[LEVEL_MISS, LEVEL_L1]), Some(true));
        assert_eq!(of(&[LEVEL_HIT, 4]), Some(true), "the line is on its way");
        assert_eq!(of(&[LEVEL_HIT, 7]), Some(true), "it comes from memory");
        assert_eq!(of(&[LEVEL_HIT, LEVEL_UNCACHED]), None);
        assert_eq!(of(&[LEVEL_UNKNOWN]), None);
        assert_eq!(of(&[]), None);
        let numbers = [1, 2, 13, 15].map(|number| dcache_miss(number << LEVEL_NUMBER));
        assert_eq!(numbers, [Some(false), Some(true), Some(true), None]);
        assert_eq!(dtlb_miss(1 << (TLB + TLB_HIT) | 1 << (TLB + 3)), Some(false));
        assert_eq!(dtlb_miss(1 << TLB), None);
        assert_eq!(dtlb_miss(0), None);
    }
}
