//! Where the kernel does not note who filters its system calls, a process says so itself: the code
//! by which it would ask for a filter is made to set a word first.

use elfen_rewrite::{NOTICE_BYTES, notice};

use super::arena::Pages;
use super::change::{Change, Write};
use super::missed::Missed;
use super::patched::Patched;
use crate::remote::Mapping;

impl Patched {
    /// The next notice that has to be there before a check is; nothing, if all are.
    pub(super) fn notice(
        &mut self,
        thread: u32,
        mapped: &[Mapping],
        pages: &Pages,
    ) -> Result<Option<Change>, Missed> {
        if pages.filters.is_some() {
            return Ok(None);
        }
        self.notices.search_new(&self.memory, mapped);
        let Some((index, site)) = self.notices.next(&self.memory)? else { return Ok(None) };
        let (arena, room) = self.room(thread, site.at, NOTICE_BYTES, pages)?;
        let word = self.said().ok_or(Missed::Gone)?;
        let patches = notice(site.at, &site.original, room.at, word);
        let ([jump, code], Some(used)) = (patches.ok_or(Missed::NoPlace)?, self.arenas.get(arena))
        else {
            return Err(Missed::Gone);
        };
        let header = used.arena.header(code.at + code.bytes.len() as u64).to_vec();
        let at = used.arena.code;
        self.notices.is_to_hold(index, &jump.bytes);
        let ours = |at, bytes| Write { at, expected: None, bytes };
        let writes = vec![
            ours(code.at, code.bytes),
            ours(at, header),
            Write { at: site.at, expected: Some(site.original), bytes: jump.bytes },
        ];
        Ok(Some(self.change_of(site.at, writes)))
    }

    /// The word by which the process says that it asked for a filter: in its first arena.
    pub(super) fn said(&self) -> Option<u64> {
        self.arenas.first().map(|used| used.arena.said)
    }

    /// Whether the process has asked for a filter since it was met.
    pub fn asked_for_filter(&self) -> bool {
        let word = self.said().and_then(|at| self.memory.read_vec(at, 8).ok());
        word.is_some_and(|word| word.iter().any(|&byte| byte != 0))
    }
}
