//! A parser: JSON text to a tree and back. The text is written the one way that the printer writes
//! it, so that what is printed must be what was parsed.
//!
//! Recursive calls, small allocations, and a branch on every byte.

use elfen_rt::check;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::fmt::Write;
use workloads::batch::{Program, Work, Wrong, checksum};
use workloads::text::word;

const DOCUMENTS: usize = 300;
const DEEPEST: u32 = 64;

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Null,
    Bool(bool),
    Number(i64),
    Text(String),
    List(Vec<Value>),
    Map(Vec<(String, Value)>),
}

#[derive(Debug)]
pub(super) struct Json {
    text: String,
}

impl Json {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let documents = (0..DOCUMENTS).map(|_| random_value(&mut rng, 4)).collect();
        let mut text = String::new();
        print(&Value::List(documents), &mut text);
        Self { text }
    }
}

impl Program for Json {
    fn work(&self) -> Work {
        Work { amount: self.text.len() as u64, unit: "bytes" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let value = parse(&self.text).ok_or(Wrong("the text was not understood"))?;
        let mut printed = String::with_capacity(self.text.len());
        print(&value, &mut printed);
        if printed == self.text {
            Ok(checksum(printed.as_bytes()))
        } else {
            Err(Wrong("what was printed is not what was parsed"))
        }
    }
}

fn random_value(rng: &mut Xoshiro256PlusPlus, depth: u32) -> Value {
    let text = |rng: &mut Xoshiro256PlusPlus| {
        let mut text = word(rng.random_range(0..100_000));
        let endings = ["", " \"quoted\"", "\\", "\n", "\u{1}", "\u{e4}\u{20ac}\u{1d11e}"];
        text.push_str(endings[rng.random_range(0..endings.len())]);
        text
    };
    let kinds = if depth == 0 { 4 } else { 8 };
    match rng.random_range(0..kinds) {
        0 => Value::Null,
        1 => Value::Bool(rng.random()),
        2 => Value::Number(rng.random::<i64>() >> rng.random_range(0..64_u32)),
        3 => Value::Text(text(rng)),
        4 | 5 => {
            let length = rng.random_range(0..8);
            Value::List((0..length).map(|_| random_value(rng, depth - 1)).collect())
        }
        _ => {
            let length = rng.random_range(0..8);
            Value::Map((0..length).map(|_| (text(rng), random_value(rng, depth - 1))).collect())
        }
    }
}

fn print(value: &Value, out: &mut String) {
    check!();
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write!(out, "{number}").expect("a String takes everything"),
        Value::Text(text) => print_text(text, out),
        Value::List(values) => {
            out.push('[');
            for (at, value) in values.iter().enumerate() {
                out.push_str(if at == 0 { "" } else { "," });
                print(value, out);
            }
            out.push(']');
        }
        Value::Map(entries) => {
            out.push('{');
            for (at, (key, value)) in entries.iter().enumerate() {
                out.push_str(if at == 0 { "" } else { "," });
                print_text(key, out);
                out.push(':');
                print(value, out);
            }
            out.push('}');
        }
    }
}

fn print_text(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\0'..' ' => {
                write!(out, "\\u{:04x}", u32::from(character)).expect("a String takes everything");
            }
            _ => out.push(character),
        }
    }
    out.push('"');
}

