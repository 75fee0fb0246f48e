//! What `elfen shim` is asked.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use elfen_console::duration;
use elfen_host::cpulist::CpuSet;

use crate::signal_spec::Ask;

#[derive(clap::Args, Debug)]
#[group(skip)]
pub(super) struct Args {
    /// Lanes to observe, and to keep a started program on [default: all but the observer's]
    #[arg(long, value_name = "LANES")]
    pub(super) on: Option<CpuSet>,

    /// The observer's lane [default: one that shares no core with --on]; several lanes have an
    /// observer each, and share those of --on
    #[arg(long, value_name = "LANES")]
    pub(super) from: Option<CpuSet>,

    /// Allow the observer a lane that shares a core with an observed one
    #[arg(long)]
    pub(super) sibling: bool,

    /// Time between two samples in the mean, as in 300ns; max for as fast as it goes; auto for as
    /// often as costs the observed 2 %, by how often what is watched changes and how far apart the
    /// lanes are, and never below 1us
    #[arg(long, value_name = "TIME", default_value = "auto", value_parser = pace)]
    pub(super) period: Pace,

    /// What to look at; may be repeated [default: who runs, functions and tags]
    #[arg(long, value_name = "SIGNAL", value_parser = Ask::parse)]
    pub(super) watch: Vec<Ask>,

    /// The change of a counter by that of the clock or of another: calls, instructions/cycles, or
    /// a SYMBOL
    #[arg(long, value_name = "WORD[/WORD]")]
    pub(super) rate: Vec<String>,

    /// Functions that publish at their entries what their thread has executed, for --rate
    /// instructions/cycles, which is then the default; may be repeated
    #[arg(long, value_name = "FUNCTION", requires = "program")]
    pub(super) count_at: Vec<String>,

    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = duration::parse)]
    pub(super) duration: Option<Duration>,

    /// Keep only the end
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(super) last: Option<Duration>,

    /// End when a signal is above a number, as in 'queue_len > 20'; with --last to see what led to
    /// it
    #[arg(long, value_name = "SIGNAL > N")]
    pub(super) until: Option<String>,

    /// What is kept: runs of equal samples, each sample by itself, or only how long each thing was
    /// done and in which lengths, however long it takes
    #[arg(long, value_name = "WHAT", value_enum, default_value = "runs")]
    pub(super) keep: Keep,

    /// Join equal tags or numbers through gaps that are no longer, as if nothing had changed in
    /// them: the observer's own timer interrupts take some microseconds each. What is proven not to
    /// have changed is joined anyway
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(super) bridge: Option<Duration>,

    /// Memory for the recording
    #[arg(long, value_name = "SIZE", default_value = "64MB", value_parser = size)]
    pub(super) memory: usize,

    /// Write the recording here
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,

    /// Leave every tenth stretch of 10 ms unobserved, and say by what progressed in it what being
    /// observed costs
    #[arg(long)]
    pub(super) measure_cost: bool,

    /// What counts as progress [default: calls]
    #[arg(long, value_name = "SIGNAL", requires = "measure_cost", value_parser = Ask::parse)]
    pub(super) progress: Option<Ask>,

    /// Show who runs and what is done, once a second; on a terminal q ends it, and what the program
    /// prints is shown behind it
    #[arg(long, conflicts_with = "json")]
    pub(super) live: bool,

    /// Of a process that runs: share the pages of what is watched while it is, instead of reading
    /// them each 100 us; it is stopped for that twice, for a millisecond, and traced in between, so
    /// that each of its signals costs two switches more
    #[arg(long)]
    pub(super) share: bool,

    /// Observe forked children as well, until they start another program: each has tags and
    /// functions of its own
    #[arg(long)]
    pub(super) follow: bool,

    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,

    /// A process that runs
    #[arg(short, long, value_name = "PID", conflicts_with = "program")]
    pub(super) process: Option<u32>,

    /// The program to start, and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    pub(super) program: Vec<OsString>,
}

impl Args {
    /// What rates are asked for.
    pub(super) fn rates(&self) -> Vec<String> {
        match (&self.rate[..], &self.count_at[..]) {
            ([], [_, ..]) => vec!["instructions/cycles".to_owned()],
            (rates, _) => rates.to_vec(),
        }
    }

    /// Whether anything that is asked for is told by functions.
    pub(super) fn wants_functions(&self) -> bool {
        self.watch.is_empty()
            || !self.count_at.is_empty()
            || self.watch.contains(&Ask::Function)
            || self.rate.iter().any(|rate| rate.split('/').any(|word| word == "calls"))
    }
}

/// What a recording holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(super) enum Keep {
    Runs,
    Samples,
    Histogram,
}

/// How often to look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pace {
    Auto,
    Max,
    Every(Duration),
}

fn pace(text: &str) -> Result<Pace, String> {
    match text {
        "auto" => Ok(Pace::Auto),
        "max" => Ok(Pace::Max),
        text => match duration::parse(text)? {
            Duration::ZERO => {
                Err("no time is between two samples; for as fast as it goes say max".to_owned())
            }
            every => Ok(Pace::Every(every)),
        },
    }
}

fn size(text: &str) -> Result<usize, String> {
    let say = || "a size is a whole number and KB, MB or GB, as in 256MB".to_owned();
    let unit = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(say)?;
    let (number, unit) = text.split_at(unit);
    let scale: usize = match unit {
        "KB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        _ => return Err(say()),
    };
    let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(scale));
    bytes.filter(|bytes| (1..=1 << 36).contains(bytes)).ok_or_else(say)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_and_sizes_are_checked() {
        assert_eq!((pace("auto"), pace("max")), (Ok(Pace::Auto), Ok(Pace::Max)));
        assert_eq!(pace("300ns"), Ok(Pace::Every(Duration::from_nanos(300))));
        for wrong in ["0", "0us", "-5us", "1ps", "", "fast"] {
            assert!(pace(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!((size("256MB"), size("1KB")), (Ok(256 << 20), Ok(1 << 10)));
        for wrong in ["", "0MB", "1", "1TB", "-1MB", "99999999999GB"] {
            assert!(size(wrong).is_err(), "{wrong:?}");
        }
    }
}
