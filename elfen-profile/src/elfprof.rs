//! The file of a profile, `.elfprof`: a JSON header, and columns of numbers.
//!
//! ```text
//! ELFPROF1   length of the header (u32)   header (JSON)   columns, zlib   CRC-32 of all before
//! ```
//!
//! A column holds one field of all blocks or edges, as LEB128 numbers. Sorted columns hold
//! differences. A file is input: every count, index and length is checked.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use elfen_core_model::estimate::{LATENCIES, Mean, RATES, SiteEstimate};
use elfen_stream::counts::EdgeKind;
use miniz_oxide::deflate::compress_to_vec_zlib;
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use serde::{Deserialize, Serialize};

use crate::profile::{
    BlockCount, Caller, DataReference, DataStream, Edge, EdgeCount, FIRST_CALLER, FIRST_PATH_BLOCK,
    PathBlock, PathCount, Place, Profile, ProfiledFile, ProfiledRule, RuleCount, RuleMember,
    STREAM_REFERENCES_MAX, SampledEvent, SampledPlace, Source, StackCount, StackEnd, StreamCount,
    ValueCount,
};

const MAGIC: &[u8; 8] = b"ELFPROF1";
const CRC_BYTES: usize = 4;
/// A longer file is none of ours.
const FILE_BYTES_MAX: u64 = 1 << 31;
/// More than a profile of the largest program takes.
const COLUMNS_MAX: usize = 1 << 30;
/// Columns take up less than this more, and this many times the bytes that they are compressed to.
const COLUMNS_MORE: usize = 1 << 24;
const COLUMNS_TIMES: usize = 64;
const COMPRESSION: u8 = 6;
const BLOCK_COLUMNS: usize = 6;
const EDGE_COLUMNS: usize = 7;
const CALLER_COLUMNS: usize = 3;
const STACK_COLUMNS: usize = 5;
const PATH_BLOCK_COLUMNS: usize = 3;
const PATH_COLUMNS: usize = 4;
const RULE_COLUMNS: usize = 7;
const VALUE_COLUMNS: usize = 6;
const TOP_COLUMNS: usize = 2;
/// The place and the event; samples and outcomes; two for each mean.
const SAMPLE_COLUMNS: usize = 3 + OUTCOMES + 2 * MEANS;
const OUTCOMES: usize = 6;
const MEANS: usize = LATENCIES + 1 + RATES;
const STREAM_COLUMNS: usize = 5;
const REFERENCE_COLUMNS: usize = 4;

/// Why a file is not a profile.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it is not a profile of Elfen")]
    Magic,
    #[error("it is cut short or damaged")]
    Damaged,
    #[error("its header is invalid: {0}")]
    Header(serde_json::Error),
}

#[derive(Serialize, Deserialize)]
struct Header {
    program: Vec<String>,
    by: Source,
    bursts: u64,
    ran_ns: u64,
    cost_ns: u64,
    files: Vec<ProfiledFile>,
    instructions: u64,
    programs: u64,
    left: Vec<String>,
    #[serde(default)]
    calls: [u64; 5],
    #[serde(default)]
    faults: u64,
    blocks: usize,
    edges: usize,
    #[serde(default)]
    callers: usize,
    #[serde(default)]
    stacks: usize,
    #[serde(default)]
    path_blocks: usize,
    #[serde(default)]
    paths: usize,
    #[serde(default)]
    rules: Vec<ProfiledRule>,
    #[serde(default)]
    rule_counts: usize,
    #[serde(default)]
    values: usize,
    /// Of all instructions in `values` together.
    #[serde(default)]
    top_values: usize,
    #[serde(default)]
    sampled_events: Vec<SampledEvent>,
    #[serde(default)]
    samples: usize,
    #[serde(default)]
    regions: Vec<String>,
    #[serde(default)]
    references: u64,
    #[serde(default)]
    streams: usize,
    /// Of all `streams` together.
    #[serde(default)]
    stream_references: usize,
}

