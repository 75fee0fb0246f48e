//! The signals that a user can name after `--watch`, and their syntax.

use std::fmt;
use std::str::FromStr;

/// A signal to watch. `elfen shim --help` lists the syntax.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SignalSpec {
    Task,
    Function,
    Tag,
    Value,
    Service {
        name: String,
        word: ServiceWord,
    },
    Symbol {
        name: String,
        offset: u64,
        width: Width,
    },
    Address {
        at: u64,
        width: Width,
    },
    /// A number in a mapping.
    Map {
        /// The mapping's address, or its file's name or the end of that name.
        of: String,
        offset: u64,
        width: Width,
    },
    Jvm {
        counter: String,
    },
}

/// A word of a service's page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceWord {
    QueueLen,
    RunningRequest,
    FinishedRequests,
}

impl ServiceWord {
    const ALL: [(Self, &'static str); 3] = [
        (Self::QueueLen, "queue_len"),
        (Self::RunningRequest, "running_request"),
        (Self::FinishedRequests, "finished_requests"),
    ];

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(word, _)| *word == self).map_or("", |(_, name)| name)
    }
}

/// The type of a number: its size, and whether it can be negative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Width {
    pub bytes: u64,
    pub signed: bool,
}

impl Width {
    pub const U64: Self = Self { bytes: 8, signed: false };

    /// Extracts the number at byte `offset` of an eight-byte word.
    #[inline(always)]
    pub fn of(self, word: u64, offset: u64) -> u64 {
        let bits = self.bytes * 8;
        let shifted = word >> (offset % 8 * 8);
        let unused = 64 - bits;
        if self.signed {
            ((shifted << unused).cast_signed() >> unused).cast_unsigned()
        } else {
            shifted << unused >> unused
        }
    }

    /// The unsigned type of a symbol of this size; `None` if such a symbol is not a single number.
    pub fn of_size(bytes: u64) -> Option<Self> {
        matches!(bytes, 1 | 2 | 4 | 8).then_some(Self { bytes, signed: false })
    }
}

impl FromStr for Width {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let say = || format!("{text:?} is not a type: use u8, u16, u32, u64, i8, i16, i32 or i64");
        let (sign, bits) = text.split_at_checked(1).ok_or_else(say)?;
        let bytes = match bits {
            "8" => 1,
            "16" => 2,
            "32" => 4,
            "64" => 8,
            _ => return Err(say()),
        };
        match sign {
            "u" | "i" => Ok(Self { bytes, signed: sign == "i" }),
            _ => Err(say()),
        }
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.signed { 'i' } else { 'u' }, self.bytes * 8)
    }
}

/// The type of a signal without a type. A symbol then has the type of its size.
const UNSAID: Width = Width { bytes: 0, signed: false };

impl SignalSpec {
    /// The parser for clap.
    pub fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for SignalSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => return Err("a signal has a name".to_owned()),
            "task" => return Ok(Self::Task),
            "function" => return Ok(Self::Function),
            "tag" => return Ok(Self::Tag),
            "value" => return Ok(Self::Value),
            _ => {}
        }
        if let Some(rest) = text.strip_prefix("service:") {
            return service(rest);
        }
        if let Some(counter) = text.strip_prefix("jvm:") {
            let counter = counter.to_owned();
            if counter.is_empty() {
                return Err("jvm: needs a counter, as in jvm:sun.gc.collector.0".to_owned());
            }
            return Ok(Self::Jvm { counter });
        }
        let (place, width) = typed(text)?;
        if let Some(rest) = place.strip_prefix("map:") {
            let (of, offset) = offset(rest)?;
            let of = of.to_owned();
            return Ok(Self::Map { of, offset, width: width.unwrap_or(Width::U64) });
        }
        if place.starts_with("0x") {
            let at = number(place)?;
            let width = width.unwrap_or(Width::U64);
            aligned(at, width)?;
            return Ok(Self::Address { at, width });
        }
        let (name, offset) = offset(place)?;
        if name.is_empty() {
            return Err(format!("{text:?} has no name"));
        }
        Ok(Self::Symbol { name: name.to_owned(), offset, width: width.unwrap_or(UNSAID) })
    }
}

impl Width {
    /// Returns whether the user gave a type.
    pub fn is_said(self) -> bool {
        self.bytes != 0
    }
}

