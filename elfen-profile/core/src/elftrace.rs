//! The file of a trace, `.elftrace`.
//!
//! ```text
//! ELFTRAC1   length of the header (u32)   header (JSON)   numbers, zlib   CRC-32 of all before
//! ```
//!
//! The numbers are LEB128: first the blocks with their instructions, then the blocks that ran, then
//! the addresses. Most blocks are followed by the same block as last time, and most accesses are
//! near their last address, so these are differences. A file is input: every count, number and
//! length is checked.

use std::io::{self, BufReader, BufWriter, Read, Write};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};

use crate::instruction::{ACCESSES_MAX, Access, Class, Instruction, RegisterSet};
use crate::trace::{Block, BlockNumber, CodeFile, Trace, TraceFault};

const MAGIC: &[u8; 8] = b"ELFTRAC1";
const CRC_BYTES: usize = 4;
const HEADER_MAX: usize = 1 << 24;
/// Instructions that a trace can hold.
pub const EXECUTED_MAX: u64 = 200_000_000;
const BLOCKS_MAX: u64 = 1 << 24;
const BLOCK_INSTRUCTIONS_MAX: u64 = 1 << 12;
const ADDRESSES_MAX: u64 = 1 << 28;

/// Why a file is not a trace.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it is not a trace of Elfen")]
    Magic,
    #[error("it is a trace of another version of Elfen")]
    Version,
    #[error("it is cut short or damaged")]
    Damaged,
    #[error("its header is invalid: {0}")]
    Header(serde_json::Error),
    #[error("it holds more than the {EXECUTED_MAX} instructions that a trace can hold")]
    TooLong,
    #[error("{0}")]
    Fault(#[from] TraceFault),
}

#[derive(Serialize, Deserialize)]
struct Header {
    program: Vec<String>,
    files: Vec<CodeFile>,
    skipped: u64,
    untraced_accesses: u64,
    blocks: u64,
    runs: u64,
    addresses: u64,
}

/// Writes a trace.
pub fn write(trace: &Trace, out: impl Write) -> io::Result<()> {
    let header = Header {
        program: trace.program.clone(),
        files: trace.files.clone(),
        skipped: trace.skipped,
        untraced_accesses: trace.untraced_accesses,
        blocks: trace.blocks.len() as u64,
        runs: trace.runs.len() as u64,
        addresses: trace.addresses.len() as u64,
    };
    let header = serde_json::to_vec(&header)?;
    let mut out = Summed { out: BufWriter::new(out), crc: crc32fast::Hasher::new() };
    out.write_all(MAGIC)?;
    let length = u32::try_from(header.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&header)?;
    let mut numbers = BufWriter::new(ZlibEncoder::new(out, Compression::fast()));
    for block in &trace.blocks {
        put_block(trace, block, &mut numbers)?;
    }
    let mut following = Following::new(trace.blocks.len());
    for &run in &trace.runs {
        put_difference(run.into(), following.expect().into(), &mut numbers)?;
        following.note(run);
    }
    let mut last = LastAddresses::new(trace);
    let mut addresses = trace.addresses.iter();
    for &run in &trace.runs {
        for (known, &address) in last.of(run).iter_mut().zip(&mut addresses) {
            put_difference(address, *known, &mut numbers)?;
            *known = address;
        }
    }
    let encoder = numbers.into_inner().map_err(io::IntoInnerError::into_error)?;
    let Summed { mut out, crc } = encoder.finish()?;
    out.write_all(&crc.finalize().to_le_bytes())?;
    out.flush()
}

/// Reads a trace.
pub fn read(mut input: impl Read) -> Result<Trace, ReadError> {
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes)?;
    parse(&bytes)
}

