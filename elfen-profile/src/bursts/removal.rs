//! Takes everything of ours out of a process: of one that was recorded, of its forked children, and
//! of one whose recording was killed. The process itself keeps the list of what that is.

use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfen_instrument::process::is_filtered;
use elfen_instrument::remote::{Group, Memory, TouchError, mappings};

use super::inside::{RECORD, SCRATCH};
use super::refusal::Refusal;
use crate::engine::region::{HEADER_AT, HEADER_BYTES, MAPPED_NAME, Region};
use crate::engine::thread::seize;

/// The signals of faults, which no handler of ours blocks.
pub(super) const FAULTS: [i32; 4] = [libc::SIGILL, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV];
/// Words of what the kernel does about a signal.
pub(super) const ACTION_WORDS: usize = 4;
pub(super) const ACTION_BYTES: u64 = 8 * ACTION_WORDS as u64;
/// Behind the actions of all signals: whether our handlers are taken out, and how many calls are
/// installing one.
const ENDS: u64 = 32 * ACTION_BYTES;
const INSTALLING: u64 = ENDS + 8;
/// Its last byte is the version of the list.
const MAGIC: u64 = u64::from_le_bytes(*b"elfbur\0\x01");
const RANGES_MAX: usize = 16;
const PATCHES_MAX: usize = 20;
const PATCH_BYTES_MAX: usize = 16;
const PATCH_WORDS: usize = 6;
const FIXED_WORDS: usize = 8;
const WORDS: usize = FIXED_WORDS + 2 * RANGES_MAX + PATCH_WORDS * PATCHES_MAX;
/// Where the word is that each look at a process changes.
const BEAT: u64 = 8;
/// A recording looks at its processes much more often.
const BEAT_WITHIN: Duration = Duration::from_millis(500);
/// For how long a process is stopped again and again, until none of its threads is in our code. On
/// an overloaded machine, a stop takes long.
const PATIENCE: Duration = Duration::from_secs(10);
/// For how long calls may install a handler. If a signal's handler jumps out of one, it never ends.
const INSTALLING_WITHIN: Duration = Duration::from_millis(200);

/// Bytes of the program that were replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Patch {
    pub(super) at: u64,
    pub(super) old: Vec<u8>,
    pub(super) new: Vec<u8>,
}

impl Patch {
    /// Whether an address lies behind the first replaced byte.
    pub(super) fn holds(&self, at: u64) -> bool {
        at > self.at && at - self.at < self.old.len() as u64
    }
}

/// What is ours in a process.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct List {
    pub(super) on_tick: u64,
    pub(super) on_fault: u64,
    /// What the program does about the signals whose handlers are ours, by number.
    pub(super) actions: u64,
    /// A word that is 0 in forked children.
    pub(super) is_origin: u64,
    pub(super) mapped: Vec<Range<u64>>,
    pub(super) patches: Vec<Patch>,
}

impl List {
    fn words(&self) -> Vec<u64> {
        let (ranges, patches) = (self.mapped.len() as u64, self.patches.len() as u64);
        let first = [MAGIC, 0, self.on_tick, self.on_fault, self.actions, self.is_origin];
        let mut words: Vec<u64> = first.into_iter().chain([ranges, patches]).collect();
        words.extend(self.mapped.iter().flat_map(|range| [range.start, range.end]));
        words.resize(FIXED_WORDS + 2 * RANGES_MAX, 0);
        for Patch { at, old, new } in &self.patches {
            let mut bytes = [old.as_slice(), new].map(|bytes| {
                let mut padded = [0; PATCH_BYTES_MAX];
                padded[..bytes.len()].copy_from_slice(bytes);
                padded
            });
            words.extend([*at, old.len() as u64]);
            for half in bytes.as_flattened_mut().chunks_exact(8) {
                words.push(half.try_into().map_or(0, u64::from_le_bytes));
            }
        }
        words
    }

