//! Writes and reads recordings. They are read from memory that was just written, or from a file,
//! which is untrusted input.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use miniz_oxide::deflate::core::{
    CompressionStrategy, CompressorOxide, TDEFLFlush, compress_to_output,
    create_comp_flags_from_zip_params,
};
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use super::form::{
    CHUNK_BLOCK_BYTES, CHUNK_BYTES, CHUNK_MARK, ChunkHead, EXPANSION_MAX, GAP, HEAD_BYTES,
    HEAD_MARK, Head, Kind, MAGIC, NOT_RUNNING, OTHER, RUNS_MAX, Run, State, TAGS_MAX, TAIL_MARK,
    VERSION, take, unzigzag,
};
use super::pool::Pool;
use crate::observe::{OBSERVERS_MAX, WORDS_MAX};

/// The maximum size of a file in bytes. The whole file is read into memory.
const FILE_BYTES: u64 = 4 << 30;

/// The level of DEFLATE. A higher level reduces the size by less than one percent.
const LEVEL: i32 = 6;

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is a {0}, not a file")]
    NoFile(&'static str),
    #[error("it is empty")]
    Empty,
    #[error("it has {0} bytes, more than {FILE_BYTES}")]
    TooLong(u64),
    #[error("it is not a recording: it does not begin with ELFNSHIM")]
    Magic,
    #[error("it is of version {0}; this build reads version {VERSION}")]
    Version(u32),
    #[error("it ends before its first chunk")]
    CutInHead,
    #[error("its head is damaged: {0}")]
    Head(&'static str),
    #[error("its head is not the expected JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its chunk at byte {at} is damaged: {why}")]
    Chunk { at: usize, why: &'static str },
}

/// Writes a complete file to `out`, which must be empty.
pub fn write(head: &Head, pool: &Pool, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    let text = serde_json::to_vec(head)?;
    if text.len() > HEAD_BYTES {
        return Err(io::Error::other("the head is too long"));
    }
    write_block(HEAD_MARK, &text, out)?;
    let chunks = pool.chunks();
    for (chunk, runs) in &chunks {
        write_chunk(chunk, &pack(runs), out)?;
    }
    write_block(TAIL_MARK, &(chunks.len() as u64).to_le_bytes(), out)?;
    out.flush()
}

/// Writes a chunk with these compressed bytes.
pub(super) fn write_chunk(chunk: &ChunkHead, packed: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let (first, runs) = (chunk.first_ticks.to_le_bytes(), chunk.runs.to_le_bytes());
    write_block(CHUNK_MARK, &[&[chunk.series], &first[..], &runs, packed].concat(), out)
}

/// Writes a block: its mark, the length of its payload, a checksum over both and the payload, and
/// the payload.
fn write_block(mark: u8, payload: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(io::Error::other)?.to_le_bytes();
    let head = [&[mark], &length[..]].concat();
    out.write_all(&head)?;
    out.write_all(&checksum(&head, payload).to_le_bytes())?;
    out.write_all(payload)
}

/// Compresses a chunk's runs by DEFLATE.
pub(super) fn pack(runs: &[u8]) -> Vec<u8> {
    let packed = deflate(runs, CompressionStrategy::Default);
    if packed.len() * EXPANSION_MAX >= runs.len() {
        return packed;
    }
    // Without references to earlier bytes, each byte takes at least one bit.
    deflate(runs, CompressionStrategy::HuffmanOnly)
}

fn deflate(runs: &[u8], strategy: CompressionStrategy) -> Vec<u8> {
    let flags = create_comp_flags_from_zip_params(LEVEL, 0, strategy as i32);
    let mut packed = Vec::new();
    let mut compressor = CompressorOxide::new(flags);
    compress_to_output(&mut compressor, runs, TDEFLFlush::Finish, |part| {
        packed.extend_from_slice(part);
        true
    });
    packed
}

/// Decompresses the runs of a chunk, and checks that no bytes follow them.
fn unpack(packed: &[u8]) -> Result<Vec<u8>, &'static str> {
    let mut runs = vec![0; CHUNK_BYTES.min(packed.len() * EXPANSION_MAX)];
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, read, written) =
        decompress(&mut DecompressorOxide::new(), packed, &mut runs, 0, flags);
    runs.truncate(written);
    match status {
        TINFLStatus::Done if read == packed.len() => Ok(runs),
        TINFLStatus::Done => Err("it has bytes after its compressed runs"),
        TINFLStatus::HasMoreOutput => Err("it unpacks to too many bytes"),
        _ => Err("it cannot be unpacked"),
    }
}

/// The checksum over a head and its payload. For the fuzzer it is 0, because the fuzzer cannot
/// compute checksums for the bytes that it changes.
pub(super) fn checksum(fields: &[u8], bytes: &[u8]) -> u32 {
    if cfg!(fuzzing) {
        return 0;
    }
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(fields);
    checksum.update(bytes);
    checksum.finalize()
}

