//! The programs that profiles are judged with: programs of Debian that compute for some tenths of a
//! second, with inputs that are always the same.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A program and its arguments.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    words: Vec<OsString>,
    again: Again,
}

/// How a program does the same work several times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Again {
    /// Its last argument is the number.
    Number,
    /// It has its last argument as many times.
    Last,
    /// A shell starts it as many times.
    Shell,
}

/// Names, how they repeat their work, and command lines. TEXT, LUA, PERL, PYTHON, SQL and C stand
/// for input files.
const COMMANDS: [(&str, Again, &[&str]); 9] = [
    ("lua", Again::Number, &["lua5.4", "LUA"]),
    ("sqlite", Again::Last, &["sqlite3", ":memory:", ".read SQL"]),
    ("gzip", Again::Last, &["gzip", "-9", "-c", "TEXT"]),
    ("bzip2", Again::Last, &["bzip2", "-9", "-c", "TEXT"]),
    ("xz", Again::Last, &["xz", "-T1", "-2", "-c", "TEXT"]),
    ("perl", Again::Number, &["perl", "PERL"]),
    ("python", Again::Number, &["/usr/bin/python3", "PYTHON"]),
    ("sort", Again::Shell, &["sort", "-k3", "TEXT"]),
    ("gcc", Again::Shell, &["gcc", "-O2", "-S", "-o", "/dev/null", "C"]),
];

impl Program {
    /// The command line for doing the work several times.
    pub(crate) fn words(&self, times: u32) -> Vec<OsString> {
        let mut words = self.words.clone();
        let count = usize::try_from(times).unwrap_or(usize::MAX);
        match self.again {
            Again::Number => words.push(times.to_string().into()),
            Again::Last => {
                let last = words.last().cloned().into_iter();
                words.extend(last.cycle().take(count.saturating_sub(1)));
            }
            Again::Shell => {
                let script =
                    format!("i=0; while [ $i -lt {times} ]; do \"$@\" || exit 1; i=$((i+1)); done");
                let shell = ["sh", "-c", &script, "sh"].map(OsString::from);
                words.splice(0..0, shell);
            }
        }
        words
    }

    /// The command line for doing the work once, all of it in the first process. A trace holds
    /// nothing of others.
    pub(crate) fn process_words(&self) -> io::Result<Vec<OsString>> {
        let mut words = self.words.clone();
        if self.again == Again::Number {
            words.push("1".into());
        }
        if self.name == "gcc" {
            // The compiler proper is a process of its own.
            let printed = Command::new("gcc").arg("-print-prog-name=cc1").output()?.stdout;
            let compiler = String::from_utf8_lossy(&printed).trim().to_owned();
            let input = words.pop();
            words = [&compiler, "-quiet", "-O2", "-o", "/dev/null"].map(OsString::from).into();
            words.extend(input);
        }
        Ok(words)
    }
}

const LUA: &str = include_str!("../../../workloads/profile/bench.lua");
const PERL: &str = "\
for my $round (1 .. $ARGV[0]) {
my (%count, @words);
for my $n (1 .. 150000) {
    my $word = chr(97 + $n % 26) . ($n * 7919 % 1009);
    $count{$word} += length $word;
    push @words, $word if $n % 17 == 0;
}
my @sorted = sort { $count{$b} <=> $count{$a} || $a cmp $b } keys %count;
my $text = join ' ', @words;
my $digits = () = $text =~ /[0-9]{2}/g;
print \"$sorted[0] $digits\\n\";
}
";
const PYTHON: &str = "\
import json, re, sys
for round in range(int(sys.argv[1])):
    data = {str(n): [n * i % 7919 for i in range(20)] for n in range(3000)}
    text = json.dumps(data)
    back = json.loads(text)
    words = re.findall('[0-9]+', text)
    primes = [n for n in range(2, 8000) if all(n % d for d in range(2, int(n ** 0.5) + 1))]
    print(len(words), sum(len(v) for v in back.values()), len(primes), sorted(words)[100])
