//! What /proc tells of a process: since when it runs, what it has consumed, what it is called.

use std::fs;

/// A line of /proc/PID/stat, as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stat {
    pub(super) parent: u32,
    /// Time on a CPU, of all its threads, in clock ticks.
    pub(super) cpu_ticks: u64,
    /// With the process id, who it is: the id alone comes back.
    pub(super) started_ticks: u64,
    /// Ended, and not yet collected by its parent.
    pub(super) ended: bool,
}

/// `None` if there is no such process any more.
pub(super) fn stat(process: u32) -> Option<Stat> {
    parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// The name in parentheses may hold anything, parentheses and spaces as well.
fn parse(line: &str) -> Option<Stat> {
    let (_, after_name) = line.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some(Stat {
        parent: u32::try_from(number(1)?).ok()?,
        cpu_ticks: number(11)? + number(12)?,
        started_ticks: number(19)?,
        ended: matches!(*fields.first()?, "Z" | "X"),
    })
}

/// The name of a thread; empty if it has ended.
pub(super) fn thread_name(thread: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every field is the right one, whatever the name. Method: proc(5)'s order, with the
    /// fields numbered, and a name made to confuse.
    #[test]
    fn fields_are_counted_from_the_name() {
        let numbers: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let line = format!("77 (a) R (b c) S {}", numbers.join(" "));
        let expected = Stat { parent: 4, cpu_ticks: 14 + 15, started_ticks: 22, ended: false };
        assert_eq!(parse(&line), Some(expected));
        assert!(parse(&line.replace(") S", ") Z")).is_some_and(|stat| stat.ended));
        assert_eq!(parse("77 (cut) S 4 5"), None);
    }

    #[test]
    fn finds_itself() {
        let own = stat(std::process::id()).expect("it runs");
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(!own.ended && own.started_ticks > 0);
    }
}
