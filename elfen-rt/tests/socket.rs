//! Goal: a process that has only the path of a socket gets its pages there and uses them for
//! checks. Without pages it runs on, whatever the daemon does. Method: two processes. The test
//! plays the daemon, with sealed pages, and a service. Its child is this same program, started
//! again as the batch.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use elfen_rt::bpf::Descriptor;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::pages::{
    self, ANSWERS, ENTRIES_MAX, REQUEST, TASKS_ANSWER, TASKS_REQUEST, TasksError,
};
use elfen_rt::process::pid_namespace;
use elfen_rt::sealed::{self, Writers};
use elfen_rt::service::Service;
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, Slot};

/// Request lanes that no machine has, so that only the test makes them busy.
const REQUEST_CPUS: [u32; 2] = [6001, 6002];
/// A lane that no thread ever runs on.
const NOWHERE: u32 = 6003;
/// The variable with the segment in which the batch counts its progress.
const BOARD: &str = "SOCKET_TEST_BOARD";
const PATIENCE: Duration = Duration::from_secs(60);

fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happens() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Runs before the test runner, because a process that was started as a batch runs no tests.
#[used]
#[unsafe(link_section = ".init_array")]
static BATCH_IF_ASKED: extern "C" fn() = batch_if_asked;

/// If this process is a batch, counts with a check at each step, until it is killed.
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

