//! Entry points for the fuzzer: the parts of this crate that parse files and memory of programs.

use std::collections::HashMap;

use crate::elf;
use crate::live::fuzzed as live;
use crate::remote::{Mapping, Memory};

pub fn file(bytes: &[u8]) {
    let _read = elf::read(bytes);
}

/// Looks up the function around `ip` in an object that a program has mapped.
pub fn object(image: &[u8], ip: u64) {
    let (memory, mapped) = mapped(image, "/bin/true");
    let ip = mapped.range.start + ip % (image.len() as u64 + 1);
    live::function(&memory, std::slice::from_ref(&mapped), ip);
}

/// Looks up the method around `ip` in a virtual machine with these field offsets. Words of the
/// image whose upper 16 bits are 0x7f7f become addresses within the image.
pub fn hotspot(offsets: [u16; 16], ip: u16, image: &[u8]) {
    const ADDRESS: u64 = 0x7f7f;
    let mut image = image.to_vec();
    let base = image.as_ptr().expose_provenance() as u64;
    for word in image.as_chunks_mut::<8>().0 {
        let value = u64::from_le_bytes(*word);
        if value >> 48 == ADDRESS {
            *word = (base + (value & 0xffff)).to_le_bytes();
        }
    }
    let (memory, mapped) = mapped(&image, "/lib/server/libjvm.so");
    let names = live::FIELDS.iter().map(|&name| name.to_owned());
    let offsets: HashMap<String, u64> = names.zip(offsets.map(u64::from)).collect();
    live::method(&memory, &mapped, &offsets, base + u64::from(ip));
}

/// A range of this process's own memory, presented like the memory of another process.
fn mapped(image: &[u8], name: &str) -> (Memory, Mapping) {
    let base = image.as_ptr().expose_provenance() as u64;
    let mapping = Mapping {
        range: base..base + image.len() as u64,
        writable: false,
        executable: true,
        private: true,
        offset: 0,
        file: Some(("8:1".to_owned(), 1)),
        name: name.to_owned(),
    };
    (Memory::open(std::process::id()).expect("our own memory"), mapping)
}
