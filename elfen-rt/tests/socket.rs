//! Goal: a process that is told of a socket alone gets its pages there, checks itself by them, and
//! goes on without them whatever the other side does. Method: two processes. The test is the
//! daemon, with pages that it seals and a service that it plays; its child is this very program,
//! started again as the batch.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use elfen_rt::bpf::Descriptor;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::pages::{self, ANSWERS, MOST, REQUEST, TASKS_ANSWER, TASKS_REQUEST, TasksError};
use elfen_rt::process::pid_namespace;
use elfen_rt::sealed::{self, Writers};
use elfen_rt::service::Service;
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, Slot};

/// Request lanes that no machine has: only the test says what they do.
const REQUEST_CPUS: [u32; 2] = [6001, 6002];
/// A lane that no thread is ever on.
const NOWHERE: u32 = 6003;
/// Of the batch: the segment in which it counts.
const BOARD: &str = "SOCKET_TEST_BOARD";
const PATIENCE: Duration = Duration::from_secs(60);

fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happens() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Before the test runner begins: a process that was started as a batch is no test.
#[used]
#[unsafe(link_section = ".init_array")]
static BATCH_IF_ASKED: extern "C" fn() = batch_if_asked;

/// Counts, with a check at each turn, until it is killed.
extern "C" fn batch_if_asked() {
    let Ok(board) = std::env::var(BOARD) else { return };
    let board = Memory::attach_id(board.parse().unwrap(), Access::Write).unwrap();
    loop {
        elfen_rt::check!();
        word(&board).fetch_add(1, Relaxed);
    }
}

fn word(board: &Memory) -> &AtomicU64 {
    // SAFETY: the segment has a page, and both sides use atomics.
    unsafe { board.base().cast::<AtomicU64>().as_ref() }
}

/// A CPU that this process may use, for a batch that is kept to it.
fn cpu() -> u32 {
    // SAFETY: takes nothing.
    u32::try_from(unsafe { libc::sched_getcpu() }).unwrap()
}

struct Batch {
    child: Child,
    board: Memory,
}

impl Batch {
    fn start(cpu: u32, socket: &Path) -> Self {
        let board = Memory::create_segment(libc::IPC_PRIVATE, 4096, 0o600).unwrap();
        board.remove_name().unwrap();
        let mut command = Command::new("taskset");
        command.args(["-c", &cpu.to_string()]).arg(std::env::current_exe().unwrap());
        command.env_remove("ELFEN_RUN").env("ELFEN_SOCKET", socket);
        let child = command.env(BOARD, board.segment_id().unwrap().to_string()).spawn().unwrap();
        Self { child, board }
    }

    fn progress(&self) -> u64 {
        word(&self.board).load(Relaxed)
    }

    fn goes_on(&self) {
        let before = self.progress();
        until("the batch runs", || self.progress() > before + 1000);
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A socket that hears one request.
struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Listener {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("elfend.sock");
        let (address, length) = pages::address(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: socket takes numbers.
        let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0) };
        // SAFETY: the kernel reads `length` bytes of `address`.
        assert_eq!(unsafe { libc::bind(fd, (&raw const address).cast(), length) }, 0);
        // SAFETY: listen takes numbers.
        assert_eq!(unsafe { libc::listen(fd, 8) }, 0);
        // SAFETY: the kernel has just given us this descriptor.
        Self { socket: unsafe { OwnedFd::from_raw_fd(fd) }, path, _folder: folder }
    }

    /// Waits for a process that asks, and for its question.
    fn hear(&self) -> OwnedFd {
        self.hear_of(REQUEST)
    }

    fn hear_of(&self, request: &[u8]) -> OwnedFd {
        let (nobody, none) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the kernel is given nowhere to write an address to.
        let fd = unsafe { libc::accept(self.socket.as_raw_fd(), nobody, none) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the kernel has just given us this descriptor.
        let asks = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut text = [0_u8; 64];
        // SAFETY: the kernel writes at most 64 bytes.
        let length = unsafe { libc::recv(fd, text.as_mut_ptr().cast(), text.len(), 0) };
        assert_eq!(&text[..usize::try_from(length).unwrap()], request);
        asks
    }
}

fn page<S: Slot>(slots: u32, writers: Writers) -> (Page<S>, Descriptor) {
    let (memory, file) = sealed::create(Page::<S>::bytes(slots), writers).unwrap();
    (Page::format(memory, slots, pid_namespace(), &[0; 32]).unwrap(), file)
}

/// Pages for one batch lane.
struct Lent {
    lanes: Page<LaneSlot>,
    files: [Descriptor; 2],
}

impl Lent {
    fn new(batch: u32, request: u32, service: &Service) -> Self {
        let (lanes, lanes_file) = page::<LaneSlot>(1, Writers::Everybody);
        lanes.slot(0).unwrap().assign(batch, request);
        let (control, control_file) = page::<ControlSlot>(2, Writers::Nobody);
        let slot = control.slot(0).unwrap();
        slot.publish(&Settings::BORROW_IDLE);
        let segment = service.page().memory().segment_id().unwrap();
        slot.service_segment.store(u64::from(segment.unsigned_abs()) + 1, Relaxed);
        Self { lanes, files: [lanes_file, control_file] }
    }

    fn numbers(&self) -> [i32; 2] {
        self.files.each_ref().map(Descriptor::raw)
    }

    fn naps(&self) -> bool {
        let state = self.lanes.slot(0).unwrap().state();
        state.is_some_and(|(state, _)| state == LaneState::Napping)
    }
}

/// The page of a service that goes with the test.
struct Served(Option<Service>);

impl Served {
    fn new(name: &str) -> Self {
        Self(Some(Service::open(&format!("{name}-{}", std::process::id()), 2).unwrap()))
    }

