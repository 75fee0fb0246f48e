//! Log lines of the daemon: with the priority that the journal reads, or with a name for people.

use std::fmt;
use std::io::{self, Write};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Level {
    Error = 3,
    Warning = 4,
    Notice = 5,
    Info = 6,
}

pub(super) fn report(level: Level, line: impl fmt::Display) {
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let prefix = if journal { format!("<{}>", level as u8) } else { "elfend: ".to_owned() };
    let line = line.to_string().replace(|c: char| c.is_control(), " ");
    // If stderr is gone there is no other place for the line, and fences matter more.
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
        report(Level::Warning, format_args!("systemd cannot be told {words:?}: {error}"));
    }
}
