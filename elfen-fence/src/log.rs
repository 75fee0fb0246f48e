//! What the daemon reports: log lines, messages to systemd, and the list of what is pending.

use std::fmt;
use std::io::{self, Write};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Level {
    Error = 3,
    Warning = 4,
    Notice = 5,
    Info = 6,
}

/// Logs a line: with the priority that the journal reads, or with a name for people.
pub(super) fn report(level: Level, line: impl fmt::Display) {
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let prefix = if journal { format!("<{}>", level as u8) } else { "elfend: ".to_owned() };
    let line = line.to_string().replace(|c: char| c.is_control(), " ");
    // If stderr is gone, the line is lost: fences matter more.
    writeln!(io::stderr(), "{prefix}{line}").ok();
}

/// Tells systemd's watchdog that the daemon makes progress. A check of many units may take longer
/// than the watchdog's limit if systemd itself answers slowly, so each step of it calls this.
pub(super) fn pet_watchdog() {
    notify_systemd("WATCHDOG=1");
}

/// Sends a message to systemd, if this is a service of type notify.
pub(super) fn notify_systemd(words: &str) {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixDatagram;
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = UnixDatagram::unbound().and_then(|socket| match path.as_bytes() {
        [b'@', name @ ..] => {
            use std::os::linux::net::SocketAddrExt;
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            socket.send_to_addr(words.as_bytes(), &address)
        }
        _ => socket.send_to(words.as_bytes(), &path),
    });
    if let Err(error) = sent {
        report(Level::Warning, format_args!("telling systemd {words:?} failed: {error}"));
    }
}

/// What the settings request but the daemon cannot do yet. Each entry is logged once.
#[derive(Debug, Default)]
pub(super) struct PendingList {
    before: Vec<String>,
    now: Vec<String>,
}

impl PendingList {
    /// Begins a new round of checks.
    pub(super) fn begin_round(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    pub(super) fn add(&mut self, what: &str, why: &str) {
        let line = format!("{what} waits: {why}");
        if !self.before.contains(&line) && !self.now.contains(&line) {
            report(Level::Warning, &line);
        }
        if !self.now.contains(&line) {
            self.now.push(line);
        }
    }

    pub(super) fn lines(&self) -> &[String] {
        &self.now
    }
}
