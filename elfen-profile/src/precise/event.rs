//! Events of perf_event_open(2) that sample instructions, as each processor's devices have them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use elfen_core_model::sample::InstructionSample;
use elfen_machine::samplers::{EXACT_FROM, EventConfig, Sampler, SamplerKind};
use perf_event::events::Raw;
use perf_event::{Builder, Counter, SampleFlag, SampleSkid};
use rand::RngExt;

use super::records::{
    RawSample, SAMPLE_ADDR, SAMPLE_DATA_SRC, SAMPLE_IP, SAMPLE_RAW, SAMPLE_TID,
    SAMPLE_WEIGHT_STRUCT,
};
use super::ring::Ring;
use super::{ibs, pebs};
use crate::bursts::IOC_PERIOD;
use crate::profile::{SampleUnit, SampledEvent};

/// Of the second buffer, for SPE; a power of two.
const AUX_PAGES: usize = 16;
/// SPE: the processor interrupts after this many bytes.
const AUX_WATERMARK: u32 = 16 * 1024;
/// IBS does not have the lowest four bits of an interval, and SPE not the lowest eight.
const IBS_STEP: u64 = 16;
const SPE_STEP: u64 = 256;
/// One instruction in this number is a load, about. So loads have about as many samples.
const INSTRUCTIONS_PER_LOAD: u64 = 4;
/// Intel: instructions that retired, evenly (`INST_RETIRED.PREC_DIST`).
const PRECISE_INSTRUCTIONS: [(&str, u64); 2] = [("event", 0xc0), ("umask", 0x01)];

/// How the samples of an event are decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Decoding {
    IbsOp,
    IbsFetch,
    Pebs,
    /// From the second buffer.
    Spe,
}

impl Decoding {
    /// Decodes a sample of the first buffer.
    pub(crate) fn decode(self, sample: &RawSample<'_>) -> Option<InstructionSample> {
        match self {
            Self::IbsOp => ibs::decode_op(sample.raw, sample.thread),
            Self::IbsFetch => ibs::decode_fetch(sample.raw, sample.thread),
            Self::Pebs => {
                let fields = pebs::PebsFields {
                    pc: sample.pc,
                    address: sample.address,
                    weight: sample.weight,
                    data_source: sample.data_source,
                };
                Some(pebs::decode(fields, sample.thread))
            }
            Self::Spe => None,
        }
    }

    pub(crate) const fn sample_type(self) -> u64 {
        match self {
            Self::IbsOp | Self::IbsFetch => SAMPLE_IP | SAMPLE_TID | SAMPLE_RAW,
            Self::Pebs => {
                SAMPLE_IP | SAMPLE_TID | SAMPLE_ADDR | SAMPLE_WEIGHT_STRUCT | SAMPLE_DATA_SRC
            }
            Self::Spe => SAMPLE_IP | SAMPLE_TID,
        }
    }
}

/// One way to open an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Variant {
    pub(super) config: EventConfig,
    /// As `precise_ip` in perf_event_open(2)'s attributes.
    pub(super) precise: u8,
}

/// An event, and how to read it.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct EventPlan {
    pub(super) described: SampledEvent,
    pub(super) decoding: Decoding,
    /// The type in perf_event_open(2)'s attributes.
    pub(super) number: u32,
    /// The first one that the kernel accepts is used.
    pub(super) variants: Vec<Variant>,
    /// An event that has to be in front of it in a group.
    pub(super) leader: Option<EventConfig>,
    /// The kernel leaves its own instructions out. Else they are left out here.
    pub(super) excludes_kernel: bool,
    /// Samples without an exact address are left out.
    pub(super) needs_exact: bool,
    /// Intervals are multiples of this.
    pub(super) step: u64,
}

/// The events of a machine's samplers, with one sample in `every` instructions or operations.
pub(super) fn plans(samplers: &[Sampler], every: u64) -> Vec<EventPlan> {
    samplers.iter().flat_map(|sampler| plans_of(sampler, every)).collect()
}

