//! Programs of Debian.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use elfen_profile::everything::Ended;

use super::program::{EDGES, words_of};
use super::{assert_same, counted};

fn text(folder: &Path) -> PathBuf {
    let mut text = String::new();
    let mut state = 1_u32;
    for line in 0..20_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let word = ["alpha", "beta", "gamma", "delta"][state as usize >> 30];
        writeln!(text, "{word} {line} {state}").unwrap();
    }
    let path = folder.join("text");
    fs::write(&path, text).unwrap();
    path
}

const COMMANDS: [&str; 6] = [
    "sort TEXT",
    "sed -e s/alpha/omega/g TEXT",
    "grep -c beta.*9 TEXT",
    "wc TEXT",
    "md5sum TEXT",
    "sh -c i=0;while|[|$i|-lt|500|];do|i=$((i+1));done;echo|$i|$(echo|child)",
];

#[test]
fn programs_of_the_base_system_behave_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &COMMANDS);
}

const PACKAGED: [&str; 9] = [
    "gzip -c TEXT",
    "xz -T1 -1 -c TEXT",
    "xz -T2 -1 --block-size=100000 -c TEXT",
    "zstd -q -c -T2 TEXT",
    "busybox md5sum TEXT",
    "perl -e my|%h;$h{$_%99}.=chr(65+$_%26)for(1..9999);print|join(',',%h{1,5,7})",
    "/usr/bin/python3 -c import|json,re;print(len(re.findall('1',json.dumps(list(range(9999))))))",
    "gcc -O1 -S -o - -x c SOURCE",
    "sqlite3 :memory: create|table|t(a);with|c(x)as(select|1|union|all|select|x+1|from|c|limit|\
     9999)insert|into|t|select|x*x|from|c;select|sum(a),max(a)|from|t;",
];

#[test]
#[ignore = "needs programs of Debian"]
fn packaged_programs_behave_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &PACKAGED);
}

/// Goal: a program that generates code runs on without us, and the profile says so; a program with
/// a runtime of its own, as Go's, is counted whole. Method: Java, and a Go program with goroutines.
#[test]
#[ignore = "needs Java and Go"]
fn programs_with_runtimes_behave_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["java", "-version"].map(OsString::from);
    let (_, recorded) = counted(folder.path(), &words, EDGES);
    assert_eq!(recorded.ended, Ended::Exited(0));
    let [left] = &recorded.profile.left[..] else { panic!("{:?}", recorded.profile.left) };
    assert!(left.ends_with("it runs code that belongs to no file"), "{left}");
    let source = "package main\nimport (\"fmt\"; \"sync\")\nfunc main() {\n\
        var wait sync.WaitGroup; sums := make([]int, 4)\n\
        for i := range sums { wait.Add(1); go func(i int) { defer wait.Done()\n\
        for k := 0; k < 3000000; k++ { sums[i] += k % (i + 3) } }(i) }\n\
        wait.Wait(); fmt.Println(sums) }\n";
    fs::write(folder.path().join("main.go"), source).unwrap();
    let mut build = Command::new("go");
    build.args(["build", "-o", "main", "main.go"]).current_dir(folder.path());
    build.env("GOCACHE", folder.path().join("cache")).env("GOFLAGS", "-mod=mod");
    assert!(build.status().expect("needs Go").success());
    assert_same(folder.path(), &[folder.path().join("main").into()]);
}

fn run(folder: &Path, commands: &[&str]) {
    let text = text(folder);
    for command in commands {
        assert_same(folder, &words_of(command, &text));
    }
}

/// CPU features that Valgrind does not have: the C library chooses its functions by them.
const FEATURES: &str = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD,\
    -ERMS,-FSRM,-Prefer_ERMS,-Prefer_FSRM";
/// In a thousand.
const TOLERATED: u64 = 1;

/// Goal: as many instructions are counted as Callgrind counts. Method: the same programs, with long
/// runs, because Valgrind's own library takes some 50,000 instructions to load.
#[test]
#[ignore = "needs Valgrind"]
fn instructions_are_those_of_callgrind() {
    let folder = tempfile::tempdir().unwrap();
    let text = text(folder.path());
    let long = "perl -e my|$s=0;for(1..900000){$s+=$_%7}print|$s";
    for command in ["gzip -9 -c TEXT", "xz -T1 -3 -c TEXT", "sort -r -k3 TEXT TEXT TEXT", long] {
        let words = words_of(command, &text);
        let mut callgrind = Command::new("valgrind");
        callgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).args(&words);
        let printed = callgrind.env("GLIBC_TUNABLES", FEATURES).output().unwrap().stderr;
        let printed = String::from_utf8(printed).unwrap();
        let collected = printed.lines().find_map(|line| line.split("Collected : ").nth(1));
        let expected: u64 = collected.unwrap_or_else(|| panic!("{printed}")).parse().unwrap();
        let mut env: Vec<OsString> =
            ["env".into(), format!("GLIBC_TUNABLES={FEATURES}").into()].into();
        env.extend(words);
        let (_, recorded) = counted(folder.path(), &env, EDGES);
        // Less the shell that opens the output, and `env`, up to where they execute.
        let (_, more) = counted(folder.path(), &["env".into(), "true".into()], EDGES);
        let (_, own) = counted(folder.path(), &["true".into()], EDGES);
        let env = more.profile.instructions - own.profile.instructions;
        let found = recorded.profile.instructions - 2 * env;
        let difference = found.abs_diff(expected);
        println!("{command}: {found}, Callgrind {expected}");
        assert!(difference * 1000 <= TOLERATED * expected, "{command}: {found}, {expected}");
    }
}
