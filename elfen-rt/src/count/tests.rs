//! Tests the code that reads hardware counters in programs. Where no counter is available, the
//! instruction faults, and a signal handler of the test emulates it.

use core::ffi::c_void;
use std::sync::Mutex;
use std::vec::Vec;

use super::*;

/// The values of the emulated counters.
static COUNTERS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
/// A page that the handler changes, like a kernel that moves the event to another counter.
static MOVED: AtomicPtr<EventPage> = AtomicPtr::new(ptr::null_mut());
/// How often the handler still changes it.
static MOVES: AtomicU32 = AtomicU32::new(0);
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const RDPMC: [u8; 2] = [0x0f, 0x33];

extern "C" fn emulate_rdpmc(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes the context of the thread that faulted.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let registers = &mut context.uc_mcontext.gregs;
    let register = |which: c_int| usize::try_from(which).unwrap();
    let at: *const [u8; 2] =
        ptr::with_exposed_provenance(usize::try_from(registers[register(libc::REG_RIP)]).unwrap());
    // SAFETY: the thread executed the instruction at this address, so it is readable.
    if unsafe { at.read_unaligned() } != RDPMC {
        // Another fault: it repeats, and ends the process.
        // SAFETY: signal takes numbers.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        return;
    }
    let index = usize::try_from(registers[register(libc::REG_RCX)]).unwrap();
    let count = COUNTERS[index].load(Relaxed);
    registers[register(libc::REG_RAX)] = (count & 0xffff_ffff).cast_signed();
    registers[register(libc::REG_RDX)] = (count >> 32).cast_signed();
    registers[register(libc::REG_RIP)] += 2;
    let moved = MOVED.load(Relaxed);
    if !moved.is_null() && MOVES.load(Relaxed) > 0 {
        MOVES.fetch_sub(1, Relaxed);
        // SAFETY: the page belongs to the test, which waits for this thread.
        let page = unsafe { &*moved };
        page.lock.fetch_add(2, Relaxed);
        page.index.store(2, Relaxed);
        page.offset.store(5_000, Relaxed);
    }
}

/// Installs the emulation. Fails where the instruction reads a real counter.
#[track_caller]
fn emulate_counters() -> std::sync::MutexGuard<'static, ()> {
    const RULE: &str = "/sys/bus/event_source/devices/cpu/rdpmc";
    let is_open = std::fs::read_to_string(RULE).is_ok_and(|rule| rule.trim() == "2");
    assert!(!is_open, "every process may read real counters: {RULE} is 2. Change it to 1");
    let guard = ONE_AT_A_TIME.lock().unwrap();
    // The first model of loom in a process installs a handler of SIGSEGV. A model in another test
    // must not replace ours.
    loom::model(|| {});
    // SAFETY: an all-zero action is a valid value of that plain C structure.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = emulate_rdpmc as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler lives as long as the process.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSEGV, &action, ptr::null_mut()) }, 0);
    guard
}

fn page(index: u32, offset: u64, width: u16) -> EventPage {
    EventPage {
        versions: [0; 2],
        lock: AtomicU32::new(2),
        index: AtomicU32::new(index),
        offset: AtomicU64::new(offset),
        times: [const { AtomicU64::new(0) }; 2],
        capabilities: AtomicU64::new(1 << MAY_READ),
        width: AtomicU16::new(width),
    }
}

/// Goal: a count is computed as the kernel's page describes. Method: counters of 64, 48 and 32 bits
/// above and below zero, and pages without a counter.
#[test]
fn counters_are_extended_by_their_sign() {
    let _guard = emulate_counters();
    let of = |counter: u64, offset: u64, width: u16| {
        COUNTERS[0].store(counter, Relaxed);
        read(&page(1, offset, width))
    };
    assert_eq!(of(7, 100, 48), Some(107));
    assert_eq!(of(7, 0, 64), Some(7));
    // The kernel starts a counter below zero, so that it overflows after a chosen count.
    let below = |width: u16, by: u64| (1_u64 << width) - by;
    assert_eq!(of(below(48, 30), 1_000, 48), Some(970));
    assert_eq!(of(below(48, 1), 1 << 40, 48), Some((1 << 40) - 1));
    assert_eq!(of(below(32, 30), 1_000, 32), Some(970));
    assert_eq!(of(below(47, 1), 0, 48), Some((1 << 47) - 1), "only the highest bit is the sign");
    assert_eq!(of(0xffff << 48 | 5, 0, 48), Some(5), "bits above the width are ignored");
    assert_eq!(read(&page(0, 55, 48)), None, "no counter");
    let hidden = page(1, 55, 48);
    hidden.capabilities.store(!(1 << MAY_READ), Relaxed);
    assert_eq!(read(&hidden), None);
}

