//! Writes a recording to a file.

use std::io::{self, Write};

use super::form::{
    CHUNK_MARK, ChunkHead, Head, JSON_BYTES, MAGIC, PACKED_MARK, TAIL_MARK, Tail, VERSION,
};
use super::pack::pack;
use super::pool::Pool;

/// Writes a whole file to `out`, which is empty.
pub fn write(head: &Head, pool: &Pool, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    write_json(head, out)?;
    let chunks = pool.chunks();
    for (chunk, bytes) in &chunks {
        let signal = head.signals.get(usize::from(chunk.series));
        match signal.and_then(|signal| pack(signal.kind, chunk.runs, bytes)) {
            Some(packed) => write_chunk(PACKED_MARK, chunk, &packed, out)?,
            None => write_chunk(CHUNK_MARK, chunk, bytes, out)?,
        }
    }
    out.write_all(&[TAIL_MARK])?;
    write_json(&Tail { chunks: chunks.len() as u64 }, out)?;
    out.flush()
}

fn write_chunk(mark: u8, chunk: &ChunkHead, bytes: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let fields = fields(mark, &ChunkHead { bytes: length, ..*chunk });
    out.write_all(&fields)?;
    out.write_all(&checksum(&fields, bytes).to_le_bytes())?;
    out.write_all(bytes)
}

/// The bytes of a chunk's head without its checksum.
pub(super) fn fields(mark: u8, head: &ChunkHead) -> Vec<u8> {
    let mut fields = vec![mark, head.series];
    fields.extend(head.first_ticks.to_le_bytes());
    fields.extend(head.runs.to_le_bytes());
    fields.extend(head.bytes.to_le_bytes());
    fields
}

/// The checksum over a head and its payload. It is 0 for the fuzzer, which cannot compute checksums
/// for the bytes that it changes.
pub(super) fn checksum(fields: &[u8], bytes: &[u8]) -> u32 {
    if cfg!(fuzzing) {
        return 0;
    }
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(fields);
    checksum.update(bytes);
    checksum.finalize()
}

/// Writes the length of a JSON text, its checksum, and the text.
fn write_json(value: &impl serde::Serialize, out: &mut dyn Write) -> io::Result<()> {
    let text = serde_json::to_vec(value)?;
    let length = u32::try_from(text.len()).ok().filter(|_| text.len() <= JSON_BYTES);
    let length = length.ok_or_else(|| io::Error::other("the head is too long"))?.to_le_bytes();
    out.write_all(&length)?;
    out.write_all(&checksum(&length, &text).to_le_bytes())?;
    out.write_all(&text)
}
