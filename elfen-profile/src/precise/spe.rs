//! Samples of Arm's Statistical Profiling Extension.
//!
//! The processor writes packets into the buffer: a header, and one to eight bytes of payload. The
//! packets of one operation end with an end packet or with a time. The format is that of the
//! "Statistical Profiling Extension Sample Record Specification" in Arm's architecture manual.

use elfen_core_model::sample::{InstructionSample, Outcome, SampleEvents, SampleLatencies};

use super::bits::{bit, number};
use super::records::{AUX_COLLISION, AUX_TRUNCATED, AuxPiece};

/// Headers of packets.
const PADDING: u8 = 0x00;
const END: u8 = 0x01;
const TIME: u8 = 0x71;
/// From here on, each header has the length of its payload.
const FIRST_WITH_LENGTH: u8 = 0x20;

/// Kinds of addresses and of counters.
const ADDRESS_PC: u8 = 0;
const ADDRESS_TARGET: u8 = 1;
const ADDRESS_DATA: u8 = 2;
const COUNTER_TOTAL: u8 = 0;
const COUNTER_ISSUE: u8 = 1;
const COUNTER_TRANSLATION: u8 = 2;

/// Classes of operations.
const CLASS_MEMORY: u8 = 1;
const CLASS_BRANCH: u8 = 2;

/// An address without its tag, or without its exception level.
const ADDRESS: u64 = (1 << 56) - 1;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Packet {
    Padding,
    End,
    Time,
    Address(u8, u64),
    Counter(u8, u64),
    Events(u64),
    Operation(u8, u64),
    /// Its context, where data came from (which each processor numbers in its own way), or a kind
    /// that is not known.
    Other,
}

/// Why bytes cannot be read as a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NoPacket {
    Cut,
    /// No packet has this header, so its length is not known.
    Unknown,
}

/// What the packets of one operation have said so far.
#[derive(Clone, Copy, Default, Debug)]
struct Operation {
    pc: Option<u64>,
    target: Option<u64>,
    data: Option<u64>,
    events: Option<u64>,
    class: Option<(u8, u64)>,
    total: Option<u32>,
    issue: Option<u32>,
    translation: Option<u32>,
}

impl Operation {
    fn note(&mut self, packet: Packet) {
        match packet {
            Packet::Address(ADDRESS_PC, value) => self.pc = Some(value),
            Packet::Address(ADDRESS_TARGET, value) => self.target = Some(value & ADDRESS),
            Packet::Address(ADDRESS_DATA, value) => self.data = Some(value & ADDRESS),
            Packet::Counter(COUNTER_TOTAL, value) => self.total = Some(number(value, 0, 16)),
            Packet::Counter(COUNTER_ISSUE, value) => self.issue = Some(number(value, 0, 16)),
            Packet::Counter(COUNTER_TRANSLATION, value) => {
                self.translation = Some(number(value, 0, 16));
            }
            Packet::Events(value) => self.events = Some(value),
            Packet::Operation(class, value) => self.class = Some((class, value)),
            _ => {}
        }
    }

    /// `None` without an address, or for an operation of the kernel.
    fn sample(&self, context: u32) -> Option<InstructionSample> {
        let pc = self.pc.filter(|pc| pc >> 61 & 3 == 0)? & ADDRESS;
        let event = |at| self.events.map(|events| bit(events, at));
        let is_branch = self.class.is_some_and(|(class, _)| class == CLASS_BRANCH);
        let is_load =
            self.class.is_some_and(|(class, kind)| class == CLASS_MEMORY && !bit(kind, 0));
        let after_issue = self.total.zip(self.issue).and_then(|(all, one)| all.checked_sub(one));
        Some(InstructionSample {
            context: Some(context),
            pc,
            instruction: None,
            address: self.data.or(self.target),
            events: SampleEvents {
                dcache_miss: event(3).filter(|_| event(2) == Some(true)),
                dtlb_miss: event(5).filter(|_| event(4) == Some(true)),
                taken: event(6).filter(|_| is_branch).map(|not_taken| !not_taken),
                mispredicted: event(7).filter(|_| is_branch),
                trap: event(0),
                ..SampleEvents::default()
            },
            outcome: event(1).map(
                |retires| {
                    if retires { Outcome::Retired } else { Outcome::Aborted(None) }
                },
            ),
            history: None,
            latencies: SampleLatencies {
                map_to_issue: self.issue,
                issue_to_retire_ready: after_issue,
                load_issue_to_completion: after_issue.filter(|_| is_load),
                translation: self.translation,
                ..SampleLatencies::default()
            },
        })
    }
}

