//! The System V segments of this machine, as the kernel lists them: the only registry there is of batches and services.

use std::fs;
use std::io;

use elfen_rt::signal::page::NAME_BYTES;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) key: i32,
    pub(crate) id: i32,
    pub(crate) bytes: usize,
}

pub(crate) fn segments() -> io::Result<Vec<Segment>> {
    Ok(fs::read_to_string("/proc/sysvipc/shm")?.lines().filter_map(parse).collect())
}

/// `None` of the heading.
fn parse(line: &str) -> Option<Segment> {
    let mut fields = line.split_whitespace();
    let (key, id) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Segment { key, id, bytes: fields.nth(1)?.parse().ok()? })
}

/// The name of a page, without the bytes that fill it up.
pub(crate) fn text_of(name: &[u8; NAME_BYTES]) -> String {
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_list() {
        let heading = "       key      shmid perms                  size  cpid  lpid nattch";
        assert_eq!(parse(heading), None);
        let line = " -516947884          3   640                  5376  4242  4243      2";
        assert_eq!(parse(line), Some(Segment { key: -516_947_884, id: 3, bytes: 5376 }));
    }
}