/// A complete recording.
#[derive(Debug)]
pub struct Recording {
    pub head: Head,
    /// Runs of each signal, in order. Each run ends where the next one starts. The last run is a
    /// gap that only marks the end.
    pub runs: Vec<Vec<Run>>,
    /// Whether the file was truncated.
    pub cut: bool,
}

/// Opens and reads a file.
pub fn open(path: &Path) -> Result<Recording, ReadError> {
    // Opening a FIFO would otherwise wait for a writer.
    let options = libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = File::options().read(true).custom_flags(options).open(path)?;
    let about = file.metadata()?;
    match about.len() {
        _ if about.is_dir() => return Err(ReadError::NoFile("folder")),
        _ if !about.is_file() => return Err(ReadError::NoFile("device or a pipe")),
        0 => return Err(ReadError::Empty),
        bytes if bytes > FILE_BYTES => return Err(ReadError::TooLong(bytes)),
        _ => {}
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES).read_to_end(&mut bytes)?;
    Recording::parse(&bytes)
}

impl Recording {
    /// Reads the chunks that were just recorded.
    pub fn of(head: Head, pool: &Pool) -> Result<Self, ReadError> {
        let mut recording = Self::empty(head)?;
        for (chunk, bytes) in pool.chunks() {
            recording.add(&chunk, bytes).map_err(|why| ReadError::Chunk { at: 0, why })?;
        }
        Ok(recording)
    }

    fn empty(head: Head) -> Result<Self, ReadError> {
        if head.signals.len() > WORDS_MAX * 2 * OBSERVERS_MAX {
            return Err(ReadError::Head("too many signals"));
        }
        let of_all = head.observers.iter().try_fold(0_usize, |sum, one| {
            (one.signals > 0).then(|| sum.checked_add(one.signals)).flatten()
        });
        if !head.observers.is_empty() && of_all != Some(head.signals.len()) {
            return Err(ReadError::Head("its observers do not have all signals"));
        }
        if head.clock.ticks_per_second == 0 || head.clock.step_ticks == 0 {
            return Err(ReadError::Head("its clock has no rate or no step"));
        }
        let runs = head.signals.iter().map(|_| Vec::new()).collect();
        Ok(Self { head, runs, cut: false })
    }