/// A CPU that this process may use, for pinning a batch.
fn cpu() -> u32 {
    // SAFETY: sched_getcpu takes nothing.
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

    fn assert_runs(&self) {
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

/// A daemon's socket for one request.
struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Listener {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("elfend.sock");
        let (address, length) = pages::socket_address(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: socket takes numbers.
        let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0) };
        // SAFETY: the kernel reads `length` bytes of `address`.
        assert_eq!(unsafe { libc::bind(fd, (&raw const address).cast(), length) }, 0);
        // SAFETY: listen takes numbers.
        assert_eq!(unsafe { libc::listen(fd, 8) }, 0);
        // SAFETY: the kernel has just given us this descriptor.
        Self { socket: unsafe { OwnedFd::from_raw_fd(fd) }, path, _folder: folder }
    }

    /// Waits for a client and its request for pages; returns the connection.
    fn accept(&self) -> OwnedFd {
        self.accept_request(REQUEST)
    }

    fn accept_request(&self, request: &[u8]) -> OwnedFd {
        let (no_address, no_length) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: with null pointers, the kernel writes no address.
        let fd = unsafe { libc::accept(self.socket.as_raw_fd(), no_address, no_length) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the kernel has just given us this descriptor.
        let client = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut text = [0_u8; 64];
        // SAFETY: the kernel writes at most 64 bytes.
        let length = unsafe { libc::recv(fd, text.as_mut_ptr().cast(), text.len(), 0) };
        assert_eq!(&text[..usize::try_from(length).unwrap()], request);
        client
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
        let (lanes, lanes_file) = page::<LaneSlot>(1, Writers::AnyProcess);
        lanes.slot(0).unwrap().assign(batch, request);
        let (control, control_file) = page::<ControlSlot>(2, Writers::MakerOnly);
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

/// A service whose page is removed at the end of the test.
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

/// Goal: the batch naps when the request lane of its own lane is busy, by the pages of that lane.
/// Method: the pages of two services, of which the second has the batch's lane; a request on each.
#[test]
fn checks_use_pages_from_a_socket() {
    let served = Served::new("socket");
    let service = served.service();
    let mut workers = [0, 1].map(|at: u32| service.claim(at, REQUEST_CPUS[at as usize]).unwrap());
    let cpu = cpu();
    let other = Lent::new(NOWHERE, REQUEST_CPUS[0], service);
    let own = Lent::new(cpu, REQUEST_CPUS[1], service);
    let listener = Listener::new();
    let batch = Batch::start(cpu, &listener.path);
    let client = listener.accept();
    let numbers = [other.numbers(), own.numbers()].concat();
    assert!(pages::send_answer(client.as_raw_fd(), ANSWERS[1], &numbers));
    batch.assert_runs();
    workers[0].begin(1);
    batch.assert_runs();
    for request in 1..=3 {
        workers[1].begin(request);
        until("the batch naps", || own.naps());
        let before = batch.progress();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(batch.progress(), before, "a napping thread makes no progress");
        workers[1].end();
        batch.assert_runs();
    }
    assert!(!other.naps());
    workers[0].end();
}

/// Goal: after any answer and without an answer the batch runs on, even next to a request. It opens
/// a service's page only if the daemon permits it. Method: a batch for each answer.
#[test]
fn a_batch_without_pages_runs_on() {
    let served = Served::new("socket-refused");
    let service = served.service();
    let mut worker = service.claim(0, REQUEST_CPUS[0]).unwrap();
    worker.begin(1);
    let cpu = cpu();
    let lent = Lent::new(cpu, REQUEST_CPUS[0], service);
    let [lanes, control] = lent.numbers();
    // SAFETY: the name is a NUL-terminated literal.
    let unsealed = unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_ALLOW_SEALING) };
    let (_short, short) = sealed::create(100, Writers::AnyProcess).unwrap();
    let short = short.raw();
    let many = [lanes, control].repeat(ENTRIES_MAX + 3);
    let answers: [(&str, &[u8], &[i32]); 10] = [
        ("services elsewhere", ANSWERS[0], &[lanes, control]),
        ("no descriptors", ANSWERS[1], &[]),
        ("half the descriptors", ANSWERS[1], &[lanes]),
        ("the wrong order", ANSWERS[1], &[control, lanes]),
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
        let client = listener.accept();
        let sent = pages::send_answer(client.as_raw_fd(), text, numbers);
        assert!(sent, "{what}");
        batch.assert_runs();
    }
    // The daemon never answers.
    let listener = Listener::new();
    let batch = Batch::start(cpu, &listener.path);
    let silent = listener.accept();
    batch.assert_runs();
    drop((silent, batch));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "no socket").unwrap();
    let long = folder.path().join("x".repeat(200));
    for path in [Path::new(""), &folder.path().join("none"), folder.path(), &file, &long] {
        Batch::start(cpu, path).assert_runs();
    }

    // The test can fail: with the same pages and the daemon's permission, the batch naps. It also
    // naps if the answer has more descriptors than there is room for; the others are left out.
    for numbers in [&[lanes, control][..], &many] {
        let listener = Listener::new();
        let batch = Batch::start(cpu, &listener.path);
        assert!(pages::send_answer(listener.accept().as_raw_fd(), ANSWERS[1], numbers));
        until("the batch naps", || lent.naps());
        drop(batch);
        lent.lanes.slot(0).unwrap().enter(LaneState::Off, 1);
    }
}

/// Goal: a client does not accept another file as the task map, and distinguishes a refusal from an
/// absent daemon. Method: a request for each answer; no answer has an eBPF map.
#[test]
fn other_files_are_not_accepted_as_the_task_map() {
    let (_page, page) = sealed::create(8192, Writers::AnyProcess).unwrap();
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
        let client =
            std::thread::spawn(move || pages::request_task_map(path.as_os_str().as_bytes()).err());
        let connection = listener.accept_request(TASKS_REQUEST);
        assert!(pages::send_answer(connection.as_raw_fd(), text, numbers));
        let error = client.join().unwrap().unwrap();
        assert_eq!(matches!(error, TasksError::Map(_)), is_map, "{text:?}: {error:?}");
        assert!(is_map || error == TasksError::Refused, "{text:?}: {error:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let none = folder.path().join("none");
    let absent = pages::request_task_map(none.as_os_str().as_bytes()).err();
    assert_eq!(absent, Some(TasksError::Absent));
}
