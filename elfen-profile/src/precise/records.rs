//! Records that the kernel writes into the buffer of an event, as linux/perf_event.h describes
//! them.
//!
//! The crate perf-event2 does not know latencies as a structure (`PERF_SAMPLE_WEIGHT_STRUCT`), so
//! it would read the fields behind them wrongly. Only the fields that events here ask for are read.

use std::ops::Range;

/// Fields of samples (`PERF_SAMPLE_*`), in the order in which the kernel writes them.
pub(crate) const SAMPLE_IP: u64 = 1 << 0;
pub(crate) const SAMPLE_TID: u64 = 1 << 1;
pub(crate) const SAMPLE_ADDR: u64 = 1 << 3;
pub(crate) const SAMPLE_RAW: u64 = 1 << 10;
pub(crate) const SAMPLE_WEIGHT_STRUCT: u64 = 1 << 24;
pub(crate) const SAMPLE_DATA_SRC: u64 = 1 << 15;

/// Kinds of records (`PERF_RECORD_*`).
const LOST: u32 = 2;
const COMM: u32 = 3;
const THROTTLE: u32 = 5;
const FORK: u32 = 7;
const SAMPLE: u32 = 9;
const MMAP2: u32 = 10;
const AUX: u32 = 11;
const LOST_SAMPLES: u32 = 13;

/// Bits of a record's header (`PERF_RECORD_MISC_*`).
const MODE: u16 = 7;
const MODE_USER: u16 = 2;
const IS_EXEC: u16 = 1 << 13;
const IS_EXACT: u16 = 1 << 14;

/// Bits of `PERF_RECORD_AUX`.
pub(crate) const AUX_TRUNCATED: u64 = 1;
pub(crate) const AUX_COLLISION: u64 = 8;

const HEADER_BYTES: usize = 8;
/// Rights of a mapping (`PROT_EXEC`).
const EXECUTABLE: u32 = 4;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum PerfRecord<'a> {
    Sample(RawSample<'a>),
    /// A process has mapped a file.
    Mapped {
        process: u32,
        range: Range<u64>,
        offset: u64,
        path: String,
    },
    /// A thread was created, in a new process or in the one that has created it.
    Forked {
        process: u32,
        parent: u32,
        thread: u32,
    },
    /// A process executes another program.
    Executed {
        process: u32,
    },
    /// A piece of the second buffer was written.
    Aux(AuxPiece),
    /// Samples or other records that found no room.
    Lost(u64),
    /// The kernel stopped the event for the rest of a tick: its interrupts took too long.
    Throttled,
}

/// The fields of a sample. A field that was not asked for is 0.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RawSample<'a> {
    pub(crate) pc: u64,
    pub(crate) process: u32,
    pub(crate) thread: u32,
    pub(crate) address: u64,
    pub(crate) raw: &'a [u8],
    pub(crate) weight: u64,
    pub(crate) data_source: u64,
    /// It was taken in user space.
    pub(crate) is_user: bool,
    /// The address is that of the instruction itself.
    pub(crate) is_exact: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AuxPiece {
    /// Counts all bytes that were ever written.
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    pub(crate) flags: u64,
}

/// All records of some bytes. `sample_type` has the fields of samples. Also returns how many bytes
/// at the end are no records.
pub(crate) fn parse(mut bytes: &[u8], sample_type: u64) -> (Vec<PerfRecord<'_>>, usize) {
    let mut records = Vec::new();
    while let Some((record, rest)) = next(bytes) {
        let Record { kind, flags, body } = record;
        records.extend(parse_one(kind, flags, Fields(body), sample_type));
        bytes = rest;
    }
    (records, bytes.len())
}

struct Record<'a> {
    kind: u32,
    flags: u16,
    body: &'a [u8],
}

fn next(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let mut fields = Fields(bytes);
    let kind = fields.half()?;
    let flags_and_size = fields.half()?;
    let [flags, size] = [flags_and_size & 0xffff, flags_and_size >> 16];
    let size = usize::try_from(size).ok().filter(|&size| size >= HEADER_BYTES)?;
    let (record, rest) = bytes.split_at_checked(size)?;
    let flags = u16::try_from(flags).ok()?;
    Some((Record { kind, flags, body: &record[HEADER_BYTES..] }, rest))
}

/// `None` for a record that is of no use, or is cut.
fn parse_one<'a>(
    kind: u32,
    flags: u16,
    mut fields: Fields<'a>,
    sample_type: u64,
) -> Option<PerfRecord<'a>> {
    match kind {
        SAMPLE => sample(flags, fields, sample_type).map(PerfRecord::Sample),
        MMAP2 => mapping(fields),
        FORK => {
            let [process, parent] = [fields.half()?, fields.half()?];
            Some(PerfRecord::Forked { process, parent, thread: fields.half()? })
        }
        COMM if flags & IS_EXEC != 0 => Some(PerfRecord::Executed { process: fields.half()? }),
        AUX => {
            let [from, bytes, flags] = [fields.word()?, fields.word()?, fields.word()?];
            Some(PerfRecord::Aux(AuxPiece { from, bytes, flags }))
        }
        LOST => {
            let _event = fields.word()?;
            fields.word().map(PerfRecord::Lost)
        }
        LOST_SAMPLES => fields.word().map(PerfRecord::Lost),
        THROTTLE => Some(PerfRecord::Throttled),
        _ => None,
    }
}

