//! How a batch process finds its channels, by its environment.
//!
//! In a fence, the process requests its pages over elfend's socket ([`crate::pages`]). A batch of
//! `elfen run` inherits `ELFEN_RUN`. Any process could have set that variable, so each number in it
//! is opened as the kind that it should be, and refused if it is something else.
//!
//! The inherited descriptors belong to the program as well. So this code opens copies and closes
//! only those. The originals stay for the processes that the program starts.

use core::ffi::{CStr, c_char, c_int};
use core::{fmt, ptr};

use crate::bpf::Descriptor;
use crate::memory::{Access, Memory};
use crate::pages::{self, ENTRIES_MAX, Pages};
use crate::process::parse_u64;
use crate::signal::page::{Page, Slot};
use crate::signal::service::ServiceReader;
use crate::signal::task::TaskMap;

/// The variable: see [`Inherited`].
pub const VARIABLE: &CStr = c"ELFEN_RUN";
const PROTOCOL: c_int = 3;

/// The variable's text: `3 LANES CONTROL TASKS LINK SERVICE`.
///
/// LANES, CONTROL and SERVICE are segment ids; TASKS and LINK are descriptors. `-` means that there
/// is none. `module -` stands for the nanonap module's task map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Inherited {
    pub lanes: c_int,
    pub control: c_int,
    pub tasks: Option<TaskMapSource>,
    pub service: Option<c_int>,
}

/// Where the task map comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskMapSource {
    /// The descriptors of task map and link. A batch only reads the map.
    Descriptors([c_int; 2]),
    Module,
}

impl fmt::Display for Inherited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PROTOCOL} {} {} ", self.lanes, self.control)?;
        match self.tasks {
            Some(TaskMapSource::Descriptors([tasks, link])) => write!(f, "{tasks} {link} ")?,
            Some(TaskMapSource::Module) => f.write_str("module - ")?,
            None => f.write_str("- - ")?,
        }
        match self.service {
            Some(service) => service.fmt(f),
            None => f.write_str("-"),
        }
    }
}

impl Inherited {
    /// Parses the variable's text. `None` for any text that [`Inherited`] does not print.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut fields = text.split(|&byte| byte == b' ');
        let mut next = || fields.next();
        if number(next()?)? != PROTOCOL {
            return None;
        }
        let (lanes, control) = (number(next()?)?, number(next()?)?);
        let tasks = match [next()?, next()?] {
            [b"module", b"-"] => Some(TaskMapSource::Module),
            [b"-", b"-"] => None,
            numbers => match numbers.map(number) {
                [Some(tasks), Some(link)] => Some(TaskMapSource::Descriptors([tasks, link])),
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
    /// A run has one entry. A fence has an entry for each service or pair with lanes in it. The
    /// first entries are filled, without gaps.
    pub pages: [Option<Pages>; ENTRIES_MAX],
    pub tasks: Option<TaskMap>,
}

/// Whether the environment names channels.
pub fn is_named() -> bool {
    text().is_some() || value(pages::VARIABLE).is_some()
}

fn text() -> Option<&'static [u8]> {
    value(VARIABLE)
}

/// A variable's value. `None` if the program has more privileges than the process that started it:
/// then the environment is not trusted.
pub(crate) fn value(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: getauxval takes a number.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // SAFETY: the C library has set up `environ` before any caller of this runs.
    unsafe { value_of(name) }.map(CStr::to_bytes)
}

impl Run {
    /// Opens the channels that the environment names. `None` in these cases:
    /// - this process belongs to no run and no fence,
    /// - the lane page or the control page is missing,
    /// - neither the task map nor a service's page can be read, so a check has nothing to sample.
    pub fn inherited() -> Option<Self> {
        let run = match text() {
            Some(text) => Self::open(&Inherited::parse(text)?)?,
            None => {
                let answer = pages::request_pages(value(pages::VARIABLE)?, Access::Write)?;
                Self { pages: answer.pages, tasks: answer.tasks }
            }
        };
        let mut can_sample = run.tasks.is_some();
        for pages in run.pages() {
            can_sample |= pages.service.is_some();
        }
        (can_sample && run.pages().next().is_some()).then_some(run)
    }