fn plans_of(sampler: &Sampler, every: u64) -> Vec<EventPlan> {
    let plan = |unit, interval: u64, decoding, variants| EventPlan {
        described: SampledEvent {
            device: sampler.name.to_owned(),
            source: sampler.kind.name().to_owned(),
            unit,
            interval,
            ..SampledEvent::default()
        },
        decoding,
        number: sampler.number,
        variants,
        leader: None,
        excludes_kernel: true,
        needs_exact: false,
        step: 1,
    };
    match sampler.kind {
        SamplerKind::IbsOp | SamplerKind::IbsFetch => {
            let is_op = sampler.kind == SamplerKind::IbsOp;
            let mut config = EventConfig::default();
            // Without `cnt_ctl`, cycles would be counted. Old processors can only count these.
            let (unit, decoding) = match is_op {
                true if sampler.set("cnt_ctl", 1, &mut config).is_some() => {
                    (SampleUnit::Operations, Decoding::IbsOp)
                }
                true => (SampleUnit::Cycles, Decoding::IbsOp),
                false => {
                    let _fixed = sampler.set("rand_en", 1, &mut config);
                    (SampleUnit::Fetches, Decoding::IbsFetch)
                }
            };
            let excludes_kernel = sampler.set("swfilt", 1, &mut config).is_some();
            let variants = vec![Variant { config, precise: 0 }];
            let interval = every.next_multiple_of(IBS_STEP);
            vec![EventPlan {
                excludes_kernel,
                step: IBS_STEP,
                ..plan(unit, interval, decoding, variants)
            }]
        }
        SamplerKind::Pebs => {
            let levels = || (EXACT_FROM..=sampler.precise_max.min(3)).rev();
            let at_levels = |config| levels().map(move |precise| Variant { config, precise });
            let mut even = EventConfig::default();
            let is_known = PRECISE_INSTRUCTIONS
                .into_iter()
                .all(|(term, value)| sampler.set(term, value, &mut even).is_some());
            let others = sampler.event("instructions");
            let variants: Vec<Variant> =
                is_known.then_some(even).into_iter().chain(others).flat_map(at_levels).collect();
            let instructions = plan(SampleUnit::Instructions, every, Decoding::Pebs, variants);
            let loads = sampler.event("mem-loads").map(|config| {
                let interval = (every / INSTRUCTIONS_PER_LOAD).max(1);
                EventPlan {
                    leader: sampler.event("mem-loads-aux"),
                    ..plan(SampleUnit::Loads, interval, Decoding::Pebs, at_levels(config).collect())
                }
            });
            let all = [Some(instructions), loads].into_iter().flatten();
            all.filter(|plan| !plan.variants.is_empty())
                .map(|plan| EventPlan { needs_exact: true, ..plan })
                .collect()
        }
        SamplerKind::Spe => {
            let mut config = EventConfig::default();
            let _fixed = sampler.set("jitter", 1, &mut config);
            let least = sampler.interval_min.unwrap_or(0);
            let interval = every.max(least).next_multiple_of(SPE_STEP);
            let variants = vec![Variant { config, precise: 0 }];
            let unit = SampleUnit::Operations;
            vec![EventPlan { step: SPE_STEP, ..plan(unit, interval, Decoding::Spe, variants) }]
        }
    }
}

impl EventPlan {
    /// A random interval: from half of the mean one to one and a half of it.
    pub(super) fn random_interval(&self, random: &mut impl rand::Rng) -> u64 {
        let mean = self.described.interval.max(2);
        let found = random.random_range(mean / 2..=mean + mean / 2);
        (found - found % self.step).max(self.step)
    }

    /// Drops all variants but the first one that the kernel accepts.
    pub(super) fn choose(&mut self) -> io::Result<()> {
        let own = 0;
        let mut first = Err(io::ErrorKind::Unsupported.into());
        for number in 0..self.variants.len() {
            match self.open_variant(self.variants[number], own, self.described.interval) {
                Ok(_) => {
                    self.variants = vec![self.variants[number]];
                    return Ok(());
                }
                // The error of the first one is the clearest, but for missing rights.
                Err(error) if number == 0 || error.kind() == io::ErrorKind::PermissionDenied => {
                    first = Err(error);
                }
                Err(_) => {}
            }
        }
        first
    }

    fn open_variant(
        &self,
        variant: Variant,
        thread: libc::pid_t,
        interval: u64,
    ) -> io::Result<(Counter, Option<Counter>)> {
        let mut leader = match self.leader {
            Some(config) => Some(builder(self.number, config, thread).build()?),
            None => None,
        };
        let mut builder = builder(self.number, variant.config, thread);
        builder.sample_period(interval);
        builder.sample(SampleFlag::from_bits_retain(self.decoding.sample_type()));
        builder.wakeup_events(1).exclude_kernel(self.excludes_kernel);
        builder.exclude_hv(self.excludes_kernel);
        builder.precise_ip(match variant.precise {
            0 => SampleSkid::Arbitrary,
            1 => SampleSkid::Constant,
            2 => SampleSkid::RequestZero,
            _ => SampleSkid::RequireZero,
        });
        // Mappings of code, programs that are executed, and new threads.
        builder.mmap(true).mmap2(true).comm(true).comm_exec(true).task(true);
        if self.decoding == Decoding::Spe {
            builder.aux_watermark(AUX_WATERMARK);
        }
        let counter = match &mut leader {
            Some(leader) => builder.build_with_group(leader)?,
            None => builder.build()?,
        };
        Ok((counter, leader))
    }

