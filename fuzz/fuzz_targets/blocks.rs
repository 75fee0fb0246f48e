//! Machine code of a program, in a code cache: translated, promoted and retired.
#![no_main]

use elfen_stream::counts::{Observed, derive};
use elfen_stream::{Cache, Cluster, CodeMemory, Source};
use libfuzzer_sys::fuzz_target;

const START: u64 = 0x10_0000;
const HOT: u64 = 0x100_0000;
const COLD: u64 = 0x200_0000;
const END: u64 = 0x300_0000;
const TABLE: u64 = 0x1000_0000;

struct Code<'a>(&'a [u8]);

impl Source for Code<'_> {
    fn code(&mut self, at: u64) -> Option<(u32, &[u8])> {
        let from = usize::try_from(at.checked_sub(START)?).ok()?;
        let bytes = self.0.get(from..).filter(|bytes| !bytes.is_empty())?;
        Some((0, bytes))
    }
}

struct Nowhere;

impl CodeMemory for Nowhere {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        let is_code = HOT <= at && end <= END;
        assert!(is_code || TABLE <= at && end <= TABLE + Cache::TABLE_BYTES, "{at:#x}");
    }
}

fuzz_target!(|input: (&[u8], Vec<u16>)| {
    let (bytes, entries) = input;
    let mut cache = Cache::new(TABLE, 20);
    cache.add_cluster(Cluster { hot: HOT..COLD, cold: COLD..END }, TABLE, &mut Nowhere).unwrap();
    let mut code = Code(bytes);
    for (number, &entry) in (0..).zip(&entries) {
        let at = START + u64::from(entry) % (bytes.len() as u64 + 1);
        let _stop = cache.translate(at, &mut code, &mut Nowhere);
        cache.promote(number % 4, at, &mut Nowhere);
        if entry & 0xf00 == 0xf00 {
            cache.retire(&(at..at + 16), &mut Nowhere);
        }
        if let Some(original) = cache.original(HOT + u64::from(entry)) {
            assert!(START <= original.at && original.at <= START + bytes.len() as u64);
        }
    }
    let counters = vec![1; cache.counters().len()];
    let counts = derive(&cache, &Observed { counters, ..Observed::default() });
    assert_eq!(counts.blocks.len(), cache.blocks().len());
});
