//! One line that may arrive in pieces, with a bound on its length.

use crate::load::outcome::Malformed;

#[derive(Debug)]
pub(super) struct Line {
    bytes: Vec<u8>,
    ended: bool,
    longest: usize,
}

impl Line {
    pub(super) fn new(longest: usize) -> Self {
        Self { bytes: Vec::new(), ended: false, longest }
    }

    /// Takes bytes up to the end of the line; true once the line is whole. The next call begins a
    /// new one.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, bool), Malformed> {
        if self.ended {
            self.bytes.clear();
            self.ended = false;
        }
        let newline = bytes.iter().position(|byte| *byte == b'\n');
        let taken = newline.map_or(bytes.len(), |at| at + 1);
        if self.bytes.len() + taken > self.longest {
            return Err(Malformed);
        }
        self.bytes.extend_from_slice(&bytes[..taken]);
        self.ended = newline.is_some();
        Ok((taken, self.ended))
    }

    /// The whole line without its line end.
    pub(super) fn content(&self) -> &[u8] {
        let line = self.bytes.strip_suffix(b"\n").unwrap_or(&self.bytes);
        line.strip_suffix(b"\r").unwrap_or(line)
    }
}

/// A decimal number and nothing else; `None` for anything that isn't, or that no 64 bits hold.
pub(super) fn decimal(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}