    /// Opens the event for a thread. It counts from then on.
    pub(super) fn open(&self, thread: u32, interval: u64) -> io::Result<ThreadEvent> {
        let thread = libc::pid_t::try_from(thread).map_err(|_| io::ErrorKind::InvalidInput)?;
        let &variant = self.variants.first().ok_or(io::ErrorKind::Unsupported)?;
        let (counter, leader) = self.open_variant(variant, thread, interval)?;
        let aux_pages = if self.decoding == Decoding::Spe { AUX_PAGES } else { 0 };
        let ring = Ring::map(&counter, aux_pages)?;
        Ok(ThreadEvent { counter, _leader: leader, ring })
    }
}

/// An event by the fields of perf_event_open(2)'s attributes.
fn builder<'a>(number: u32, config: EventConfig, thread: libc::pid_t) -> Builder<'a> {
    let [config, config1, config2] = config;
    let mut builder = Builder::new(Raw::new(config).config1(config1).config2(config2));
    builder.attrs_mut().type_ = number;
    builder.observe_pid(thread).any_cpu().enabled(true);
    builder
}

/// An event of one thread, with its buffers.
#[derive(Debug)]
pub(super) struct ThreadEvent {
    pub(super) counter: Counter,
    _leader: Option<Counter>,
    pub(super) ring: Ring,
}

impl ThreadEvent {
    /// Begins another interval.
    pub(super) fn set_interval(&self, interval: u64) -> io::Result<()> {
        let fd = self.counter.as_raw_fd();
        // SAFETY: the kernel reads the interval, which is a local variable.
        let done = unsafe { libc::ioctl(fd, IOC_PERIOD, &raw const interval) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for ThreadEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the counter has the descriptor open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.counter.as_raw_fd()) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::hint::black_box;

    use elfen_machine::source::Source;
    use rand::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;
    use crate::precise::records::{PerfRecord, parse};

    /// A clock of the kernel in place of an event of the processor: its samples have the same
    /// fields as those of PEBS, and come through the same buffers.
    pub(in crate::precise) fn clock(interval: u64) -> EventPlan {
        const SOFTWARE: u32 = 1;
        const TASK_CLOCK: u64 = 1;
        EventPlan {
            described: SampledEvent {
                device: "clock".to_owned(),
                interval,
                ..SampledEvent::default()
            },
            decoding: Decoding::Pebs,
            number: SOFTWARE,
            variants: vec![Variant { config: [TASK_CLOCK, 0, 0], precise: 0 }],
            leader: None,
            excludes_kernel: true,
            needs_exact: false,
            step: 1,
        }
    }

    fn found(text: &str) -> Vec<EventPlan> {
        let lines: String =
            text.lines().map(|line| format!("/sys/bus/event_source/devices/{line}\n")).collect();
        let source = Source::parse_recording(&lines).unwrap();
        plans(&elfen_machine::samplers::read(&source).unwrap(), 500_000)
    }

    #[test]
    fn amd_samples_operations_and_fetches() {
        let all = found(
            "ibs_op/type: 11\nibs_op/format/cnt_ctl: config:19\nibs_fetch/type: 10\n\
             ibs_fetch/format/rand_en: config:57\nibs_fetch/format/swfilt: config2:0",
        );
        let [op, fetch] = &all[..] else { panic!("{all:?}") };
        assert_eq!((op.number, op.described.unit), (11, SampleUnit::Operations));
        assert_eq!(op.variants, [Variant { config: [1 << 19, 0, 0], precise: 0 }]);
        assert!(!op.excludes_kernel, "this kernel does not filter by mode");
        assert_eq!(
            (fetch.described.unit, fetch.decoding),
            (SampleUnit::Fetches, Decoding::IbsFetch)
        );
        assert_eq!(fetch.variants[0].config, [1 << 57, 0, 1]);
        assert!(fetch.excludes_kernel);
        let old = found("ibs_op/type: 11");
        assert_eq!(old[0].described.unit, SampleUnit::Cycles, "it only counts cycles");
    }

    #[test]
    fn intel_samples_instructions_and_loads() {
        let all = found(
            "cpu/type: 4\ncpu/caps/max_precise: 3\ncpu/format/event: config:0-7\n\
             cpu/format/umask: config:8-15\ncpu/format/ldlat: config1:0-15\n\
             cpu/events/instructions: event=0xc0\n\
             cpu/events/mem-loads: event=0xcd,umask=0x1,ldlat=3\n\
             cpu/events/mem-loads-aux: event=0x03,umask=0x82",
        );
        let [instructions, loads] = &all[..] else { panic!("{all:?}") };
        let variant = |config, precise| Variant { config: [config, 0, 0], precise };
        let expected = [(0x1c0, 3), (0x1c0, 2), (0xc0, 3), (0xc0, 2)];
        assert_eq!(instructions.variants, expected.map(|(config, level)| variant(config, level)));
        assert!(instructions.needs_exact && loads.needs_exact);
        assert_eq!((instructions.leader, loads.leader), (None, Some([0x8203, 0, 0])));
        assert_eq!(loads.variants[0], Variant { config: [0x1cd, 3, 0], precise: 3 });
        assert_eq!((loads.described.unit, loads.described.interval), (SampleUnit::Loads, 125_000));
        assert!(found("cpu/type: 4\ncpu/caps/max_precise: 1").is_empty());
    }

    #[test]
    fn arm_has_a_shortest_interval() {
        let all = found(
            "arm_spe_0/type: 9\narm_spe_0/format/jitter: config:16\n\
             arm_spe_0/caps/min_interval: 1000000",
        );
        let [spe] = &all[..] else { panic!("{all:?}") };
        assert_eq!((spe.decoding, spe.described.interval), (Decoding::Spe, 1_000_192));
        assert_eq!(spe.variants[0].config, [1 << 16, 0, 0]);
    }

    #[test]
    fn intervals_are_random_around_their_mean() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        for (interval, step) in [(500_000, 1), (500_000, 16), (1000, 256)] {
            let plan = EventPlan { step, ..clock(interval) };
            let all: Vec<u64> = (0..1000).map(|_| plan.random_interval(&mut random)).collect();
            let mean = all.iter().sum::<u64>() / 1000;
            assert!(mean.abs_diff(interval) < interval / 20 + step / 2, "{mean}");
            assert!(all.iter().all(|one| one % step == 0 && *one >= interval / 2 - step));
            let distinct: std::collections::HashSet<&u64> = all.iter().collect();
            assert!(distinct.len() > 3, "{distinct:?}");
        }
        let tiny = EventPlan { step: 16, ..clock(1) };
        assert_eq!(tiny.random_interval(&mut random), 16);
    }