    /// Writes the list behind the header of a region.
    pub(super) fn write(&self, region: &Region, header: u64) -> Result<(), Refusal> {
        if self.mapped.len() > RANGES_MAX || self.patches.len() > PATCHES_MAX {
            return Err(Refusal::Unfit("too much would have to be changed in it"));
        }
        for (number, word) in (0..).zip(self.words()) {
            region.set_word(header + RECORD + 8 * number, word);
        }
        Ok(())
    }

    /// `None` if these are not the words of a list. The process may have written anything there.
    fn parse(words: &[u64]) -> Option<Self> {
        let (&[magic, _, on_tick, on_fault, actions, is_origin, ranges, patches], rest) =
            words.split_first_chunk::<FIXED_WORDS>()?;
        let (ranges, patches) = (usize::try_from(ranges).ok()?, usize::try_from(patches).ok()?);
        if magic != MAGIC || ranges > RANGES_MAX || patches > PATCHES_MAX {
            return None;
        }
        let (of_ranges, of_patches) = rest.split_at_checked(2 * RANGES_MAX)?;
        let mapped = of_ranges.chunks_exact(2).take(ranges).map(|pair| pair[0]..pair[1]).collect();
        let patches = of_patches.chunks_exact(PATCH_WORDS).take(patches).map(|words| {
            let length = usize::try_from(words[1]).ok().filter(|&one| one <= PATCH_BYTES_MAX)?;
            let bytes = |words: &[u64]| -> Vec<u8> {
                words.iter().flat_map(|word| word.to_le_bytes()).take(length).collect()
            };
            Some(Patch { at: words[0], old: bytes(&words[2..4]), new: bytes(&words[4..6]) })
        });
        let patches = patches.collect::<Option<_>>()?;
        Some(Self { on_tick, on_fault, actions, is_origin, mapped, patches })
    }
}

/// What a process has of ours, from a recording of it or of one of its ancestors.
pub(super) struct Found {
    /// The inode of the memory file.
    pub(super) inode: u64,
    header: u64,
    list: List,
}

impl Found {
    pub(super) fn of(process: u32) -> Option<Self> {
        let all = mappings(process).ok()?;
        let part = all.iter().find(|one| {
            one.name.starts_with(MAPPED_NAME) && one.offset == HEADER_AT && one.writable
        })?;
        let (header, (_, inode)) = (part.range.start, part.file.clone()?);
        let words = Memory::open(process).ok()?.words(header + RECORD, WORDS).ok()?;
        Some(Self { inode, header, list: List::parse(&words)? })
    }

    /// Whether it was forked from the process that was recorded.
    pub(super) fn is_copy(&self, process: u32) -> bool {
        let word = Memory::open(process).and_then(|memory| memory.words(self.list.is_origin, 1));
        word.is_ok_and(|word| word == [0])
    }

    /// Whether a recording is still looking at it.
    pub(super) fn is_recorded(&self, process: u32) -> bool {
        let at = self.header + RECORD + BEAT;
        let beat = || Memory::open(process).and_then(|memory| memory.words(at, 1)).ok();
        let (before, until) = (beat(), Instant::now() + BEAT_WITHIN);
        while Instant::now() < until {
            sleep(Duration::from_millis(20));
            if beat() != before {
                return true;
            }
        }
        false
    }
}

/// Notes that a recording is looking at its process.
pub(super) fn beat(region: &Region, header: u64) {
    let at = header + RECORD + BEAT;
    region.set_word(at, region.word(at).wrapping_add(1));
}

/// Takes everything out of a process, if there is something. From the start, none of our handlers
/// is installed any more. The rest goes once no thread is in it.
pub(super) fn remove(process: u32) -> Result<(), Refusal> {
    if Found::of(process).is_none() {
        return Ok(());
    }
    if is_filtered(process) {
        return Err(Refusal::Unfit("it filters its system calls"));
    }
    let mut group = seize(process)?;
    let (start, mut pause) = (Instant::now(), Duration::from_millis(1));
    let done = loop {
        match try_to_remove(&mut group, start.elapsed() < INSTALLING_WITHIN) {
            Ok(true) => break Ok(()),
            Ok(false) | Err(Refusal::Touch(_)) if start.elapsed() < PATIENCE => {}
            Ok(false) => break Err(Refusal::Unfit("a thread does not leave our code")),
            Err(error) => break Err(error),
        }
        group.go_on();
        sleep(pause);
        pause *= 2;
    };
    group.release();
    done
}

