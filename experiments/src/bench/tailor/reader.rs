//! What recording takes for itself: `elfen tailor record` as a process, beside a service that is
//! under load, with all that it does, from looks at its rings to writing its file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use elfen_console::duration::number;
use elfen_console::programs::find_program;

use crate::live::scratch::Scratch;
use crate::live::usage;

/// It has read its programs into the kernel, and looked who is there.
const SETTLED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub(crate) struct Reader {
    pub(crate) events_a_second: f64,
    pub(crate) lost: u64,
    /// Of one CPU.
    pub(crate) cpu_share: f64,
}

/// Records a service, which the first words name, for so long.
pub(crate) fn measure(service: &[String], time: Duration) -> io::Result<Reader> {
    let scratch = Scratch::new(1)?;
    let all = time + SETTLED * 2;
    let mut command = Command::new(find_program("elfen").map_err(io::Error::other)?);
    command.args(["tailor", "record"]).args(service).arg("--for");
    command.arg(format!("{}ms", all.as_millis())).arg("-o").arg(scratch.path("reader.tale"));
    let told = File::options().write(true).create_new(true).open(scratch.path("told"))?;
    command.stdin(Stdio::null()).stdout(told).stderr(Stdio::piped());
    let mut recorder = command.spawn()?;
    let said = recorder.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let mut lines = BufReader::new(said).lines();
    let mut before = Vec::new();
    loop {
        match lines.next().transpose()? {
            Some(line) if line.starts_with("elfen: recording ") => break,
            Some(line) => before.push(line),
            None => return Err(io::Error::other(before.join("; "))),
        }
    }
    std::thread::sleep(SETTLED);
    let (spent_ns, began) = (usage::process_cpu_ns(recorder.id()), Instant::now());
    std::thread::sleep(time);
    let spent_ns = usage::process_cpu_ns(recorder.id()).saturating_sub(spent_ns);
    let took = began.elapsed();
    let status = recorder.wait()?;
    let mut text = String::new();
    File::open(scratch.path("told"))?.read_to_string(&mut text)?;
    let (events, lost) = counts(&text).filter(|_| status.success()).ok_or_else(|| {
        io::Error::other(format!("elfen tailor record ended with {status}: {text:?}"))
    })?;
    Ok(Reader {
        events_a_second: number(events) / all.as_secs_f64(),
        lost,
        cpu_share: number(spent_ns) / 1e9 / took.as_secs_f64(),
    })
}

/// `1234 events in FILE, 5 lost; ..`
fn counts(text: &str) -> Option<(u64, u64)> {
    let (events, rest) = text.split_once(" events in ")?;
    let (_, lost) = rest.rsplit_once(" lost; ")?.0.rsplit_once(", ")?;
    Some((events.parse().ok()?, lost.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_says_what_it_took() {
        let told = "104321 events in /tmp/a, b.tale, 7 lost; `elfen tailor report /tmp/a` tells\n";
        assert_eq!(counts(told), Some((104_321, 7)));
        assert_eq!(counts("elfen: no"), None);
    }
}
