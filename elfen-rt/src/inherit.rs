//! What a batch process inherits: where its channels are.
//!
//! In a fence that is elfend's socket, which hands the pages to who is inside ([`crate::pages`]).
//! From `elfen run` it is `ELFEN_RUN`, which holds numbers that any process could have written:
//! each is opened as what it is said to be, and refused if it is something else. The descriptors
//! belong to the program as much as to us, so we open copies of our own and close those alone; the
//! originals stay for the processes that the program starts.

use core::ffi::{CStr, c_char, c_int};
use core::{fmt, ptr};

use crate::bpf::Descriptor;
use crate::memory::{Access, Memory};
use crate::pages::{self, MOST, Pages};
use crate::process::parse_u64;
use crate::signal::page::{Page, Slot};
use crate::signal::service::ServiceReader;
use crate::signal::task::TaskMap;

/// The variable: see [`Inherited`].
pub const VARIABLE: &CStr = c"ELFEN_RUN";
const PROTOCOL: c_int = 3;

/// The variable's text: `3 LANES CONTROL TASKS LINK SERVICE`. Ids of segments, descriptors, and
/// again the id of a segment; `-` where there is none, and `module -` for the nanonap module's task
/// map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Inherited {
    pub lanes: c_int,
    pub control: c_int,
    pub tasks: Option<Tasks>,
    pub service: Option<c_int>,
}

/// Where the task map is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tasks {
    /// Task map and link: a batch reads who runs, and asks nothing of the kernel.
    Descriptors([c_int; 2]),
    Module,
}

impl fmt::Display for Inherited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PROTOCOL} {} {} ", self.lanes, self.control)?;
        match self.tasks {
            Some(Tasks::Descriptors([tasks, link])) => write!(f, "{tasks} {link} ")?,
            Some(Tasks::Module) => f.write_str("module - ")?,
            None => f.write_str("- - ")?,
        }
        match self.service {
            Some(service) => service.fmt(f),
            None => f.write_str("-"),
        }
    }
}

impl Inherited {
    /// `None` for anything that [`Inherited`] does not print.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut fields = text.split(|&byte| byte == b' ');
        let mut next = || fields.next();
        if number(next()?)? != PROTOCOL {
            return None;
        }
        let (lanes, control) = (number(next()?)?, number(next()?)?);
        let tasks = match [next()?, next()?] {
            [b"module", b"-"] => Some(Tasks::Module),
            [b"-", b"-"] => None,
            numbers => match numbers.map(number) {
                [Some(tasks), Some(link)] => Some(Tasks::Descriptors([tasks, link])),
                _ => return None,
            },
        };
        let service = match next()? {
            b"-" => None,
            id => Some(number(id)?),
        };
        next().is_none().then_some(Self { lanes, control, tasks, service })
    }
}

/// The channels of the run, or of the fence, that this process belongs to.
#[derive(Debug)]
pub struct Run {
    /// Of a run one; of a fence as many as have lanes in it, and no gap before them.
    pub pages: [Option<Pages>; MOST],
    pub tasks: Option<TaskMap>,
}

/// Whether the environment says where channels may be.
pub fn is_named() -> bool {
    text().is_some() || value(pages::VARIABLE).is_some()
}

fn text() -> Option<&'static [u8]> {
    value(VARIABLE)
}

/// A variable's value, unless the program has more rights than the process that started it: then
/// it takes no addresses from that process.
pub(crate) fn value(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: getauxval takes a number.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // SAFETY: the C library has set `environ` up before any of our callers run.
    unsafe { value_of(name) }.map(CStr::to_bytes)
}

impl Run {
    /// Opens the channels that the environment names. `None` if this process belongs to no run and
    /// to no fence, if the lane or control page is not there, or if neither the task map nor a
    /// service's page can be read: then a check has nothing to look at.
    pub fn inherited() -> Option<Self> {
        let run = match text() {
            Some(text) => Self::open(&Inherited::parse(text)?)?,
            None => {
                let answer = pages::ask(value(pages::VARIABLE)?, Access::Write)?;
                Self { pages: answer.pages, tasks: answer.tasks }
            }
        };
        let mut sees = run.tasks.is_some();
        run.pages().for_each(|pages| sees |= pages.service.is_some());
        (sees && run.pages().next().is_some()).then_some(run)
    }

    pub fn pages(&self) -> impl Iterator<Item = &Pages> {
        pages::of(&self.pages)
    }

    #[inline(never)]
    fn open(fields: &Inherited) -> Option<Self> {
        let tasks = fields.tasks.and_then(|tasks| match tasks {
            Tasks::Descriptors(numbers) => task_map(numbers),
            Tasks::Module => TaskMap::open_module_unseen().ok(),
        });
        let service = fields.service.and_then(|id| ServiceReader::open_segment(id).ok());
        let only = Pages { lanes: page(fields.lanes)?, control: page(fields.control)?, service };
        let mut pages = [const { None }; MOST];
        pages[0] = Some(only);
        Some(Self { pages, tasks })
    }
}