/// The kinds of edges by their numbers in a file.
const KINDS: [EdgeKind; 8] = [
    EdgeKind::Falls,
    EdgeKind::Jump,
    EdgeKind::Taken,
    EdgeKind::Call,
    EdgeKind::ComputedJump,
    EdgeKind::ComputedCall,
    EdgeKind::Return,
    EdgeKind::ReturnFar,
];

/// Writes a profile.
pub fn write(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    let header = Header {
        program: profile.program.clone(),
        by: profile.by,
        bursts: profile.bursts,
        ran_ns: profile.ran_ns,
        cost_ns: profile.cost_ns,
        files: profile.files.clone(),
        instructions: profile.instructions,
        programs: profile.programs,
        left: profile.left.clone(),
        calls: profile.calls,
        faults: profile.faults,
        blocks: profile.blocks.len(),
        edges: profile.edges.len(),
        callers: profile.callers.len(),
        stacks: profile.stacks.len(),
        path_blocks: profile.path_blocks.len(),
        paths: profile.paths.len(),
        rules: profile.rules.clone(),
        rule_counts: profile.rule_counts.len(),
        values: profile.values.len(),
        top_values: profile.values.values().map(|one| one.top.len()).sum(),
        sampled_events: profile.sampled_events.clone(),
        samples: profile.samples.len(),
        regions: profile.regions.clone(),
        references: profile.references,
        streams: profile.streams.len(),
        stream_references: profile.streams.keys().map(|one| one.references.len()).sum(),
    };
    let header = serde_json::to_vec(&header)?;
    let mut columns = Vec::new();
    let blocks: Vec<[u64; BLOCK_COLUMNS]> = profile.blocks.iter().map(block_row).collect();
    let edges: Vec<[u64; EDGE_COLUMNS]> = profile.edges.iter().map(edge_row).collect();
    put_columns(&blocks, &mut columns);
    put_columns(&edges, &mut columns);
    let callers: Vec<[u64; CALLER_COLUMNS]> = profile.callers.iter().map(caller_row).collect();
    let stacks: Vec<[u64; STACK_COLUMNS]> = profile.stacks.iter().map(stack_row).collect();
    put_columns(&callers, &mut columns);
    put_columns(&stacks, &mut columns);
    let path_blocks = profile.path_blocks.iter().map(path_block_row);
    let path_blocks: Vec<[u64; PATH_BLOCK_COLUMNS]> = path_blocks.collect();
    let paths: Vec<[u64; PATH_COLUMNS]> = profile.paths.iter().map(path_row).collect();
    put_columns(&path_blocks, &mut columns);
    put_columns(&paths, &mut columns);
    let rule_counts: Vec<[u64; RULE_COLUMNS]> = profile.rule_counts.iter().map(rule_row).collect();
    put_columns(&rule_counts, &mut columns);
    let values: Vec<[u64; VALUE_COLUMNS]> = profile.values.iter().map(value_row).collect();
    let tops = profile.values.values().flat_map(|one| &one.top);
    let tops: Vec<[u64; TOP_COLUMNS]> = tops.map(|&(value, count)| [value, count]).collect();
    put_columns(&values, &mut columns);
    put_columns(&tops, &mut columns);
    let samples: Vec<[u64; SAMPLE_COLUMNS]> = profile.samples.iter().map(sample_row).collect();
    put_columns(&samples, &mut columns);
    let streams: Vec<[u64; STREAM_COLUMNS]> = profile.streams.iter().map(stream_row).collect();
    let references = profile.streams.keys().flat_map(|one| &one.references).map(reference_row);
    let references: Vec<[u64; REFERENCE_COLUMNS]> = references.collect();
    put_columns(&streams, &mut columns);
    put_columns(&references, &mut columns);
    let mut bytes = MAGIC.to_vec();
    let length = u32::try_from(header.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    bytes.extend(length.to_le_bytes());
    bytes.extend(header);
    bytes.extend(compress_to_vec_zlib(&columns, COMPRESSION));
    let crc = crc32fast::hash(&bytes);
    bytes.extend(crc.to_le_bytes());
    out.write_all(&bytes)
}

/// Reads a profile.
pub fn read(path: &Path) -> Result<Profile, ReadError> {
    let mut bytes = Vec::new();
    let mut file = File::open(path)?.take(FILE_BYTES_MAX + 1);
    // Anything else may be without end.
    file.by_ref().take(MAGIC.len() as u64).read_to_end(&mut bytes)?;
    if bytes == MAGIC {
        file.read_to_end(&mut bytes)?;
    }
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(ReadError::Damaged);
    }
    parse(&bytes)
}