";
const SQL: &str = "\
DROP TABLE IF EXISTS t;
CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c INT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 60000)
INSERT INTO t SELECT i, hex(i * 7919), i % 97 FROM n;
CREATE INDEX tc ON t(c);
UPDATE t SET b = b || c WHERE c < 50;
SELECT c, count(*), max(b) FROM t GROUP BY c ORDER BY 2 DESC, 1 LIMIT 5;
SELECT sum(x.c * y.c) FROM t x JOIN t y ON x.a = y.a + 1;
SELECT count(*) FROM t WHERE b LIKE '%77%';
";

/// The programs that are installed, of those with a name in `chosen`, and the names of the others.
/// Writes their inputs to a folder.
pub(crate) fn prepare(
    folder: &Path,
    chosen: &[String],
) -> io::Result<(Vec<Program>, Vec<&'static str>)> {
    let inputs = [
        ("TEXT", text()),
        ("LUA", LUA.to_owned()),
        ("PERL", PERL.to_owned()),
        ("PYTHON", PYTHON.to_owned()),
        ("SQL", SQL.to_owned()),
        ("C", c_source()),
    ];
    let path_of = |name: &str| {
        let suffix = if name == "C" { "input.c".to_owned() } else { name.to_lowercase() };
        folder.join(suffix)
    };
    for (name, content) in &inputs {
        fs::write(path_of(name), content)?;
    }
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for (name, again, words) in COMMANDS {
        if !chosen.is_empty() && !chosen.iter().any(|one| one == name) {
            continue;
        }
        if !words.first().is_some_and(|program| is_installed(program)) {
            missing.push(name);
            continue;
        }
        let word = |word: &&str| -> OsString {
            match *word {
                ".read SQL" => format!(".read {}", path_of("SQL").display()).into(),
                word if inputs.iter().any(|(name, _)| *name == word) => path_of(word).into(),
                word => word.into(),
            }
        };
        found.push(Program { name, words: words.iter().map(word).collect(), again });
    }
    Ok((found, missing))
}

/// The names that can be chosen.
pub(crate) fn names() -> Vec<&'static str> {
    COMMANDS.iter().map(|(name, ..)| *name).collect()
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    Path::new(program).is_file()
        || std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Lines of words, of which some are frequent.
fn text() -> String {
    const LINES: usize = 40_000;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let words: Vec<String> = (0..2000)
        .map(|_| {
            let length = random.random_range(2..10);
            (0..length).map(|_| char::from(b'a' + random.random_range(0..26))).collect()
        })
        .collect();
    let mut text = String::new();
    for line in 0..LINES {
        for _ in 0..4 {
            // The product of two draws is small more often than not.
            let word = random.random_range(0..45) * random.random_range(0..45);
            text.push_str(words.get(word).map_or("", String::as_str));
            text.push(' ');
        }
        let _written = writeln!(text, "{line} {}", random.random_range(0..1_000_000));
    }
    text
}

/// Functions with loops, branches and calls of each other.
fn c_source() -> String {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
    let mut text = "unsigned f0(unsigned a, unsigned b) { return a * 3 + b; }\n".to_owned();
    for number in 1..250 {
        let called = random.random_range(0..number);
        let (odd, shift) = (2 * random.random_range(1..5000_u32) + 1, random.random_range(1..20));
        let lines = [
            format!("unsigned f{number}(unsigned a, unsigned b)"),
            "{".to_owned(),
            format!("unsigned table[16], sum = {odd};"),
            "for (unsigned i = 0; i < 16; i++)".to_owned(),
            format!("table[i] = (a + i * {odd}) ^ b >> {shift};"),
            "for (unsigned i = 0; i < b % 64; i++) {".to_owned(),
            format!("if (table[i % 16] & {odd}) sum += f{called}(sum, i);"),
            format!("else sum ^= table[(i + {shift}) % 16];"),
            "} return sum; }".to_owned(),
        ];
        text += &lines.join("\n");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_always_the_same() {
        assert_eq!((text(), c_source()), (text(), c_source()));
        let folder = tempfile::tempdir().unwrap();
        let (found, missing) = prepare(folder.path(), &["sort".to_owned()]).unwrap();
        assert!(missing.is_empty());
        let [sort] = &found[..] else { panic!("{found:?}") };
        let words = sort.words(2);
        let output = Command::new(&words[0]).args(&words[1..]).output();
        let printed = output.unwrap().stdout;
        assert_eq!(printed.iter().filter(|&&byte| byte == b'\n').count(), 2 * 40_000);
    }
}