    pub fn pages(&self) -> impl Iterator<Item = &Pages> {
        pages::filled(&self.pages)
    }

    #[inline(never)]
    fn open(fields: &Inherited) -> Option<Self> {
        let tasks = fields.tasks.and_then(|tasks| match tasks {
            TaskMapSource::Descriptors(numbers) => task_map(numbers),
            TaskMapSource::Module => TaskMap::open_module_map().ok(),
        });
        let service = fields.service.and_then(|id| ServiceReader::open_segment(id).ok());
        let only = Pages { lanes: page(fields.lanes)?, control: page(fields.control)?, service };
        let mut pages = [const { None }; ENTRIES_MAX];
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

/// Copies a descriptor. The copy's number is above the original's, so that the program's next
/// descriptor gets the number that the program expects.
fn copy_of(number: c_int) -> Option<Descriptor> {
    // SAFETY: F_DUPFD_CLOEXEC takes numbers and changes no descriptor that is open.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, number) };
    // SAFETY: the kernel has just made this descriptor, and no other code knows it.
    (copy >= 0).then(|| unsafe { Descriptor::from_raw(copy) })
}

fn number(digits: &[u8]) -> Option<c_int> {
    parse_u64(digits).and_then(|number| c_int::try_from(number).ok())
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The current value of an environment variable. Like `getenv`, but reads the list only once.
///
/// # Safety
/// 1. No other thread changes the environment meanwhile. No reader of the environment can enforce
///    this.
unsafe fn value_of(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: this is the C library's variable, which is null or points to a list that ends in
    // null.
    let mut at = unsafe { ptr::addr_of!(environ).read() };
    if at.is_null() {
        return None;
    }
    loop {
        // SAFETY: `at` has not passed the null that ends the list.
        let entry = unsafe { *at };
        if entry.is_null() {
            return None;
        }
        // SAFETY: entries of the list are NUL-terminated.
        let entry = unsafe { CStr::from_ptr(entry) };
        if let Some(value) = value_in(entry, name) {
            return Some(value);
        }
        // SAFETY: the entry was not the list's last.
        at = unsafe { at.add(1) };
    }
}

/// The value in an entry `NAME=value`, if the entry has this name.
fn value_in<'a>(entry: &'a CStr, name: &CStr) -> Option<&'a CStr> {
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
        tasks: Some(TaskMapSource::Descriptors([900, 901])),
        service: Some(14),
    };

    #[test]
    fn printed_text_parses_back() {
        assert_eq!(std::format!("{FULL}"), "3 12 13 900 901 14");
        let tasks = [FULL.tasks, Some(TaskMapSource::Module), None];
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
    fn only_the_whole_name_matches() {
        assert_eq!(value_in(c"ELFEN_RUN=1 2", VARIABLE), Some(c"1 2"));
        assert_eq!(value_in(c"ELFEN_RUN=", VARIABLE), Some(c""));
        for entry in [c"ELFEN_RUNNING=1", c"ELFEN_RUN", c"ELFEN=RUN=1", c""] {
            assert_eq!(value_in(entry, VARIABLE), None, "{entry:?}");
        }
    }

    /// Goal: a number of the wrong kind is refused, and its descriptor stays open. Method: a
    /// segment without a page, and standard error as a map.
    #[test]
    fn numbers_of_the_wrong_kind_are_refused() {
        let memory = Memory::create_segment(libc::IPC_PRIVATE, 4096, 0o600).unwrap();
        let id = memory.segment_id().unwrap();
        assert!(page::<LaneSlot>(id).is_none());
        memory.remove_name().unwrap();
        assert!(task_map([2, 2]).is_none());
        // SAFETY: F_GETFD reads a flag.
        assert!(unsafe { libc::fcntl(2, libc::F_GETFD) } >= 0);
    }
}
