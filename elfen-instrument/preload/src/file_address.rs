//! Addresses in files, as the launcher names them in its order. An address names its file, so that
//! an order for one file never applies to another, even after the process executed another program.

use core::ffi::CStr;

/// A loaded file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct File {
    device: u64,
    inode: u64,
}

/// An address in a file, before the file is mapped.
#[derive(Clone, Copy)]
pub(crate) struct FileAddress {
    pub(crate) file: File,
    pub(crate) address: u64,
}

impl File {
    /// `None` if the file cannot be looked up.
    pub(crate) fn at(path: &CStr) -> Option<Self> {
        // SAFETY: an all-zero stat is a valid value of that plain C structure.
        let mut about: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: the path is NUL-terminated, and `about` is a local variable.
        let failed = unsafe { libc::stat(path.as_ptr(), &mut about) } != 0;
        (!failed).then_some(Self { device: about.st_dev, inode: about.st_ino })
    }
}

impl FileAddress {
    /// Parses `DEVICE:INODE:ADDRESS`.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let mut fields = text.split(|&byte| byte == b':').map(number);
        let (device, inode, address) = (fields.next()??, fields.next()??, fields.next()??);
        Some(Self { file: File { device, inode }, address })
    }
}

pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |value, &digit| {
        let digit = digit.checked_sub(b'0').filter(|&digit| digit < 10)?;
        value.checked_mul(10)?.checked_add(digit.into())
    })
}
