//! Goal: unmodified programs do the same work, whichever pages of their data are shared from the
//! start. Method: each program runs unchanged, and then once for each sixteen pages of its .data
//! and .bss. These pages are moved to a memory file in the same way as by `elfen shim`. Output and
//! status must be the same. Shells and make fork in these runs.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::needs;
use crate::stage::run_preloaded;

const PAGE: u64 = 4096;
/// The number of pages that can be shared at a time.
const PAGES: usize = 16;
/// The least number of programs that must be installed.
const ENOUGH: usize = 5;

const MAKEFILE: &str = "all: a b c d
	@cat a b c d
%:
	@for n in 1 2 3 4 5 6 7 8; do echo $@ $$n; done >$@
.PHONY: all
";

/// Programs and their arguments. They run in a folder with a Makefile, `data`, and `small.c`.
const ZOO: &[(&str, &[&str])] = &[
    ("bash", &["-c", "n=0; for i in 1 2 3 4 5 6 7 8; do (exit $i); n=$((n + $?)); done; echo $n"]),
    ("dash", &["-c", "n=0; while [ $n -lt 20 ]; do n=$(expr $n + 1); (echo $n); done"]),
    ("make", &["-B", "-s", "-j2", "all"]),
    ("perl", &["-e", "for (1..9) { $p = fork; exit $_ unless $p; waitpid $p, 0; print $? >> 8 }"]),
    ("python3", &["-c", "import json; print(json.dumps({str(i): i ** 9 for i in range(2000)}))"]),
    ("gcc", &["-O2", "-S", "-o", "-", "small.c"]),
    ("redis-server", &["--version"]),
    ("nginx", &["-V"]),
    ("node", &["-e", "let n = 0n; for (let i = 0; i < 1e5; i++) n += BigInt(i); console.log(n)"]),
    ("java", &["-Xlog:disable", "-Xshare:auto", "--version"]),
    ("lua5.4", &["-e", "t = {} for i = 1, 1e5 do t[i] = i .. '' end print(#table.concat(t))"]),
    ("sqlite3", &[":memory:", "create table t(n); insert into t values(7); select sum(n) from t"]),
    ("openssl", &["enc", "-aes-256-cbc", "-K", "00", "-iv", "00", "-base64", "-in", "data"]),
    ("xz", &["-6", "-T1", "-c", "data"]),
    ("zstd", &["-q", "-15", "-c", "data"]),
    ("sort", &["--parallel=2", "data"]),
    ("awk", &["{ n += length($0) } END { print n }", "data"]),
    ("jq", &["-n", "[range(10000)] | add"]),
];

/// The program of this name in Debian's folders only.
fn file_of(program: &str) -> Option<PathBuf> {
    let folders = ["/usr/bin", "/usr/sbin"];
    let file = folders.iter().find_map(|f| fs::canonicalize(Path::new(f).join(program)).ok())?;
    fs::read(&file).ok()?.starts_with(b"\x7fELF").then_some(file)
}

/// The addresses, within the file, of the pages of a program's data.
fn pages_of(file: &Path) -> Vec<u64> {
    let output = Command::new("readelf").arg("-lW").arg(file).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let data = text.lines().filter(|line| line.trim_start().starts_with("LOAD"));
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    let pages = data.filter(|line| line.contains(" RW ")).flat_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (start, bytes) = (number(fields[2]), number(fields[5]));
        (start & !(PAGE - 1)..start + bytes).step_by(4096)
    });
    pages.collect()
}

fn command(file: &Path, words: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(file);
    command.args(words).current_dir(folder).stdin(Stdio::null()).env("LC_ALL", "C");
    command
}

/// Runs a program with these pages shared. Returns how many of the pages were not all zeroes at the
/// end.
fn run(file: &Path, words: &[&str], folder: &Path, pages: &[u64]) -> (Output, usize) {
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(c"elfen-globals".as_ptr(), 0) };
    assert!(fd >= 0);
    // SAFETY: memfd_create has just returned this descriptor, which has no other owner.
    let shared = unsafe { File::from_raw_fd(fd) };
    shared.set_len(PAGES as u64 * PAGE).unwrap();
    let about = fs::metadata(file).unwrap();
    let place = |page: &u64| format!("{}:{}:{page}", about.dev(), about.ino());
    let places: Vec<String> = pages.iter().map(place).collect();
    let order = format!("- {} {}", shared.as_raw_fd(), places.join(" "));
    let (output, _) = run_preloaded(&mut command(file, words, folder), &order);
    let used = (0..pages.len() as u64).filter(|index| {
        let mut bytes = [0; 4096];
        shared.read_exact_at(&mut bytes, index * PAGE).unwrap();
        bytes.iter().any(|&byte| byte != 0)
    });
    (output, used.count())
}

#[test]
#[ignore = "needs readelf, and the programs of a Debian machine"]
fn programs_do_the_same_with_all_of_their_data_shared() {
    needs::programs(&["readelf"]);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("Makefile"), MAKEFILE).unwrap();
    fs::write(at("small.c"), "int f(int n) { return n * n; }\n").unwrap();
    let lines: String = (0..20_000).map(|n: u64| format!("{}\n", n * n % 9973)).collect();
    fs::write(at("data"), lines).unwrap();
    let only = std::env::var("SHIM_ZOO_ONLY").ok();
    let mut done = Vec::new();
    for (program, words) in ZOO {
        if only.as_deref().is_some_and(|only| !program.contains(only)) {
            continue;
        }
        let Some(file) = file_of(program) else { continue };
        let alone = command(&file, words, folder.path()).output().unwrap();
        let pages = pages_of(&file);
        let mut all_used = 0;
        for group in pages.chunks(PAGES) {
            let (output, used) = run(&file, words, folder.path(), group);
            assert_eq!(output.status, alone.status, "{program}: {output:?}");
            assert!(output.stdout == alone.stdout, "{program}: its output differs");
            assert!(output.stderr == alone.stderr, "{program}: {output:?}");
            all_used += used;
        }
        assert!(all_used > 0, "{program}: no page of {} was shared", pages.len());
        done.push(format!("{program} {all_used} of {}", pages.len()));
    }
    println!("pages that were not all zeroes, of all: {}", done.join(", "));
    assert!(done.len() >= ENOUGH || only.is_some(), "{done:?}");
}
