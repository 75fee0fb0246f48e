//! Goal: patched code behaves like the original at every kind of site. Method: sites all over the
//! code of real programs. A traced child steps twice through each site, from the same random
//! registers. It first runs the original instructions, then the jump, the check and the moved
//! instructions. Registers, live flags, memory and faults must be equal.

mod draw;
mod object;
mod puppet;

use std::path::{Path, PathBuf};
use std::process::Command;

use draw::{Draw, mapped, named};
use elfen_entries::Frame;
use elfen_rewrite::{BLOCK_BYTES, CpuWords, Function, Hooks, PatchSite, Permitted, Tactic, Words};
use object::Object;
use puppet::{Outcome, Puppet};

/// Sites per object. They are drawn at random from the whole object.
fn sites() -> usize {
    let configured = std::env::var("STEPPED_PLACES").ok();
    configured.map_or(3_000, |sites| sites.parse().expect("STEPPED_PLACES is a number"))
}

fn function(object: &Object, frame: &Frame) -> Option<Function> {
    let bytes = object.bytes(frame.start, frame.bytes)?;
    if frame.is_signal {
        return None;
    }
    Function::decode(bytes, frame.start, None).ok()
}

/// The three kinds of words that checks test.
fn words(puppet: &Puppet, kind: u64) -> Words {
    let at = puppet.near.words;
    match kind & 3 {
        0 => Words::Fixed { words: [at, at + 8], count: None },
        1 => Words::Fixed { words: [at, at + 8], count: Some(at + 16) },
        // The child has the C library of its parent, which keeps a CPU number in every thread.
        _ => Words::PerCpu(CpuWords { blocks: at, cpu_at: cpu_at(), count_at: 16 }),
    }
}

/// The words to write so that one of the two tested words rings, or none.
fn words_of(words: Words, ringing: Option<u64>) -> Vec<(u64, [u8; 8])> {
    let is_ringing = |which: u64| u64::from(ringing == Some(which)).to_le_bytes();
    match words {
        Words::Fixed { words: [task, probe], .. } => {
            vec![(task, is_ringing(0)), (probe, is_ringing(1))]
        }
        // For every CPU that the child may be on. The distances in a block of zeros point to the
        // block itself.
        Words::PerCpu(CpuWords { blocks, .. }) => (0..puppet::cpus())
            .map(|cpu| blocks + cpu * BLOCK_BYTES)
            .flat_map(|block| {
                let distances = if ringing.is_some() { 24 | 32 << 32 } else { 0_u64 };
                let named = [is_ringing(0), is_ringing(1)];
                [(block, distances.to_le_bytes()), (block + 24, named[0]), (block + 32, named[1])]
            })
            .collect(),
    }
}

fn cpu_at() -> i32 {
    unsafe extern "C" {
        static __rseq_offset: libc::ptrdiff_t;
    }
    // SAFETY: a constant of the C library.
    i32::try_from(unsafe { __rseq_offset }).unwrap()
}

/// Runs the original and the patched code from the same state, and compares the outcomes.
fn assert_same_behaviour(
    puppet: &mut Puppet,
    function: &Function,
    site: &PatchSite,
    draw: &mut Draw,
) {
    let registers = std::array::from_fn(|_| draw.word());
    let flags = draw.next();
    let code = puppet.code(site.at, site.bytes);
    let Some(named) = named(&code, site.at, puppet.thread_pointer()) else { return };
    let contents: Vec<Vec<u8>> = named.iter().map(|&named| puppet.named(named)).collect();
    puppet.prepare(&registers, flags, site.at);
    let before = puppet.run(&(site.at..site.at + site.bytes as u64), None, &named);
    puppet.write_all(&named, &contents);
    let words = words(puppet, draw.next());
    let hooks = Hooks { words, ring: puppet.near.ring };
    let Some(trampoline) = function.trampoline(site, puppet.near.arena, &hooks) else { return };
    puppet.write(trampoline.at, &trampoline.bytes);
    let jump = site.jump(puppet.near.arena).unwrap();
    puppet.write(jump.at, &jump.bytes);
    puppet.prepare(&registers, flags, site.at);
    let arena = puppet.near.arena..puppet.near.arena + trampoline.bytes.len() as u64;
    let after = puppet.run(&(site.at..site.at + site.bytes as u64), Some(&arena), &named);
    puppet.write(site.at, &code);
    puppet.write_all(&named, &contents);
    let compared =
        if site.tactic == Tactic::Flags { Outcome::whole } else { Outcome::without_flags };
    let what = || format!("{site:x?} of {code:x?}, registers {registers:x?}, flags {flags:x}");
    assert_eq!(compared(&before), compared(&after), "{}", what());
}

