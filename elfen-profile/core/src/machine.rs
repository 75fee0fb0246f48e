//! The description of a core, built in or from a file.
//!
//! A file is TOML or JSON. It names a built-in core in `like`, and gives the fields that differ:
//!
//! ```text
//! like = "wide"
//! [map]
//! reorder = 256
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A core. All times are in cycles.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub name: String,
    pub fetch: Fetch,
    pub map: Mapper,
    pub issue: Issue,
    pub units: Units,
    pub latency: Latencies,
    pub retire: Retire,
    pub l1i: CacheSize,
    pub l1d: CacheSize,
    pub l2: CacheSize,
    /// 0 bytes: there is none.
    pub l3: CacheSize,
    /// From issue until data of a load is there that no cache has.
    pub memory_latency: u32,
    pub itlb: TlbSize,
    pub dtlb: TlbSize,
    pub predictor: PredictorSize,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Fetch {
    /// Instructions per cycle.
    pub width: u32,
    /// Instructions of one cycle lie in one aligned block of this size.
    pub block_bytes: u32,
    /// Instructions that are fetched, and not mapped yet.
    pub queue: u32,
    /// Cycles without fetch after a branch that is predicted taken.
    pub taken_bubble: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mapper {
    pub width: u32,
    /// From fetch.
    pub delay: u32,
    /// Instructions that are mapped, and not retired yet; also the loads and stores of them.
    pub reorder: u32,
    pub load_queue: u32,
    pub store_queue: u32,
    /// Instructions that wait for issue.
    pub integer_window: u32,
    pub float_window: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Issue {
    pub width: u32,
    /// No instruction issues before an older one.
    pub in_order: bool,
}

/// How many instructions of a kind can issue per cycle. There is one divider for integers and one
/// for floating point.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Units {
    pub integer: u32,
    pub multiply: u32,
    pub float_add: u32,
    pub float_multiply: u32,
    pub vector: u32,
    pub branch: u32,
    pub load: u32,
    pub store: u32,
}

/// From issue until the result is there. An instruction that also reads memory takes the time of
/// that in addition. A divider takes the next division after the time of one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Latencies {
    pub integer: u32,
    pub multiply: u32,
    pub divide: u32,
    pub float_add: u32,
    pub float_multiply: u32,
    pub float_divide: u32,
    pub vector: u32,
    pub branch: u32,
    pub store: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Retire {
    pub width: u32,
    /// Loads retire as soon as their address is known to be valid.
    pub early_loads: bool,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheSize {
    pub bytes: u32,
    pub ways: u32,
    pub line_bytes: u32,
    /// From issue until data is there; for instructions, cycles that fetch loses.
    pub latency: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TlbSize {
    pub entries: u32,
    pub ways: u32,
    pub page_bytes: u32,
    /// More cycles after a miss.
    pub miss: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PredictorSize {
    /// Bits of the number of counters.
    pub gshare_bits: u32,
    pub bimodal_bits: u32,
    pub chooser_bits: u32,
    /// Directions of the last conditional branches.
    pub history_bits: u32,
    pub return_stack: u32,
    /// Bits of the number of remembered targets of computed branches, and of the history that
    /// chooses one of them.
    pub target_bits: u32,
    pub target_history_bits: u32,
}

/// What is wrong with a description.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MachineError {
    #[error("it is neither TOML nor JSON: {0}")]
    Syntax(String),
    #[error("`like` names no built-in core; they are {}", Machine::BUILT_IN.join(", "))]
    Like,
    #[error("`{0}` is not a field")]
    Unknown(String),
    #[error("`{0}` must be {1}")]
    Kind(String, &'static str),
    #[error("`{field}` is {value}; it must be {must}")]
    Value { field: &'static str, value: u64, must: String },
}

/// Cycles and instructions in flight are kept in rings of up to this size.
const SPAN_MAX: u64 = 1 << 22;
const LATENCY_MAX: u32 = 10_000;
const FILE_MAX: usize = 1 << 20;

impl Machine {
    pub const BUILT_IN: [&'static str; 3] = ["21264", "21164", "wide"];

    /// A built-in core by its name.
    pub fn built_in(name: &str) -> Option<Self> {
        match name {
            "21264" => Some(Self::alpha_21264()),
            "21164" => Some(Self::alpha_21164()),
            "wide" => Some(Self::wide()),
            _ => None,
        }
    }

    /// The core of the paper. It can issue six instructions per cycle, and sustains four.
    fn alpha_21264() -> Self {
        Self {
            name: "21264".to_owned(),
            fetch: Fetch { width: 4, block_bytes: 16, queue: 16, taken_bubble: 0 },
            map: Mapper {
                width: 4,
                delay: 2,
                reorder: 80,
                load_queue: 32,
                store_queue: 32,
                integer_window: 20,
                float_window: 15,
            },
            issue: Issue { width: 4, in_order: false },
            units: Units {
                integer: 4,
                multiply: 1,
                float_add: 1,
                float_multiply: 1,
                vector: 2,
                branch: 2,
                load: 2,
                store: 2,
            },
            latency: Latencies {
                integer: 1,
                multiply: 7,
                divide: 30,
                float_add: 4,
                float_multiply: 4,
                float_divide: 15,
                vector: 2,
                branch: 2,
                store: 1,
            },
            retire: Retire { width: 8, early_loads: true },
            l1i: CacheSize { bytes: 64 << 10, ways: 2, line_bytes: 64, latency: 0 },
            l1d: CacheSize { bytes: 64 << 10, ways: 2, line_bytes: 64, latency: 3 },
            l2: CacheSize { bytes: 2 << 20, ways: 1, line_bytes: 64, latency: 16 },
            l3: CacheSize { bytes: 0, ways: 1, line_bytes: 64, latency: 16 },
            memory_latency: 100,
            itlb: TlbSize { entries: 128, ways: 128, page_bytes: 8192, miss: 30 },
            dtlb: TlbSize { entries: 128, ways: 128, page_bytes: 8192, miss: 30 },
            predictor: PredictorSize {
                gshare_bits: 12,
                bimodal_bits: 12,
                chooser_bits: 12,
                history_bits: 12,
                return_stack: 32,
                target_bits: 9,
                target_history_bits: 0,
            },
        }
    }

    /// The core in front of it, which issues in order.
    fn alpha_21164() -> Self {
        let base = Self::alpha_21264();
        Self {
            name: "21164".to_owned(),
            fetch: Fetch { queue: 8, ..base.fetch },
            map: Mapper { reorder: 28, integer_window: 8, float_window: 8, ..base.map },
            issue: Issue { in_order: true, ..base.issue },
            units: Units { integer: 2, branch: 1, store: 1, ..base.units },
            latency: Latencies { multiply: 8, float_divide: 22, ..base.latency },
            retire: Retire { width: 4, ..base.retire },
            l1i: CacheSize { bytes: 8 << 10, ways: 1, line_bytes: 32, latency: 0 },
            l1d: CacheSize { bytes: 8 << 10, ways: 1, line_bytes: 32, latency: 2 },
            l2: CacheSize { bytes: 96 << 10, ways: 3, line_bytes: 64, latency: 9 },
            l3: CacheSize { bytes: 2 << 20, ways: 1, line_bytes: 64, latency: 20 },
            itlb: TlbSize { entries: 48, ways: 48, ..base.itlb },
            dtlb: TlbSize { entries: 64, ways: 64, ..base.dtlb },
            predictor: PredictorSize {
                gshare_bits: 4,
                bimodal_bits: 11,
                history_bits: 1,
                return_stack: 12,
                ..base.predictor
            },
            ..base
        }
    }

    /// A core as wide as those of servers in 2025.
    fn wide() -> Self {
        Self {
            name: "wide".to_owned(),
            fetch: Fetch { width: 8, block_bytes: 32, queue: 96, taken_bubble: 0 },
            map: Mapper {
                width: 8,
                delay: 8,
                reorder: 512,
                load_queue: 192,
                store_queue: 112,
                integer_window: 160,
                float_window: 96,
            },
            issue: Issue { width: 10, in_order: false },
            units: Units {
                integer: 6,
                multiply: 2,
                float_add: 2,
                float_multiply: 2,
                vector: 4,
                branch: 2,
                load: 3,
                store: 2,
            },
            latency: Latencies {
                integer: 1,
                multiply: 3,
                divide: 12,
                float_add: 3,
                float_multiply: 4,
                float_divide: 13,
                vector: 1,
                branch: 1,
                store: 1,
            },
            retire: Retire { width: 8, early_loads: false },
            l1i: CacheSize { bytes: 32 << 10, ways: 8, line_bytes: 64, latency: 0 },
            l1d: CacheSize { bytes: 48 << 10, ways: 12, line_bytes: 64, latency: 5 },
            l2: CacheSize { bytes: 2 << 20, ways: 16, line_bytes: 64, latency: 16 },
            l3: CacheSize { bytes: 32 << 20, ways: 16, line_bytes: 64, latency: 70 },
            memory_latency: 350,
            itlb: TlbSize { entries: 256, ways: 8, page_bytes: 4096, miss: 20 },
            dtlb: TlbSize { entries: 2048, ways: 16, page_bytes: 4096, miss: 30 },
            predictor: PredictorSize {
                gshare_bits: 17,
                bimodal_bits: 15,
                chooser_bits: 15,
                history_bits: 17,
                return_stack: 32,
                target_bits: 12,
                target_history_bits: 10,
            },
        }
    }

    /// Reads a description.
    pub fn parse(text: &str) -> Result<Self, MachineError> {
        if text.len() > FILE_MAX {
            return Err(MachineError::Syntax(format!("it is larger than {FILE_MAX} bytes")));
        }
        let parsed: Value = if text.trim_start().starts_with('{') {
            serde_json::from_str(text).map_err(|error| MachineError::Syntax(error.to_string()))?
        } else {
            let found = toml::from_str(text);
            found.map_err(|error: toml::de::Error| MachineError::Syntax(first_line(&error)))?
        };
        let Value::Object(mut given) = parsed else {
            return Err(MachineError::Syntax("it has no fields".to_owned()));
        };
        let like = given.remove("like").unwrap_or_else(|| "21264".into());
        let base = like.as_str().and_then(Self::built_in).ok_or(MachineError::Like)?;
        let mut fields = match serde_json::to_value(&base) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        replace(&mut fields, given, "")?;
        let found = serde_json::from_value(Value::Object(fields));
        let machine: Self = found.map_err(|error| MachineError::Syntax(error.to_string()))?;
        machine.check()?;
        Ok(machine)
    }

    /// Checks that the model can be as described.
    pub fn check(&self) -> Result<(), MachineError> {
        let Self { fetch, map, issue, units, latency, retire, predictor, .. } = self;
        for (field, value, least, most) in [
            ("fetch.width", fetch.width, 1, 64),
            ("fetch.queue", fetch.queue, 1, 4096),
            ("fetch.taken_bubble", fetch.taken_bubble, 0, 64),
            ("map.width", map.width, 1, 64),
            ("map.delay", map.delay, 1, 64),
            ("map.reorder", map.reorder, 1, 4096),
            ("map.load_queue", map.load_queue, 1, 4096),
            ("map.store_queue", map.store_queue, 1, 4096),
            ("map.integer_window", map.integer_window, 1, 4096),
            ("map.float_window", map.float_window, 1, 4096),
            ("issue.width", issue.width, 1, 64),
            ("units.integer", units.integer, 1, 64),
            ("units.multiply", units.multiply, 1, 64),
            ("units.float_add", units.float_add, 1, 64),
            ("units.float_multiply", units.float_multiply, 1, 64),
            ("units.vector", units.vector, 1, 64),
            ("units.branch", units.branch, 1, 64),
            ("units.load", units.load, 1, 64),
            ("units.store", units.store, 1, 64),
            ("latency.integer", latency.integer, 1, LATENCY_MAX),
            ("latency.multiply", latency.multiply, 1, LATENCY_MAX),
            ("latency.divide", latency.divide, 1, LATENCY_MAX),
            ("latency.float_add", latency.float_add, 1, LATENCY_MAX),
            ("latency.float_multiply", latency.float_multiply, 1, LATENCY_MAX),
            ("latency.float_divide", latency.float_divide, 1, LATENCY_MAX),
            ("latency.vector", latency.vector, 1, LATENCY_MAX),
            ("latency.branch", latency.branch, 1, LATENCY_MAX),
            ("latency.store", latency.store, 1, LATENCY_MAX),
            ("retire.width", retire.width, 1, 64),
            ("l1i.latency", self.l1i.latency, 0, LATENCY_MAX),
            ("l1d.latency", self.l1d.latency, 1, LATENCY_MAX),
            ("l2.latency", self.l2.latency, self.l1d.latency, LATENCY_MAX),
            ("l3.latency", self.l3.latency, self.l2.latency, LATENCY_MAX),
            ("memory_latency", self.memory_latency, self.l3.latency, LATENCY_MAX),
            ("itlb.miss", self.itlb.miss, 0, LATENCY_MAX),
            ("dtlb.miss", self.dtlb.miss, 0, LATENCY_MAX),
            ("predictor.gshare_bits", predictor.gshare_bits, 0, 24),
            ("predictor.bimodal_bits", predictor.bimodal_bits, 0, 24),
            ("predictor.chooser_bits", predictor.chooser_bits, 0, 24),
            ("predictor.history_bits", predictor.history_bits, 0, 64),
            ("predictor.return_stack", predictor.return_stack, 1, 4096),
            ("predictor.target_bits", predictor.target_bits, 0, 24),
            ("predictor.target_history_bits", predictor.target_history_bits, 0, 64),
        ] {
            if value < least || most < value {
                return Err(MachineError::Value {
                    field,
                    value: value.into(),
                    must: format!("from {least} to {most}"),
                });
            }
        }
        for (field, value) in [
            ("fetch.block_bytes", fetch.block_bytes),
            ("l1i.line_bytes", self.l1i.line_bytes),
            ("l1d.line_bytes", self.l1d.line_bytes),
            ("l2.line_bytes", self.l2.line_bytes),
            ("l3.line_bytes", self.l3.line_bytes),
            ("itlb.page_bytes", self.itlb.page_bytes),
            ("dtlb.page_bytes", self.dtlb.page_bytes),
        ] {
            if !value.is_power_of_two() {
                let must = "a power of two".to_owned();
                return Err(MachineError::Value { field, value: value.into(), must });
            }
        }
        for (field, size) in [
            ("l1i.bytes", &self.l1i),
            ("l1d.bytes", &self.l1d),
            ("l2.bytes", &self.l2),
            ("l3.bytes", &self.l3),
        ] {
            let is_none = field == "l3.bytes" && size.bytes == 0;
            let set = u64::from(size.ways) * u64::from(size.line_bytes);
            if !is_none && !sets(size.bytes.into(), set).is_some_and(u64::is_power_of_two) {
                let must = "a power of two times its ways and line_bytes".to_owned();
                return Err(MachineError::Value { field, value: size.bytes.into(), must });
            }
        }
        for (field, size) in [("itlb.entries", &self.itlb), ("dtlb.entries", &self.dtlb)] {
            let sets = sets(size.entries.into(), size.ways.into());
            if !sets.is_some_and(u64::is_power_of_two) || size.entries > 1 << 20 {
                let must = "a power of two times its ways, up to 1048576".to_owned();
                return Err(MachineError::Value { field, value: size.entries.into(), must });
            }
        }
        if self.span() > SPAN_MAX {
            return Err(MachineError::Value {
                field: "map.reorder",
                value: map.reorder.into(),
                must: format!("at most {SPAN_MAX} divided by the longest time of an instruction"),
            });
        }
        Ok(())
    }

    /// More cycles than there can be between the map of an instruction and its completion.
    pub(crate) fn span(&self) -> u64 {
        let Latencies { divide, float_divide, .. } = self.latency;
        let others = [
            self.latency.integer,
            self.latency.multiply,
            self.latency.float_add,
            self.latency.float_multiply,
            self.latency.vector,
            self.latency.branch,
            self.latency.store,
        ];
        let longest = others.into_iter().chain([divide, float_divide]).max().unwrap_or(1);
        let memory = u64::from(self.memory_latency) + u64::from(self.dtlb.miss);
        let delay = u64::from(self.map.delay) + 64;
        (u64::from(self.map.reorder) + 1) * (memory + u64::from(longest) + 4) + delay
    }
}

/// How many sets there are; `None` if the last one is not whole, or there is none.
fn sets(all: u64, of_one: u64) -> Option<u64> {
    let is_whole = of_one > 0 && all > 0 && all.is_multiple_of(of_one);
    is_whole.then(|| all / of_one)
}

fn first_line(error: &toml::de::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Replaces fields by those of a file, which must exist and have the same kind.
fn replace(
    fields: &mut Map<String, Value>,
    given: Map<String, Value>,
    within: &str,
) -> Result<(), MachineError> {
    for (name, value) in given {
        let path = format!("{within}{name}");
        let field = fields.get_mut(&name).ok_or_else(|| MachineError::Unknown(path.clone()))?;
        match (field, value) {
            (Value::Object(field), Value::Object(value)) => {
                replace(field, value, &format!("{path}."))?;
            }
            (Value::Object(_), _) => return Err(MachineError::Kind(path, "a table of fields")),
            (field @ Value::Bool(_), value) => match value {
                Value::Bool(_) => *field = value,
                _ => return Err(MachineError::Kind(path, "true or false")),
            },
            (field @ Value::String(_), value) => match value {
                Value::String(_) => *field = value,
                _ => return Err(MachineError::Kind(path, "a text")),
            },
            (field, value) => {
                let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
                let must = "a whole number from 0 to 4294967295";
                *field = number.ok_or(MachineError::Kind(path, must))?.into();
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_cores_are_valid() {
        for name in Machine::BUILT_IN {
            let machine = Machine::built_in(name).unwrap();
            assert_eq!((machine.name.as_str(), machine.check()), (name, Ok(())));
            let text = serde_json::to_string(&machine).unwrap();
            assert_eq!(Machine::parse(&text), Ok(machine));
        }
    }

    #[test]
    fn a_file_changes_fields_of_a_built_in_core() {
        let found = Machine::parse("like = \"wide\"\n[map]\nreorder = 256\n").unwrap();
        let mut expected = Machine::wide();
        expected.map.reorder = 256;
        assert_eq!(found, expected);
        assert_eq!(Machine::parse("{\"like\": \"21164\"}"), Ok(Machine::alpha_21164()));
    }

    #[test]
    fn errors_name_the_field() {
        for (text, expected) in [
            ("[map]\nrob = 3", "`map.rob` is not a field"),
            ("like = \"p4\"", "`like` names no built-in core; they are 21264, 21164, wide"),
            ("[map]\nreorder = 0", "`map.reorder` is 0; it must be from 1 to 4096"),
            ("map = 3", "`map` must be a table of fields"),
            ("[issue]\nin_order = 1", "`issue.in_order` must be true or false"),
            ("[l1d]\nways = -1", "`l1d.ways` must be a whole number from 0 to 4294967295"),
            ("[l1d]\nline_bytes = 48", "`l1d.line_bytes` is 48; it must be a power of two"),
            ("[l2]\nlatency = 2", "`l2.latency` is 2; it must be from 3 to 10000"),
            (
                "[l1d]\nways = 3",
                "`l1d.bytes` is 65536; it must be a power of two times its ways and line_bytes",
            ),
            (
                "[itlb]\nways = 0",
                "`itlb.entries` is 128; it must be a power of two times its ways, up to 1048576",
            ),
            (
                "memory_latency = 9000\n[map]\nreorder = 4000",
                "`map.reorder` is 4000; it must be at most 4194304 divided by the longest time of \
                 an instruction",
            ),
        ] {
            assert_eq!(Machine::parse(text).unwrap_err().to_string(), expected);
        }
        assert!(matches!(Machine::parse("map = "), Err(MachineError::Syntax(_))));
        assert!(matches!(Machine::parse("{"), Err(MachineError::Syntax(_))));
    }
}