pub fn parse(bytes: &[u8]) -> Result<Profile, ReadError> {
    if !bytes.starts_with(MAGIC) {
        return Err(ReadError::Magic);
    }
    let (body, crc) = bytes.split_last_chunk::<CRC_BYTES>().ok_or(ReadError::Damaged)?;
    if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
        return Err(ReadError::Damaged);
    }
    let rest = body.get(MAGIC.len()..).ok_or(ReadError::Damaged)?;
    let (length, rest) = rest.split_first_chunk::<4>().ok_or(ReadError::Damaged)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| ReadError::Damaged)?;
    let (header, columns) = rest.split_at_checked(length).ok_or(ReadError::Damaged)?;
    let header: Header = serde_json::from_slice(header).map_err(ReadError::Header)?;
    let most = columns.len().saturating_mul(COLUMNS_TIMES).saturating_add(COLUMNS_MORE);
    let columns = decompress_to_vec_zlib_with_limit(columns, most.min(COLUMNS_MAX))
        .map_err(|_| ReadError::Damaged)?;
    let mut columns = Columns(&columns);
    let found = (|| {
        let blocks = columns.rows(header.blocks)?;
        let edges = columns.rows(header.edges)?;
        let callers = columns.rows(header.callers)?;
        let stacks = columns.rows(header.stacks)?;
        let path_blocks = columns.rows(header.path_blocks)?;
        let paths = columns.rows(header.paths)?;
        let rule_counts = columns.rows(header.rule_counts)?;
        let values: Vec<[u64; VALUE_COLUMNS]> = columns.rows(header.values)?;
        let tops: Vec<[u64; TOP_COLUMNS]> = columns.rows(header.top_values)?;
        let samples = columns.rows(header.samples)?;
        let streams: Vec<[u64; STREAM_COLUMNS]> = columns.rows(header.streams)?;
        let references: Vec<[u64; REFERENCE_COLUMNS]> = columns.rows(header.stream_references)?;
        let files = header.files.len();
        let blocks = blocks.iter().map(|row| block(row, files)).collect::<Option<_>>()?;
        let edges = edges.iter().map(|row| edge(row, files)).collect::<Option<_>>()?;
        let callers: Vec<Caller> = (FIRST_CALLER..)
            .zip(&callers)
            .map(|(number, row)| caller(row, number, files))
            .collect::<Option<_>>()?;
        let limit = FIRST_CALLER.checked_add(u32::try_from(callers.len()).ok()?)?;
        let stacks = stacks.iter().map(|row| stack(row, limit, files)).collect::<Option<_>>()?;
        let path_blocks: Vec<PathBlock> = (FIRST_PATH_BLOCK..)
            .zip(&path_blocks)
            .map(|(number, row)| path_block(row, number, files))
            .collect::<Option<_>>()?;
        let limit = FIRST_PATH_BLOCK.checked_add(u32::try_from(path_blocks.len()).ok()?)?;
        let paths = paths.iter().map(|row| path(row, limit)).collect::<Option<_>>()?;
        let rule_counts = rule_counts
            .iter()
            .map(|row| rule_count(row, header.rules.len(), files))
            .collect::<Option<_>>()?;
        let mut tops = &tops[..];
        let values = values.iter().map(|row| value(row, &mut tops, files));
        let values = values.collect::<Option<_>>().filter(|_| tops.is_empty())?;
        let events = header.sampled_events.len();
        let samples =
            samples.iter().map(|row| sample(row, events, files)).collect::<Option<_>>()?;
        let mut references = &references[..];
        let limits = [header.rules.len(), files, header.regions.len()];
        let streams = streams.iter().map(|row| stream_of_data(row, &mut references, limits));
        let streams = streams.collect::<Option<_>>().filter(|_| references.is_empty())?;
        let noted = (values, samples, streams);
        Some((blocks, edges, callers, stacks, path_blocks, paths, rule_counts, noted))
    })();
    let (blocks, edges, callers, stacks, path_blocks, paths, rule_counts, noted) =
        found.ok_or(ReadError::Damaged)?;
    let (values, samples, streams) = noted;
    Ok(Profile {
        program: header.program,
        by: header.by,
        bursts: header.bursts,
        ran_ns: header.ran_ns,
        cost_ns: header.cost_ns,
        files: header.files,
        blocks,
        edges,
        callers,
        stacks,
        path_blocks,
        paths,
        rules: header.rules,
        rule_counts,
        values,
        sampled_events: header.sampled_events,
        samples,
        regions: header.regions,
        streams,
        references: header.references,
        instructions: header.instructions,
        programs: header.programs,
        left: header.left,
        calls: header.calls,
        faults: header.faults,
    })
}