/// Checks that a number is aligned to its size. Then it lies within one eight-byte word, and one
/// load reads all of it.
pub fn aligned(at: u64, width: Width) -> Result<(), String> {
    if at.is_multiple_of(width.bytes.max(1)) {
        return Ok(());
    }
    Err(format!(
        "{at:#x} is not a multiple of {}, so one load cannot read a {width} there",
        width.bytes
    ))
}

fn service(rest: &str) -> Result<SignalSpec, String> {
    let words = || ServiceWord::ALL.map(|(_, name)| name).join(", ");
    let say = || format!("expected service:NAME.WORD, where WORD is one of {}", words());
    let (name, word) = rest.rsplit_once('.').ok_or_else(say)?;
    let word = ServiceWord::ALL.iter().find(|(_, known)| *known == word).ok_or_else(say)?.0;
    match name {
        "" => Err(say()),
        name => Ok(SignalSpec::Service { name: name.to_owned(), word }),
    }
}

/// Splits off the type at the end, if any. The colons in C++ names come in pairs.
fn typed(text: &str) -> Result<(&str, Option<Width>), String> {
    match text.rsplit_once(':') {
        Some((place, width)) if !place.ends_with(':') && !width.contains('+') && place != "map" => {
            Ok((place, Some(width.parse()?)))
        }
        _ => Ok((text, None)),
    }
}

fn offset(text: &str) -> Result<(&str, u64), String> {
    match text.rsplit_once('+') {
        Some((name, offset)) if !offset.is_empty() && !name.ends_with("operator") => {
            Ok((name, number(offset)?))
        }
        _ => Ok((text, 0)),
    }
}

fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is not a number"))
}

impl fmt::Display for SignalSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let typed = |f: &mut fmt::Formatter<'_>, offset: u64, width: &Width| {
            if offset != 0 {
                write!(f, "+{offset}")?;
            }
            if width.is_said() { write!(f, ":{width}") } else { Ok(()) }
        };
        match self {
            Self::Task => f.write_str("task"),
            Self::Function => f.write_str("function"),
            Self::Tag => f.write_str("tag"),
            Self::Value => f.write_str("value"),
            Self::Service { name, word } => write!(f, "service:{name}.{}", word.name()),
            Self::Jvm { counter } => write!(f, "jvm:{counter}"),
            Self::Address { at, width } => write!(f, "{at:#x}:{width}"),
            Self::Symbol { name, offset, width } => {
                f.write_str(name)?;
                typed(f, *offset, width)
            }
            Self::Map { of, offset, width } => {
                write!(f, "map:{of}")?;
                typed(f, *offset, width)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every form is parsed, and prints as it was typed.
    #[test]
    fn signals_print_as_they_are_typed() {
        for text in [
            "task",
            "function",
            "tag",
            "value",
            "service:search.queue_len",
            "server.stat_numcommands",
            "hits+16:u32",
            "ns::cls<int>::count",
            "ns::count:i16",
            "map:zone.shm+128:u64",
            "map:0x7f0000000000+8:u32",
            "0x55d0c010:u64",
            "jvm:sun.gc.collector.0",
        ] {
            assert_eq!(text.parse::<SignalSpec>().map(|ask| ask.to_string()).as_deref(), Ok(text));
        }
        let width = Width { bytes: 4, signed: false };
        let symbol = SignalSpec::Symbol { name: "hits".into(), offset: 16, width };
        assert_eq!("hits+0x10:u32".parse(), Ok(symbol));
        for wrong in [
            "",
            "jvm:",
            "service:x",
            "service:.queue_len",
            "service:x.size",
            "hits:u24",
            "hits:f64",
            "hits:u",
            "0xzz",
            "0x1004:u64",
            "0x1001:u16",
            "+8",
            "hits+x",
        ] {
            assert!(wrong.parse::<SignalSpec>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn numbers_are_extracted_from_words() {
        let word = 0x8877_6655_4433_2211;
        let of = |text: &str, offset| text.parse::<Width>().unwrap().of(word, offset);
        assert_eq!((of("u8", 0), of("u8", 7), of("u16", 2)), (0x11, 0x88, 0x4433));
        assert_eq!((of("u32", 4), of("u64", 0)), (0x8877_6655, word));
        assert_eq!(of("i8", 7).cast_signed(), -0x78);
        assert_eq!((of("i64", 0), of("i32", 0)), (word, 0x4433_2211));
    }
}
