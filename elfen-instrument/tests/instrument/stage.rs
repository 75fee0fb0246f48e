//! The environment of the tests in this crate: the compiler, the service of a pair, and `elfen run`
//! for a batch on it. Signals come only from the service's page, which needs no privileges, unless
//! a test has the task map.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use elfen_rt::inherit::{Inherited, TaskMapSource};
use elfen_rt::memory::Memory;
use elfen_rt::nap::NapKind;
use elfen_rt::process::pid_namespace;
use elfen_rt::service::{Service, Worker};
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, Slot};

/// How long a test waits for an event that must happen.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The preload library as shipped. Only release builds cannot panic.
pub(crate) fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build_library("release", "release"))
}

/// Builds the library with one of cargo's profiles, which puts it into `folder`.
pub(crate) fn build_library(profile: &str, folder: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("preload");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--profile", profile, "--offline", "--quiet", "-p", "elfen-preload"]);
    let output = command.arg("--target-dir").arg(&target).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join(folder).join(elfen_instrument::LIBRARY)
}

/// Compiles a C file of this crate. Calls of the library's hooks need no linker flag.
#[track_caller]
pub(crate) fn compile(source: &str, program: &str, flags: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (object, output) = (folder.join(format!("{program}.o")), folder.join(program));
    let cc = |arguments: &[&OsStr]| Command::new("cc").args(arguments).output();
    let source = root().join("tests/c").join(source);
    let include = format!("-I{}", root().join("../elfen-rt/include").display());
    let mut arguments: Vec<&OsStr> = ["-O2", "-Wall", "-c", &include].map(OsStr::new).to_vec();
    arguments.extend(flags.iter().map(OsStr::new));
    arguments.extend([source.as_os_str(), "-o".as_ref(), object.as_os_str()]);
    let compiled = cc(&arguments).expect("building Rust needs a C compiler too");
    let why = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "needs a compiler with {flags:?}: {why}");
    let mut arguments: Vec<&OsStr> = vec![object.as_os_str(), "-o".as_ref(), output.as_os_str()];
    arguments.extend(["-pthread", "-lm"].map(OsStr::new));
    let returns = library().with_file_name("libelfen_return.a");
    if flags.contains(&RETURNS) {
        arguments.push(returns.as_os_str());
    }
    if flags.contains(&"c++") {
        arguments.push("-lstdc++".as_ref());
    }
    // Flags that both the compiler and the linker must know.
    arguments.extend(flags.iter().filter(|flag| LINKING.contains(flag)).map(OsStr::new));
    let linked = cc(&arguments).unwrap();
    assert!(linked.status.success(), "{}", String::from_utf8_lossy(&linked.stderr));
    output
}

/// Makes functions return by the `ret` of `libelfen_return.a`.
pub(crate) const RETURNS: &str = "-mfunction-return=thunk-extern";

const LINKING: [&str; 5] = ["-flto", "-fsanitize=address", "-no-pie", "-shared", "-static"];

/// Waits for something that must happen.
pub(crate) fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happens() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

fn segment(bytes: usize) -> Memory {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600).unwrap();
    memory.remove_name().unwrap();
    memory
}

pub(crate) fn page<S: Slot>(slots: u32) -> Page<S> {
    Page::format(segment(Page::<S>::bytes(slots)), slots, pid_namespace(), &[0; 32]).unwrap()
}

/// The shared words of the programs' `loop` and `crowd` modes.
pub(crate) struct Board {
    memory: Memory,
    words: usize,
}

/// The words before the counters of the crowd's threads.
const COMMON_WORDS: usize = 4;

impl Board {
    pub(crate) fn new() -> Self {
        Self::of_crowd(0)
    }

    /// With one word for each thread of a crowd.
    pub(crate) fn of_crowd(threads: usize) -> Self {
        let words = COMMON_WORDS + threads;
        Self { memory: segment(words * 8), words }
    }

    /// The segment id, by which the program finds the board.
    pub(crate) fn id(&self) -> String {
        self.memory.segment_id().unwrap().to_string()
    }

    /// The program's counter.
    pub(crate) fn progress(&self) -> u64 {
        self.word(0).load(Relaxed)
    }

    /// The counter of each thread of a crowd.
    pub(crate) fn of_each(&self) -> Vec<u64> {
        (COMMON_WORDS..self.words).map(|word| self.word(word).load(Relaxed)).collect()
    }

    /// Tells the program to end.
    pub(crate) fn stop(&self) {
        self.word(1).store(1, Relaxed);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words);
        // SAFETY: the segment has this many words, is page-aligned, and lives as long as `self`.
        let word = unsafe { self.memory.base().cast::<AtomicU64>().add(index) };
        // SAFETY: the pointer is valid for `self`'s lifetime, and both sides use atomics.
        unsafe { word.as_ref() }
    }
}

/// A program that is killed at the end of the test, even of a failing test.
pub(crate) struct Batch(Child);

impl Batch {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// How long the program has run on a CPU.
    pub(crate) fn busy_ns(&self) -> i64 {
        let mut clock = 0;
        let process = i32::try_from(self.0.id()).unwrap();
        // SAFETY: `clock` is a local variable.
        assert_eq!(unsafe { libc::clock_getcpuclockid(process, &mut clock) }, 0);
        let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `used` is a local variable.
        assert_eq!(unsafe { libc::clock_gettime(clock, &mut used) }, 0);
        used.tv_sec * 1_000_000_000 + used.tv_nsec
    }

