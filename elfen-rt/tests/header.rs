//! Goal: `elfen.h` and `elfen_rt::signal` define the same ABI. Method: compile the header as C11
//! and C++17 with warnings as errors. Each side writes pages with a different value in every word,
//! and the other side reads them. For the service, two live processes use one page.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::Liveness;
use elfen_rt::service::Service;
use elfen_rt::signal::account::{Account, Claim};
use elfen_rt::signal::control::{ControlSlot, PolicyKind, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::mark::{Cursor, Mark, Step};
use elfen_rt::signal::page::{Page, Slot};
use elfen_rt::signal::service::{ServiceReader, ServiceSlot, Writer};
use elfen_rt::signal::task::{LEASE_NS, Running, Switch, Task, TaskSlot};
use elfen_rt::signal::thread::ThreadSlot;

const WARNINGS: [&str; 6] =
    ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Compiles a source with the header and without libraries.
#[track_caller]
fn compile(compiler: &str, standard: &[&str], source: &Path, program: &str) -> PathBuf {
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join(program);
    let result = Command::new(compiler)
        .args(standard)
        .args(WARNINGS)
        .arg(format!("-I{}", root().join("include").display()))
        .arg(source)
        .arg("-o")
        .arg(&output)
        .output()
        .unwrap_or_else(|error| panic!("needs {compiler}: {error}"));
    let messages = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{compiler} {standard:?} refuses elfen.h:\n{messages}");
    output
}

/// The C program of these tests, built once.
fn twin() -> Command {
    static TWIN: OnceLock<PathBuf> = OnceLock::new();
    let path = TWIN.get_or_init(|| {
        let source = root().join("tests/c/twin.c");
        compile("cc", &["-std=c11"], &source, "twin")
    });
    Command::new(path)
}

/// A name that no other test and no other run uses.
fn service_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// Copies bytes into shared memory that ends with the test.
fn memory_of(bytes: &[u8]) -> Memory {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes.len(), 0o600).unwrap();
    memory.remove_name().unwrap();
    assert_eq!(memory.access(), Access::Write);
    // SAFETY: this test made the segment, writable and as long as `bytes`, and no other process has
    // its id.
    unsafe { memory.base().as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    memory
}

fn page_from_c<S: Slot>(channel: &str, values: &[u64]) -> Page<S> {
    let values = values.iter().map(u64::to_string);
    let output = twin().args(["emit", channel]).args(values).output().unwrap();
    assert!(output.status.success());
    Page::open(memory_of(&output.stdout)).unwrap()
}

/// The words that C reads from a page that `write` filled in.
fn shown_by_c<S: Slot>(channel: &str, write: impl Fn(&S)) -> Vec<u64> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(1), 0o600).unwrap();
    memory.remove_name().unwrap();
    let page = Page::<S>::format(memory, 1, 0, &[0; 32]).unwrap();
    write(page.slot(0).unwrap());
    // SAFETY: the slice is the page's memory, which nothing writes meanwhile.
    let bytes =
        unsafe { std::slice::from_raw_parts(page.memory().base().as_ptr(), page.memory().len()) };
    let mut child = twin()
        .args(["show", channel])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    text.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

#[test]
fn the_header_compiles_as_c_without_warnings() {
    compile("cc", &["-std=c11"], &root().join("tests/c/twin.c"), "twin-c11");
}

#[test]
#[ignore = "needs a C++ compiler"]
fn the_header_compiles_as_cpp_without_warnings() {
    let standard = ["-x", "c++", "-std=c++17"];
    compile("c++", &standard, &root().join("tests/c/twin.c"), "twin-cxx17");
}

#[test]
fn a_lease_has_the_same_length_on_both_sides() {
    let printed = twin().arg("lease").output().unwrap().stdout;
    assert_eq!(String::from_utf8(printed).unwrap(), LEASE_NS.to_string());
}