/// Reads a trace from the bytes of its file.
pub fn parse(bytes: &[u8]) -> Result<Trace, ReadError> {
    let (name, version) = MAGIC.split_at(MAGIC.len() - 1);
    let rest = bytes.strip_prefix(name).ok_or(ReadError::Magic)?;
    if !rest.is_empty() && !rest.starts_with(version) {
        return Err(ReadError::Version);
    }
    let (body, crc) = bytes.split_last_chunk::<CRC_BYTES>().ok_or(ReadError::Damaged)?;
    if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
        return Err(ReadError::Damaged);
    }
    let rest = body.get(MAGIC.len()..).ok_or(ReadError::Damaged)?;
    let (length, rest) = rest.split_first_chunk().ok_or(ReadError::Damaged)?;
    let length = u32::from_le_bytes(*length) as usize;
    let header = rest.get(..length).filter(|_| length <= HEADER_MAX).ok_or(ReadError::Damaged)?;
    let header: Header = serde_json::from_slice(header).map_err(ReadError::Header)?;
    if header.runs > EXECUTED_MAX || header.addresses > ADDRESSES_MAX {
        return Err(ReadError::TooLong);
    }
    let numbers = rest.get(length..).ok_or(ReadError::Damaged)?;
    // One byte more than a number, so that what follows the last one is seen.
    let mut numbers = Numbers(BufReader::with_capacity(1 << 16, ZlibDecoder::new(numbers)));
    let mut trace = Trace {
        program: header.program,
        files: header.files,
        skipped: header.skipped,
        untraced_accesses: header.untraced_accesses,
        ..Trace::default()
    };
    if header.blocks > BLOCKS_MAX {
        return Err(ReadError::Damaged);
    }
    for _ in 0..header.blocks {
        take_block(&mut trace, &mut numbers).ok_or(ReadError::Damaged)?;
    }
    let mut following = Following::new(trace.blocks.len());
    let mut executed = 0;
    for _ in 0..header.runs {
        let run = numbers.difference(following.expect().into());
        let run = run.and_then(|run| BlockNumber::try_from(run).ok()).ok_or(ReadError::Damaged)?;
        let block = trace.block(run).ok_or(TraceFault::Run(run))?;
        executed += block.instructions.len() as u64;
        if executed > EXECUTED_MAX {
            return Err(ReadError::TooLong);
        }
        following.note(run);
        trace.runs.push(run);
    }
    let mut last = LastAddresses::new(&trace);
    let mut addresses = Vec::new();
    for &run in &trace.runs {
        for known in last.of(run) {
            *known = numbers.difference(*known).ok_or(ReadError::Damaged)?;
            addresses.push(*known);
        }
        if addresses.len() as u64 > header.addresses {
            return Err(ReadError::Damaged);
        }
    }
    trace.addresses = addresses;
    if numbers.number().is_some() || trace.addresses.len() as u64 != header.addresses {
        return Err(ReadError::Damaged);
    }
    trace.check()?;
    Ok(trace)
}

/// Which block follows which: the same as last time.
struct Following {
    after: Vec<BlockNumber>,
    last: usize,
}

impl Following {
    fn new(blocks: usize) -> Self {
        Self { after: vec![0; blocks], last: usize::MAX }
    }

    fn expect(&self) -> BlockNumber {
        self.after.get(self.last).copied().unwrap_or(0)
    }

    fn note(&mut self, run: BlockNumber) {
        if let Some(after) = self.after.get_mut(self.last) {
            *after = run;
        }
        self.last = run as usize;
    }
}

/// The last address of each access of each instruction.
struct LastAddresses {
    /// Where those of each block begin.
    first: Vec<usize>,
    addresses: Vec<u64>,
}

impl LastAddresses {
    fn new(trace: &Trace) -> Self {
        let mut first = vec![0];
        let mut sum = 0;
        for block in &trace.blocks {
            sum += trace.code(block).iter().map(Instruction::addresses).sum::<usize>();
            first.push(sum);
        }
        Self { first, addresses: vec![0; sum] }
    }

    fn of(&mut self, run: BlockNumber) -> &mut [u64] {
        let range = self.first.get(run as usize..).and_then(|rest| rest.first_chunk());
        let found = range.and_then(|&[from, to]| self.addresses.get_mut(from..to));
        found.unwrap_or_default()
    }
}

/// The kind of an access, in a byte.
const PRESENT: u64 = 1;
const READS: u64 = 2;
const WRITES: u64 = 4;

