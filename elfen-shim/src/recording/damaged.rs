//! Goal: no file makes the reader crash or use much more memory than the file's size. Method:
//! recordings with changed bytes, some of them with corrected checksums.

use std::sync::OnceLock;

use proptest::prelude::*;

use super::tests::{file as whole_file, file_of_chunk, head};
use super::*;

/// The offset and the length of the payload of the block that begins at `at`.
fn payload_of(file: &[u8], at: usize) -> Option<(usize, usize)> {
    let length = file.get(at + 1..at + 5)?;
    Some((at + 9, usize::try_from(u32::from_le_bytes(length.try_into().ok()?)).ok()?))
}

/// Changes bytes of a file and parses it. With `mended`, the checksum of the first chunk is
/// corrected, so that the reader continues.
fn changed(whole: &[u8], changes: &[(usize, u8)], mended: bool) -> Result<(), TestCaseError> {
    let mut bytes = whole.to_vec();
    for (at, byte) in changes {
        let at = at % bytes.len();
        bytes[at] = *byte;
    }
    let (head, length) = payload_of(whole, 12).unwrap();
    let chunk = head + length;
    if let Some((at, length)) = payload_of(&bytes, chunk).filter(|_| mended)
        && let Some(payload) = bytes.get(at..at + length)
    {
        let sum = file::checksum(&bytes[chunk..chunk + 5], payload);
        bytes[chunk + 5..chunk + 9].copy_from_slice(&sum.to_le_bytes());
    }
    if let Ok(read) = Recording::parse(&bytes) {
        let runs: usize = read.runs.iter().map(Vec::len).sum();
        prop_assert!(runs <= bytes.len() * 4, "memory is bounded by the file");
    }
    Ok(())
}

proptest::proptest! {
    #[test]
    fn changed_files_are_read_or_refused(
        changes in proptest::collection::vec((0usize..4000, any::<u8>()), 1..6),
        mended: bool,
    ) {
        // Created once, because creating it would take most of the time of ten million cases.
        static FILE: OnceLock<Vec<u8>> = OnceLock::new();
        changed(FILE.get_or_init(|| whole_file(300)), &changes, mended)?;
    }

    /// Method: any bytes as runs, to test the code after the decompression; and any bytes instead
    /// of compressed runs.
    #[test]
    fn any_payload_is_read_or_refused(
        payload: Vec<u8>,
        runs in 0u32..2000,
        kind: bool,
        packed: bool,
    ) {
        let mut head = head();
        head.signals[0].kind = if kind { Kind::Tags } else { Kind::Values };
        let payload = if packed { file::pack(&payload) } else { payload };
        if let Ok(read) = Recording::parse(&file_of_chunk(&head, runs, &payload)) {
            prop_assert!(read.runs[0].len() <= payload.len() * 4);
        }
    }
}

/// Goal: a changed byte is detected. `elfen/tests/shim/refused.rs` tests files that are not
/// recordings.
#[test]
fn a_changed_byte_is_noticed() {
    let mut wrong = whole_file(10);
    let near_end = wrong.len() - 60;
    wrong[near_end] ^= 1;
    assert!(Recording::parse(&wrong).unwrap_err().to_string().contains("checksum"));
}