#[test]
fn task_slots_are_the_same_on_both_sides() {
    let page = page_from_c::<TaskSlot>("task", &[7 << 32 | 9, 1234, 56, 56, 1000, 1200]);
    let task = Task { process: 7, thread: 9 };
    let expected = Switch {
        running: Running::Task(task),
        at_ns: Some(1234),
        count: 56,
        busy_ns: 1000,
        busy_since_ns: Some(1200),
    };
    assert_eq!(expected.busy_until_ns(1300), 1100);
    assert_eq!(page.slot(0).unwrap().snapshot(), Some(expected));

    let words = shown_by_c("task", |slot: &TaskSlot| {
        slot.task.store(1, Relaxed);
        slot.switched_at_ns.store(2, Relaxed);
        slot.switches.store(3, Relaxed);
        slot.switches_begun.store(4, Relaxed);
        slot.busy_ns.store(5, Relaxed);
        slot.busy_since_ns.store(6, Relaxed);
    });
    assert_eq!(words, [1, 2, 3, 4, 5, 6]);
}

/// An account is not a slot of a page, so the C side prints its words one by one.
#[test]
fn accounts_are_the_same_on_both_sides() {
    let printed = twin().arg("account").output().unwrap().stdout;
    let words: Vec<u64> =
        String::from_utf8(printed).unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(bytes.len(), size_of::<Account>());
    let memory = memory_of(&bytes);
    // SAFETY: this test made the memory, at a page boundary and as long as an account, which
    // consists of atomics.
    let account = unsafe { memory.base().cast::<Account>().as_ref() };
    let claim = Claim::of_program(7);
    let counted = account.counted(claim.word()).expect("the C program claims it for process 7");
    assert_eq!((counted.ran_until_ns(1_010), counted.shared_until_ns(1_010, 45)), (110, 55));
    assert_eq!(account.counted(Claim::of_run(0, 7).word()), None, "another claim");
}

#[test]
fn lane_slots_are_the_same_on_both_sides() {
    let page = page_from_c::<LaneSlot>(
        "lane",
        &[
            2, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33,
            18, 19,
        ],
    );
    let slot = page.slot(0).unwrap();
    assert_eq!(slot.state(), Some((LaneState::Napping, 11)));
    let words = [&slot.batch_cpu, &slot.request_cpu, &slot.naps, &slot.borrowed_ns]
        .map(|word| word.load(Relaxed));
    assert_eq!(words, [12, 13, 14, 15]);
    let words = [&slot.overlapped_ns, &slot.napped_ns].map(|word| word.load(Relaxed));
    assert_eq!(words, [16, 17]);
    let words =
        [&slot.inputs.policy_state[0], &slot.inputs.policy_state[3]].map(|word| word.load(Relaxed));
    assert_eq!(words, [20, 21]);
    let words = [&slot.counted_ran_ns, &slot.counted_shared_ns, &slot.inputs.hotplug];
    assert_eq!(words.map(|word| word.load(Relaxed)), [22, 23, 25]);
    assert_eq!(slot.wakes.load(Relaxed), 24);
    let words = [
        &slot.inputs.ipc_milli,
        &slot.inputs.ipc_since_ns,
        &slot.inputs.ipc_until_ns,
        &slot.critical,
    ];
    assert_eq!(words.map(|word| word.load(Relaxed)), [26, 27, 28, 29]);
    let words = [&slot.account_claim, &slot.account_index, &slot.check_nap, &slot.guard_nap];
    assert_eq!(words.map(|word| word.load(Relaxed)), [30, 31, 32, 33]);
    assert_eq!((slot.reaction.max_ns(), slot.wake.max_ns()), (18, 19));

    let words = shown_by_c("lane", |slot: &LaneSlot| {
        slot.assign(3, 2);
        slot.enter(LaneState::Napping, 1000);
        slot.enter(LaneState::Running, 1700);
        slot.add_borrowed(50);
        slot.add_overlapped(60);
        slot.inputs.policy_state[0].store(61, Relaxed);
        slot.inputs.policy_state[3].store(62, Relaxed);
        slot.counted_ran_ns.store(63, Relaxed);
        slot.counted_shared_ns.store(64, Relaxed);
        slot.wakes.store(65, Relaxed);
        slot.inputs.hotplug.store(66, Relaxed);
        slot.inputs.publish_ipc(67, 68, 69);
        slot.critical.store(81, Relaxed);
        slot.account_claim.store(82, Relaxed);
        slot.account_index.store(83, Relaxed);
        slot.check_nap.store(84, Relaxed);
        slot.guard_nap.store(85, Relaxed);
        slot.reaction.record_shared(70);
        slot.wake.record_shared(80);
    });
    let expected = [
        1, 1700, 3, 2, 1, 50, 60, 700, 61, 62, 63, 64, 65, 66, 67, 68, 69, 81, 82, 83, 84, 85, 70,
        80,
    ];
    assert_eq!(words, expected);
}