fn value_row((place, one): (&Place, &ValueCount)) -> [u64; VALUE_COLUMNS] {
    let ValueCount { bytes, count, bursts, ref top } = *one;
    [place.file.into(), place.offset, bytes.into(), count, bursts, top.len() as u64]
}

/// Takes the values of an instruction from the front of `tops`.
fn value(
    row: &[u64; VALUE_COLUMNS],
    tops: &mut &[[u64; TOP_COLUMNS]],
    files: usize,
) -> Option<(Place, ValueCount)> {
    let &[file, offset, bytes, count, bursts, length] = row;
    let (own, rest) = tops.split_at_checked(usize::try_from(length).ok()?)?;
    *tops = rest;
    let top = own.iter().map(|&[value, count]| (value, count)).collect();
    let bytes = u8::try_from(bytes).ok()?;
    Some((place(file, offset, files)?, ValueCount { bytes, count, bursts, top }))
}

fn sample_row((at, one): (&SampledPlace, &SiteEstimate)) -> [u64; SAMPLE_COLUMNS] {
    let [direction, back, other] = one.aborted;
    let place = [at.place.file.into(), at.place.offset, at.event.into()];
    let outcomes = [one.samples, one.retired, one.fetched, direction, back, other];
    let means = one.latencies.iter().chain([&one.in_progress]).copied().chain(one.rates());
    let mut row = [0; SAMPLE_COLUMNS];
    let fields = place.into_iter().chain(outcomes);
    for (cell, field) in
        row.iter_mut().zip(fields.chain(means.flat_map(|mean| [mean.sum, mean.count])))
    {
        *cell = field;
    }
    row
}

fn sample(
    row: &[u64; SAMPLE_COLUMNS],
    events: usize,
    files: usize,
) -> Option<(SampledPlace, SiteEstimate)> {
    let (&[file, offset, event], row) = row.split_first_chunk()?;
    let (&[samples, retired, fetched, direction, back, other], means) = row.split_first_chunk()?;
    let mut one = SiteEstimate {
        samples,
        retired,
        fetched,
        aborted: [direction, back, other],
        ..SiteEstimate::default()
    };
    let mut means = means.chunks_exact(2).map(|pair| Mean { sum: pair[0], count: pair[1] });
    for mean in &mut one.latencies {
        *mean = means.next()?;
    }
    one.in_progress = means.next()?;
    for mean in one.rates_mut() {
        *mean = means.next()?;
    }
    let event = u32::try_from(event).ok()?;
    let is_known = usize::try_from(event).is_ok_and(|event| event < events);
    is_known.then_some((SampledPlace { place: place(file, offset, files)?, event }, one))
}

/// A rule is one more than its index, or 0 for the streams of the whole program.
fn stream_row((stream, one): (&DataStream, &StreamCount)) -> [u64; STREAM_COLUMNS] {
    let rule = stream.rule.map_or(0, |rule| u64::from(rule) + 1);
    [rule, stream.references.len() as u64, one.times, one.bursts, one.first.into()]
}

