//! Where the body of a message ends: by its length, by its chunks, or with its connection.
//!
//! Bytes pass as they are; only their end is looked for, so that what follows is not taken for
//! theirs.

/// A body, as far as it has not passed yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Body {
    Length(u64),
    Chunked(Chunks),
    /// As long as the connection.
    UntilClose,
}

/// What is no body by the rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Malformed;

/// Within a chunked body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Chunks {
    /// In the line that says how long the chunk is: so far, with how many digits.
    Size {
        size: u64,
        digits: u8,
    },
    /// Behind the digits; how many bytes.
    Extension {
        size: u64,
        count: u16,
    },
    /// In the chunk, with so many bytes to come.
    Data {
        left: u64,
    },
    /// Behind it.
    DataEnd {
        seen_cr: bool,
    },
    /// In a line behind the last chunk; of this line, and of all of them.
    Trailer {
        line: u16,
        all: u16,
    },
    Done,
}

/// A chunk's length has no more digits.
const MOST_DIGITS: u8 = 15;
/// Extensions and trailers are not longer.
const LONGEST: u16 = 16 << 10;

impl Body {
    pub(super) const EMPTY: Self = Self::Length(0);
    pub(super) const CHUNKED: Self = Self::Chunked(Chunks::Size { size: 0, digits: 0 });

    pub(super) fn is_done(self) -> bool {
        matches!(self, Self::Length(0) | Self::Chunked(Chunks::Done))
    }

    /// How many of these bytes are of the body, which goes on behind them.
    pub(super) fn pass(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        match self {
            Self::UntilClose => Ok(bytes.len()),
            Self::Length(left) => {
                let passed = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= passed as u64;
                Ok(passed)
            }
            Self::Chunked(chunks) => {
                let mut at = 0;
                while at < bytes.len() && *chunks != Chunks::Done {
                    at += chunks.pass(&bytes[at..])?;
                }
                Ok(at)
            }
        }
    }
}

impl Chunks {
    /// Passes at least one of the bytes.
    fn pass(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let byte = bytes[0];
        *self = match *self {
            Self::Size { size, digits } => match (char::from(byte).to_digit(16), byte) {
                (Some(_), _) if digits == MOST_DIGITS => return Err(Malformed),
                (Some(digit), _) => {
                    Self::Size { size: size << 4 | u64::from(digit), digits: digits + 1 }
                }
                _ if digits == 0 => return Err(Malformed),
                (None, b'\n') => Self::begins(size),
                (None, b'\r' | b';' | b' ' | b'\t') => Self::Extension { size, count: 0 },
                (None, _) => return Err(Malformed),
            },
            Self::Extension { size, .. } if byte == b'\n' => Self::begins(size),
            Self::Extension { count: LONGEST, .. } => return Err(Malformed),
            Self::Extension { size, count } => Self::Extension { size, count: count + 1 },
            Self::Data { left } => {
                let passed = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let left = left - passed as u64;
                *self = match left {
                    0 => Self::DataEnd { seen_cr: false },
                    left => Self::Data { left },
                };
                return Ok(passed);
            }
            Self::DataEnd { seen_cr: false } if byte == b'\r' => Self::DataEnd { seen_cr: true },
            Self::DataEnd { .. } if byte == b'\n' => Self::Size { size: 0, digits: 0 },
            Self::DataEnd { .. } => return Err(Malformed),
            Self::Trailer { all: LONGEST, .. } => return Err(Malformed),
            Self::Trailer { line: 0, .. } if byte == b'\n' => Self::Done,
            Self::Trailer { all, .. } if byte == b'\n' => Self::Trailer { line: 0, all: all + 1 },
            Self::Trailer { line, all } if byte == b'\r' => Self::Trailer { line, all: all + 1 },
            Self::Trailer { line, all } => Self::Trailer { line: line + 1, all: all + 1 },
            Self::Done => return Ok(0),
        };
        Ok(1)
    }

    fn begins(size: u64) -> Self {
        if size == 0 { Self::Trailer { line: 0, all: 0 } } else { Self::Data { left: size } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKED: &[u8] = b"4;a=\"b\"\r\nwiki\r\n00A\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n";

    /// Goal: the end is found wherever the bytes are cut, and what follows is left alone.
    #[test]
    fn a_chunked_body_ends_at_its_last_line() {
        let followed = [CHUNKED, b"HTTP/1.1 200 OK\r\n"].concat();
        for cut in 0..CHUNKED.len() {
            let mut body = Body::CHUNKED;
            assert_eq!(body.pass(&followed[..cut]), Ok(cut));
            assert!(!body.is_done(), "{cut}");
            assert_eq!(body.pass(&followed[cut..]), Ok(CHUNKED.len() - cut));
            assert!(body.is_done());
            assert_eq!(body.pass(b"more"), Ok(0));
        }
    }

    #[test]
    fn what_is_no_chunk_is_refused() {
        let long = [&b"1;"[..], &[b'x'; 20_000]].concat();
        let trailers = [&b"0\r\n"[..], &b"a: b\r\n".repeat(4_000)].concat();
        let wrong: [&[u8]; 8] = [
            b"\r\n",
            b"x\r\n",
            b"-1\r\n",
            b"1111111111111111\r\n",
            b"1\r\nab\r\n",
            b"1\r\na\rb",
            &long,
            &trailers,
        ];
        for bytes in wrong {
            let mut body = Body::CHUNKED;
            assert_eq!(body.pass(bytes), Err(Malformed), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_length_is_kept() {
        let mut body = Body::Length(5);
        assert_eq!((body.pass(b"abc"), body.is_done()), (Ok(3), false));
        assert_eq!((body.pass(b"defg"), body.is_done()), (Ok(2), true));
        let mut endless = Body::UntilClose;
        assert_eq!((endless.pass(b"abc"), endless.is_done()), (Ok(3), false));
        assert!(Body::EMPTY.is_done());
    }
}