fn put_block(trace: &Trace, block: &Block, out: &mut impl Write) -> io::Result<()> {
    put(block.start, out)?;
    let (file, offset) = block.place.map_or((0, 0), |(file, at)| (u64::from(file) + 1, at));
    put(file, out)?;
    put(offset, out)?;
    put(block.target.is_some().into(), out)?;
    if let Some(target) = block.target {
        put_difference(target, block.start, out)?;
    }
    put(block.instructions.len() as u64, out)?;
    for one in trace.code(block) {
        let class = Class::ALL.iter().position(|class| *class == one.class).unwrap_or(0);
        put(class as u64, out)?;
        put(one.length.into(), out)?;
        for set in [one.sources, one.destinations, one.early] {
            put(set.0, out)?;
        }
        for access in one.accesses {
            let kind = access.map_or(0, |one| {
                PRESENT + READS * u64::from(one.reads) + WRITES * u64::from(one.writes)
            });
            put(kind, out)?;
            if let Some(access) = access {
                put(access.bytes.into(), out)?;
            }
        }
        put(one.has_unknown_addresses.into(), out)?;
    }
    Ok(())
}

fn take_block(trace: &mut Trace, numbers: &mut Numbers<impl Read>) -> Option<()> {
    let start = numbers.number()?;
    let (file, offset) = (numbers.number()?, numbers.number()?);
    let place = match file.checked_sub(1) {
        Some(file) => Some((u32::try_from(file).ok()?, offset)),
        None => None,
    };
    let target = match numbers.number()? {
        0 => None,
        1 => Some(numbers.difference(start)?),
        _ => return None,
    };
    let count = numbers.number().filter(|&count| count <= BLOCK_INSTRUCTIONS_MAX)?;
    let first = u32::try_from(trace.instructions.len()).ok()?;
    for _ in 0..count {
        trace.instructions.push(take_instruction(numbers)?);
    }
    let instructions = first..u32::try_from(trace.instructions.len()).ok()?;
    trace.blocks.push(Block { start, place, instructions, target });
    Some(())
}

fn take_instruction(numbers: &mut Numbers<impl Read>) -> Option<Instruction> {
    let class = *Class::ALL.get(usize::try_from(numbers.number()?).ok()?)?;
    let length = u8::try_from(numbers.number()?).ok()?;
    let mut one = Instruction { length, ..Instruction::new(class) };
    one.sources = RegisterSet(numbers.number()?);
    one.destinations = RegisterSet(numbers.number()?);
    one.early = RegisterSet(numbers.number()?);
    for number in 0..ACCESSES_MAX {
        let kind = numbers.number().filter(|&kind| kind <= PRESENT | READS | WRITES)?;
        if kind & PRESENT != 0 {
            let bytes = u16::try_from(numbers.number()?).ok()?;
            let (reads, writes) = (kind & READS != 0, kind & WRITES != 0);
            // The second one is present only with the first.
            if number > 0 && one.accesses[number - 1].is_none() {
                return None;
            }
            one.accesses[number] = Some(Access { reads, writes, bytes });
        }
    }
    one.has_unknown_addresses = match numbers.number()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    Some(one)
}

fn put(mut number: u64, out: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; 10];
    let mut length = 0;
    while number >= 0x80 {
        bytes[length] = number.to_le_bytes()[0] | 0x80;
        number >>= 7;
        length += 1;
    }
    bytes[length] = number.to_le_bytes()[0];
    out.write_all(&bytes[..=length])
}

/// Writes a number as its difference to another one, of either sign.
fn put_difference(number: u64, from: u64, out: &mut impl Write) -> io::Result<()> {
    let difference = number.wrapping_sub(from).cast_signed();
    put((difference << 1 ^ difference >> 63).cast_unsigned(), out)
}

struct Numbers<R>(R);