fn reference_row(one: &DataReference) -> [u64; REFERENCE_COLUMNS] {
    let DataReference { at, region, distance } = *one;
    [at.file.into(), at.offset, region.into(), distance.cast_unsigned()]
}

/// Takes the references of a stream from the front of `all`. The limits are those of rules, files
/// and regions.
fn stream_of_data(
    row: &[u64; STREAM_COLUMNS],
    all: &mut &[[u64; REFERENCE_COLUMNS]],
    [rules, files, regions]: [usize; 3],
) -> Option<(DataStream, StreamCount)> {
    let &[rule, length, times, bursts, first] = row;
    let rule = match rule.checked_sub(1) {
        Some(rule) => Some(u32::try_from(rule).ok().filter(|&rule| (rule as usize) < rules)?),
        None => None,
    };
    let length = usize::try_from(length).ok()?;
    let (own, rest) = all.split_at_checked(length)?;
    *all = rest;
    let reference = |&[file, offset, region, distance]: &[u64; REFERENCE_COLUMNS]| {
        let region = u32::try_from(region).ok().filter(|&one| (one as usize) < regions)?;
        let at = place(file, offset, files)?;
        Some(DataReference { at, region, distance: distance.cast_signed() })
    };
    let references = own.iter().map(reference).collect::<Option<_>>()?;
    let first = u32::try_from(first).ok()?;
    ((1..=STREAM_REFERENCES_MAX).contains(&length) && (first as usize) < length)
        .then_some((DataStream { rule, references }, StreamCount { times, bursts, first }))
}

fn block_row((start, one): (&Place, &BlockCount)) -> [u64; BLOCK_COLUMNS] {
    let BlockCount { bytes, instructions, count, bursts } = *one;
    [start.file.into(), start.offset, bytes.into(), instructions.into(), count, bursts]
}

fn block(row: &[u64; BLOCK_COLUMNS], files: usize) -> Option<(Place, BlockCount)> {
    let &[file, offset, bytes, instructions, count, bursts] = row;
    let bytes = u32::try_from(bytes).ok()?;
    let instructions = u32::try_from(instructions).ok()?;
    Some((place(file, offset, files)?, BlockCount { bytes, instructions, count, bursts }))
}

fn edge_row((edge, count): (&Edge, &EdgeCount)) -> [u64; EDGE_COLUMNS] {
    let Edge { from, to, kind } = edge;
    let kind = KINDS.iter().position(|one| one == kind).unwrap_or(0) as u64;
    [from.file.into(), from.offset, to.file.into(), to.offset, kind, count.count, count.bursts]
}

fn edge(row: &[u64; EDGE_COLUMNS], files: usize) -> Option<(Edge, EdgeCount)> {
    let &[from_file, from, to_file, to, kind, count, bursts] = row;
    let kind = *KINDS.get(usize::try_from(kind).ok()?)?;
    let (from, to) = (place(from_file, from, files)?, place(to_file, to, files)?);
    Some((Edge { from, to, kind }, EdgeCount { count, bursts }))
}

fn caller_row(one: &Caller) -> [u64; CALLER_COLUMNS] {
    [one.caller.into(), one.call.file.into(), one.call.offset]
}

/// A caller, whose own caller is in front of it.
fn caller(row: &[u64; CALLER_COLUMNS], number: u32, files: usize) -> Option<Caller> {
    let &[caller, file, offset] = row;
    let caller = u32::try_from(caller).ok().filter(|&caller| caller < number)?;
    Some(Caller { caller, call: place(file, offset, files)? })
}

fn stack_row((end, one): (&StackEnd, &StackCount)) -> [u64; STACK_COLUMNS] {
    let StackEnd { caller, block } = *end;
    [caller.into(), block.file.into(), block.offset, one.instructions, one.bursts]
}

