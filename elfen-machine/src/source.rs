//! The source of facts about a machine: its own sysfs and procfs, or a recording of another
//! machine.
//!
//! A recording is text with one `PATH: CONTENT` on each line and `#` for comments. A file with
//! several lines has several such lines. Paths are absolute. The affinity mask of the recording
//! process has the name `affinity`, and the result of an attempt has the attempt's name. A live
//! source remembers everything that was read. So `elfen lanes --dump-machine` writes exactly what a
//! replay reads.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::affinity;
use super::cpulist::{CpuSet, ListError};

const AFFINITY: &str = "affinity";

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("{path:?}: {error}")]
    Unreadable { path: String, error: io::Error },
    #[error("line {line} is not PATH: CONTENT")]
    NotARecording { line: usize },
    #[error("the recording has no line {AFFINITY}: CPUS")]
    NoAffinity,
    #[error("the recording has no line {0}: RESULT")]
    NotTried(&'static str),
    #[error("{path} holds {text:?}: {error}")]
    Malformed { path: String, text: String, error: ListError },
    #[error("sched_getaffinity: {0}")]
    Affinity(io::Error),
}

/// Files by path. A live source adds the files that are read.
type Files = BTreeMap<String, String>;

#[derive(Debug)]
pub enum Source {
    Live { seen: RefCell<Files> },
    Recorded(Files),
}

impl Source {
    pub fn live() -> Self {
        Self::Live { seen: RefCell::default() }
    }

    pub fn open_recording(file: &Path) -> Result<Self, SourceError> {
        let path = file.display().to_string();
        let text =
            fs::read_to_string(file).map_err(|error| SourceError::Unreadable { path, error })?;
        Self::parse_recording(&text)
    }

