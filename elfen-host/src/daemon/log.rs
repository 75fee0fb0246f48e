//! Lines of a daemon: with the priority that the journal reads where it listens, for people
//! elsewhere.

use std::fmt;
use std::io::{self, Write};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Level {
    Error = 3,
    Warning = 4,
    Notice = 5,
    Info = 6,
}

pub(super) fn say(level: Level, line: impl fmt::Display) {
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let prefix = if journal { format!("<{}>", level as u8) } else { "elfend: ".to_owned() };
    let line = line.to_string().replace(|c: char| c.is_control(), " ");
    // With stderr gone there is nobody left to tell, and the fences are more than words.
    writeln!(io::stderr(), "{prefix}{line}").ok();
}

/// For systemd's watchdog. A look at many units may take longer than it waits, where systemd itself
/// is slow to answer: so each step of it says this.
pub(super) fn gets_on() {
    notify("WATCHDOG=1");
}

/// What systemd is told of a service of type notify; nothing where it did not ask.
pub(super) fn notify(words: &str) {
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
        say(Level::Warning, format_args!("systemd cannot be told {words:?}: {error}"));
    }
}
