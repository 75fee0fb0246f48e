//! Goal: a program and everything around it are with shadows as without, and shadows show what the
//! program does. Method: a program that looks for traces of them, programs with known shares, and
//! programs of Debian.

#[path = "../program/mod.rs"]
mod program;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use elfen_profile::everything;
use elfen_profile::profile::{DataStream, Profile, StreamCount, What};
use elfen_profile::recording::{Recorded, RecordingError};
use elfen_profile::shadows::{Order, ShadowError, Shadows, record};
use program::{
    ALL, Counts, EDGES, Running, assert_shares, busy_shell, compile, in_shell, natively,
    process_subject, program_subject, words_of,
};

/// As many shadows as there is time for.
const ORDER: Order = Order {
    cost: 0.5,
    load: 2.0,
    sample: 50_000,
    stall_max: Duration::from_millis(100),
    cpu: None,
    what: ALL,
    until: None,
};

fn recorded(folder: &Path, words: &[OsString], order: &Order) -> (String, Recorded, Shadows) {
    let (output, shell) = in_shell(folder, words);
    let (recorded, shadows) = record(&program_subject(shell), order, |_| {}).unwrap();
    (fs::read_to_string(output).unwrap(), recorded, shadows)
}

/// Goal: children, accounts, descriptors, locks, pipes, shared memory, files and signals are as
/// ever. Method: the program checks them itself, and prints the same.
#[test]
fn a_program_finds_no_trace_of_its_shadows() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "shadows.c", &["-pthread"]);
    let words = ["300".into(), folder.path().as_os_str().to_owned()];
    let native = Command::new(&program).args(&words).output().unwrap();
    let expected = String::from_utf8(native.stdout).unwrap();
    assert!(expected.lines().all(|line| line.ends_with(": 0")), "{expected}");
    let rounds: u32 = std::env::var("SHADOW_ROUNDS").map_or(2, |text| text.parse().unwrap());
    let mut shadows = 0;
    for _ in 0..rounds {
        let words = [program.clone().into(), words[0].clone(), words[1].clone()];
        let (found, recorded, Shadows { ends, .. }) = recorded(folder.path(), &words, &ORDER);
        assert_eq!(found, expected);
        assert_eq!(recorded.ended.unwrap().code(), Some(42));
        eprintln!("{ends:?}");
        assert!(!ends.contains_key("the filter of system calls"), "{ends:?}");
        shadows += recorded.profile.bursts;
    }
    eprintln!("{shadows} shadows");
    assert!(shadows > 10 * u64::from(rounds), "{shadows} shadows");
}

/// Goal: shares are those of the program. Method: a loop whose functions execute known numbers of
/// instructions.
#[test]
fn shares_are_those_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "shares.c", &[]);
    let words = [program.clone().into(), "1500".into()];
    let order = Order { sample: 1_000_000, ..ORDER };
    let (text, recorded, _) = recorded(folder.path(), &words, &order);
    let profile = recorded.profile;
    assert!(profile.bursts > 10, "{} shadows", profile.bursts);
    assert!(profile.instructions >= 900_000 * profile.bursts, "{}", profile.instructions);
    assert_shares(&profile, &program, &text);
}

/// Goal: a recording of a process ends when enough is known. Method: three loops.
#[test]
#[ignore = "needs root: the process is not a descendant"]
fn a_recording_ends_when_enough_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "shares.c", &[]);
    let running = Running::start(Command::new(&program).arg("100000000"));
    sleep(Duration::from_millis(100));
    let most = Duration::from_secs(60);
    let subject = process_subject(running.0.id(), 60_000);
    let until = |error| record(&subject, &Order { until: Some(error), ..ORDER }, |_| {}).unwrap().0;
    let rough = until(0.5);
    assert!(rough.is_known && rough.elapsed < most, "{rough:?}");
    assert!(rough.profile.bursts >= 10, "{rough:?}");
    let finer = until(0.1);
    assert!(finer.is_known && finer.elapsed < most, "{finer:?}");
    // A shadow sees one loop, mostly. The rarest has a sixth of them, so 500 have an error of 0.1.
    assert!(finer.profile.bursts > 200, "{finer:?}");
}