fn page<S: Slot>(id: c_int) -> Option<Page<S>> {
    Page::open(Memory::attach_id(id, Access::Write).ok()?).ok()
}

fn task_map(numbers: [c_int; 2]) -> Option<TaskMap> {
    let [tasks, link] = numbers.map(copy_of);
    TaskMap::lent(tasks?, link?).ok()
}

/// A copy that is ours to close, above the original so that the program's next descriptor
/// has the number it expects.
fn copy_of(number: c_int) -> Option<Descriptor> {
    // SAFETY: F_DUPFD_CLOEXEC takes numbers and changes no descriptor that is open.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, number) };
    // SAFETY: the kernel has just made this descriptor, for us.
    (copy >= 0).then(|| unsafe { Descriptor::from_raw(copy) })
}

fn number(digits: &[u8]) -> Option<c_int> {
    parse_u64(digits).and_then(|number| c_int::try_from(number).ok())
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The value of a variable, as the environment has it now. `getenv` would do the same;
/// this reads the list once.
///
/// # Safety
/// 1. No other thread changes the environment meanwhile: what every reader of it has to hope for.
unsafe fn value_of(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the C library's own variable; it is null or points to a list that ends in null.
    let mut at = unsafe { ptr::addr_of!(environ).read() };
    if at.is_null() {
        return None;
    }
    loop {
        // SAFETY: `at` has not passed the list's null yet.
        let entry = unsafe { *at };
        if entry.is_null() {
            return None;
        }
        // SAFETY: entries of the list are NUL-terminated.
        let entry = unsafe { CStr::from_ptr(entry) };
        if let Some(value) = after(entry, name) {
            return Some(value);
        }
        // SAFETY: the entry was not the list's last.
        at = unsafe { at.add(1) };
    }
}

/// The value of `NAME=value`, if it is this name's.
fn after<'a>(entry: &'a CStr, name: &CStr) -> Option<&'a CStr> {
    let value = entry.to_bytes_with_nul().strip_prefix(name.to_bytes())?.strip_prefix(b"=")?;
    CStr::from_bytes_with_nul(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal::lane::LaneSlot;

    const FULL: Inherited = Inherited {
        lanes: 12,
        control: 13,
        tasks: Some(Tasks::Descriptors([900, 901])),
        service: Some(14),
    };

    #[test]
    fn what_is_printed_is_read_back() {
        assert_eq!(std::format!("{FULL}"), "3 12 13 900 901 14");
        let tasks = [FULL.tasks, Some(Tasks::Module), None];
        for (tasks, service) in tasks.iter().flat_map(|t| [(*t, FULL.service), (*t, None)]) {
            let inherited = Inherited { tasks, service, ..FULL };
            let text = std::format!("{inherited}");
            assert_eq!(Inherited::parse(text.as_bytes()), Some(inherited), "{text:?}");
        }
    }

    #[test]
    fn other_values_are_refused() {
        for text in [
            "",
            "3",
            "2 12 13 - - -",
            "3 12 13 - -",
            "3 12 13 - - - -",
            "3 12 13 900 - -",
            "3 12 13 module 3 -",
            "3 -12 13 - - -",
            "3 +12 13 - - -",
            "3 12 99999999999 - - -",
            "3 12  13 - - -",
            "3 12 13 - - search",
        ] {
            assert_eq!(Inherited::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn a_name_is_found_whole() {
        assert_eq!(after(c"ELFEN_RUN=1 2", VARIABLE), Some(c"1 2"));
        assert_eq!(after(c"ELFEN_RUN=", VARIABLE), Some(c""));
        for entry in [c"ELFEN_RUNNING=1", c"ELFEN_RUN", c"ELFEN=RUN=1", c""] {
            assert_eq!(after(entry, VARIABLE), None, "{entry:?}");
        }
    }

    /// Goal: numbers that name something else do no harm. Method: a segment that is no page, and
    /// standard error as a map.
    #[test]
    fn what_is_not_what_it_is_said_to_be_is_refused_and_left_open() {
        let memory = Memory::create_segment(libc::IPC_PRIVATE, 4096, 0o600).unwrap();
        let id = memory.segment_id().unwrap();
        assert!(page::<LaneSlot>(id).is_none());
        memory.remove_name().unwrap();
        assert!(task_map([2, 2]).is_none());
        // SAFETY: F_GETFD reads a flag.
        assert!(unsafe { libc::fcntl(2, libc::F_GETFD) } >= 0);
    }
}