fn sample<'a>(flags: u16, mut fields: Fields<'a>, sample_type: u64) -> Option<RawSample<'a>> {
    let mut sample = RawSample {
        is_user: flags & MODE == MODE_USER,
        is_exact: flags & IS_EXACT != 0,
        ..RawSample::default()
    };
    let has = |field| sample_type & field != 0;
    if has(SAMPLE_IP) {
        sample.pc = fields.word()?;
    }
    if has(SAMPLE_TID) {
        sample.process = fields.half()?;
        sample.thread = fields.half()?;
    }
    if has(SAMPLE_ADDR) {
        sample.address = fields.word()?;
    }
    if has(SAMPLE_RAW) {
        let length = usize::try_from(fields.half()?).ok()?;
        sample.raw = fields.bytes(length)?;
    }
    if has(SAMPLE_WEIGHT_STRUCT) {
        sample.weight = fields.word()?;
    }
    if has(SAMPLE_DATA_SRC) {
        sample.data_source = fields.word()?;
    }
    Some(sample)
}

fn mapping<'a>(mut fields: Fields<'a>) -> Option<PerfRecord<'a>> {
    let process = fields.half()?;
    let _thread = fields.half()?;
    let [start, length, offset] = [fields.word()?, fields.word()?, fields.word()?];
    // The file by its device and inode, or by its build id.
    fields.bytes(24)?;
    let rights = fields.half()?;
    let _flags = fields.half()?;
    let path = fields.0.split(|&byte| byte == 0).next()?;
    let range = start..start.checked_add(length)?;
    (rights & EXECUTABLE != 0).then(|| PerfRecord::Mapped {
        process,
        range,
        offset,
        path: String::from_utf8_lossy(path).into_owned(),
    })
}

/// What is left of a record.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (found, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(found)
    }

    fn word(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.bytes(8)?.first_chunk()?))
    }

    fn half(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(*self.bytes(4)?.first_chunk()?))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record(kind: u32, flags: u16, body: &[u8]) -> Vec<u8> {
        let size = u16::try_from(HEADER_BYTES + body.len()).unwrap();
        [&kind.to_le_bytes()[..], &flags.to_le_bytes(), &size.to_le_bytes(), body].concat()
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|one| one.to_le_bytes()).collect()
    }

    const PEBS: u64 = SAMPLE_IP | SAMPLE_TID | SAMPLE_ADDR | SAMPLE_WEIGHT_STRUCT | SAMPLE_DATA_SRC;

    #[test]
    fn fields_of_samples_follow_their_type() {
        let body = words(&[0x40_1000, 7 << 32 | 6, 0x7fff, 230, 0x42]);
        let bytes = record(SAMPLE, IS_EXACT | MODE_USER, &body);
        let sample = RawSample {
            pc: 0x40_1000,
            process: 6,
            thread: 7,
            address: 0x7fff,
            raw: &[],
            weight: 230,
            data_source: 0x42,
            is_user: true,
            is_exact: true,
        };
        assert_eq!(parse(&bytes, PEBS), (vec![PerfRecord::Sample(sample)], 0));
        let mut body = words(&[1, 2]);
        body.extend([8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]);
        let bytes = record(SAMPLE, 1, &body);
        let (records, _) = parse(&bytes, SAMPLE_IP | SAMPLE_TID | SAMPLE_RAW);
        let [PerfRecord::Sample(sample)] = records[..] else { panic!("{records:?}") };
        assert_eq!(sample.raw, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(!sample.is_user && !sample.is_exact);
        // A raw part that is longer than its record.
        body[16] = 0xff;
        let bytes = record(SAMPLE, 1, &body);
        assert!(parse(&bytes, SAMPLE_IP | SAMPLE_TID | SAMPLE_RAW).0.is_empty());
    }

    #[test]
    fn other_records_are_read() {
        let mut map = words(&[7 << 32 | 6, 0x1000, 0x2000, 0x3000, 0, 0, 0, 2 << 32 | 5]);
        map.extend(b"/bin/a\0\0");
        let mut data = map.clone();
        data[56] = 3;
        let fork = words(&[6 << 32 | 8, 7 << 32 | 9, 0]);
        let bytes = [
            record(MMAP2, 0, &map),
            record(MMAP2, 0, &data),
            record(FORK, 0, &fork),
            record(COMM, IS_EXEC, &words(&[6, 0])),
            record(COMM, 0, &words(&[6, 0])),
            record(AUX, 0, &words(&[64, 32, AUX_TRUNCATED])),
            record(LOST, 0, &words(&[1, 5])),
            record(LOST_SAMPLES, 0, &words(&[3])),
            record(THROTTLE, 0, &words(&[1, 2, 3])),
            record(99, 0, &[]),
        ]
        .concat();
        let path = "/bin/a".to_owned();
        let expected = vec![
            PerfRecord::Mapped { process: 6, range: 0x1000..0x3000, offset: 0x3000, path },
            PerfRecord::Forked { process: 8, parent: 6, thread: 9 },
            PerfRecord::Executed { process: 6 },
            PerfRecord::Aux(AuxPiece { from: 64, bytes: 32, flags: AUX_TRUNCATED }),
            PerfRecord::Lost(5),
            PerfRecord::Lost(3),
            PerfRecord::Throttled,
        ];
        assert_eq!(parse(&bytes, 0), (expected, 0));
    }

    /// Goal: wrong bytes end the parsing. Method: records with a size of less than
    /// their header, or of more than there is.
    #[test]
    fn bytes_that_are_no_records_are_reported() {
        let good = record(LOST_SAMPLES, 0, &words(&[3]));
        for wrong in [vec![9, 0, 0, 0, 0, 0, 7, 0, 1], vec![9, 0, 0, 0, 0, 0, 80, 0], vec![9]] {
            let bytes = [good.clone(), wrong.clone()].concat();
            assert_eq!(parse(&bytes, PEBS), (vec![PerfRecord::Lost(3)], wrong.len()));
        }
    }
}