    /// Its threads except the first.
    pub(crate) fn threads(&self) -> Vec<u32> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        let ids = threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse());
        ids.map(Result::unwrap).filter(|&id| id != self.0.id()).collect()
    }

    /// How often one of its threads has left its CPU.
    pub(crate) fn switches(&self, thread: u32) -> u64 {
        let status = format!("/proc/{}/task/{thread}/status", self.0.id());
        let status = fs::read_to_string(status).unwrap();
        let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:\t"));
        counts.map(|(_, count)| count.parse::<u64>().unwrap()).sum()
    }

    /// Whether its first thread sleeps in the kernel.
    pub(crate) fn sleeps(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('S')
    }

    /// Waits until it ends; whether it succeeded.
    pub(crate) fn succeeds(&mut self) -> bool {
        self.0.wait().unwrap().success()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // Fails if the program has ended already.
        let _ended = self.0.kill();
        self.0.wait().unwrap();
    }
}

/// A request lane that no machine has, so only the test decides what it does.
const REQUEST_CPU: u32 = 6001;

/// A run with one pair.
pub(crate) struct Run {
    lanes: Page<LaneSlot>,
    control: Page<ControlSlot>,
    /// The page of the service; `None` for a run without one.
    service: Option<&'static Service>,
    cpu: u32,
}

impl Run {
    /// A run with a service that is the only source of its request lane.
    pub(crate) fn new() -> (Self, Worker<'static>) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("check-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        // Leaked, so that its worker can have a static lifetime.
        let service: &'static Service = Box::leak(Box::new(Service::open(&name, 1).unwrap()));
        let worker = service.claim(0, REQUEST_CPU).unwrap();
        (Self::on(cpus()[0], REQUEST_CPU, Some(service)), worker)
    }

    /// A run with a service, on this batch lane.
    pub(crate) fn on_lane(cpu: u32) -> (Self, Worker<'static>) {
        let (mut run, worker) = Self::new();
        run.lane().assign(cpu, REQUEST_CPU);
        run.cpu = cpu;
        (run, worker)
    }

    /// A run that depends only on the task map.
    pub(crate) fn on_tasks(batch: u32, request: u32) -> Self {
        Self::on(batch, request, None)
    }

    fn on(cpu: u32, request: u32, service: Option<&'static Service>) -> Self {
        let (lanes, control) = (page::<LaneSlot>(1), page::<ControlSlot>(1));
        lanes.slot(0).unwrap().assign(cpu, request);
        control.slot(0).unwrap().publish(&Settings::BORROW_IDLE);
        Self { lanes, control, service, cpu }
    }

    pub(crate) fn lane(&self) -> &LaneSlot {
        self.lanes.slot(0).unwrap()
    }

    /// Selects how threads with checks nap.
    pub(crate) fn nap_by(&self, kind: NapKind) {
        self.control.slot(0).unwrap().nap.store(kind as u64, Relaxed);
    }

    pub(crate) fn is(&self, state: LaneState) -> bool {
        self.lane().state().is_some_and(|(found, _)| found == state)
    }

    /// A command that starts the program as a batch of this run, on its lane.
    pub(crate) fn batch(&self, program: &Path) -> Command {
        self.batch_with(program, None)
    }

    /// The same, with the numbers of the task map's descriptors.
    pub(crate) fn batch_with(&self, program: &Path, tasks: Option<TaskMapSource>) -> Command {
        let id = |memory: &Memory| memory.segment_id().unwrap();
        let (lanes, control) = (id(self.lanes.memory()), id(self.control.memory()));
        let service = self.service.map(|service| id(service.page().memory()));
        let mut command = Command::new(program);
        let inherited = Inherited { lanes, control, tasks, service };
        command.env("ELFEN_RUN", inherited.to_string());
        command.env("LD_PRELOAD", library()).current_dir(env!("CARGO_TARGET_TMPDIR"));
        let cpu = self.cpu;
        // SAFETY: `pin` makes one system call.
        unsafe { command.pre_exec(move || pin(cpu)) };
        command
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(service) = self.service {
            service.page().memory().remove_name().unwrap();
        }
    }
}

/// Two CPUs that this process may use; the same CPU twice if there is only one.
pub(crate) fn cpus() -> [u32; 2] {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a local variable of the given size.
    assert_eq!(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) }, 0);
    // SAFETY: `set` was filled in, and no index reaches its size.
    let mut usable = (0..1024u32).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu as usize, &set) });
    let first = usable.next().unwrap();
    [first, usable.next().unwrap_or(first)]
}

pub(crate) fn pin(cpu: u32) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` came from `cpus`.
    unsafe { libc::CPU_SET(cpu as usize, &mut set) };
    // SAFETY: `set` is a local variable of the given size.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ranks this process below every ordinary one.
pub(crate) fn idle() -> io::Result<()> {
    let no_priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: `no_priority` is a local variable.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &no_priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A service that has a request half of the time.
pub(crate) struct Toggle {
    stop: &'static AtomicBool,
    thread: Option<JoinHandle<()>>,
}

impl Toggle {
    pub(crate) fn start(mut worker: Worker<'static>) -> Self {
        let stop: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let serve = move || {
            for request in 1.. {
                worker.begin(request);
                thread::sleep(Duration::from_micros(300));
                worker.end();
                thread::sleep(Duration::from_micros(300));
                if stop.load(Relaxed) {
                    return;
                }
            }
        };
        Self { stop, thread: Some(thread::spawn(serve)) }
    }
}

impl Drop for Toggle {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}