/// Goal: if the page changes while the counter is read, both are read again, a limited number of
/// times. Method: a handler that changes the page during each read.
#[test]
fn an_event_that_is_moved_is_read_again() {
    let _guard = emulate_counters();
    COUNTERS[0].store(11, Relaxed);
    COUNTERS[1].store(22, Relaxed);
    let moving = |times: u32| {
        let page = page(1, 100, 48);
        MOVES.store(times, Relaxed);
        MOVED.store(ptr::from_ref(&page).cast_mut(), Relaxed);
        let found = read(&page);
        MOVED.store(ptr::null_mut(), Relaxed);
        found
    };
    assert_eq!(moving(0), Some(111));
    assert_eq!(moving(1), Some(5_022), "the other counter, by the page's new offset");
    assert_eq!(moving(TRIES - 1), Some(5_022));
    assert_eq!(moving(TRIES), None);
}

/// Goal: an entry publishes both counts or neither, and changes no register of its caller except
/// `%r11`. Method: call it with known registers, with and without counters.
#[test]
fn an_entry_publishes_both_counts() {
    let _guard = emulate_counters();
    COUNTERS[0].store(1_000, Relaxed);
    COUNTERS[2].store(2_500, Relaxed);
    let (cycles, instructions) = (page(1, 0, 48), page(3, 0, 48));
    let at = |page: &EventPage| AtomicPtr::new(ptr::from_ref(page).cast_mut());
    let events = Events { instructions: at(&instructions), cycles: at(&cycles) };
    let published = || {
        let before: [u64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
        let mut after = before;
        // SAFETY: `publish` changes only %r11 and the flags, which this test verifies.
        unsafe {
            asm!(
                "call {publish}",
                publish = sym publish,
                inlateout("rax") before[0] => after[0],
                inlateout("rcx") before[1] => after[1],
                inlateout("rdx") before[2] => after[2],
                inlateout("rsi") before[3] => after[3],
                inlateout("rdi") before[4] => after[4],
                inlateout("r8") before[5] => after[5],
                inlateout("r9") before[6] => after[6],
                inlateout("r10") before[7] => after[7],
                out("r11") _,
            );
        }
        assert_eq!(before, after);
        let words = &tag::own_slot().unwrap().words;
        (words.instructions.load(Relaxed), words.cycles.load(Relaxed))
    };
    std::thread::scope(|scope| {
        let found = scope.spawn(|| {
            tag::begin_thread();
            let mut found: Vec<(u64, u64)> = Vec::new();
            found.push(published());
            point_to(&events);
            found.push(published());
            COUNTERS[2].store(9_000, Relaxed);
            cycles.index.store(0, Relaxed);
            found.push(published());
            cycles.index.store(1, Relaxed);
            found.push(published());
            found
        });
        let wanted = [(0, 0), (2_500, 1_000), (2_500, 1_000), (9_000, 1_000)];
        assert_eq!(found.join().unwrap(), wanted);
    });
}

/// Goal: events can be opened, and their pages have the layout of [`EventPage`]. Method: software
/// clock events, which have no counter and count the time that they ran.
#[test]
#[ignore = "needs perf events"]
fn event_pages_have_the_kernels_layout() {
    const SOFTWARE: u32 = 1;
    let pages = open_both(SOFTWARE, [0, 1]);
    for at in pages.unwrap_or_else(|error| panic!("needs perf events: {error:?}")) {
        // SAFETY: `open_both` mapped the page, and it is unmapped below.
        let page = unsafe { &*at };
        assert_eq!(page.index.load(Relaxed), 0);
        assert_eq!(page.lock.load(Relaxed) % 2, 0, "no change is in progress");
        assert!(page.lock.load(Relaxed) > 0, "the kernel has written it");
        let [enabled, running] = [0, 1].map(|which| page.times[which].load(Relaxed));
        assert!(enabled > 0 && running <= enabled, "{enabled} {running}");
        assert_eq!(read(page), None);
        unmap(at);
    }
    assert_eq!(open_both(SOFTWARE, [0, u64::MAX]), Err(CountError::Open(libc::ENOENT)));
}

/// Goal: a child that a program forks without the C library has no addresses of pages that it has
/// not mapped. Method: the child reads its table.
#[test]
fn a_child_finds_an_empty_table() {
    begin();
    let table = TABLE.load(Relaxed);
    assert!(!table.is_null());
    let marked = page(0, 0, 0);
    // SAFETY: `begin` has mapped the table.
    let last = unsafe { &*table.wrapping_add(THREADS as usize - 1) };
    last.cycles.store(ptr::from_ref(&marked).cast_mut(), Relaxed);
    // SAFETY: the child only makes system calls.
    let child = unsafe { libc::syscall(libc::SYS_fork) };
    if child == 0 {
        let wiped = last.cycles.load(Relaxed).is_null();
        // SAFETY: ends the child.
        unsafe { libc::_exit(if wiped { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: only this test waits for the child, and `status` is a local number.
    unsafe { libc::waitpid(c_int::try_from(child).unwrap(), &mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 7);
    last.cycles.store(ptr::null_mut(), Relaxed);
}
