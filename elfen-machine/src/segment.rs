//! Lists the System V segments of this machine. Batches and services are found by their segments;
//! no other registry of them exists.

use std::{fs, io};

use crate::process::plain_text;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    pub key: i32,
    pub id: i32,
    pub bytes: usize,
    /// The user id of its creator. Unlike that of the owner, it stays.
    pub creator: u32,
}

pub fn segments() -> io::Result<Vec<Segment>> {
    Ok(fs::read_to_string("/proc/sysvipc/shm")?.lines().filter_map(parse).collect())
}

/// Parses a line; `None` for the heading.
fn parse(line: &str) -> Option<Segment> {
    let mut fields = line.split_whitespace();
    let key = fields.next()?.parse().ok()?;
    let id = fields.next()?.parse().ok()?;
    let bytes = fields.nth(1)?.parse().ok()?;
    Some(Segment { key, id, bytes, creator: fields.nth(5)?.parse().ok()? })
}

/// The name of a page as text, without the padding.
pub fn text_of(name: &[u8]) -> String {
    // Any user can create a page, and root may print its name on a terminal.
    plain_text(name.split(|&byte| byte == 0).next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_rt::signal::page::NAME_BYTES;

    #[test]
    fn a_name_cannot_control_the_terminal() {
        let name = |bytes: &[u8]| {
            let mut padded = [0; NAME_BYTES];
            padded[..bytes.len()].copy_from_slice(bytes);
            text_of(&padded)
        };
        assert_eq!(name(b"xz"), "xz");
        assert_eq!(name(b"\x1b[2Jx\ny\x7f\xff"), "\u{fffd}[2Jx\u{fffd}y\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_line_of_the_list_is_parsed() {
        let heading =
            "       key      shmid perms       size  cpid  lpid nattch   uid   gid  cuid  cgid";
        assert_eq!(parse(heading), None);
        let line =
            " -516947884          3   640       5376  4242  4243      2     7     7  1000  1000";
        let expected = Segment { key: -516_947_884, id: 3, bytes: 5376, creator: 1000 };
        assert_eq!(parse(line), Some(expected));
    }
}