    fn service(&self) -> &Service {
        self.0.as_ref().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0.take().unwrap().remove().unwrap();
    }
}

/// Goal: the batch heeds the request lane of the lane that it is on, by the pages that are that
/// lane's. Method: the pages of two services, of which the second has the batch's lane; a request
/// on either.
#[test]
fn pages_over_a_socket_are_checked_by() {
    let served = Served::new("socket");
    let service = served.service();
    let mut workers = [0, 1].map(|at: u32| service.claim(at, REQUEST_CPUS[at as usize]).unwrap());
    let cpu = cpu();
    let other = Lent::new(NOWHERE, REQUEST_CPUS[0], service);
    let own = Lent::new(cpu, REQUEST_CPUS[1], service);
    let listener = Listener::new();
    let batch = Batch::start(cpu, &listener.path);
    let asks = listener.hear();
    let numbers = [other.numbers(), own.numbers()].concat();
    assert!(pages::answer(asks.as_raw_fd(), ANSWERS[1], &numbers));
    batch.goes_on();
    workers[0].begin(1);
    batch.goes_on();
    for request in 1..=3 {
        workers[1].begin(request);
        until("the batch naps", || own.naps());
        let before = batch.progress();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(batch.progress(), before, "a napping thread makes no progress");
        workers[1].end();
        batch.goes_on();
    }
    assert!(!other.naps());
    workers[0].end();
}

/// Goal: whatever is answered, or not, the batch goes on, beside a request too, and no page of a
/// service is opened that the daemon does not vouch for. Method: one answer each.
#[test]
fn without_its_pages_a_batch_goes_on() {
    let served = Served::new("socket-refused");
    let service = served.service();
    let mut worker = service.claim(0, REQUEST_CPUS[0]).unwrap();
    worker.begin(1);
    let cpu = cpu();
    let lent = Lent::new(cpu, REQUEST_CPUS[0], service);
    let [lanes, control] = lent.numbers();
    // SAFETY: the name is a NUL-terminated literal.
    let unsealed = unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_ALLOW_SEALING) };
    let (_short, short) = sealed::create(100, Writers::Everybody).unwrap();
    let short = short.raw();
    let many = [lanes, control].repeat(MOST + 3);
    let answers: [(&str, &[u8], &[i32]); 10] = [
        ("services elsewhere", ANSWERS[0], &[lanes, control]),
        ("no descriptors", ANSWERS[1], &[]),
        ("half of them", ANSWERS[1], &[lanes]),
        ("the wrong way round", ANSWERS[1], &[control, lanes]),
        ("no seals", ANSWERS[1], &[unsealed, unsealed]),
        ("shorter than a header", ANSWERS[1], &[short, short]),
        ("a terminal as a map", ANSWERS[0], &[lanes, control, 2, 2]),
        ("a refusal", br#"{"refused":{"why":"no","fix":"none"}}"#, &[]),
        ("a refusal with pages", br#"{"refused":{}}"#, &[lanes, control]),
        ("no words", b"", &[]),
    ];
    for (what, text, numbers) in answers {
        let listener = Listener::new();
        let batch = Batch::start(cpu, &listener.path);
        let asks = listener.hear();
        let sent = pages::answer(asks.as_raw_fd(), text, numbers);
        assert!(sent, "{what}");
        batch.goes_on();
    }
    // Nobody answers at all.
    let listener = Listener::new();
    let batch = Batch::start(cpu, &listener.path);
    let silent = listener.hear();
    batch.goes_on();
    drop((silent, batch));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "no socket").unwrap();
    let long = folder.path().join("x".repeat(200));
    for path in [Path::new(""), &folder.path().join("none"), folder.path(), &file, &long] {
        Batch::start(cpu, path).goes_on();
    }

    // The test can fail: with the same pages, vouched for, it naps; and so it does with more than
    // there is room for, which are left out.
    for numbers in [&[lanes, control][..], &many] {
        let listener = Listener::new();
        let batch = Batch::start(cpu, &listener.path);
        assert!(pages::answer(listener.hear().as_raw_fd(), ANSWERS[1], numbers));
        until("the batch naps", || lent.naps());
        drop(batch);
        lent.lanes.slot(0).unwrap().enter(LaneState::Off, 1);
    }
}

/// Goal: who asks for the task map takes nothing for one that is none, and knows whether it was
/// refused or nobody is there. Method: one answer each; none is the kernel's map.
#[test]
fn what_is_no_task_map_is_not_taken() {
    let (_page, page) = sealed::create(8192, Writers::Everybody).unwrap();
    let (page, terminal) = (page.raw(), 2);
    let answers: [(&[u8], &[i32], bool); 5] = [
        (TASKS_ANSWER, &[page, page, page], true),
        (TASKS_ANSWER, &[terminal, terminal, terminal], true),
        (TASKS_ANSWER, &[page, page], false),
        (br#"{"refused":{"why":"no","fix":"none"}}"#, &[], false),
        (ANSWERS[0], &[page, page, page], false),
    ];
    for (text, numbers, is_map) in answers {
        let listener = Listener::new();
        let path = listener.path.clone();
        let asks = std::thread::spawn(move || pages::tasks(path.as_os_str().as_bytes()).err());
        let heard = listener.hear_of(TASKS_REQUEST);
        assert!(pages::answer(heard.as_raw_fd(), text, numbers));
        let error = asks.join().unwrap().unwrap();
        assert_eq!(matches!(error, TasksError::Map(_)), is_map, "{text:?}: {error:?}");
        assert!(is_map || error == TasksError::Refused, "{text:?}: {error:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let none = folder.path().join("none");
    let absent = pages::tasks(none.as_os_str().as_bytes()).err();
    assert_eq!(absent, Some(TasksError::Absent));
}
