//! Goal: the task map is correct, lives as long as its last reader, and leaves nothing behind.
//! Method: the real program in the running kernel, and real processes that are killed. Needs
//! CAP_BPF, CAP_PERFMON and, to find other processes' programs, CAP_SYS_ADMIN.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elfen_kernel::task_map::{self, Loaded, Source};
use elfen_rt::signal::task::{Running, TaskMap};

/// Runs one test at a time, because the tests share the machine's one program.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[track_caller]
fn open() -> (TaskMap, Source) {
    task_map::open().unwrap_or_else(|error| panic!("needs root and eBPF: {error}"))
}

/// Fails if another process on this machine keeps the program attached.
#[track_caller]
fn require_detached() {
    drop(open());
    assert!(is_detached_soon(), "another process has the program attached");
}

/// The kernel frees a link a moment after its last descriptor is closed.
fn is_detached_soon() -> bool {
    (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        task_map::is_attached() == Some(false)
    })
}

fn pin_to(cpu: u32) {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut only: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: CPU numbers of this machine lie inside the set.
    unsafe { libc::CPU_SET(cpu as usize, &mut only) };
    // SAFETY: `only` is a local value, and its size is passed along.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of_val(&only), &only) }, 0);
}

fn own_cpu() -> u32 {
    // SAFETY: the call takes nothing and cannot fail.
    u32::try_from(unsafe { libc::sched_getcpu() }).unwrap()
}

fn own_thread() -> u32 {
    // SAFETY: the call takes nothing and cannot fail.
    u32::try_from(unsafe { libc::gettid() }).unwrap()
}

/// If this process was started as a holder, holds the task map until it is killed or its input
/// ends. Runs before the test runner, because a holder runs no tests.
#[used]
#[unsafe(link_section = ".init_array")]
static HOLD_IF_ASKED: extern "C" fn() = hold_if_asked;

const HOLD: &str = "ELFEN_TEST_HOLD";

extern "C" fn hold_if_asked() {
    if std::env::var_os(HOLD).is_none() {
        return;
    }
    let (_map, source) = task_map::open().unwrap();
    println!("{source:?}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    std::process::exit(0);
}

/// Starts this program again as a holder. Returns the process, and where its map came from.
fn holder() -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(HOLD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut source = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut source).unwrap();
    (child, source.trim().to_owned())
}

#[test]
#[ignore = "needs root and eBPF"]
fn a_reader_finds_itself_on_its_cpu() {
    let _alone = alone();
    let (map, _) = open();
    pin_to(own_cpu());
    std::thread::yield_now();
    let slot = map.slot(own_cpu()).unwrap();
    let Running::Task(task) = slot.snapshot().unwrap().running else { panic!("a task runs here") };
    assert_eq!((task.process, task.thread), (std::process::id(), own_thread()));
    assert!(slot.is_busy());
}

#[test]
#[ignore = "needs root and eBPF"]
fn a_cpu_beyond_the_last_has_no_slot() {
    let _alone = alone();
    let (map, _) = open();
    assert!(map.slot(map.cpus()).is_none() && !map.renew(map.cpus()));
    assert!(map.slot(u32::MAX).is_none() && !map.renew(u32::MAX));
}

/// Uses a map of its own, so that no other process renews a lease.
#[test]
#[ignore = "needs root and eBPF"]
fn only_watched_cpus_are_timed() {
    let _alone = alone();
    let loaded = Loaded::load().unwrap_or_else(|error| panic!("needs root and eBPF: {error}"));
    let map = loaded.map().unwrap();
    pin_to(own_cpu());
    let slot = map.slot(own_cpu()).unwrap();
    switch_away();
    assert_eq!(slot.snapshot().unwrap().at_ns, None, "no lease on this CPU");
    assert!(map.renew(own_cpu()));
    let before = elfen_rt::clock::monotonic_ns();
    switch_away();
    let switch = slot.snapshot().unwrap();
    let at_ns = switch.at_ns.expect("timed from the switch after the renewal");
    assert!(before <= at_ns && at_ns <= elfen_rt::clock::monotonic_ns());
}

/// Gives this thread the user id 65534, with only CAP_BPF and CAP_PERFMON.
fn drop_to_two_capabilities() -> std::io::Result<()> {
    const CAP_PERFMON: u32 = 38;
    const CAP_BPF: u32 = 39;
    const USER: u32 = 65_534;
    let succeeded = |result: i64| match result {
        -1 => Err(std::io::Error::last_os_error()),
        _ => Ok(()),
    };
    // SAFETY: prctl takes numbers.
    succeeded(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) }.into())?;
    // The system calls by number: libc's wrappers would change every thread of the process.
    // SAFETY: setresuid takes numbers.
    succeeded(unsafe { libc::syscall(libc::SYS_setresuid, USER, USER, USER) })?;
    // Version 3 has two words each of effective, permitted and inheritable capabilities.
    let header = [0x2008_0522_u32, 0];
    let high = 1 << (CAP_PERFMON - 32) | 1 << (CAP_BPF - 32);
    let sets = [0_u32, 0, 0, high, high, 0];
    // SAFETY: both arrays have the layout that capset reads.
    succeeded(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) })
}

