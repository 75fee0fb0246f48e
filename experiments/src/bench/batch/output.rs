//! Whether a program prints the same and ends the same as alone.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

/// How one run of the program ended.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    /// As a shell sees it.
    pub(super) status: u8,
    /// What it printed.
    pub(super) output: PathBuf,
}

impl Ended {
    /// What is different in another run, if anything is.
    pub(super) fn unlike(&self, other: &Self) -> io::Result<Option<String>> {
        if self.status != other.status {
            let (this, that) = (self.status, other.status);
            return Ok(Some(format!("exit status {that} instead of {this}")));
        }
        let at = first_difference(&self.output, &other.output)?;
        Ok(at.map(|at| format!("its output differs from byte {at} on")))
    }
}

/// Counted from 1, as `cmp` does.
fn first_difference(one: &Path, other: &Path) -> io::Result<Option<u64>> {
    let [mut one, mut other] = [File::open(one)?, File::open(other)?].map(BufReader::new);
    let (mut mine, mut theirs) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut at = 1;
    loop {
        let (n, m) = (fill(&mut one, &mut mine)?, fill(&mut other, &mut theirs)?);
        let same = mine[..n].iter().zip(&theirs[..m]).take_while(|(a, b)| a == b).count();
        at += u64::try_from(same).unwrap_or(u64::MAX);
        if same < n.max(m) {
            return Ok(Some(at));
        }
        if n == 0 {
            return Ok(None);
        }
    }
}

const CHUNK: usize = 1 << 16;

/// Reads until the chunk is full or the file ends.
fn fill(file: &mut impl Read, chunk: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < chunk.len() {
        match file.read(&mut chunk[filled..])? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Goal: a difference is found wherever it is, and none where there is none. Method: outputs
    /// about as long as what is read at once, with a byte changed, added or taken away.
    #[test]
    fn differences_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let ended = |name: &str, bytes: &[u8], status| {
            let output = folder.path().join(name);
            fs::write(&output, bytes).unwrap();
            Ended { status, output }
        };
        for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1] {
            let bytes = vec![7; length];
            let one = ended("one", &bytes, 0);
            assert_eq!(one.unlike(&ended("same", &bytes, 0)).unwrap(), None, "{length}");
            let longer = one.unlike(&ended("longer", &[&bytes[..], &[7]].concat(), 0)).unwrap();
            let from = format!("its output differs from byte {} on", length + 1);
            assert_eq!(longer.as_deref(), Some(&*from));
            let Some(last) = length.checked_sub(1) else { continue };
            assert!(one.unlike(&ended("shorter", &bytes[..last], 0)).unwrap().is_some());
            let mut changed = bytes.clone();
            changed[last] = 8;
            let found = one.unlike(&ended("changed", &changed, 0)).unwrap();
            assert_eq!(found, Some(format!("its output differs from byte {length} on")));
        }
        let other = ended("a", b"", 0).unlike(&ended("b", b"", 137)).unwrap();
        assert_eq!(other.as_deref(), Some("exit status 137 instead of 0"));
    }
}
