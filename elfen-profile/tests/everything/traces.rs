//! Goal: a trace holds the instructions that ran and the addresses that they used, and the program
//! behaves as ever. Method: a C program that prints the addresses of its data.

use std::path::Path;

use elfen_core_model::elftrace;
use elfen_core_model::instruction::{Branch, Class, Instruction};
use elfen_core_model::machine::Machine;
use elfen_core_model::pipeline;
use elfen_core_model::trace::Trace;
use elfen_instrument::symbols::FunctionTable;
use elfen_profile::everything::{RecordedTrace, TraceLimits, record_trace};

use super::*;

const ALL: TraceLimits = TraceLimits { skip: 0, instructions: 100_000_000 };

fn traced(folder: &Path, words: &[&str], limits: TraceLimits) -> (String, RecordedTrace) {
    let (output, shell) = in_shell(folder, words);
    let recorded = record_trace(&shell, limits, |_| {}).unwrap();
    assert_eq!(recorded.trace.check(), Ok(()));
    (fs::read_to_string(output).unwrap(), recorded)
}

/// Each instruction that ran in a function: its address, itself, and the addresses that it used.
fn in_function(trace: &Trace, program: &Path, name: &str) -> Vec<(u64, Instruction, Vec<u64>)> {
    let table = FunctionTable::read(program).unwrap();
    let path = program.to_str().unwrap();
    let file = trace.files.iter().position(|file| file.path == path).unwrap();
    let mut addresses = trace.addresses.iter().copied();
    let mut found = Vec::new();
    for &run in &trace.runs {
        let block = trace.block(run).unwrap();
        let mut inside = 0;
        for one in trace.code(block) {
            let own: Vec<u64> = addresses.by_ref().take(one.addresses()).collect();
            let place = block.place.filter(|(number, _)| *number as usize == file);
            let at = place.and_then(|(_, offset)| table.address_of(offset + inside));
            if at.and_then(|at| table.at(at)).is_some_and(|one| one.name == name) {
                found.push((block.start + inside, *one, own));
            }
            inside += u64::from(one.length);
        }
    }
    found
}

fn pointers(output: &str) -> Vec<u64> {
    let words = output.split_whitespace().take(4);
    words.map(|word| u64::from_str_radix(&word[2..], 16).unwrap()).collect()
}

#[test]
fn addresses_are_those_of_the_data() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "accesses.c", &[]);
    let path = program.to_str().unwrap();
    // More addresses than there is room for at a time.
    let (output, recorded) = traced(folder.path(), &[path, "50000", "7"], ALL);
    assert_eq!(recorded.ended, Ended::Exited(7));
    assert_eq!((recorded.lost, recorded.left), (0, Vec::new()));
    assert!(output.ends_with(" 0\n"), "{output}");
    let pointers = pointers(&output);
    let trace = &recorded.trace;
    let of = |name: &str| in_function(trace, &program, name);
    let data = |code: &[(u64, Instruction, Vec<u64>)]| -> Vec<u64> {
        let memory = code.iter().filter(|(_, one, _)| one.class.branch().is_none());
        memory.flat_map(|(_, _, addresses)| addresses.clone()).collect()
    };
    let found = data(&of("strides"));
    let expected = (0..50_000).map(|round| pointers[0] + 8 * (7 * round % 1000));
    // Perhaps the compiler loads, adds and stores apart.
    let times = found.len() / 50_000;
    assert!((1..=2).contains(&times), "{}", found.len());
    assert_eq!(
        found.chunks(times).map(|same| same[0]).collect::<Vec<_>>(),
        expected.collect::<Vec<_>>()
    );
    let found = data(&of("locals"));
    assert!(found.len() >= 100 && found.iter().all(|&at| at == pointers[1]), "{found:x?}");

    let kinds = of("kinds");
    let moved = kinds.iter().find(|(_, one, _)| one.addresses() == 2).unwrap();
    let mut moved = moved.2.clone();
    moved.sort_unstable();
    let mut expected = pointers[2..4].to_vec();
    expected.sort_unstable();
    assert_eq!(moved, expected);
    let stack: Vec<&(u64, Instruction, Vec<u64>)> = kinds
        .iter()
        .filter(|(_, one, _)| {
            one.early.0 != 0 && one.addresses() == 1 && one.class.branch().is_none()
        })
        .collect();
    assert_eq!(stack.len(), 2);
    assert_eq!(stack[0].2, stack[1].2);
    assert_eq!((stack[0].1.class, stack[1].1.class), (Class::Store, Class::Load));
    let untraced = kinds.iter().filter(|(_, one, _)| one.has_unknown_addresses).count();
    assert_eq!(untraced, 1);
    assert!(trace.untraced_accesses >= 1);

    // Calls and returns are in pairs, and the file keeps it all.
    let count = |branch| {
        let code = trace.runs.iter().flat_map(|&run| trace.code(trace.block(run).unwrap()));
        code.filter(|one| one.class == Class::Branch(branch)).count()
    };
    let calls = count(Branch::Call) + count(Branch::ComputedCall);
    assert!(calls.abs_diff(count(Branch::Return)) < 40, "{calls} {}", count(Branch::Return));
    let mut file = Vec::new();
    elftrace::write(trace, &mut file).unwrap();
    assert_eq!(elftrace::parse(&file).unwrap(), *trace);
    let totals = pipeline::run(trace, &Machine::built_in("wide").unwrap(), |_| {});
    assert_eq!(totals.retired, trace.executed());
}

