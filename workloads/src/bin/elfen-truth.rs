//! The command `elfen-truth`: a thread that publishes its state and records the ground truth, to
//! test `elfen shim`.
//!
//! The thread takes turns of random length. In each turn it spins on the clock. At the begin of a
//! turn it stores only the turn's tag and number, so it disturbs the measurement little. The clock
//! value that ended a turn is also the stamp of the next turn. The tags are defined in this binary,
//! because tags in the library would appear in all binaries.

use std::arch::x86_64::_rdtsc;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elfen_console::command::{self, Outcome};
use elfen_console::failure::{Failure, Status};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::tag;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;
use workloads::units::{Nanos, nanos_from_f64, parse_nanos};

/// Runs turns of random length, publishes them with tags, and writes the start and the end of each
/// turn.
#[derive(Debug, Parser)]
#[command(
    name = "elfen-truth",
    version,
    after_help = "Turns have numbers from 1, and the tags odd and even; the number is the thread's \
                  value. Lengths are drawn log-uniformly. FILE gets one row per turn: turn, tag, \
                  start_ns, end_ns, by CLOCK_MONOTONIC.\n\n\
                  Example: elfen shim --watch tag -o run.shim -- elfen-truth turns.csv\n\n\
                  Exit status: 0 done, 1 failed, 2 wrong arguments."
)]
struct TruthArgs {
    /// The file for the stamps
    #[arg(value_name = "FILE")]
    stamps: PathBuf,

    /// End after this time
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = parse_nanos)]
    duration: Nanos,

    /// The shortest length of a turn
    #[arg(long, value_name = "TIME", default_value = "100ns", value_parser = parse_nanos)]
    shortest: Nanos,

    /// The longest length of a turn
    #[arg(long, value_name = "TIME", default_value = "100us", value_parser = parse_nanos)]
    longest: Nanos,

    /// Seed of the lengths
    #[arg(long, default_value = "1")]
    seed: u64,
}

/// The maximum number of turns: their stamps need half a gigabyte.
const TURNS_MAX: u64 = 1 << 26;
/// The number of lengths, a power of two. They are drawn before the first turn, and then repeat.
const LENGTHS: usize = 1 << 16;

fn main() -> ExitCode {
    command::main::<TruthArgs>(|_| Ok(()), run)
}

fn run(args: TruthArgs, out: &mut dyn Write) -> Outcome {
    if args.shortest == 0 || args.shortest > args.longest {
        let (why, fix) = ("--shortest is 0 or above --longest", "see `elfen-truth --help`");
        return Err(Failure::new(Status::Usage, "arguments", why, fix));
    }
    let unwritten = |error| Failure::unwritable("stamps", &args.stamps, error);
    // The file is created before the turns, so that an unwritable file is reported at once.
    let file = File::create(&args.stamps).map_err(unwritten)?;
    let before = Moment::now();
    // This rate has an error of about 1 in 10,000. The stamps use the rate over the whole run.
    while before.since_ns() < 10_000_000 {
        std::hint::spin_loop();
    }
    let rate = before.ticks_per_ns();
    let drawn = draw(&args);
    let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
    let lengths: Vec<u64> = drawn.iter().map(|ns| whole(ns * rate)).collect();
    let ticks = whole(args.duration as f64 * rate);
    let most = whole(args.duration as f64 / mean * 2.0).clamp(2 * LENGTHS as u64, TURNS_MAX);
    // Writes all pages now, so that page faults do not disturb the turns.
    let mut stamps = vec![1; usize::try_from(most).unwrap_or(LENGTHS)];
    let turns = take_turns(&lengths, ticks, &mut stamps);
    let clock = Conversion { first: before, ns_per_tick: 1.0 / before.ticks_per_ns() };
    write(file, &stamps[..=turns], clock).map_err(unwritten)?;
    writeln!(out, "{turns} turns").map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

fn whole(value: f64) -> u64 {
    nanos_from_f64(value).unwrap_or(u64::MAX)
}

/// Draws lengths log-uniformly: each octave gets the same number of turns.
fn draw(args: &TruthArgs) -> Vec<f64> {
    let mut random = SplitMix64::seed_from_u64(args.seed);
    let (low, high) = ((args.shortest as f64).ln(), (args.longest as f64).ln());
    (0..LENGTHS).map(|_| (low + random.random::<f64>() * (high - low)).exp()).collect()
}

/// Takes turns until the time is over or the stamps are full, and returns their number. A turn ends
/// at the stamp at which the next turn begins.
#[inline(never)]
fn take_turns(lengths: &[u64], ticks: u64, stamps: &mut [u64]) -> usize {
    let length = |turn: usize| lengths[turn % LENGTHS];
    let _even = tag!("even");
    let (mut turn, mut now) = (0, ticks_now());
    let end = now.saturating_add(ticks);
    while now < end && turn + 2 < stamps.len() {
        stamps[turn] = now;
        turn += 1;
        {
            let _odd = tag!("odd");
            tag::value(turn as u64);
            now = wait(now.saturating_add(length(turn)));
        }
        stamps[turn] = now;
        turn += 1;
        tag::value(turn as u64);
        now = wait(now.saturating_add(length(turn)));
    }
    stamps[turn] = now;
    turn
}

#[inline(always)]
fn wait(until: u64) -> u64 {
    loop {
        let now = ticks_now();
        if now >= until {
            return now;
        }
    }
}

#[inline(always)]
fn ticks_now() -> u64 {
    // SAFETY: every x86-64 has a time stamp counter, and Linux lets programs read it.
    unsafe { _rdtsc() }
}

/// Readings of both clocks at the same time.
#[derive(Clone, Copy, Debug)]
struct Moment {
    ticks: u64,
    ns: u64,
}

impl Moment {
    /// Reads both clocks several times and keeps the pair with the least time in between, because a
    /// reading may be interrupted.
    fn now() -> Self {
        let one = |_| {
            let (first, ns, last) = (ticks_now(), monotonic_ns(), ticks_now());
            (last - first, first + (last - first) / 2, ns)
        };
        let (_, ticks, ns) = (0..16).map(one).min().expect("sixteen tries");
        Self { ticks, ns }
    }

    fn since_ns(self) -> u64 {
        monotonic_ns() - self.ns
    }

    fn ticks_per_ns(self) -> f64 {
        let now = Self::now();
        (now.ticks - self.ticks) as f64 / (now.ns - self.ns).max(1) as f64
    }
}

/// Converts ticks to CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
struct Conversion {
    first: Moment,
    ns_per_tick: f64,
}

impl Conversion {
    fn ns(self, ticks: u64) -> u64 {
        self.first.ns + whole((ticks - self.first.ticks) as f64 * self.ns_per_tick)
    }
}

fn write(file: File, stamps: &[u64], clock: Conversion) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    writeln!(out, "turn,tag,start_ns,end_ns")?;
    for (turn, pair) in (1..).zip(stamps.windows(2)) {
        let tag = if turn % 2 == 1 { "odd" } else { "even" };
        writeln!(out, "{turn},{tag},{},{}", clock.ns(pair[0]), clock.ns(pair[1]))?;
    }
    out.flush()
}