const ROUNDS: usize = 3;

/// Runs a loop as it was, and with rounds after its check, from the same state. The patched loop
/// must end, fault or reach the site as the original does after one of the first `ROUNDS + 1`
/// rounds. Returns whether the outcomes were compared.
fn compare_rounds(
    puppet: &mut Puppet,
    function: &Function,
    site: &PatchSite,
    draw: &mut Draw,
) -> bool {
    let Some(around) = function.loops_around(site.at).pop() else { return false };
    let hooks = Hooks { words: words(puppet, draw.next()), ring: puppet.near.ring };
    let (arena, most) = (puppet.near.arena, 4000);
    let found = function.trampoline_of_rounds(site, ROUNDS, most, &EVERYTHING, arena, &hooks);
    let Some(trampoline) = found else { return false };
    let registers = std::array::from_fn(|_| draw.word());
    let flags = draw.next();
    let range = around.start..around.back + 1;
    let body = puppet.code(range.start, usize::try_from(around.back - around.start).unwrap());
    let Some(named) = named(&body, range.start, puppet.thread_pointer()) else { return false };
    let contents: Vec<Vec<u8>> = named.iter().map(|&named| puppet.named(named)).collect();
    let run = |puppet: &mut Puppet, times, arena: Option<&std::ops::Range<u64>>| {
        puppet.prepare(&registers, flags, site.at);
        let outcome = puppet.run_loop(&range, (site.at, times), arena, &named);
        puppet.write_all(&named, &contents);
        outcome
    };
    let before: Option<Vec<Outcome>> =
        (1..=ROUNDS + 1).map(|times| run(puppet, times, None)).collect();
    let Some(before) = before else { return false };
    let code = puppet.code(site.at, site.bytes);
    puppet.write(trampoline.at, &trampoline.bytes);
    puppet.write(site.at, &site.jump(arena).unwrap().bytes);
    let arena = arena..arena + trampoline.bytes.len() as u64;
    let after = run(puppet, 1, Some(&arena));
    puppet.write(site.at, &code);
    let Some(after) = after else { return false };
    let compared =
        if site.tactic == Tactic::Flags { Outcome::whole } else { Outcome::without_flags };
    let is_one = before.iter().any(|before| compared(before) == compared(&after));
    assert!(is_one, "{site:x?} in {around:x?}: {before:x?}, {after:x?}, flags {flags:x}");
    true
}

const EVERYTHING: Permitted<'static> =
    Permitted { several: true, memory: true, flags: true, named: &[], hotspot: None };

fn test_object(path: &Path, seed: u64) {
    let object = Object::read(path).unwrap_or_else(|| panic!("{}", path.display()));
    let mut puppet = Puppet::start(&object);
    let functions = &object.functions;
    assert!(functions.len() > 10, "{} has functions", path.display());
    let (mut draw, mut tested) = (Draw(seed), [0; 4]);
    let (mut refused, mut rounds, wanted) = (0, 0, sites());
    while tested.iter().sum::<usize>() < wanted {
        let frame = functions[draw.below(functions.len())];
        let Some(function) = function(&object, &frame) else {
            refused += 1;
            assert!(refused < 10 * wanted, "{}: nothing decodes", path.display());
            continue;
        };
        let sites: Vec<PatchSite> = function.sites(&EVERYTHING).collect();
        // Only a few sites of each function, because most are alike.
        for _ in 0..sites.len().min(4) {
            let site = &sites[draw.below(sites.len())];
            assert_same_behaviour(&mut puppet, &function, site, &mut draw);
            tested[site.tactic as usize] += 1;
            rounds += usize::from(compare_rounds(&mut puppet, &function, site, &mut draw));
        }
    }
    println!("{}: seed {seed}, {tested:?} sites by tactic, {rounds} loops", path.display());
    assert!(tested.iter().all(|&count| count > 20), "{tested:?}");
    assert!(rounds > 20, "{rounds} loops");
}