/// Samples of one piece of the buffer.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct SpeSamples {
    pub(crate) samples: Vec<InstructionSample>,
    /// Operations that are cut at the end, or hold a packet that is not known.
    pub(crate) damaged: u64,
}

/// Decodes a piece of the buffer that begins at `position`, which alignment refers to.
pub(crate) fn decode(bytes: &[u8], position: u64, context: u32) -> SpeSamples {
    let mut found = SpeSamples::default();
    let mut operation = Some(Operation::default());
    let (mut at, mut has_begun) = (0, false);
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        let (packet, length) = match next(rest, position.wrapping_add(at as u64)) {
            Ok(found) => found,
            Err(NoPacket::Cut) => {
                has_begun = true;
                break;
            }
            Err(NoPacket::Unknown) => {
                operation = None;
                has_begun = true;
                at += 1;
                continue;
            }
        };
        at += length;
        match packet {
            Packet::Padding => {}
            Packet::End | Packet::Time => {
                match operation {
                    Some(whole) => found.samples.extend(whole.sample(context)),
                    None => found.damaged += 1,
                }
                operation = Some(Operation::default());
                has_begun = false;
            }
            packet => {
                has_begun = true;
                if let Some(operation) = &mut operation {
                    operation.note(packet);
                }
            }
        }
    }
    found.damaged += u64::from(has_begun);
    found
}

/// Decodes a piece that the kernel has announced. Each loss that it reports is one operation at
/// least.
pub(crate) fn decode_piece(bytes: &[u8], piece: &AuxPiece, context: u32) -> SpeSamples {
    // Of a piece that is longer than the buffer, the last bytes are left.
    let gone = piece.bytes.saturating_sub(bytes.len() as u64);
    let mut found = decode(bytes, piece.from.wrapping_add(gone), context);
    let losses = [AUX_TRUNCATED, AUX_COLLISION].iter().filter(|&&flag| piece.flags & flag != 0);
    found.damaged += losses.count() as u64;
    found
}