/// The whole text as one value; `None` if it is not JSON, nests too deeply, or has numbers that are
/// not 64-bit integers.
fn parse(text: &str) -> Option<Value> {
    let mut parser = Parser { rest: text };
    let value = parser.value(DEEPEST)?;
    parser.skip_space();
    parser.rest.is_empty().then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
    }

    fn take(&mut self, token: &str) -> Option<()> {
        self.skip_space();
        self.rest = self.rest.strip_prefix(token)?;
        Some(())
    }

    fn value(&mut self, depth: u32) -> Option<Value> {
        check!();
        let depth = depth.checked_sub(1)?;
        self.skip_space();
        match self.rest.as_bytes().first()? {
            b'n' => self.take("null").map(|()| Value::Null),
            b't' => self.take("true").map(|()| Value::Bool(true)),
            b'f' => self.take("false").map(|()| Value::Bool(false)),
            b'"' => self.text().map(Value::Text),
            b'[' => self.list("[", "]", |parser| parser.value(depth)).map(Value::List),
            b'{' => self.list("{", "}", |parser| parser.entry(depth)).map(Value::Map),
            _ => self.number(),
        }
    }

    fn entry(&mut self, depth: u32) -> Option<(String, Value)> {
        self.skip_space();
        let key = self.text()?;
        self.take(":")?;
        Some((key, self.value(depth)?))
    }

    fn list<T>(
        &mut self,
        open: &str,
        close: &str,
        mut element: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.take(open)?;
        let mut elements = Vec::new();
        if self.take(close).is_some() {
            return Some(elements);
        }
        loop {
            elements.push(element(self)?);
            if self.take(close).is_some() {
                return Some(elements);
            }
            self.take(",")?;
        }
    }

    fn number(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| c != '-' && !c.is_ascii_digit());
        let (digits, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        digits.parse().ok().map(Value::Number)
    }

    fn text(&mut self) -> Option<String> {
        self.rest = self.rest.strip_prefix('"')?;
        let mut text = String::new();
        loop {
            let plain = self.rest.find(['"', '\\'])?;
            text.push_str(&self.rest[..plain]);
            let is_end = self.rest.as_bytes()[plain] == b'"';
            self.rest = &self.rest[plain + 1..];
            if is_end {
                return Some(text);
            }
            text.push(self.escaped()?);
        }
    }

    fn escaped(&mut self) -> Option<char> {
        let kind = self.rest.chars().next()?;
        self.rest = &self.rest[kind.len_utf8()..];
        match kind {
            '"' | '\\' | '/' => Some(kind),
            'n' => Some('\n'),
            'r' => Some('\r'),
            't' => Some('\t'),
            'u' => {
                let digits = self.rest.get(..4).filter(|d| !d.starts_with('+'))?;
                self.rest = &self.rest[4..];
                char::from_u32(u32::from_str_radix(digits, 16).ok()?)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Goal: text is parsed and printed alike, each time, and another seed has other text. Method:
    /// runs.
    #[test]
    fn documents_survive() {
        let mut program = Json::new(1);
        let sum = program.iterate().expect("its own text");
        assert_eq!(program.iterate(), Ok(sum));
        assert_ne!(Json::new(2).iterate(), Ok(sum));
        assert!(program.text.len() > 10_000, "{} bytes", program.text.len());
    }

    /// Goal: JSON's own rules. Method: a text with all of them, and texts that break one each.
    #[test]
    fn rules_are_kept() {
        let text = " {\"a\" : [1 , -2, null,true,\tfalse], \"\\u00e9\\n\\\"\" :{}}\n";
        let list = [Value::Number(1), Value::Number(-2), Value::Null, Value::Bool(true)];
        let list = list.into_iter().chain([Value::Bool(false)]).collect();
        let expected = Value::Map(vec![
            ("a".to_owned(), Value::List(list)),
            ("é\n\"".to_owned(), Value::Map(Vec::new())),
        ]);
        assert_eq!(parse(text), Some(expected));
        let deep = "[".repeat(100_000);
        for text in ["", "[1,]", "[1", "{\"a\"}", "nul", "1 2", "\"\\x\"", "\"\\ud800\"", &deep] {
            assert_eq!(parse(text), None, "{text:.20}");
        }
    }

    proptest! {
        /// Goal: no text makes the parser panic, and what it accepts it prints so that it is
        /// accepted again. Method: text made of JSON's own characters.
        #[test]
        fn any_text_is_survived(text in "[\\[\\]{}:,\"\\\\u0-9a-f \\-nulltre]{0,40}") {
            if let Some(value) = parse(&text) {
                let mut printed = String::new();
                print(&value, &mut printed);
                prop_assert_eq!(parse(&printed), Some(value));
            }
        }
    }
}
