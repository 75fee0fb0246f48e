//! What the kernel reports about a process: whether it is ending, its threads, its descendants, and
//! whether it shares its memory.

use std::fs;
use std::io;
use std::iter;

/// The fields of /proc/PID/stat that are needed here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// As `ps` prints it: `R` is runnable, `S` sleeps, `T` is stopped.
    pub state: char,
    pub parent: u32,
    /// It runs none of its program any more: it exits, or has a signal that it cannot catch.
    pub dying: bool,
    /// CPU time of the children that it has waited for, and of those that these had waited for.
    pub waited_for_ticks: u64,
    /// When it started, which distinguishes it from other processes with the same id.
    pub began_ticks: u64,
}

/// In the flags of a task: it exits.
const PF_EXITING: u64 = 4;
/// In the pending signals of a thread. The kernel sets it for any signal that ends the process
/// without a handler.
const KILL_PENDING: u64 = 1 << (libc::SIGKILL - 1);

const GENERATIONS_MAX: usize = 1000;

/// `None` if the process does not exist.
pub fn stat(process: u32) -> Option<Stat> {
    parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// Parses the line. The name in parentheses may contain anything, even parentheses and spaces.
fn parse(line: &str) -> Option<Stat> {
    let (_, after_name) = line.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: u32::try_from(number(1)?).ok()?,
        dying: number(6)? & PF_EXITING != 0 || number(28)? & KILL_PENDING != 0,
        waited_for_ticks: number(13)?.checked_add(number(14)?)?,
        began_ticks: number(19)?,
    })
}

/// The CPU time of the calling thread.
pub fn own_cpu_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live timespec of ours, and every thread has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// CPU time of a process, including threads that have ended; `None` if the process does not exist.
pub fn cpu_time_ns(process: u32) -> Option<u64> {
    let process = libc::pid_t::try_from(process).ok()?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the call writes one clock id to a live local.
    if unsafe { libc::clock_getcpuclockid(process, &raw mut clock) } != 0 {
        return None;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec to a live local.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let ns = u64::try_from(time.tv_nsec).ok()?;
    Some(seconds * 1_000_000_000 + ns)
}

/// The CPU time of a thread, and whether the kernel reports it as sleeping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spent {
    pub sleeps: bool,
    pub user_ticks: u64,
    pub system_ticks: u64,
}

/// `None` if the thread does not exist.
pub fn spent(thread: u32) -> Option<Spent> {
    // In /proc/THREAD/stat the first thread of a process has the times of the whole process.
    let line = fs::read_to_string(format!("/proc/{thread}/task/{thread}/stat")).ok()?;
    let (_, after_name) = line.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    let sleeps = fields.next()? == "S";
    let mut ticks = fields.skip(10).map(|field| field.parse().ok());
    Some(Spent { sleeps, user_ticks: ticks.next()??, system_ticks: ticks.next()?? })
}

/// All descendants of a process.
pub fn below(ancestor: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut ahead = children(ancestor);
    while let Some(process) = ahead.pop() {
        ahead.extend(children(process));
        found.push(process);
    }
    found
}

/// Whether a process is a descendant of another. `false` also if a process between them ends
/// meanwhile.
pub fn descends(process: u32, ancestor: u32) -> bool {
    let parent = |&process: &u32| stat(process).map(|stat| stat.parent);
    // Parents never form a cycle, but process ids may be reused while they are read.
    let mut above = iter::successors(parent(&process), parent).take(GENERATIONS_MAX);
    above.any(|process| process == ancestor)
}

/// The threads of a process; empty if the process does not exist.
pub fn threads_of(process: u32) -> Vec<u32> {
    numbers_in(&format!("/proc/{process}/task"))
}

/// The processes that a process started or inherited, over all its threads.
pub fn children(process: u32) -> Vec<u32> {
    let lists = threads_of(process).into_iter().map(|thread| {
        // Empty if the thread has ended meanwhile: its children have another parent by then, and
        // the next call finds them there.
        fs::read_to_string(format!("/proc/{process}/task/{thread}/children")).unwrap_or_default()
    });
    let numbers = |list: String| {
        list.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>()
    };
    lists.flat_map(numbers).collect()
}

pub fn numbers_in(folder: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether two processes share one memory, as between vfork and exec. `false` if one of them does
/// not exist; `None` where the kernel does not say.
pub fn share_memory(one: u32, other: u32) -> Option<bool> {
    const KCMP_VM: i32 = 1;
    // SAFETY: kcmp takes numbers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    let is_gone = || io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    match order {
        0 => Some(true),
        1.. => Some(false),
        _ => is_gone().then_some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every field is the right one, whatever the name. Method: the fields in proc(5)'s order
    /// with their numbers as values, and a confusing name.
    #[test]
    fn fields_are_counted_from_the_name() {
        let numbers: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let line = format!("77 (a) R (b c) S {}", numbers.join(" "));
        let waited_for_ticks = 16 + 17;
        let began_ticks = 22;
        let (state, parent, dying) = ('S', 4, false);
        let stat = Stat { state, parent, dying, waited_for_ticks, began_ticks };
        assert_eq!(parse(&line), Some(stat));
        let dying = |from, to| parse(&line.replace(from, to)).is_some_and(|stat| stat.dying);
        assert!(dying(" 9 ", " 4228364 ") && dying(" 31 ", " 256 "), "PF_EXITING; SIGKILL");
        assert_eq!(parse("77 (cut) S 4 5"), None);
    }

    #[test]
    fn this_process_is_found() {
        let own = stat(std::process::id()).expect("it runs");
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(!own.dying);
    }

    #[test]
    fn descendants_are_found_by_their_parents() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        assert!(descends(child.id(), own) && descends(child.id(), parent));
        assert!(!descends(own, child.id()) && !descends(own, own) && !descends(u32::MAX, own));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_cpu_time_of_a_thread_is_read() {
        // SAFETY: takes nothing and cannot fail.
        let thread = unsafe { libc::gettid() }.unsigned_abs();
        let before = spent(thread).expect("it runs");
        let busy = || spent(thread).is_some_and(|now| now.user_ticks >= before.user_ticks + 3);
        while !busy() {
            (0..1_000_000).for_each(|n| {
                std::hint::black_box(n);
            });
        }
        assert!(!before.sleeps, "it reads this");
        assert_eq!(spent(u32::MAX), None);
    }
}