/// A packet and its length.
fn next(bytes: &[u8], position: u64) -> Result<(Packet, usize), NoPacket> {
    let &first = bytes.first().ok_or(NoPacket::Cut)?;
    match first {
        PADDING => return Ok((Packet::Padding, 1)),
        END => return Ok((Packet::End, 1)),
        _ if first < FIRST_WITH_LENGTH => return Err(NoPacket::Unknown),
        _ => {}
    }
    // A header of two bytes has two more bits for the kind.
    let is_extended = first & 0xfc == 0x20;
    let header = if is_extended { *bytes.get(1).ok_or(NoPacket::Cut)? } else { first };
    if is_extended && header == PADDING {
        let alignment = 2_u64 << (first & 0xf);
        let padding = alignment - position % alignment;
        return Ok((Packet::Padding, usize::try_from(padding).map_err(|_| NoPacket::Unknown)?));
    }
    let length = 1_usize << (header >> 4 & 3);
    let from = if is_extended { 2 } else { 1 };
    let payload = bytes.get(from..from + length).ok_or(NoPacket::Cut)?;
    let mut value = [0; 8];
    value[..length].copy_from_slice(payload);
    let value = u64::from_le_bytes(value);
    let kind = header & 7 | if is_extended { (first & 3) << 3 } else { 0 };
    let packet = match header {
        _ if header & 0xf8 == 0xb0 => Packet::Address(kind, value),
        _ if header & 0xf8 == 0x98 => Packet::Counter(kind, value),
        TIME if !is_extended => Packet::Time,
        _ if header & 0xcf == 0x42 && !is_extended => Packet::Events(value),
        _ if header & 0xfc == 0x48 && !is_extended => Packet::Operation(header & 3, value),
        _ => Packet::Other,
    };
    Ok((packet, from + length))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load that misses the cache and walks the page tables, with a time at its end.
    fn load(pc: u64) -> Vec<u8> {
        let mut bytes = vec![0xb0];
        bytes.extend(pc.to_le_bytes());
        // Its context, at EL1.
        bytes.extend([0x65, 1, 2, 3, 4]);
        bytes.extend([0x49, 0x00, 0x52, 0b0011_1110, 0x03]);
        bytes.extend([0x98, 100, 0, 0x99, 30, 0, 0x9a, 12, 0]);
        bytes.push(0xb2);
        bytes.extend((0xff << 56 | 0xffff_1234_u64).to_le_bytes());
        bytes.extend([0x43, 0x0d, 0x71, 1, 2, 3, 4, 5, 6, 7, 8]);
        bytes
    }

    #[test]
    fn a_load_that_misses() {
        let found = decode(&load(0x40_1000), 0, 5);
        assert_eq!(found.damaged, 0);
        let [sample] = &found.samples[..] else { panic!("{found:?}") };
        assert_eq!((sample.context, sample.pc), (Some(5), 0x40_1000));
        assert_eq!(sample.address, Some(0xffff_1234), "the tag is left out");
        assert_eq!(sample.outcome, Some(Outcome::Retired));
        let events = SampleEvents {
            dcache_miss: Some(true),
            dtlb_miss: Some(true),
            trap: Some(false),
            ..SampleEvents::default()
        };
        assert_eq!(sample.events, events);
        let latencies = SampleLatencies {
            map_to_issue: Some(30),
            issue_to_retire_ready: Some(70),
            load_issue_to_completion: Some(70),
            translation: Some(12),
            ..SampleLatencies::default()
        };
        assert_eq!(sample.latencies, latencies);
    }

    /// Goal: a branch that aborts has no fields of memory. Method: its header has two bytes, and
    /// its end has no time.
    #[test]
    fn a_branch_that_aborts() {
        let mut bytes = vec![0x20, 0xb0];
        bytes.extend(0x40_2000_u64.to_le_bytes());
        bytes.extend([0x4a, 0x01, 0x42, 0b1100_0000, 0xb1]);
        bytes.extend(0x40_3000_u64.to_le_bytes());
        bytes.extend([0x98, 9, 0, 0x01]);
        let found = decode(&bytes, 0, 5);
        let [sample] = &found.samples[..] else { panic!("{found:?}") };
        assert_eq!((sample.pc, sample.address), (0x40_2000, Some(0x40_3000)));
        assert_eq!(sample.outcome, Some(Outcome::Aborted(None)));
        assert_eq!((sample.events.taken, sample.events.mispredicted), (Some(false), Some(true)));
        assert_eq!((sample.events.dcache_miss, sample.events.dtlb_miss), (None, None));
        let latencies = &sample.latencies;
        assert_eq!((latencies.map_to_issue, latencies.issue_to_retire_ready), (None, None));
    }

    #[test]
    fn padding_and_alignment_are_skipped() {
        let mut bytes = vec![0x00, 0x00, 0x20, 0x00];
        bytes.extend(load(0x10));
        bytes.extend([0x00, 0x00]);
        let found = decode(&bytes, 60, 1);
        assert_eq!((found.samples.len(), found.damaged), (1, 0));
        // Alignment to 2, 8 and 16 bytes.
        assert_eq!(next(&[0x20, 0x00], 62), Ok((Packet::Padding, 2)));
        assert_eq!(next(&[0x22, 0x00], 62), Ok((Packet::Padding, 2)));
        assert_eq!(next(&[0x23, 0x00], 56), Ok((Packet::Padding, 8)));
    }

    /// Goal: packets of later versions are skipped by their length.
    #[test]
    fn unknown_kinds_are_skipped() {
        let mut bytes =
            vec![0xe2, END, 2, 3, 4, 0x22, 0x92, END, END, 0xb7, 1, 2, 3, 4, 5, 6, 7, 8];
        bytes.extend(load(0x10));
        assert_eq!(decode(&bytes, 0, 1), decode(&load(0x10), 0, 1));
    }

    #[test]
    fn operations_of_the_kernel_and_without_address_are_left_out() {
        let mut bytes = load(0x40_1000 | 1 << 61);
        bytes.extend([0x49, 0x00, END]);
        assert_eq!(decode(&bytes, 0, 1), SpeSamples::default());
    }

    /// Goal: a cut or wrong packet costs its own operation only. Method: three loads, of which the
    /// second has a header that no packet has; then the third is cut at each byte.
    #[test]
    fn damage_costs_one_operation() {
        let mut bytes = load(1);
        let second = bytes.len();
        bytes.extend(load(2));
        // In place of its class.
        bytes[second + 14] = 0x1f;
        let third = bytes.len();
        bytes.extend(load(3));
        let found = decode(&bytes, 0, 1);
        let pcs: Vec<u64> = found.samples.iter().map(|sample| sample.pc).collect();
        assert_eq!((&pcs[..], found.damaged), (&[1, 3][..], 1));
        for end in third + 1..bytes.len() {
            let found = decode(&bytes[..end], 0, 1);
            assert_eq!((found.samples.len(), found.damaged), (1, 2), "{end}");
        }
    }
}
