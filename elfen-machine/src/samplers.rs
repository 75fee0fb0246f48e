//! The devices of a machine that sample instructions precisely, as sysfs lists them.
//!
//! A sampler follows one instruction through the pipeline, and reports its own address and what
//! happened to it. Such devices are IBS of AMD, PEBS of Intel, and SPE of Arm. Each has a folder
//! in sysfs that says which bits of perf_event_open(2)'s attributes mean what.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::source::{Source, SourceError};

const DEVICES: &str = "/sys/bus/event_source/devices";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SamplerKind {
    /// Operations of AMD's processors, chosen when they are dispatched.
    IbsOp,
    /// Fetches of AMD's processors.
    IbsFetch,
    /// Events of Intel's processors whose records name the instruction.
    Pebs,
    /// Operations of Arm's processors.
    Spe,
}

impl SamplerKind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::IbsOp | Self::IbsFetch => "IBS",
            Self::Pebs => "PEBS",
            Self::Spe => "SPE",
        }
    }
}

/// PEBS: from this level on, a sample has the address of its own instruction.
pub const EXACT_FROM: u8 = 2;

/// The names of devices. A machine with two kinds of cores has two devices of one kind.
const NAMES: [(&str, SamplerKind); 9] = [
    ("ibs_op", SamplerKind::IbsOp),
    ("ibs_fetch", SamplerKind::IbsFetch),
    ("cpu", SamplerKind::Pebs),
    ("cpu_core", SamplerKind::Pebs),
    ("cpu_atom", SamplerKind::Pebs),
    ("arm_spe_0", SamplerKind::Spe),
    ("arm_spe_1", SamplerKind::Spe),
    ("arm_spe_2", SamplerKind::Spe),
    ("arm_spe_3", SamplerKind::Spe),
];

/// The terms of each kind that are used, and its events.
fn terms(kind: SamplerKind) -> (&'static [&'static str], &'static [&'static str]) {
    match kind {
        SamplerKind::IbsOp => (&["cnt_ctl", "swfilt"], &[]),
        SamplerKind::IbsFetch => (&["rand_en", "swfilt"], &[]),
        SamplerKind::Pebs => {
            (&["event", "umask", "ldlat"], &["instructions", "mem-loads", "mem-loads-aux"])
        }
        SamplerKind::Spe => (&["jitter"], &[]),
    }
}

/// The fields `config`, `config1` and `config2` of perf_event_open(2)'s attributes.
pub type EventConfig = [u64; 3];

/// A device that samples instructions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sampler {
    pub kind: SamplerKind,
    /// As in sysfs.
    pub name: &'static str,
    /// The type in perf_event_open(2)'s attributes.
    pub number: u32,
    formats: BTreeMap<&'static str, Format>,
    events: BTreeMap<&'static str, String>,
    /// PEBS: the most precise level of an event.
    pub precise_max: u8,
    /// SPE: the shortest interval.
    pub interval_min: Option<u64>,
}

impl Sampler {
    /// Sets a term. `None` if the device does not have it, or if the value is too large for it.
    pub fn set(&self, term: &str, value: u64, config: &mut EventConfig) -> Option<()> {
        self.formats.get(term)?.set(value, config)
    }

    /// An event by its name in sysfs, as in `mem-loads`.
    pub fn event(&self, name: &str) -> Option<EventConfig> {
        let mut config = EventConfig::default();
        for term in self.events.get(name)?.split(',') {
            let (term, value) = term.trim().split_once('=').unwrap_or((term.trim(), "1"));
            let value = match value.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16).ok()?,
                None => value.parse().ok()?,
            };
            self.set(term, value, &mut config)?;
        }
        Some(config)
    }
}

/// Where the bits of a term are, the lowest ones first, as in `config1:0-15`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Format {
    field: usize,
    bits: Vec<RangeInclusive<u32>>,
}

impl Format {
    fn parse(text: &str) -> Option<Self> {
        let (field, bits) = text.split_once(':')?;
        let field = ["config", "config1", "config2"].iter().position(|one| *one == field)?;
        let range = |text: &str| {
            let (from, to) = text.split_once('-').unwrap_or((text, text));
            let (from, to): (u32, u32) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
            (from <= to && to < u64::BITS).then_some(from..=to)
        };
        Some(Self { field, bits: bits.split(',').map(range).collect::<Option<_>>()? })
    }

    fn set(&self, mut value: u64, config: &mut EventConfig) -> Option<()> {
        let mut changed = config[self.field];
        for range in &self.bits {
            let width = range.end() - range.start() + 1;
            let mask = u64::MAX >> (u64::BITS - width);
            changed = changed & !(mask << range.start()) | (value & mask) << range.start();
            value = value.checked_shr(width).unwrap_or(0);
        }
        (value == 0).then(|| config[self.field] = changed)
    }
}

/// Reads the samplers of a machine. The device `cpu` is one only if its events can be exact.
pub fn read(source: &Source) -> Result<Vec<Sampler>, SourceError> {
    let mut found = Vec::new();
    for (name, kind) in NAMES {
        let text = |file: &str| source.text(&format!("{DEVICES}/{name}/{file}"));
        let Some(number) = text("type")?.and_then(|text| text.parse().ok()) else { continue };
        let precise_max = match kind {
            SamplerKind::Pebs => text("caps/max_precise")?.and_then(|text| text.parse().ok()),
            _ => None,
        };
        let precise_max = precise_max.unwrap_or(0);
        if kind == SamplerKind::Pebs && precise_max < EXACT_FROM {
            continue;
        }
        let interval_min = match kind {
            SamplerKind::Spe => text("caps/min_interval")?.and_then(|text| text.parse().ok()),
            _ => None,
        };
        let (formats, events) = terms(kind);
        let mut sampler = Sampler {
            kind,
            name,
            number,
            formats: BTreeMap::new(),
            events: BTreeMap::new(),
            precise_max,
            interval_min,
        };
        for term in formats {
            let format = text(&format!("format/{term}"))?;
            if let Some(format) = format.as_deref().and_then(Format::parse) {
                sampler.formats.insert(term, format);
            }
        }
        for event in events {
            if let Some(event_text) = text(&format!("events/{event}"))? {
                sampler.events.insert(event, event_text);
            }
        }
        found.push(sampler);
    }
    Ok(found)
}