    fn own_thread() -> u32 {
        // SAFETY: takes nothing.
        unsafe { libc::gettid() }.unsigned_abs()
    }

    fn burn(rounds: u64) -> u64 {
        (0..rounds).fold(1, |all: u64, one| black_box(all.wrapping_mul(one | 1)))
    }

    /// Goal: a new interval holds at once, samples name code of this test, and samples that find
    /// no room are counted. Method: a clock of this thread, which would first fire after 18
    /// minutes; then intervals so short that the buffer becomes full.
    #[test]
    #[ignore = "needs root, or kernel.perf_event_paranoid of at most 2"]
    fn samples_come_through_the_buffer() {
        const ROUNDS: u32 = 1000;
        let plan = clock(1 << 40);
        let mut event = plan.open(own_thread(), 1 << 40).unwrap();
        burn(100_000);
        let early = event.ring.take();
        let (early, _) = parse(&early, plan.decoding.sample_type());
        let is_sample = |one: &PerfRecord<'_>| matches!(one, PerfRecord::Sample(_));
        assert!(!early.iter().any(is_sample), "the first interval is too long: {early:?}");
        event.set_interval(20_000).unwrap();
        let (mut samples, mut lost) = (0, 0);
        for _ in 0..ROUNDS {
            burn(1_000_000);
            let bytes = event.ring.take();
            let (records, rest) = parse(&bytes, plan.decoding.sample_type());
            assert_eq!(rest, 0);
            for record in records {
                match record {
                    PerfRecord::Sample(sample) => {
                        samples += 1;
                        assert_eq!((sample.process, sample.is_user), (std::process::id(), true));
                        assert_eq!(sample.thread, own_thread());
                        let found = plan.decoding.decode(&sample).unwrap();
                        assert_eq!(found.pc, sample.pc);
                        assert_eq!(found.latencies.load_issue_to_completion, None);
                    }
                    PerfRecord::Lost(count) => lost += count,
                    _ => {}
                }
            }
            if samples > 0 && lost > 0 {
                return;
            }
            // Longer and longer without reading.
            burn(20_000_000);
        }
        panic!("{samples} samples, {lost} lost");
    }
}
