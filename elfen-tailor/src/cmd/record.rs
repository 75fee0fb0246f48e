//! `elfen tailor record`: writes the kernel's events around a service's requests into a file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::trace::Writer;
use elfen_console::duration;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::create_private;
use elfen_rt::clock::monotonic_ns;

use super::failure::DEFAULT_TRACE;
use super::target::{Target, describe};
use crate::recorder::Recorder;
use crate::signals::EndSignals;

const EXAMPLES: &str = "\
Examples:
  sudo elfen tailor record -d 10s --port 6379      then elfen tailor report
  sudo elfen tailor record --service search        with the service's own marks
  sudo elfen tailor record -p 4711 -o web.trace    until Ctrl-C";

/// Record what the kernel does around a service's requests
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct RecordArgs {
    #[command(flatten)]
    target: Target,

    /// How long to record; without it, until Ctrl-C
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// The file to write; only its owner can read it
    #[arg(short, long, value_name = "FILE", default_value = DEFAULT_TRACE)]
    output: PathBuf,
}

pub(super) fn run(args: &RecordArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let unwritable = |error: io::Error| Failure::unwritable("trace", &args.output, error);
    let ending = EndSignals::new().map_err(|error| {
        Failure::new(Status::Failed, "waiting for signals", error, "see `ulimit -n`")
    })?;
    let mut recorder = args.target.attach()?;
    let file = create_private(&args.output).map_err(unwritable)?;
    let head = recorder.head(args.target.detail());
    to_stderr(&format!("recording {}", describe(&head)));
    let mut writer = Writer::new(BufWriter::new(file), head).map_err(unwritable)?;
    let signal =
        record_until_end(&mut recorder, &mut writer, &ending, args.duration).map_err(unwritable)?;
    writer.end(monotonic_ns()).map_err(unwritable)?;
    let Recorder { taken, lost, .. } = recorder;
    let path = args.output.display();
    writeln!(out, "{taken} events in {path}, {lost} lost; see `elfen tailor report {path}`")
        .map_err(Failure::output)?;
    // Without --duration, Ctrl-C is the regular end of a recording.
    let is_regular = args.duration.is_none() || signal.is_none();
    let code = if is_regular { 0 } else { signal.map_or(0, |n| Status::of_signal(n) as u8) };
    Ok(ExitCode::from(code))
}

fn record_until_end(
    recorder: &mut Recorder,
    writer: &mut Writer<BufWriter<File>>,
    ending: &EndSignals,
    time: Option<Duration>,
) -> io::Result<Option<i32>> {
    let began = Instant::now();
    loop {
        let left = time.map(|time| time.saturating_sub(began.elapsed()));
        let poll_in = recorder.next_poll_in();
        let signal = ending.wait(left.unwrap_or(poll_in).min(poll_in));
        recorder.poll(writer)?;
        if signal.is_some() || left.is_some_and(|left| left.is_zero()) {
            recorder.refresh(writer)?;
            recorder.write_last_names(writer)?;
            recorder.write_last_pause(writer)?;
            return Ok(signal);
        }
    }
}
