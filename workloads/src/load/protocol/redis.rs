//! RESP, as Redis answers it (version 2, and what version 3 adds to plain replies).
//!
//! An answer is one element, and an element may hold others. No stack is needed to find the end: it
//! is enough to count how many elements are still to come.

use super::line::{Line, decimal};
use crate::load::outcome::{Failure, Malformed, Reply};

/// Simple strings and errors are one line each.
const LONGEST_LINE: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Parser {
    /// Elements that the answer still lacks; 0 between answers.
    missing: u64,
    result: Result<(), Failure>,
    state: State,
    line: Line,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Line,
    Bulk { left: u64 },
    BulkEnd,
}

impl Default for Parser {
    fn default() -> Self {
        Self { missing: 0, result: Ok(()), state: State::Line, line: Line::new(LONGEST_LINE) }
    }
}

impl Parser {
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Reply>), Malformed> {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            if let State::Bulk { left } = self.state {
                let here = left.min(rest.len() as u64);
                at += usize::try_from(here).map_err(|_| Malformed)?;
                self.state = match left - here {
                    0 => State::BulkEnd,
                    left => State::Bulk { left },
                };
                continue;
            }
            let (taken, ended) = self.line.feed(rest)?;
            at += taken;
            if ended && self.line_ended()? {
                let result = std::mem::replace(&mut self.result, Ok(()));
                return Ok((at, Some(Reply::bare(result))));
            }
        }
        Ok((at, None))
    }

    /// True when the line was the last of an answer.
    fn line_ended(&mut self) -> Result<bool, Malformed> {
        if let State::BulkEnd = self.state {
            self.state = State::Line;
            return if self.line.content().is_empty() {
                Ok(self.missing == 0)
            } else {
                Err(Malformed)
            };
        }
        let (&kind, rest) = self.line.content().split_first().ok_or(Malformed)?;
        let top = self.missing == 0;
        self.missing = self.missing.saturating_sub(1);
        match kind {
            b'+' | b':' | b'_' | b'#' | b',' | b'(' => {}
            b'-' if top => self.result = Err(Failure::Refused),
            b'-' => {}
            b'$' | b'=' | b'!' => {
                if top && kind == b'!' {
                    self.result = Err(Failure::Refused);
                }
                match length(rest)? {
                    None => {}
                    Some(0) => self.state = State::BulkEnd,
                    Some(left) => self.state = State::Bulk { left },
                }
            }
            b'*' | b'~' => self.expect(length(rest)?.unwrap_or(0))?,
            b'%' => {
                let pairs = length(rest)?.unwrap_or(0);
                self.expect(pairs.checked_mul(2).ok_or(Malformed)?)?;
            }
            _ => return Err(Malformed),
        }
        Ok(self.missing == 0 && matches!(self.state, State::Line))
    }

    fn expect(&mut self, elements: u64) -> Result<(), Malformed> {
        self.missing = self.missing.checked_add(elements).ok_or(Malformed)?;
        Ok(())
    }
}

/// An announced length; `None` is RESP's null, `-1`.
fn length(digits: &[u8]) -> Result<Option<u64>, Malformed> {
    if digits == b"-1" {
        return Ok(None);
    }
    decimal(digits).map(Some).ok_or(Malformed)
}
