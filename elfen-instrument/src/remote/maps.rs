//! What a process has mapped where: `/proc/PID/maps`.

use std::fs;
use std::io;
use std::ops::Range;

/// A line of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    pub range: Range<u64>,
    pub writable: bool,
    pub executable: bool,
    /// Writes to it are nobody else's.
    pub private: bool,
    pub offset: u64,
    /// Device and inode; `None` where no file is behind it.
    pub file: Option<(String, u64)>,
    pub name: String,
}

/// In order of their addresses.
pub fn mappings(process: u32) -> io::Result<Vec<Mapping>> {
    // A program may have mapped a file whose name is no text.
    let text = fs::read(format!("/proc/{process}/maps"))?;
    Ok(String::from_utf8_lossy(&text).lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let mut next = || fields.next();
    let (from, to) = next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let rights = next()?.as_bytes();
    let offset = number(next()?)?;
    let device = next()?.to_owned();
    let inode: u64 = next()?.parse().ok()?;
    Some(Mapping {
        range: number(from)?..number(to)?,
        writable: rights.get(1) == Some(&b'w'),
        executable: rights.get(2) == Some(&b'x'),
        private: rights.get(3) == Some(&b'p'),
        offset,
        file: (inode != 0).then_some((device, inode)),
        name: next().unwrap_or_default().trim_start().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let line = "7f1c00200000-7f1c00221000 r-xp 00026000 08:01 1234   /lib/x y.so (deleted)";
        let expected = Mapping {
            range: 0x7f1c_0020_0000..0x7f1c_0022_1000,
            writable: false,
            executable: true,
            private: true,
            offset: 0x2_6000,
            file: Some(("08:01".to_owned(), 1234)),
            name: "/lib/x y.so (deleted)".to_owned(),
        };
        assert_eq!(parse(line), Some(expected));
        let heap = parse("55d0c000-55d0d000 rw-s 00000000 00:00 0 ").unwrap();
        assert!(heap.writable && !heap.executable && !heap.private);
        assert_eq!((heap.file, heap.name.as_str()), (None, ""));
        for bad in ["", "1-2", "1-g r-xp 0 0 0", "1-2 r-xp 0 0:0 x"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_finds_its_own_code() {
        let here = a_process_finds_its_own_code as fn() as usize as u64;
        let own = mappings(std::process::id()).unwrap();
        let code = own.iter().find(|one| one.range.contains(&here)).unwrap();
        assert!(code.executable && !code.writable && code.private && code.file.is_some());
        assert!(own.is_sorted_by_key(|one| one.range.start));
    }
}