/// Returns whether nothing is left.
fn try_to_remove(group: &mut Group, await_handlers: bool) -> Result<bool, Refusal> {
    group.stop(Group::keep_threads)?;
    // It may execute another program by now.
    let Some(found) = Found::of(group.process) else { return Ok(true) };
    if group.any_stopped_thread().is_none() {
        group.deliver_signals(Group::keep_threads)?;
    }
    let thread = group.any_stopped_thread().ok_or(TouchError::Busy)?;
    let list = &found.list;
    group.memory.write(list.actions.wrapping_add(ENDS), &1_u64.to_le_bytes())?;
    let installing = group.memory.words(list.actions.wrapping_add(INSTALLING), 1)?;
    if await_handlers && installing != [0] {
        return Ok(false);
    }
    // From here on, no call sees a handler of ours.
    put_handlers_back(group, thread, &found)?;
    for Patch { at, old, new } in &list.patches {
        group.memory.replace(*at, new, old)?;
    }
    let is_ours = |at: &u64| list.mapped.iter().any(|range| range.contains(at));
    let is_in_patch = |at: &u64| list.patches.iter().any(|patch| patch.holds(*at));
    let is_inside = |at: &u64| is_ours(at) || is_in_patch(at);
    if group.instructions().iter().any(is_inside) {
        group.run_out(|at| is_inside(&at))?;
    }
    if group.instructions().iter().any(is_inside) {
        return Ok(false);
    }
    // A call that was not awaited may have installed one.
    put_handlers_back(group, thread, &found)?;
    group.calls(thread, |call| {
        for range in &list.mapped {
            let length = range.end.saturating_sub(range.start);
            call("munmap", libc::SYS_munmap, [range.start, length, 0, 0, 0, 0])?;
        }
        Ok::<_, TouchError>(())
    })??;
    Ok(true)
}

/// Puts the program's handlers back, which ours have replaced in the kernel.
fn put_handlers_back(group: &Group, thread: i32, found: &Found) -> Result<(), Refusal> {
    let Found { header, list, .. } = found;
    let at = header + SCRATCH;
    group.calls(thread, |call| {
        for signal in FAULTS.into_iter().chain([libc::SIGURG]) {
            let number = u64::from(signal.unsigned_abs());
            call("rt_sigaction", libc::SYS_rt_sigaction, [number, 0, at, 8, 0, 0])?;
            let handler = group.memory.words(at, 1)?;
            if [[list.on_fault], [list.on_tick]].iter().any(|ours| *ours == *handler) {
                let action = list.actions.wrapping_add(number * ACTION_BYTES);
                call("rt_sigaction", libc::SYS_rt_sigaction, [number, action, 0, 8, 0, 0])?;
            }
        }
        Ok::<_, Refusal>(())
    })??;
    Ok(())
}

const _: () = assert!(RECORD + 8 * WORDS as u64 <= SCRATCH && SCRATCH + 64 <= HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> List {
        List {
            on_tick: 1,
            on_fault: 2,
            actions: 3,
            is_origin: 4,
            mapped: vec![0x1000..0x2000, 0x5000..0x9000],
            patches: vec![
                Patch { at: 7, old: vec![1; 7], new: (0..7).collect() },
                Patch { at: 9, old: vec![2; 14], new: vec![3; 14] },
            ],
        }
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let mut words = list().words();
        words.resize(WORDS, 0);
        assert_eq!(List::parse(&words), Some(list()));
    }

    #[test]
    fn words_that_are_no_list_are_refused() {
        let mut words = list().words();
        words.resize(WORDS, 0);
        assert_eq!(List::parse(&words[..20]), None);
        let first_patch = FIXED_WORDS + 2 * RANGES_MAX;
        for at in [0, 6, 7, first_patch + 1] {
            let mut words = words.clone();
            words[at] = u64::MAX;
            assert_eq!(List::parse(&words), None, "word {at}");
        }
    }
}