/// The values of the instruction of a function with the most different ones, and its executions.
fn values(profile: &Profile, program: &Path, function: &str) -> (u64, Vec<(u64, u64)>) {
    let counts = Counts::of(profile, program);
    let own = profile.values.iter().filter(|(place, _)| counts.is_in(**place, function));
    // The index has as many values as the load has; only the load has a 9.
    let load = own.map(|(_, one)| one).find(|one| one.top.iter().any(|&(value, _)| value == 9));
    let load = load.expect("a load");
    (load.count, load.top.clone())
}

/// Goal: results of instructions are what they are, exactly and by shadows. Method: loads from a
/// table with known values.
#[test]
fn results_of_instructions_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "values.c", &[]);
    let what = What { values: true, ..EDGES };
    let words = |rounds: &str| [program.clone().into(), rounds.into()];
    let exact = everything::record(&words("40000"), what, |_| {}).unwrap();
    let (count, top) = values(&exact.profile, &program, "load");
    assert_eq!((count, top), (40_000, vec![(9, 30_000), (5, 10_000)]));
    let order = Order { what, ..ORDER };
    let (_, recorded, _) = recorded(folder.path(), &words("2000000000"), &order);
    let (count, top) = values(&recorded.profile, &program, "load");
    let [(9, often), (5, rare)] = top[..] else { panic!("{top:?}") };
    assert_eq!(often + rare, count);
    assert!((often as f64 / count as f64 - 0.75).abs() < 0.001, "{often} of {count}");
    assert!(recorded.profile.bursts > 0);
}

/// File and offset of an instruction, and the region and the distance of what it has used.
type NamedReference = (String, u64, String, i64);

/// The hottest stream of a program with its instructions and data by name, and its part of all
/// references.
fn hottest_stream(profile: &Profile) -> (BTreeSet<NamedReference>, f64, StreamCount) {
    let heat = |one: &DataStream, count: &StreamCount| one.references.len() as u64 * count.times;
    let (stream, &count) =
        profile.streams.iter().max_by_key(|(one, count)| heat(one, count)).expect("a stream");
    let named = stream.references.iter().map(|one| {
        let file = profile.files[one.at.file as usize].path.clone();
        (file, one.at.offset, profile.regions[one.region as usize].clone(), one.distance)
    });
    (named.collect(), heat(stream, &count) as f64 / profile.references as f64, count)
}

/// Goal: shadows find the same stream as everything does, in another process with other addresses,
/// and bursts cut from shadows find no longer ones than they are. Method: a program that walks a
/// list in a fixed order.
#[test]
fn streams_are_those_of_the_whole_program() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "chase.c", &[]);
    let what = What { streams: true, ..EDGES };
    let words = |rounds: &str| [program.clone().into(), rounds.into(), "40".into()];
    let exact = everything::record(&words("20000"), what, |_| {}).unwrap();
    let (known, known_share, _) = hottest_stream(&exact.profile);
    let order = Order { what, sample: 1_000_000, ..ORDER };
    let (_, found, _) = recorded(folder.path(), &words("20000000"), &order);
    let (stream, share, count) = hottest_stream(&found.profile);
    assert_eq!(stream, known);
    // A shadow of a million instructions has some 3,000 rounds. It begins and ends inside of one,
    // and the grammar needs some rounds until it has a rule for the walk.
    assert!((share - known_share).abs() < 0.02, "{share}, not {known_share}");
    let shadows = found.profile.bursts;
    // The shell that starts the program may be in a shadow, too.
    assert!(count.bursts <= shadows && count.bursts * 10 >= shadows * 9, "{count:?}, {shadows}");

    let what = What { stream_burst: 10, ..what };
    let order = Order { what, ..ORDER };
    let (_, found, _) = recorded(folder.path(), &words("20000000"), &order);
    let longest = found.profile.streams.keys().map(|one| one.references.len()).max();
    assert!((5..=10).contains(&longest.unwrap()), "{longest:?}");
}

