//! The programs of the evaluation, and their inputs.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const LUA: &str = "\
local function fib(n) if n < 2 then return n end return fib(n - 1) + fib(n - 2) end
local Point = {}
Point.__index = Point
local function point(x, y) return setmetatable({x = x, y = y}, Point) end
function Point:add(other) return point(self.x + other.x, self.y + other.y) end
local numbers, words, sum = {}, {}, point(0, 0)
for i = 1, 6000 do numbers[i] = i * 7919 % 10007 end
table.sort(numbers, function(a, b) return a < b end)
for i = 1, 4000 do words[i] = string.format('%d:%s', numbers[i], tostring(i)) end
for word in table.concat(words, ','):gmatch('%d+:') do sum = sum:add(point(#word, 1)) end
print(fib(18), sum.x, sum.y)
";
const PERL: &str = include_str!("../../../../workloads/profile/work.pl");
const PYTHON: &str = "\
import json
words = {}
for i in range(40000):
    key = 'w%d' % (i * 7919 % 1009)
    words[key] = words.get(key, 0) + i
text = json.dumps(words, sort_keys=True)
print(len(text), sum(json.loads(text).values()))
";
const SQL: &str = "\
create table t(a integer primary key, b integer, c text);
with n(x) as (select 1 union all select x + 1 from n limit 20000)
  insert into t select x, x * 7919 % 10007, 'row ' || x from n;
create index i on t(b);
select count(*), sum(length(c)) from t where b between 100 and 5000;
select b % 10, count(*), max(c) from t group by b % 10 order by 2, 1;
";
const LINES: usize = 20_000;

/// A program, as words of a shell without quotes. TEXT and SCRIPT stand for files.
pub(crate) struct StudyProgram {
    pub(crate) name: &'static str,
    words: &'static str,
    script: &'static str,
    /// The package of Debian.
    pub(crate) package: &'static str,
}

const fn program(
    name: &'static str,
    words: &'static str,
    script: &'static str,
    package: &'static str,
) -> StudyProgram {
    StudyProgram { name, words, script, package }
}

pub(crate) const PROGRAMS: [StudyProgram; 10] = [
    program("bzip2", "bzip2 -c TEXT", "", "bzip2"),
    program("grep", "grep -c -E (a.*b|c.?d).*[0-9]9 TEXT", "", "grep"),
    program("gzip", "gzip -c TEXT", "", "gzip"),
    program("lua", "lua5.4 SCRIPT", LUA, "lua5.4"),
    program("perl", "perl SCRIPT 1", PERL, "perl"),
    program("python", "python3 SCRIPT", PYTHON, "python3"),
    program("sed", "sed -E s/([a-m]+)([0-9]+)/\\2-\\1/g TEXT", "", "sed"),
    program("sort", "sort TEXT", "", "coreutils"),
    program("sqlite", "sqlite3 -init SCRIPT :memory: .quit", SQL, "sqlite3"),
    program("xz", "xz -T1 -1 -c TEXT", "", "xz-utils"),
];

/// Folders of programs, before those of PATH: a version manager may have scripts in PATH.
const FOLDERS: [&str; 2] = ["/usr/bin", "/bin"];

impl StudyProgram {
    /// Its words, with files in a folder; `None` if it is not installed.
    pub(crate) fn words(&self, folder: &Path) -> io::Result<Option<Vec<OsString>>> {
        let mut words = self.words.split(' ');
        let Some(found) = words.next().and_then(find) else { return Ok(None) };
        let script = folder.join(self.name);
        if !self.script.is_empty() {
            fs::write(&script, self.script)?;
        }
        let rest = words.map(|word| match word {
            "TEXT" => folder.join("text").into(),
            "SCRIPT" => script.clone().into(),
            word => word.into(),
        });
        Ok(Some([found.into()].into_iter().chain(rest).collect()))
    }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = FOLDERS.iter().map(PathBuf::from).chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Writes the text that programs read: words of which some are frequent.
pub(crate) fn write_text(folder: &Path, seed: u64) -> io::Result<()> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let words: Vec<String> = (0..400)
        .map(|_| {
            let letters = random.random_range(2..9);
            (0..letters).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect()
        })
        .collect();
    let mut text = String::new();
    for _ in 0..LINES {
        for _ in 0..random.random_range(2..7) {
            let limit = random.random_range(1..words.len());
            text += &words[random.random_range(0..limit)];
            text.push(' ');
        }
        // Writing to a string does not fail.
        let _always = writeln!(text, "{}", random.random_range(0..1_000_000));
    }
    fs::write(folder.join("text"), text)
}