    pub fn parse_recording(text: &str) -> Result<Self, SourceError> {
        let mut files = Files::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            // A cgroup's path may contain a colon, so the path ends at a colon with a space.
            let parts = line.split_once(": ").or_else(|| Some((line.strip_suffix(':')?, "")));
            let Some((path, content)) = parts else {
                return Err(SourceError::NotARecording { line: index + 1 });
            };
            let file: &mut String = files.entry(path.trim().to_owned()).or_default();
            file.push_str(content.trim());
            file.push('\n');
        }
        Ok(Self::Recorded(files))
    }

    /// Everything that has been read so far, in the form of a recording.
    pub fn recording(&self) -> String {
        let write = |files: &Files| {
            let lines = files.iter().flat_map(|(path, text)| {
                let lines = if text.is_empty() { vec![""] } else { text.lines().collect() };
                lines.into_iter().map(move |line| format!("{path}: {line}"))
            });
            lines.map(|line| line.trim_end().to_owned() + "\n").collect()
        };
        match self {
            Self::Live { seen } => write(&seen.borrow()),
            Self::Recorded(files) => write(files),
        }
    }

    /// A file's text without surrounding spaces; `None` if the file does not exist.
    pub fn text(&self, path: &str) -> Result<Option<String>, SourceError> {
        // Lossy, because a cgroup's name may not be UTF-8. Then only that name is damaged.
        self.read(path, || match fs::read(path) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).trim().to_owned())),
            Err(e) => absent(e),
        })
    }

    /// The lines of a file that `keep` accepts. A recording holds only these lines.
    pub fn lines(
        &self,
        path: &str,
        keep: impl Fn(&str) -> bool,
    ) -> Result<Option<String>, SourceError> {
        self.read(path, || match fs::read(path) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let kept: Vec<&str> = text.lines().filter(|line| keep(line)).collect();
                Ok(Some(kept.join("\n")))
            }
            Err(e) => absent(e),
        })
    }

    /// Whether /proc/cpuinfo lists this CPU flag, which only x86 does. A recording holds only the
    /// flags that were asked for.
    pub fn cpu_flag(&self, flag: &str) -> Result<bool, SourceError> {
        let flags = self.read("/proc/cpuinfo", || {
            let file = match fs::File::open("/proc/cpuinfo") {
                Ok(file) => file,
                Err(e) => return absent(e),
            };
            let mut lines = BufReader::new(file).lines();
            let flags = lines.find(|l| l.as_ref().map_or(true, |l| l.starts_with("flags")));
            let flags = flags.transpose()?;
            let keep = |line: String| {
                if has(&line, flag) { format!("flags: {flag}") } else { "flags:".to_owned() }
            };
            Ok(flags.map(keep))
        })?;
        Ok(flags.is_some_and(|line| has(&line, flag)))
    }

    /// Parses a file with a CPU list; `None` if the file does not exist. Kernels write `(null)` for
    /// a mask that was never set.
    pub fn cpus(&self, path: &str) -> Result<Option<CpuSet>, SourceError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        if text.is_empty() || text == "(null)" {
            return Ok(Some(CpuSet::default()));
        }
        let malformed =
            |error| SourceError::Malformed { path: path.to_owned(), text: text.clone(), error };
        text.parse().map(Some).map_err(malformed)
    }

    /// The affinity mask of this process, or of the process that made the recording.
    pub fn affinity(&self) -> Result<CpuSet, SourceError> {
        match self {
            Self::Live { seen } => {
                let cpus = affinity::allowed().map_err(SourceError::Affinity)?;
                seen.borrow_mut().insert(AFFINITY.to_owned(), cpus.to_string());
                Ok(cpus)
            }
            Self::Recorded(_) => self.cpus(AFFINITY)?.ok_or(SourceError::NoAffinity),
        }
    }

    /// The result of an attempt: tries the operation now, or reads the result from the recording.
    pub fn attempt(
        &self,
        name: &'static str,
        attempt: impl FnOnce() -> String,
    ) -> Result<String, SourceError> {
        let result = self.read(name, || Ok(Some(attempt())))?;
        result.ok_or(SourceError::NotTried(name))
    }

    fn read(
        &self,
        path: &str,
        live: impl FnOnce() -> io::Result<Option<String>>,
    ) -> Result<Option<String>, SourceError> {
        match self {
            Self::Recorded(files) => Ok(files.get(path).map(|text| text.trim().to_owned())),
            Self::Live { seen } => {
                let path = path.to_owned();
                let text = match live() {
                    Ok(text) => text,
                    Err(error) => return Err(SourceError::Unreadable { path, error }),
                };
                if let Some(text) = &text {
                    seen.borrow_mut().insert(path, text.clone());
                }
                Ok(text)
            }
        }
    }
}

fn has(line: &str, flag: &str) -> bool {
    line.split_whitespace().any(|word| word == flag)
}

/// Turns the error of a missing file into `None`. sysfs reports ENODEV if a CPU goes offline during
/// the read.
fn absent(error: io::Error) -> io::Result<Option<String>> {
    let gone = error.kind() == io::ErrorKind::NotFound
        || matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENOTDIR));
    if gone { Ok(None) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a recording returns what was recorded. Method: one file of each shape, read as text
    /// and as a CPU set.
    #[test]
    fn a_recording_returns_its_files() {
        let text = "# a comment\n/a: 0-2\n/b:c/d: 1\n/empty:\n/two: first\n/two: second\n";
        let source = Source::parse_recording(text).unwrap();
        assert_eq!(source.cpus("/a").unwrap(), Some(CpuSet::from_iter(0..=2)));
        assert_eq!(source.text("/b:c/d").unwrap().as_deref(), Some("1"));
        assert_eq!(source.cpus("/empty").unwrap(), Some(CpuSet::default()));
        assert_eq!(source.text("/two").unwrap().as_deref(), Some("first\nsecond"));
        assert_eq!(source.text("/none").unwrap(), None);
        assert_eq!(source.recording(), text.split_once('\n').unwrap().1);
        assert!(matches!(source.cpus("/two"), Err(SourceError::Malformed { .. })));
    }
}