/// Goal: a program that executes another one at any moment goes on. Method: one that executes
/// itself about a thousand times a second.
#[test]
fn a_program_that_executes_itself_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "executes.c", &[]);
    let words = [program.into(), "2000".into(), "1".into()];
    let native = natively(&words);
    assert_eq!(native.status.code(), Some(7));
    let expected = String::from_utf8(native.stdout).unwrap();
    let (found, recorded, _) = recorded(folder.path(), &words, &ORDER);
    assert_eq!((found, recorded.ended.unwrap().code()), (expected, Some(7)));
}

/// Goal: a running process is sampled and left as it was. Method: the signs of tracers, children
/// and mappings before and after.
#[test]
#[ignore = "needs root: the process is not a descendant"]
fn nothing_is_left_in_a_process() {
    let running = Running::start(&mut busy_shell());
    sleep(Duration::from_millis(100));
    let id = running.0.id();
    let look = |running: &Running| {
        let files = [format!("task/{id}/children"), "maps".to_owned(), "limits".to_owned()]
            .map(|what| running.read(&what));
        let stat = running.read("stat");
        // The CPU time of its children, of which it has none.
        let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
        let of_children: Vec<String> = fields.skip(13).take(2).map(String::from).collect();
        (files, of_children)
    };
    let before = look(&running);
    let (recorded, shadows) = record(&process_subject(id, 1000), &ORDER, |_| {}).unwrap();
    assert!(recorded.profile.bursts > 20, "{:?}", shadows.ends);
    assert_eq!(look(&running), before);
    assert!(running.read("status").contains("TracerPid:\t0"));
    assert!(running.read("stat").contains(") R "), "it goes on");
}

/// Goal: root records a process that has become another user, as servers do. Method: a shell.
#[test]
#[ignore = "needs root: it starts a process as another user"]
fn a_process_of_another_user_is_sampled() {
    let running = Running::as_another_user();
    sleep(Duration::from_millis(100));
    let subject = process_subject(running.0.id(), 1500);
    let (recorded, _) = record(&subject, &ORDER, |_| {}).unwrap();
    let Profile { bursts, left, .. } = &recorded.profile;
    assert!(*bursts > 5 && left.is_empty(), "{bursts}, {left:?}");
    assert!(!running.read("maps").contains("elfen-profile"));
}

/// Goal: processes of which no shadows are possible are named, with the reason, and go on. Method:
/// one that is gone, one that is traced, one that filters its system calls.
#[test]
fn what_cannot_be_sampled_is_said() {
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let gone = record(&process_subject(gone.id(), 1000), &ORDER, |_| {});
    assert!(matches!(gone, Err(ShadowError::Recording(RecordingError::Gone))));
    let missing = record(&program_subject(vec!["/nowhere/at/all".into()]), &ORDER, |_| {});
    assert!(matches!(missing, Err(ShadowError::Recording(RecordingError::Program(_)))));
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "confined.c", &[]);
    let words = [program.into()];
    let (_, recorded, _) = recorded(folder.path(), &words, &ORDER);
    assert_eq!(recorded.ended.unwrap().code(), Some(0));
}

const PACKAGED: [&str; 10] = [
    "sort -k3 TEXT",
    "gzip -9 -c TEXT",
    "xz -T1 -3 -c TEXT",
    "xz -T2 -1 --block-size=1000000 -c TEXT",
    "zstd -q -c -T2 -9 TEXT",
    "busybox md5sum TEXT TEXT TEXT TEXT",
    "perl -e my|%h;$h{$_%99}.=chr(65+$_%26)for(1..999999);print|join(',',%h{1,5,7})",
    "/usr/bin/python3 -c import|json,re;print(len(re.findall('1',json.dumps(list(range(9**6))))))",
    "gcc -O2 -S -o - -x c SOURCE",
    "sqlite3 :memory: create|table|t(a);with|c(x)as(select|1|union|all|select|x+1|from|c|limit|\
     299999)insert|into|t|select|x*x|from|c;select|sum(a),max(a)|from|t;",
];