impl<R: Read> Numbers<R> {
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let mut byte = [0];
            self.0.read_exact(&mut byte).ok()?;
            number |= u64::from(byte[0] & 0x7f) << shift;
            if byte[0] < 0x80 {
                return (shift < 63 || byte[0] <= 1).then_some(number);
            }
        }
        None
    }

    fn difference(&mut self, from: u64) -> Option<u64> {
        let number = self.number()?;
        let difference = (number >> 1).cast_signed() ^ -(number & 1).cast_signed();
        Some(from.wrapping_add(difference.cast_unsigned()))
    }
}

/// Sums what is written.
struct Summed<W> {
    out: W,
    crc: crc32fast::Hasher,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.crc.update(bytes.get(..written).unwrap_or(&[]));
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;
    use crate::synthetic::random;

    fn written(trace: &Trace) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(trace, &mut bytes).unwrap();
        bytes
    }

    fn trace() -> Trace {
        let mut trace = random(7, 40, 2000);
        trace.files.push(CodeFile { path: "/bin/a".into(), build_id: "0f".into() });
        trace.blocks[3].place = Some((0, 0x1000));
        trace.instructions[5].has_unknown_addresses = true;
        trace.skipped = 1 << 40;
        trace
    }

    #[test]
    fn a_trace_is_read_as_written() {
        for trace in [trace(), Trace::default()] {
            assert_eq!(parse(&written(&trace)).unwrap(), trace);
            assert_eq!(read(written(&trace).as_slice()).unwrap(), trace);
        }
    }

    #[test]
    fn damaged_files_are_refused() {
        let bytes = written(&trace());
        assert!(matches!(parse(b"PK\x03\x04"), Err(ReadError::Magic)));
        assert!(matches!(parse(b"ELFTRAC9"), Err(ReadError::Version)));
        for length in 8..bytes.len() {
            assert!(matches!(parse(&bytes[..length]), Err(ReadError::Damaged)), "{length}");
        }
        for at in 8..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(matches!(parse(&damaged), Err(ReadError::Damaged)), "{at}");
        }
    }

    /// Goal: a file whose checksum is right, but whose contents are not, is refused or is a valid
    /// trace; it never panics. Method: random bytes of the numbers, compressed again.
    #[test]
    fn hostile_files_are_refused() {
        let bytes = written(&trace());
        let header = 12 + u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        let mut numbers = Vec::new();
        let compressed = &bytes[header..bytes.len() - CRC_BYTES];
        ZlibDecoder::new(compressed).read_to_end(&mut numbers).unwrap();
        let with = |numbers: &[u8], header: &[u8]| {
            let mut encoder = ZlibEncoder::new(header.to_vec(), Compression::fast());
            encoder.write_all(numbers).unwrap();
            let mut file = encoder.finish().unwrap();
            let crc = crc32fast::hash(&file);
            file.extend(crc.to_le_bytes());
            parse(&file)
        };
        assert_eq!(with(&numbers, &bytes[..header]).unwrap(), trace());
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut refused = 0;
        for _ in 0..3000 {
            let mut hostile = numbers.clone();
            for _ in 0..random.random_range(1..4) {
                let at = random.random_range(0..hostile.len());
                hostile[at] = random.random();
            }
            match with(&hostile, &bytes[..header]) {
                Ok(trace) => assert_eq!(trace.check(), Ok(())),
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 500, "{refused}");
        // Fewer and more numbers than the header says.
        assert!(with(&numbers[..numbers.len() - 1], &bytes[..header]).is_err());
        assert!(with(&[&numbers[..], &[0]].concat(), &bytes[..header]).is_err());
        for (field, value) in [("\"runs\":", "9999999999"), ("\"blocks\":", "9999999999999")] {
            let text = String::from_utf8(bytes[12..header].to_vec()).unwrap();
            let at = text.find(field).unwrap() + field.len();
            let end = at + text[at..].find([',', '}']).unwrap();
            let text = format!("{}{value}{}", &text[..at], &text[end..]);
            let length = u32::try_from(text.len()).unwrap().to_le_bytes();
            let header = [&MAGIC[..], &length, text.as_bytes()].concat();
            assert!(with(&numbers, &header).is_err(), "{field}");
        }
    }
}