/// Why a machine has no sampler.
pub fn why_none(source: &Source) -> Result<&'static str, SourceError> {
    if source.cpu_flag("hypervisor")? {
        return Ok("this virtual machine shows neither IBS, PEBS nor SPE of its processor");
    }
    let has_counters = source.text(&format!("{DEVICES}/cpu/type"))?.is_some();
    Ok(if has_counters {
        "the kernel lists neither ibs_op (AMD) nor arm_spe_0 (Arm), and no precise level of cpu \
         (Intel)"
    } else {
        "the kernel lists no events of the processor"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL: &str = "\
/sys/bus/event_source/devices/cpu/type: 4
/sys/bus/event_source/devices/cpu/caps/max_precise: 3
/sys/bus/event_source/devices/cpu/format/event: config:0-7
/sys/bus/event_source/devices/cpu/format/umask: config:8-15
/sys/bus/event_source/devices/cpu/format/ldlat: config1:0-15
/sys/bus/event_source/devices/cpu/events/instructions: event=0xc0
/sys/bus/event_source/devices/cpu/events/mem-loads: event=0xcd,umask=0x1,ldlat=3
";

    fn recorded(text: &str) -> Source {
        Source::parse_recording(text).unwrap()
    }

    fn found(text: &str) -> Vec<Sampler> {
        read(&recorded(text)).unwrap()
    }

    #[test]
    fn events_of_intel_are_read() {
        let samplers = found(INTEL);
        let [pebs] = &samplers[..] else { panic!("{samplers:?}") };
        assert_eq!((pebs.kind, pebs.number, pebs.precise_max), (SamplerKind::Pebs, 4, 3));
        assert_eq!(pebs.event("mem-loads"), Some([0x1cd, 3, 0]));
        assert_eq!(pebs.event("instructions"), Some([0xc0, 0, 0]));
        assert_eq!(pebs.event("mem-loads-aux"), None);
        let mut config = [0x1cd, 3, 0];
        assert_eq!(pebs.set("ldlat", 30, &mut config), Some(()));
        assert_eq!(pebs.set("ldlat", 1 << 16, &mut config), None, "it is too large");
        assert_eq!(pebs.set("frontend", 1, &mut config), None, "there is no such term");
        assert_eq!(config, [0x1cd, 30, 0]);
    }

    #[test]
    fn amd_and_arm_are_found_by_their_devices() {
        let text = "\
/sys/bus/event_source/devices/ibs_op/type: 11
/sys/bus/event_source/devices/ibs_op/format/cnt_ctl: config:19
/sys/bus/event_source/devices/ibs_op/format/swfilt: config2:0
/sys/bus/event_source/devices/ibs_fetch/type: 10
/sys/bus/event_source/devices/ibs_fetch/format/rand_en: config:57
/sys/bus/event_source/devices/arm_spe_0/type: 9
/sys/bus/event_source/devices/arm_spe_0/format/jitter: config:16
/sys/bus/event_source/devices/arm_spe_0/caps/min_interval: 1024
/sys/bus/event_source/devices/cpu/type: 4
/sys/bus/event_source/devices/cpu/caps/max_precise: 0
";
        let samplers = found(text);
        let names: Vec<_> = samplers.iter().map(|one| (one.name, one.kind.name())).collect();
        assert_eq!(names, [("ibs_op", "IBS"), ("ibs_fetch", "IBS"), ("arm_spe_0", "SPE")]);
        let mut config = [0; 3];
        samplers[0].set("cnt_ctl", 1, &mut config).unwrap();
        samplers[0].set("swfilt", 1, &mut config).unwrap();
        assert_eq!(config, [1 << 19, 0, 1]);
        assert_eq!(samplers[1].set("swfilt", 1, &mut config), None);
        assert_eq!(samplers[2].interval_min, Some(1024));
    }

    #[test]
    fn a_term_may_have_several_pieces() {
        let format = Format::parse("config:0-7,32-35").unwrap();
        let mut config = [0xf_0000_0055, 0, 0];
        assert_eq!(format.set(0x123, &mut config), Some(()));
        assert_eq!(config[0], 0x1_0000_0023);
        assert_eq!(Format::parse("config:0-63").unwrap().set(u64::MAX, &mut config), Some(()));
        for wrong in ["config:7-0", "config:0-64", "config9:1", "config", "config:a"] {
            assert_eq!(Format::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_reason_tells_virtual_machines_apart() {
        let vm = recorded("/proc/cpuinfo: flags: hypervisor\n");
        assert!(why_none(&vm).unwrap().contains("virtual machine"));
        assert!(found("").is_empty());
        assert!(why_none(&recorded("")).unwrap().contains("no events"));
        let old = "/sys/bus/event_source/devices/cpu/type: 4\n";
        assert!(found(old).is_empty(), "precise levels are not listed");
        assert!(why_none(&recorded(old)).unwrap().contains("ibs_op"));
    }
}