#[test]
fn control_slots_are_the_same_on_both_sides() {
    let settings = Settings {
        policy: PolicyKind::RefreshBudget,
        budget_ns: 21,
        budget_until_ns: 26,
        slo_latency_ns: 22,
        slo_per_million: 23,
        ref_ipc_milli: 24,
    };
    let words = [5, 5, 3, 21, 26, 22, 23, 24];
    let page = page_from_c::<ControlSlot>("control", &words);
    assert_eq!(page.slot(0).unwrap().settings(), Some((5, settings)));

    let shown = shown_by_c("control", |slot: &ControlSlot| slot.publish(&settings));
    assert_eq!(shown, [1, 1, 3, 21, 26, 22, 23, 24]);
}

#[test]
fn thread_slots_are_the_same_on_both_sides() {
    let page = page_from_c::<ThreadSlot>("thread", &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    let slot = page.slot(0).unwrap();
    let words = &slot.words;
    let words = [&words.value, &words.calls, &words.instructions, &words.cycles];
    assert_eq!(words.map(|word| word.load(Relaxed)), [1, 2, 3, 4]);
    let claim = [&slot.thread, &slot.claims, &slot.refused];
    assert_eq!(claim.map(|word| word.load(Relaxed)), [5, 6, 7]);
    let patched = [&slot.entries, &slot.ambiguous, &slot.returns, &slot.counting, &slot.uncounted];
    assert_eq!(patched.map(|word| word.load(Relaxed)), [8, 9, 10, 11, 12]);
}

/// Goal: tags in C and in Rust have the same layout. Method: a C program uses a page that this test
/// made, like one of `elfen shim`. Its thread and its forked child each have a slot.
#[test]
fn a_c_program_tags_into_the_page_that_it_inherits() {
    let bytes = Page::<ThreadSlot>::bytes(4);
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
    let page = Page::<ThreadSlot>::format(memory, 4, 0, &[0; 32]).unwrap();
    let segment = page.memory().segment_id().unwrap();
    let run_with_order = |front: u32| {
        let order = format!("1 {segment} {front}");
        let output = twin().arg("tags").env("ELFEN_SHIM", order).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let printed = run_with_order(std::process::id());
    page.memory().remove_name().unwrap();
    let ids: Vec<u64> = printed.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let [inner, parent, child, outer] = ids[..] else { panic!("{printed}") };
    let [first, second] = [0, 1].map(|index| page.slot(index).unwrap());
    assert_eq!(first.thread.load(Relaxed), parent << 32 | parent);
    assert_eq!(second.thread.load(Relaxed), child << 32 | child);
    assert_eq!(u64::from(first.words.tag.load(Relaxed)), outer & 0xffff_ffff);
    assert_eq!(u64::from(second.words.tag.load(Relaxed)), inner & 0xffff_ffff);
    let values = [first, second].map(|slot| slot.words.value.load(Relaxed));
    assert_eq!(values, [1, 2], "parent and child have values of their own");
    assert_eq!(page.slot(2).unwrap().thread.load(Relaxed), 0);
    // If another process is named as its parent, the program makes a page of its own.
    run_with_order(1);
    assert_eq!(first.claims.load(Relaxed), 2);
}

#[test]
fn invalid_settings_are_refused() {
    for words in [[5, 6, 3, 0, 0, 0, 0, 0], [5, 5, 9, 0, 0, 0, 0, 0]] {
        let page = page_from_c::<ControlSlot>("control", &words);
        assert_eq!(page.slot(0).unwrap().settings(), None, "{words:?}");
    }
}

/// A live C service. It ends when its standard input ends.
struct CService {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl CService {
    fn start(name: &str) -> Self {
        let mut child = twin()
            .args(["serve", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "serving\n");
        let stdin = child.stdin.take();
        Self { child, stdin }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn finish(mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

/// The steps of a service's requests, in the order of time.
fn marks_of(slot: &ServiceSlot, thread: u32) -> Vec<(u64, String)> {
    let mut marks = Vec::new();
    let lost = slot.marks.take(&mut Cursor::default(), |words| {
        marks.push(Mark::decode(&words).expect("a mark of this version"));
    });
    assert_eq!(lost, 0);
    assert!(marks.is_sorted_by_key(|mark| mark.at_ns) && marks[0].at_ns > 0);
    assert!(marks.iter().all(|mark| mark.thread == thread));
    let step = |step| match step {
        Step::Begin { arrived_ns } => format!("begin, {}", arrived_ns == 123_456),
        Step::Stage(stage) => format!("stage {stage}"),
        Step::End { class } => format!("end, {class}"),
    };
    marks.into_iter().map(|mark| (mark.request, step(mark.step))).collect()
}

#[test]
fn a_c_service_is_read_from_rust_until_it_is_killed() {
    let name = service_name();
    let mut service = CService::start(&name);
    let reader = ServiceReader::open(&name).unwrap();
    let slot = reader.slot(1).unwrap();
    let words = [&slot.cpu, &slot.queue_len, &slot.running_request, &slot.request_arrived_ns];
    assert_eq!(words.map(|word| word.load(Relaxed)), [3, 5, 17, 123456]);
    assert!(slot.request_started_ns.load(Relaxed) > 123456, "the request waited for a long time");
    assert_eq!(slot.finished_requests.load(Relaxed), 3);
    assert_eq!(slot.latency.count(), 3);
    // Each request was published with an arrival one second before its end.
    assert!(slot.latency.quantile_ns(500_000).unwrap() >= 1_000_000_000);
    let one = ["begin, false", "stage 2", "end, 9"].map(|step| (16, step.to_owned()));
    let all = [one.clone(), one.clone(), one].concat();
    let last = [(17, "begin, true".to_owned())];
    assert_eq!(marks_of(slot, service.child.id()), [&all[..], &last].concat());
    let writer = reader.writer(1);
    assert!(matches!(writer, Writer::Process(of, Liveness::Alive) if of.pid() == service.pid()));
    assert_eq!((reader.lane_of(3), reader.lane_of(1)), (Some(1), None));

    service.child.kill().unwrap();
    service.child.wait().unwrap();
    assert_eq!(
        slot.running_request.load(Relaxed),
        17,
        "the dead writer's request stays in the page"
    );
    assert!(matches!(reader.writer(1), Writer::Process(_, Liveness::Dead)));

    // The successor takes over the slot on the same page. The reader sees it without opening the
    // page again.
    let successor = CService::start(&name);
    let writer = reader.writer(1);
    assert!(matches!(writer, Writer::Process(of, Liveness::Alive) if of.pid() == successor.pid()));
    successor.finish();
    assert_eq!(reader.writer(1), Writer::None);
    assert_eq!(slot.finished_requests.load(Relaxed), 3 + 4);
    Service::open(&name, 2).unwrap().remove().unwrap();
}

#[test]
fn a_slot_has_one_writer_whatever_its_language() {
    let name = service_name();
    let service = CService::start(&name);
    let ours = Service::open(&name, 2).unwrap();
    let refused = ours.claim(1, 0).unwrap_err();
    assert_eq!(refused.to_string(), format!("process {} writes this slot already", service.pid()));
    let worker = ours.claim(0, 0).unwrap();
    assert!(ours.claim(0, 0).is_err(), "the same process cannot claim a slot twice either");

    let second = twin().args(["serve", &name]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stdout).contains("the slot has a living writer"));
    service.finish();
    assert!(ours.claim(1, 0).is_ok());
    drop(worker);
    ours.remove().unwrap();
}

#[test]
fn a_rust_service_is_read_from_c() {
    let name = service_name();
    let service = Service::open(&name, 1).unwrap();
    let mut worker = service.claim(0, 6).unwrap();
    worker.end(); // no request runs: not counted
    worker.begin_arrived(40, elfen_rt::clock::monotonic_ns() - 2_000_000_000);
    worker.end();
    worker.begin(0); // 0 would mean none, so another id is published
    service.set_queue_len(0, 8);
    let output = twin().args(["read", &name]).output().unwrap();
    let expected = format!("{} 6 8 {} 1 1", std::process::id(), u64::MAX);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    drop(worker);
    service.remove().unwrap();
}
