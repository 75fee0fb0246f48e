//! A profile of `elfen profile record`: parsed, written again, and reported.
#![no_main]

use elfen_profile::elfprof::{parse, write};
use elfen_profile::fuzzed;
use libfuzzer_sys::fuzz_target;

// The bytes are a whole file, or one without its checksum, or a header and columns.
fuzz_target!(|input: (u8, &[u8], &[u8])| {
    let (form, bytes, columns) = input;
    let mut file = match form % 3 {
        0 => bytes.to_vec(),
        1 => [b"ELFPROF1", bytes].concat(),
        _ => {
            let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
            // A stored, uncompressed block of zlib.
            let stored = u16::try_from(columns.len().min(0xffff)).unwrap();
            let [length_bytes, inverse] = [stored, !stored].map(u16::to_le_bytes);
            let zlib = [&[0x78, 1, 1][..], &length_bytes, &inverse].concat();
            [&b"ELFPROF1"[..], &length, bytes, &zlib, columns].concat()
        }
    };
    if form % 3 != 0 {
        file.extend(crc32fast::hash(&file).to_le_bytes());
    }
    let Ok(profile) = parse(&file) else { return };
    let mut again = Vec::new();
    write(&profile, &mut again).unwrap();
    assert_eq!(parse(&again).unwrap(), profile);
    fuzzed::report(&profile);
});