    /// Reads the bytes of a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReadError> {
        let magic = bytes.get(..MAGIC.len()).unwrap_or(bytes);
        if !MAGIC.starts_with(magic) {
            return Err(ReadError::Magic);
        }
        let mut rest = bytes.get(MAGIC.len()..).ok_or(ReadError::CutInHead)?;
        let version = u32::from_le_bytes(take_some(&mut rest).ok_or(ReadError::CutInHead)?);
        if version != VERSION {
            return Err(ReadError::Version(version));
        }
        let head = match take_block(&mut rest).map_err(ReadError::Head)? {
            Some((HEAD_MARK, text)) => serde_json::from_slice(text)?,
            Some(_) => return Err(ReadError::Head("it does not come first")),
            None => return Err(ReadError::CutInHead),
        };
        let mut recording = Self::empty(head)?;
        let (mut chunks, mut runs) = (0_u64, 0);
        loop {
            let at = bytes.len() - rest.len();
            let wrong = |why| ReadError::Chunk { at, why };
            let Some((mark, mut payload)) = take_block(&mut rest).map_err(wrong)? else {
                recording.cut = true;
                return Ok(recording);
            };
            match mark {
                CHUNK_MARK => {}
                TAIL_MARK if payload == chunks.to_le_bytes() && rest.is_empty() => {
                    return Ok(recording);
                }
                TAIL_MARK => return Err(wrong("the tail has another number of chunks")),
                _ => return Err(wrong("it is a second head")),
            }
            let chunk = take_chunk_head(&mut payload).ok_or_else(|| wrong("it has no head"))?;
            runs += u64::from(chunk.runs);
            if runs > RUNS_MAX {
                return Err(wrong("the file has too many runs"));
            }
            let unpacked = unpack(payload).map_err(wrong)?;
            recording.add(&chunk, &unpacked).map_err(wrong)?;
            chunks += 1;
        }
    }

    /// Adds the runs of one chunk. A run starts with two numbers: its length in units of the clock,
    /// and its samples combined with its state. For a value, a third number follows. It is the
    /// difference from the previous value, or the number of a tag. If the tag is new, its value is
    /// a fourth number.
    fn add(&mut self, chunk: &ChunkHead, mut bytes: &[u8]) -> Result<(), &'static str> {
        let index = usize::from(chunk.series);
        let signal = self.head.signals.get(index).ok_or("its signal does not exist")?;
        let (runs, kind, step) = (&mut self.runs[index], signal.kind, self.head.clock.unit());
        let mut ticks = chunk.first_ticks;
        if runs.last().is_some_and(|last| last.start_ticks > ticks) {
            return Err("it begins before the end of the previous chunk");
        }
        let mut value = 0_u64;
        let mut tags = Vec::new();
        for _ in 0..chunk.runs {
            let mut number = || take(&mut bytes).ok_or("it ends inside of a run");
            let start_ticks = ticks;
            let end = number()?.checked_mul(step).and_then(|far| ticks.checked_add(far));
            ticks = end.ok_or("its time overflows")?;
            let coded = number()?;
            let state = match coded & 3 {
                GAP => State::Gap,
                NOT_RUNNING => State::NotRunning,
                OTHER => State::Other,
                _ if kind == Kind::Values => {
                    value = value.wrapping_add(unzigzag(number()?));
                    State::Value(value)
                }
                _ => {
                    let tag = usize::try_from(number()?).unwrap_or(usize::MAX);
                    if tag == tags.len() && tag < TAGS_MAX {
                        tags.push(number()?);
                    }
                    State::Value(
                        *tags.get(tag).ok_or("it refers to a tag that it does not define")?,
                    )
                }
            };
            runs.push(Run { start_ticks, state, samples: coded >> 2 });
        }
        if bytes.is_empty() { Ok(()) } else { Err("it has bytes after its last run") }
    }

    /// The start of the first run and the end of the last one, in ticks.
    pub fn span(&self) -> Option<(u64, u64)> {
        let first = self.runs.iter().filter_map(|runs| Some(runs.first()?.start_ticks)).min()?;
        let last = self.runs.iter().filter_map(|runs| Some(runs.last()?.start_ticks)).max()?;
        Some((first, last))
    }

    /// A signal's runs with their ends, including all gaps. [`Recording::joined`] joins runs
    /// through gaps.
    pub fn runs_with_ends(&self, signal: usize) -> impl Iterator<Item = (Run, u64)> + Clone {
        let runs = self.runs.get(signal).map_or(&[][..], Vec::as_slice);
        runs.windows(2).map(|pair| (pair[0], pair[1].start_ticks))
    }

    /// Cuts the recording to the part between two times, in nanoseconds from its start.
    pub fn cut_to(&mut self, from_ns: u64, to_ns: u64) {
        self.cut(from_ns, to_ns);
        if let (Some(began), Some((first, _))) = (self.head.began, self.span()) {
            self.head.began = Some(began.at(first, &self.head.clock));
        }
    }

    fn cut(&mut self, from_ns: u64, to_ns: u64) {
        let Some((first, _)) = self.span() else { return };
        let clock = self.head.clock;
        // In whole units of the clock, because times are written in these units.
        let at = |ns| clock.ticks(ns) / clock.unit() * clock.unit();
        let [from, to] = [from_ns, to_ns].map(|ns| first.saturating_add(at(ns)));
        for runs in &mut self.runs {
            let ends: Vec<u64> = runs.iter().skip(1).map(|run| run.start_ticks).collect();
            let mut kept: Vec<Run> = Vec::new();
            for (run, end) in runs.iter().zip(&ends) {
                if *end <= from || run.start_ticks >= to {
                    continue;
                }
                kept.push(Run { start_ticks: run.start_ticks.max(from), ..*run });
            }
            if let (Some(_), Some(&end)) = (kept.last(), ends.last()) {
                let end = end.min(to);
                kept.push(Run { start_ticks: end, state: State::Gap, samples: 0 });
            }
            *runs = kept;
        }
    }
}

/// Takes a block and verifies it. Returns `None` if the file ends inside the block.
fn take_block<'a>(rest: &mut &'a [u8]) -> Result<Option<(u8, &'a [u8])>, &'static str> {
    let mut after = *rest;
    let Some((head, sum)) = take_some::<5>(&mut after).zip(take_some(&mut after)) else {
        return Ok(None);
    };
    let [mark, length @ ..] = head;
    let most = match mark {
        HEAD_MARK => HEAD_BYTES,
        CHUNK_MARK => CHUNK_BLOCK_BYTES,
        TAIL_MARK => size_of::<u64>(),
        _ => return Err("it does not begin with a mark"),
    };
    let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > most {
        return Err("it is too long");
    }
    let Some((payload, after)) = after.split_at_checked(length) else { return Ok(None) };
    if checksum(&head, payload) != u32::from_le_bytes(sum) {
        return Err("its checksum is wrong");
    }
    *rest = after;
    Ok(Some((mark, payload)))
}

fn take_chunk_head(payload: &mut &[u8]) -> Option<ChunkHead> {
    let [series] = take_some(payload)?;
    let first_ticks = u64::from_le_bytes(take_some(payload)?);
    let runs = u32::from_le_bytes(take_some(payload)?);
    Some(ChunkHead { series, first_ticks, runs, bytes: 0 })
}

fn take_some<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(*taken)
}