fn stack(row: &[u64; STACK_COLUMNS], callers: u32, files: usize) -> Option<(StackEnd, StackCount)> {
    let &[caller, file, offset, instructions, bursts] = row;
    let caller = u32::try_from(caller).ok().filter(|&caller| caller < callers)?;
    let end = StackEnd { caller, block: place(file, offset, files)? };
    Some((end, StackCount { instructions, bursts }))
}

fn path_block_row(one: &PathBlock) -> [u64; PATH_BLOCK_COLUMNS] {
    [one.before.into(), one.block.file.into(), one.block.offset]
}

/// A block of a path, whose own one before is in front of it.
fn path_block(row: &[u64; PATH_BLOCK_COLUMNS], number: u32, files: usize) -> Option<PathBlock> {
    let &[before, file, offset] = row;
    let before = u32::try_from(before).ok().filter(|&before| before < number)?;
    Some(PathBlock { before, block: place(file, offset, files)? })
}

fn path_row((&last, one): (&u32, &PathCount)) -> [u64; PATH_COLUMNS] {
    [last.into(), one.count, one.instructions, one.bursts]
}

fn path(row: &[u64; PATH_COLUMNS], blocks: u32) -> Option<(u32, PathCount)> {
    let &[last, count, instructions, bursts] = row;
    let last = u32::try_from(last).ok().filter(|last| (FIRST_PATH_BLOCK..blocks).contains(last))?;
    Some((last, PathCount { count, instructions, bursts }))
}

/// A file is one more than its index, or 0 without a place.
fn rule_row((member, one): (&RuleMember, &RuleCount)) -> [u64; RULE_COLUMNS] {
    let place = |place: Option<Place>| match place {
        Some(Place { file, offset }) => [u64::from(file) + 1, offset],
        None => [0; 2],
    };
    let ([from_file, from], [to_file, to]) = (place(member.from), place(member.to));
    [member.rule.into(), from_file, from, to_file, to, one.count, one.bursts]
}

fn rule_count(
    row: &[u64; RULE_COLUMNS],
    rules: usize,
    files: usize,
) -> Option<(RuleMember, RuleCount)> {
    let &[rule, from_file, from, to_file, to, count, bursts] = row;
    let rule = u32::try_from(rule).ok()?;
    let optional = |file: u64, offset| match file.checked_sub(1) {
        Some(file) => place(file, offset, files).map(Some),
        None => Some(None),
    };
    let (from, to) = (optional(from_file, from)?, optional(to_file, to)?);
    let is_known = usize::try_from(rule).is_ok_and(|rule| rule < rules);
    (is_known && (from.is_some() || to.is_some()))
        .then_some((RuleMember { rule, from, to }, RuleCount { count, bursts }))
}

fn place(file: u64, offset: u64, files: usize) -> Option<Place> {
    let file = u32::try_from(file).ok()?;
    (usize::try_from(file).ok()? < files).then_some(Place { file, offset })
}

/// Appends the columns of rows, as differences between neighbours.
fn put_columns<const COLUMNS: usize>(rows: &[[u64; COLUMNS]], out: &mut Vec<u8>) {
    for column in 0..COLUMNS {
        let mut before = 0_u64;
        for row in rows {
            let difference = row[column].wrapping_sub(before).cast_signed();
            // Small differences of either sign become small numbers.
            put_number((difference << 1 ^ difference >> 63).cast_unsigned(), out);
            before = row[column];
        }
    }
}

fn put_number(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

struct Columns<'a>(&'a [u8]);

