//! How subcommands fail: with one line that says what failed, why, and what to do, and with an exit
//! status.
//!
//! Libraries return small error enums. A subcommand turns them into a [`Failure`], because only the
//! subcommand knows what the user asked for and can do now.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// The exit status that scripts read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The command could have worked on this machine, but did not.
    Failed = 1,
    /// The arguments are wrong on any machine.
    Usage = 2,
    /// This machine or kernel lacks a feature that the command needs.
    Unsupported = 3,
    /// A program cannot be executed (126) or was not found (127), as in a shell.
    NotStarted = 126,
    NotFound = 127,
    /// The command ended because of a signal. The status is 128 plus the signal's number, as shells
    /// report a killed program.
    HungUp = 129,
    Interrupted = 130,
    Terminated = 143,
}

impl Status {
    /// The status of a command that ended because of a signal.
    pub fn of_signal(signal: i32) -> Self {
        match signal {
            1 => Self::HungUp,
            15 => Self::Terminated,
            _ => Self::Interrupted,
        }
    }
}

#[derive(Debug)]
pub enum Failure {
    Reported {
        status: Status,
        what: String,
        why: String,
        fix: String,
    },
    /// A failure with a longer explanation: the line, and the text to print below it.
    WithScreen {
        failure: Box<Failure>,
        screen: String,
    },
    /// The reader of the output closed it, as in `elfen lanes | head -1`. There is nothing to
    /// report.
    ReaderGone,
}

impl Failure {
    /// Builds the line "`what` failed: `why`; `fix`". All three are clauses without a capital
    /// letter and without a full stop.
    pub fn new(
        status: Status,
        what: impl fmt::Display,
        why: impl fmt::Display,
        fix: impl fmt::Display,
    ) -> Self {
        let (what, why, fix) = (what.to_string(), why.to_string(), fix.to_string());
        Self::Reported { status, what, why, fix }
    }

    /// The failure for a file of the user that cannot be written.
    pub fn unwritable(kind: &str, path: &Path, why: impl fmt::Display) -> Self {
        Self::new(Status::Failed, named(kind, path), why, "name a file that can be written")
    }

    pub fn with_screen(self, screen: String) -> Self {
        Self::WithScreen { failure: Box::new(self), screen }
    }

    /// The failure for a standard output that cannot be written.
    pub fn output(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::ReaderGone;
        }
        let fix = "free some disk space, or write the output elsewhere";
        Self::new(Status::Failed, "writing the output", error, fix)
    }

    /// Prints the failure, except `ReaderGone`, and returns the exit status.
    pub fn report(self) -> ExitCode {
        match self {
            Self::ReaderGone => ExitCode::SUCCESS,
            Self::Reported { status, .. } => {
                to_stderr(&self.to_string());
                ExitCode::from(status as u8)
            }
            Self::WithScreen { failure, screen } => {
                let code = failure.report();
                io::stderr().write_all(screen.as_bytes()).ok();
                code
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reported { what, why, fix, .. } => {
                write!(f, "{what}: {why}; {fix}")
            }
            Self::WithScreen { failure, .. } => failure.fmt(f),
            Self::ReaderGone => f.write_str("the reader has closed the output"),
        }
    }
}

/// Names a file or folder in messages: `report "run.json"`.
pub fn named(kind: &str, path: &Path) -> String {
    format!("{kind} {:?}", path.display().to_string())
}

/// Prints one line to stderr. If stderr is closed or full, only the exit status remains.
pub fn to_stderr(line: &str) {
    writeln!(io::stderr(), "elfen: {}", one_line(&without_errno(line))).ok();
}

/// Leaves out the numbers that the standard library adds to errors of the system: `(os error 2)`.
pub fn without_errno(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        match rest.strip_prefix(')').filter(|_| rest.len() < part.len()) {
            Some(rest) => text + rest,
            None => text + " (os error " + part,
        }
    })
}

/// Escapes line breaks and terminal escapes, because messages quote what the user typed.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a failure is one line, whatever text it quotes. Method: line breaks and an escape in
    /// the text.
    #[test]
    fn a_failure_stays_one_line() {
        let failure = Failure::new(Status::Usage, "lanes \"0\n:1\"", "\u{1b}[31m", "don't\r");
        assert_eq!(one_line(&failure.to_string()), "lanes \"0\\n:1\": \\u{1b}[31m; don't\\r");
    }

    #[test]
    fn numbers_of_errors_are_left_out() {
        let error = io::Error::from_raw_os_error(2);
        assert_eq!(without_errno(&format!("a: {error}; b")), "a: No such file or directory; b");
        for other in ["(os error 2)", "x (os error )", "x (os error 2", "x"] {
            assert_eq!(without_errno(other), other);
        }
    }

    /// Goal: a command that handles a signal and ends has the status of a command that the signal
    /// kills. Method: the signals that commands handle.
    #[test]
    fn the_status_after_a_signal_is_128_plus_its_number() {
        for signal in [1, 2, 15] {
            assert_eq!(Status::of_signal(signal) as i32, 128 + signal);
        }
    }

    /// Goal: a reader that closed the output is not a failure, but a full disk is. Method: the two
    /// errors that `write` returns.
    #[test]
    fn a_reader_that_left_differs_from_a_full_disk() {
        let gone = Failure::output(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(matches!(gone, Failure::ReaderGone));
        let full = Failure::output(io::Error::from(io::ErrorKind::StorageFull));
        assert!(matches!(full, Failure::Reported { status: Status::Failed, .. }));
    }
}