/// Goal: programs print and return the same. Method: programs of Debian, sampled all the time.
#[test]
#[ignore = "needs programs of Debian"]
fn packaged_programs_behave_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    let lines = (0..150_000_u64).map(|line| {
        let number = line.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = ["alpha", "beta", "gamma"][usize::try_from(number % 3).unwrap()];
        format!("{word} {line} {number:x}\n")
    });
    fs::write(&text, lines.collect::<String>()).unwrap();
    let mut shadows = 0;
    for command in PACKAGED {
        let words = words_of(command, &text);
        let native = natively(&words);
        let (output, shell) = in_shell(folder.path(), &words);
        let (recorded, Shadows { ends, .. }) =
            record(&program_subject(shell), &ORDER, |_| {}).unwrap();
        assert_eq!(recorded.ended.unwrap().code(), native.status.code(), "{command}");
        assert!(fs::read(output).unwrap() == native.stdout, "{command}: other output");
        let profile = &recorded.profile;
        eprintln!("{command}: {} shadows, {ends:?} {:?}", profile.bursts, profile.left);
        shadows += profile.bursts;
    }
    // Some of them end before the first shadow.
    assert!(shadows > 20, "{shadows} shadows");
}

/// Commands of a database whose log is shared memory, with what they print.
fn database(rounds: u32) -> String {
    use std::fmt::Write as _;
    let mut commands = "pragma journal_mode = wal;
        create table t(k integer primary key, v int);
        with recursive c(x) as (select 1 union all select x + 1 from c limit 2000)
            insert into t select x, x * x from c;\n"
        .to_owned();
    for round in 0..rounds {
        let part = round % 7;
        writeln!(commands, "update t set v = v + k where k % 7 = {part};").unwrap();
        commands.push_str("insert into t select max(k) + 1, sum(v) % 1000 from t;");
        commands.push_str("select sum(v), count(*) from t;");
        if round % 10 == 9 {
            commands.push_str("pragma wal_checkpoint(passive);");
        }
    }
    commands
}

/// Goal: what a program says to a disk and to others is as ever. Method: a database in shared
/// memory, a log with fsync(2) and pipes, and a server that closes connections.
#[test]
#[ignore = "needs sqlite3 and python3"]
fn disks_and_peers_find_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let (database_file, commands) = (folder.path().join("db"), folder.path().join("commands"));
    fs::write(&commands, database(1000)).unwrap();
    let python = |script: &str| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(script);
        format!("exec python3 {} {}", script.display(), folder.path().display())
    };
    let sqlite = format!("exec sqlite3 {} < {}", database_file.display(), commands.display());
    let rounds: u32 = std::env::var("SHADOW_ROUNDS").map_or(1, |text| text.parse().unwrap());
    for script in [sqlite, python("pipes.py"), python("server.py")] {
        let clean = || {
            for suffix in ["", "-wal", "-shm"] {
                let _none = fs::remove_file(folder.path().join(format!("db{suffix}")));
            }
        };
        clean();
        let native = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(native.status.success(), "{script}");
        let expected = String::from_utf8(native.stdout).unwrap();
        let mut shadows = 0;
        for _ in 0..rounds {
            clean();
            let words = ["sh", "-c", &script].map(OsString::from);
            let (found, recorded, Shadows { ends, .. }) = recorded(folder.path(), &words, &ORDER);
            assert_eq!(recorded.ended.unwrap().code(), Some(0), "{script}");
            assert_eq!(found, expected, "{script}");
            assert!(!ends.contains_key("the filter of system calls"), "{script}");
            shadows += recorded.profile.bursts;
        }
        eprintln!("{script}: {shadows} shadows");
        assert!(shadows > u64::from(rounds), "{script}: {shadows} shadows");
    }
}