#[test]
fn sites_of_the_c_library() {
    test_object(&mapped("libc.so"), 0x5eed_0001);
}

#[test]
fn sites_of_a_rust_program() {
    test_object(&std::env::current_exe().unwrap(), 0x5eed_0002);
}

#[test]
#[ignore = "needs GCC"]
fn sites_of_the_c_compiler() {
    let output = Command::new("cc").arg("-print-prog-name=cc1").output().unwrap();
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    assert!(path.is_absolute(), "needs GCC: cc has no cc1");
    test_object(&path, 0x5eed_0003);
}

#[test]
#[ignore = "needs Go"]
fn sites_of_a_go_program() {
    let folder = tempfile::tempdir().unwrap();
    let source = "package main\nimport \"fmt\"\nfunc main() { fmt.Println(1) }\n";
    std::fs::write(folder.path().join("main.go"), source).unwrap();
    let mut build = Command::new("go");
    build.args(["build", "-o", "main", "main.go"]).current_dir(folder.path());
    build.env("GOCACHE", folder.path().join("cache")).env("GOFLAGS", "-mod=mod");
    assert!(build.status().expect("needs Go").success());
    test_object(&folder.path().join("main"), 0x5eed_0004);
}

/// Goal: a word that is not 0 rings. Method: the same, with one such word. The first address
/// outside of site and trampoline is the routine's, and all registers but %rax and the stack
/// pointer are as before.
#[test]
fn words_that_are_not_0_ring() {
    let object = Object::read(&mapped("libc.so")).unwrap();
    let mut puppet = Puppet::start(&object);
    let mut rung = [0; 4];
    for frame in object.functions.iter().step_by(20) {
        let Some(function) = function(&object, frame) else { continue };
        for site in function.sites(&EVERYTHING).take(2) {
            let (kind, which) = (frame.start >> 5 & 3, frame.start >> 4 & 1);
            let words = words(&puppet, kind);
            let hooks = Hooks { words, ring: puppet.near.ring };
            let patch = function.trampoline(&site, puppet.near.arena, &hooks);
            let Some(trampoline) = patch else { continue };
            let code = puppet.code(site.at, site.bytes);
            puppet.write(trampoline.at, &trampoline.bytes);
            puppet.write(site.at, &site.jump(puppet.near.arena).unwrap().bytes);
            let (before, after) = (words_of(words, None), words_of(words, Some(which)));
            let registers = std::array::from_fn(|number| number as u64 * 3 + 1);
            puppet.prepare(&registers, 0, site.at);
            for (at, word) in &after {
                puppet.write(*at, word);
            }
            let arena = puppet.near.arena..puppet.near.arena + trampoline.bytes.len() as u64;
            let outcome = puppet.run(&(site.at..site.at + site.bytes as u64), Some(&arena), &[]);
            for (at, word) in &before {
                puppet.write(*at, word);
            }
            puppet.write(site.at, &code);
            let saved: &[usize] = match words {
                Words::Fixed { .. } => &[puppet::RAX],
                Words::PerCpu(_) => &[puppet::RAX, puppet::RCX],
            };
            let (rip, kept) = outcome.at_ring(saved);
            assert_eq!(rip, puppet.near.ring, "{site:x?}");
            assert!(kept, "{site:x?}: {outcome:x?}");
            rung[site.tactic as usize] += 1;
        }
    }
    assert!(rung.iter().all(|&count| count > 5), "{rung:?}");
}
