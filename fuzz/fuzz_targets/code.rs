//! Machine code of a program: patch sites, and the code written there.
#![no_main]

use elfen_rewrite::{Function, Hooks, HotSpot, Permitted, Words, notice, notice_sites};
use libfuzzer_sys::fuzz_target;

const START: u64 = 0x40_0000;
const ROOM: u64 = 0x50_0000;

fuzz_target!(|input: (u8, u16, &[u8])| {
    let (permits, sample, code) = input;
    for site in notice_sites(code) {
        notice(START + site as u64, &code[site..site + 5], ROOM, 0x60_0000).unwrap();
    }
    let sample = (permits & 1 != 0).then(|| START + u64::from(sample));
    let Ok(function) = Function::decode(code, START, sample) else { return };
    let permitted = Permitted {
        several: permits & 2 != 0,
        memory: permits & 4 != 0,
        flags: permits & 8 != 0,
        hotspot: (permits & 16 != 0).then_some(HotSpot { entry: START }),
        ..Permitted::default()
    };
    let words = Words::Fixed { words: [0x60_0008, 0x60_0010], count: Some(0x60_0018) };
    let hooks = Hooks { words, ring: ROOM };
    let around = function.loops_around(sample.unwrap_or(START));
    let loops = around.iter().filter_map(|one| function.site_in_loop(one, &permitted));
    for site in function.sites(&permitted).chain(loops).take(64) {
        assert!(function.range().contains(&site.at), "{site:?}");
        assert!(site.at + site.bytes as u64 <= function.range().end, "{site:?}");
        let jump = site.jump(ROOM).unwrap();
        assert!(jump.at == site.at && jump.bytes.len() <= site.bytes, "{site:?}");
        let _code = function.trampoline(&site, ROOM + 0x100, &hooks);
        let at = ROOM + 0x100;
        let _rounds = function.trampoline_of_rounds(&site, 4, 4096, &permitted, at, &hooks);
    }
});