impl Columns<'_> {
    fn rows<const COLUMNS: usize>(&mut self, count: usize) -> Option<Vec<[u64; COLUMNS]>> {
        // Each number takes a byte at least.
        if count.checked_mul(COLUMNS)? > self.0.len() {
            return None;
        }
        let mut rows = vec![[0; COLUMNS]; count];
        for column in 0..COLUMNS {
            let mut before = 0_u64;
            for row in &mut rows {
                let number = self.number()?;
                let difference = (number >> 1).cast_signed() ^ -(number & 1).cast_signed();
                before = before.wrapping_add(difference.cast_unsigned());
                row[column] = before;
            }
        }
        Some(rows)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f).checked_shl(shift)?;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{NO_CALLER, NO_PATH_BLOCK, UNKNOWN_CALLER};
    use crate::rules::Handler;

    fn profile() -> Profile {
        let mut profile = Profile { program: vec!["a".into()], ..Profile::default() };
        let file = profile.file("/bin/a");
        let place = |offset| Place { file, offset };
        for (offset, count) in [(0x1000, 1), (0x1010, u64::MAX), (0x4000, 7)] {
            let block = BlockCount { bytes: 9, instructions: 3, count, bursts: 2 };
            profile.add_block(place(offset), block);
            let kind = KINDS[usize::try_from(count % 8).unwrap()];
            let edge = Edge { from: place(offset), to: place(0x1000), kind };
            profile.add_edge(edge, EdgeCount { count, bursts: 1 });
        }
        for caller in [NO_CALLER, FIRST_CALLER, UNKNOWN_CALLER] {
            profile.callers.push(Caller { caller, call: place(0x1008) });
            let end = StackEnd { caller, block: place(0x4000) };
            profile.stacks.insert(end, StackCount { instructions: 5, bursts: 1 });
        }
        for before in [NO_PATH_BLOCK, FIRST_PATH_BLOCK, NO_PATH_BLOCK] {
            profile.path_blocks.push(PathBlock { before, block: place(0x4000) });
        }
        profile.paths.insert(2, PathCount { count: 5, instructions: 50, bursts: 2 });
        for (name, handler) in [("P1", None), ("Pairs", Some(Handler::CallPair))] {
            let text = "T.OPCLASS == proc_call && overflow_1".to_owned();
            profile.rules.push(ProfiledRule {
                name: name.into(),
                text,
                handler,
                matched: 9,
                references: 6,
            });
        }
        let [from, to] = [0x1010, 0x4000].map(|offset| Some(place(offset)));
        for (from, to) in [(from, to), (from, None), (None, to)] {
            let member = RuleMember { rule: 1, from, to };
            profile.rule_counts.insert(member, RuleCount { count: 4, bursts: 2 });
        }
        profile.sampled_events =
            vec![SampledEvent { device: "ibs_op".into(), samples: 7, ..SampledEvent::default() }];
        let mut number = 0;
        let mut next = || {
            number += 1;
            number
        };
        let mut one = SiteEstimate {
            samples: next(),
            aborted: [next(), next(), next()],
            ..SiteEstimate::default()
        };
        (one.retired, one.fetched) = (next(), next());
        let mut fill = |mean: &mut Mean| *mean = Mean { sum: next(), count: next() };
        one.latencies.iter_mut().for_each(&mut fill);
        fill(&mut one.in_progress);
        one.rates_mut().into_iter().for_each(fill);
        profile.samples.insert(SampledPlace { place: place(0x1004), event: 0 }, one);
        profile.references = 70;
        let heap = profile.region("[heap]");
        for (rule, distance, length) in [(None, -8, 3), (None, i64::MIN, 1), (Some(1), 0, 2)] {
            let one = DataReference { at: place(0x1010), region: heap, distance };
            let references = vec![one; length];
            let count = StreamCount { times: 7, bursts: 2, first: 0 };
            profile.streams.insert(DataStream { rule, references }, count);
        }
        profile.instructions = 1 << 40;
        profile.left.push("process 1: why".into());
        profile
    }

    fn written(profile: &Profile) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(profile, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_profile_is_read_as_written() {
        assert_eq!(parse(&written(&profile())).unwrap(), profile());
        let empty = Profile::default();
        assert_eq!(parse(&written(&empty)).unwrap(), empty);
    }

    /// Goal: files of versions without samples are still read. Method: a header without their
    /// fields.
    #[test]
    fn files_without_samples_are_read() {
        let old = Profile { sampled_events: vec![], samples: [].into(), ..profile() };
        let bytes = written(&old);
        let text = br#","sampled_events":[],"samples":0"#;
        let at = bytes.windows(text.len()).position(|part| part == text).unwrap();
        let mut bytes = [&bytes[..at], &bytes[at + text.len()..bytes.len() - CRC_BYTES]].concat();
        let length = u32::from_le_bytes(*bytes[MAGIC.len()..].first_chunk().unwrap());
        let length = length - u32::try_from(text.len()).unwrap();
        bytes[MAGIC.len()..MAGIC.len() + 4].copy_from_slice(&length.to_le_bytes());
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        assert_eq!(parse(&bytes).unwrap(), old);
    }

    #[test]
    fn damaged_files_are_refused() {
        let bytes = written(&profile());
        assert!(matches!(parse(b"PK\x03\x04"), Err(ReadError::Magic)));
        for length in 8..bytes.len() {
            assert!(matches!(parse(&bytes[..length]), Err(ReadError::Damaged)), "{length}");
        }
        for at in 8..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(parse(&damaged).is_err(), "{at}");
        }
    }

    /// Goal: a file whose checksum is right, but whose contents are not, is refused without a
    /// panic.
    #[test]
    fn hostile_files_are_refused() {
        let bytes = written(&profile());
        let mut refused = 0;
        for at in 8..bytes.len() - CRC_BYTES {
            for with in [0, 1, 0x7f, 0xff] {
                let mut hostile = bytes[..bytes.len() - CRC_BYTES].to_vec();
                hostile[at] = with;
                let crc = crc32fast::hash(&hostile);
                hostile.extend(crc.to_le_bytes());
                refused += u32::from(parse(&hostile).is_err());
            }
        }
        assert!(refused > 100, "{refused}");
        // More rows than the columns hold.
        let at = bytes.windows(10).position(|part| part == b"\"blocks\":3").unwrap();
        let mut hostile = bytes[..bytes.len() - CRC_BYTES].to_vec();
        hostile[at + 9] = b'9';
        hostile.extend(crc32fast::hash(&hostile).to_le_bytes());
        assert!(matches!(parse(&hostile), Err(ReadError::Damaged)));
    }

    /// Goal: streams are checked. Method: profiles with one that is out of bounds.
    #[test]
    fn streams_out_of_bounds_are_refused() {
        let at = Place { file: 0, offset: 1 };
        let one = DataReference { at, region: 0, distance: 2 };
        let refused = |rule, references: Vec<DataReference>, first| {
            let mut profile = profile();
            let stream = DataStream { rule, references };
            profile.streams.insert(stream, StreamCount { times: 1, bursts: 1, first });
            parse(&written(&profile)).is_err()
        };
        assert!(!refused(Some(1), vec![one; STREAM_REFERENCES_MAX], 99));
        assert!(refused(Some(2), vec![one], 0));
        assert!(refused(None, Vec::new(), 0));
        assert!(refused(None, vec![one; STREAM_REFERENCES_MAX + 1], 0));
        assert!(refused(None, vec![one, one], 2));
        assert!(refused(None, vec![DataReference { region: 1, ..one }], 0));
        let at = Place { file: 1, ..at };
        assert!(refused(None, vec![DataReference { at, ..one }], 0));
    }

    /// Goal: a file of a version without streams is read.
    #[test]
    fn files_without_streams_are_read() {
        let mut old = profile();
        old.streams.clear();
        old.regions.clear();
        old.references = 0;
        let bytes = written(&old);
        let length = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        let header = String::from_utf8(bytes[12..12 + length].to_vec()).unwrap();
        let added =
            [",\"regions\":[]", ",\"references\":0", ",\"streams\":0", ",\"stream_references\":0"];
        let header = added.iter().fold(header, |text, one| text.replacen(one, "", 1));
        assert!(!header.contains("streams"));
        let mut without = MAGIC.to_vec();
        without.extend(u32::try_from(header.len()).unwrap().to_le_bytes());
        without.extend(header.as_bytes());
        without.extend(&bytes[12 + length..bytes.len() - CRC_BYTES]);
        without.extend(crc32fast::hash(&without).to_le_bytes());
        assert_eq!(parse(&without).unwrap(), old);
    }
}