#[test]
#[ignore = "needs root and eBPF"]
fn two_capabilities_and_no_root_are_enough() {
    let _alone = alone();
    drop(open());
    let opened = std::thread::spawn(|| {
        drop_to_two_capabilities().unwrap();
        assert_eq!(task_map::is_attached(), None, "this thread may not search for links");
        task_map::open().map(|(map, source)| (map.slot(0).unwrap().snapshot().is_some(), source))
    });
    let (_, source) = opened.join().unwrap().unwrap();
    assert!(matches!(source, Source::Attached | Source::Handed));
}

/// Goal: busy time grows while the CPU runs a thread, and not while it idles. Method: this thread
/// spins on its CPU between two sleeps.
#[test]
#[ignore = "needs root and eBPF"]
fn busy_time_grows_only_while_the_cpu_is_not_idle() {
    let _alone = alone();
    let (map, _) = open();
    pin_to(own_cpu());
    let slot = map.slot(own_cpu()).unwrap();
    let busy_ns = || {
        let now_ns = elfen_rt::clock::monotonic_ns();
        (slot.snapshot().unwrap().busy_until_ns(now_ns), now_ns)
    };
    assert!(map.renew(own_cpu()));
    switch_away();
    let (busy_before, from_ns) = busy_ns();
    while elfen_rt::clock::monotonic_ns() < from_ns + 3_000_000 {}
    switch_away();
    let (busy_after, to_ns) = busy_ns();
    let grown = busy_after - busy_before;
    // This thread spun for 3 ms. Other tasks may have run here while it slept, but the busy time
    // cannot exceed the elapsed time.
    assert!(grown >= 3_000_000 && grown <= to_ns - from_ns, "{grown} of {}", to_ns - from_ns);
}

/// Sleeps, so that this thread leaves its CPU and comes back.
fn switch_away() {
    std::thread::sleep(Duration::from_millis(2));
}

#[test]
#[ignore = "needs root and eBPF"]
fn the_map_is_read_only_for_good() {
    let _alone = alone();
    let (map, _) = open();
    let slot: *const _ = map.slot(0).unwrap();
    let page = slot.map_addr(|address| address & !4095).cast_mut();
    // SAFETY: mprotect of a mapping of this test. The call must fail and change nothing.
    let upgraded = unsafe { libc::mprotect(page.cast(), 4096, libc::PROT_READ | libc::PROT_WRITE) };
    assert_eq!(upgraded, -1);
}

#[test]
#[ignore = "needs root and eBPF"]
fn the_map_stays_live_when_the_process_that_attached_it_is_killed() {
    let _alone = alone();
    require_detached();
    let (mut first, source) = holder();
    assert_eq!(source, "Attached");
    let (map, source) = task_map::open().unwrap();
    assert_eq!(source, Source::Shared, "two processes share one program");
    first.kill().unwrap();
    first.wait().unwrap();
    let slot = map.slot(own_cpu()).unwrap();
    pin_to(own_cpu());
    let before = slot.switches.load(Relaxed);
    switch_away();
    assert!(slot.switches.load(Relaxed) > before, "frozen at {before}");
}

#[test]
#[ignore = "needs root and eBPF"]
fn after_the_last_reader_nothing_is_left_in_the_kernel() {
    let _alone = alone();
    require_detached();
    let (map, source) = task_map::open().unwrap();
    assert_eq!((source, task_map::is_attached()), (Source::Attached, Some(true)));
    let (mut other, source) = holder();
    assert_eq!(source, "Shared");
    drop(map);
    assert_eq!(task_map::is_attached(), Some(true), "the other process still reads");
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(is_detached_soon(), "the program is still attached");
}

/// Goal: a search for the program succeeds while another process attaches it. Method: one thread
/// repeatedly opens and closes the task map. Another searches meanwhile, without the lock that
/// openers take, and so finds links that the kernel is still making.
#[test]
#[ignore = "needs root and eBPF"]
fn a_search_during_an_attachment_succeeds() {
    let _alone = alone();
    require_detached();
    std::thread::scope(|scope| {
        let attaching = scope.spawn(|| (0..100).for_each(|_| drop(task_map::open().unwrap())));
        while !attaching.is_finished() {
            assert!(task_map::is_attached().is_some(), "the search failed");
        }
    });
}