/// Goal: the number of instructions is that of Elfen's exact profile.
#[test]
fn all_instructions_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "accesses.c", &[]);
    let path = program.to_str().unwrap();
    let (_, recorded) = traced(folder.path(), &[path, "3000"], ALL);
    let words = [OsString::from(path), OsString::from("3000")];
    let (_, exact) = counted(folder.path(), &words, EDGES);
    // The profile also counts the shell, and what was executed outside the cache.
    let shell = [OsString::from("true")];
    let (_, shell) = counted(folder.path(), &shell, EDGES);
    let (found, exact) = (recorded.trace.executed(), exact.profile.instructions);
    assert!(found < exact && exact < found + shell.profile.instructions, "{found} {exact}");
}

#[test]
fn a_part_of_the_program_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "accesses.c", &[]);
    let path = program.to_str().unwrap();
    let words = [path, "2000000", "3"];
    let (_, whole) = traced(folder.path(), &[path, "30000"], ALL);
    for limits in [
        TraceLimits { skip: 150_000, instructions: 60_007 },
        TraceLimits { skip: 0, instructions: 1 },
    ] {
        let (output, recorded) = traced(folder.path(), &words, limits);
        // It goes on without us, to its end.
        assert_eq!(recorded.ended, Ended::Exited(3));
        assert!(output.ends_with(" 0\n"), "{output}");
        assert_eq!(recorded.trace.executed(), limits.instructions);
        let classes = |trace: &Trace, skip: u64| -> Vec<Class> {
            let runs = trace.runs.iter().flat_map(|&run| trace.code(trace.block(run).unwrap()));
            let part = usize::try_from(limits.instructions).unwrap();
            let skip = usize::try_from(skip).unwrap();
            runs.map(|one| one.class).skip(skip).take(part).collect()
        };
        // Up to the length of an argument, both runs are the same for so long.
        let found = classes(&recorded.trace, 0);
        let expected = classes(&whole.trace, limits.skip);
        let same = found.iter().zip(&expected).filter(|(one, other)| one == other).count();
        assert!(same * 10 > found.len() * 3, "{same} of {}", found.len());
    }
}

/// Goal: faults, signals, threads and children behave as without a trace.
#[test]
fn programs_that_look_at_themselves_do_not_notice() {
    let folder = tempfile::tempdir().unwrap();
    for (source, options) in [("signals.c", &["-pthread"][..]), ("counts.c", &[])] {
        let program = compile(folder.path(), source, options);
        let native = natively(&[program.clone().into()]);
        let path = program.to_str().unwrap();
        for instructions in [ALL.instructions, 200_000] {
            let limits = TraceLimits { skip: 0, instructions };
            let (output, recorded) = traced(folder.path(), &[path], limits);
            assert_eq!(output.as_bytes(), native.stdout, "{source}");
            assert_eq!((recorded.ended, recorded.lost), (ended(native.status), 0), "{source}");
        }
    }
}
