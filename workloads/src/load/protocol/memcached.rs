//! memcached's text protocol: an answer is a line, or values and statistics up to their `END`.

use super::line::{Line, decimal};
use super::{Malformed, Reply};
use crate::load::outcome::Failure;

/// A key has at most 250 bytes; a line of numbers and an error text stay far below this.
const LONGEST_LINE: usize = 8 * 1024;

#[derive(Debug)]
pub(crate) struct Parser {
    state: State,
    line: Line,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Line,
    /// Inside a value. `last` says that the answer ends with it (`VA`, the meta get).
    Value {
        left: u64,
        last: bool,
    },
    /// At the line end after a value.
    ValueEnd {
        last: bool,
    },
}

impl Default for Parser {
    fn default() -> Self {
        Self { state: State::Line, line: Line::new(LONGEST_LINE) }
    }
}

impl Parser {
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Reply>), Malformed> {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            if let State::Value { left, last } = self.state {
                let here = left.min(rest.len() as u64);
                at += usize::try_from(here).map_err(|_| Malformed)?;
                self.state = match left - here {
                    0 => State::ValueEnd { last },
                    left => State::Value { left, last },
                };
                continue;
            }
            let (taken, ended) = self.line.feed(rest)?;
            at += taken;
            if ended && let Some(reply) = self.line_ended()? {
                return Ok((at, Some(reply)));
            }
        }
        Ok((at, None))
    }

    fn line_ended(&mut self) -> Result<Option<Reply>, Malformed> {
        if let State::ValueEnd { last } = self.state {
            self.state = State::Line;
            return match (self.line.content(), last) {
                (b"", true) => Ok(Some(Reply::bare(Ok(())))),
                (b"", false) => Ok(None),
                _ => Err(Malformed),
            };
        }
        let mut words = self.line.content().split(|byte| *byte == b' ');
        let mut number = |skip: usize| words.nth(skip).and_then(decimal).ok_or(Malformed);
        let word = self.line.content().split(|byte| *byte == b' ').next().unwrap_or_default();
        match word {
            // VALUE <key> <flags> <bytes> [<cas>]
            b"VALUE" => self.enter_value(number(3)?, false),
            // VA <bytes> <flags>*
            b"VA" => self.enter_value(number(1)?, true),
            b"STAT" => Ok(None),
            b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR" => {
                Ok(Some(Reply::bare(Err(Failure::Refused))))
            }
            b"END" | b"STORED" | b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND" | b"DELETED"
            | b"TOUCHED" | b"OK" | b"VERSION" | b"HD" | b"EN" | b"NF" | b"NS" | b"EX" | b"MN" => {
                Ok(Some(Reply::bare(Ok(()))))
            }
            // incr and decr answer with the new number.
            digits if decimal(digits).is_some() => Ok(Some(Reply::bare(Ok(())))),
            _ => Err(Malformed),
        }
    }

    fn enter_value(&mut self, left: u64, last: bool) -> Result<Option<Reply>, Malformed> {
        self.state = if left == 0 { State::ValueEnd { last } } else { State::Value { left, last } };
        Ok(None)
    }
}
