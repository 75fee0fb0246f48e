//! The format of pprof: a message of protocol buffers, by gzip.

use std::collections::HashMap;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use crate::profile::{Place, Profile};
use crate::stacks::{ShownFrame, Sources, StackFrame, Stacks, UNKNOWN};
use crate::symbols::ProfileSymbols;

/// Each file gets an address range of its own.
const FILE_BYTES: u64 = 1 << 40;

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    /// From the innermost.
    #[prost(uint64, repeated, tag = "1")]
    locations: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    values: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    start: u64,
    #[prost(uint64, tag = "3")]
    limit: u64,
    #[prost(int64, tag = "5")]
    file: i64,
    #[prost(int64, tag = "6")]
    build_id: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping: u64,
    #[prost(uint64, tag = "3")]
    address: u64,
    #[prost(message, repeated, tag = "4")]
    lines: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    file: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Viewed {
    #[prost(message, repeated, tag = "1")]
    sample_types: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    samples: Vec<Sample>,
    #[prost(message, repeated, tag = "3")]
    mappings: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    locations: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    functions: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    strings: Vec<String>,
    #[prost(int64, tag = "10")]
    duration_ns: i64,
}

/// A message in the making: what it has already, by what it is for.
struct Builder<'a> {
    stacks: &'a Stacks<'a>,
    symbols: &'a ProfileSymbols,
    sources: &'a Sources,
    viewed: Viewed,
    strings: HashMap<String, i64>,
    /// By name and source file.
    functions: HashMap<(String, Option<String>), u64>,
    locations: HashMap<Option<Place>, u64>,
}

pub(crate) fn profile(
    profile: &Profile,
    symbols: &ProfileSymbols,
    sources: &Sources,
) -> io::Result<Vec<u8>> {
    let stacks = Stacks::new(profile, symbols);
    let mut builder = Builder {
        stacks: &stacks,
        symbols,
        sources,
        viewed: Viewed::default(),
        strings: HashMap::new(),
        functions: HashMap::new(),
        locations: HashMap::new(),
    };
    // The first string is empty.
    builder.string("");
    let count = builder.string("count");
    let kind = builder.string("instructions");
    builder.viewed.sample_types.push(ValueType { kind, unit: count });
    for (id, file) in (1..).zip(&profile.files) {
        let (path, build_id) = (builder.string(&file.path), builder.string(&file.build_id));
        builder.viewed.mappings.push(Mapping {
            id,
            start: id * FILE_BYTES,
            limit: (id + 1) * FILE_BYTES,
            file: path,
            build_id,
            has_functions: true,
        });
    }
    let mut frames = Vec::new();
    for (end, count) in stacks.all() {
        let is_cut = stacks.frames(end, &mut frames);
        let mut locations: Vec<u64> =
            frames.iter().map(|frame| builder.location(Some(frame))).collect();
        if is_cut {
            locations.push(builder.location(None));
        }
        let values = vec![i64::try_from(count.instructions).unwrap_or(i64::MAX)];
        builder.viewed.samples.push(Sample { locations, values });
    }
    builder.viewed.duration_ns = i64::try_from(profile.ran_ns).unwrap_or(0);
    let mut out = GzEncoder::new(Vec::new(), Compression::default());
    out.write_all(&builder.viewed.encode_to_vec())?;
    out.finish()
}

impl Builder<'_> {
    fn string(&mut self, text: &str) -> i64 {
        if let Some(&known) = self.strings.get(text) {
            return known;
        }
        let number = i64::try_from(self.viewed.strings.len()).unwrap_or(0);
        self.viewed.strings.push(text.to_owned());
        self.strings.insert(text.to_owned(), number);
        number
    }

    /// The location of a frame; of the unknown callers without one.
    fn location(&mut self, frame: Option<&StackFrame>) -> u64 {
        let at = frame.map(|frame| frame.at);
        if let Some(&known) = self.locations.get(&at) {
            return known;
        }
        let id = self.viewed.locations.len() as u64 + 1;
        let (mapping, address) = at.map_or((0, 0), |at| {
            let mapping = u64::from(at.file) + 1;
            let table = self.symbols.table(at.file);
            let inside = table.and_then(|table| table.address_of(at.offset)).unwrap_or(at.offset);
            (mapping, mapping * FILE_BYTES + inside % FILE_BYTES)
        });
        let shown = match frame {
            Some(frame) => self.stacks.shown(frame, self.sources),
            None => [ShownFrame { name: UNKNOWN.to_owned(), source: None, line: 0 }].into(),
        };
        let lines = shown.iter().map(|one| {
            let function = self.function(one);
            Line { function, line: one.line.into() }
        });
        let lines = lines.collect();
        self.viewed.locations.push(Location { id, mapping, address, lines });
        self.locations.insert(at, id);
        id
    }

    fn function(&mut self, shown: &ShownFrame) -> u64 {
        let key = (shown.name.clone(), shown.source.clone());
        if let Some(&known) = self.functions.get(&key) {
            return known;
        }
        let name = self.string(&shown.name);
        let file = self.string(shown.source.as_deref().unwrap_or(""));
        let id = self.viewed.functions.len() as u64 + 1;
        self.viewed.functions.push(Function { id, name, system_name: name, file });
        self.functions.insert(key, id);
        id
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;
    use crate::stacks::tests;

    #[test]
    fn samples_have_their_functions_and_files() {
        let (known, symbols) = tests::profile();
        let mut bytes = Vec::new();
        GzDecoder::new(&*profile(&known, &symbols, &Sources::default()).unwrap())
            .read_to_end(&mut bytes)
            .unwrap();
        let viewed = Viewed::decode(&*bytes).unwrap();
        let text = |index: i64| &*viewed.strings[usize::try_from(index).unwrap()];
        let name = |location: &u64| {
            let location = viewed.locations.iter().find(|one| one.id == *location).unwrap();
            let function = location.lines[0].function;
            text(viewed.functions.iter().find(|one| one.id == function).unwrap().name)
        };
        let samples: Vec<(Vec<&str>, i64)> = viewed
            .samples
            .iter()
            .map(|sample| (sample.locations.iter().map(name).collect(), sample.values[0]))
            .collect();
        let (a, b) = ("a:[no symbol]", "b:[no symbol]");
        assert_eq!(samples, [(vec![b, UNKNOWN], 30), (vec![b, a], 70)]);
        assert_eq!(text(viewed.sample_types[0].kind), "instructions");
        assert_eq!(text(viewed.mappings[1].file), "/nowhere/b");
        assert_eq!(viewed.strings[0], "");
    }
}
