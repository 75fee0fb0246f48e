//! Finds the system calls by which a process requests a seccomp filter, and tracks what is written
//! at these sites.
//!
//! Only needed where the kernel does not record which threads filter their system calls. The code
//! before such a call is then patched to set a word first.

use elfen_rewrite::{JUMP_BYTES, notice_sites};

use super::missed::Missed;
use crate::remote::{Mapping, Memory};

/// Longer objects are not searched. Filters are requested by the C library.
const CODE_MAX: u64 = 1 << 28;
const CHUNK: u64 = 1 << 20;
/// How often a site may hold neither the original bytes nor ours.
const TRIES: u32 = 3;

/// The sites of a process.
#[derive(Clone, Debug, Default)]
pub(super) struct Notices {
    sites: Vec<NoticeSite>,
    /// Start and file of each mapping that was searched. Libraries are mapped while a program
    /// starts, and later.
    searched: Vec<(u64, Option<(String, u64)>)>,
    tries: u32,
}

#[derive(Clone, Debug)]
pub(super) struct NoticeSite {
    pub(super) at: u64,
    pub(super) original: Vec<u8>,
    /// Empty until a jump was to be written.
    jump: Vec<u8>,
}

impl Notices {
    /// Restores the original bytes of the sites in a copy of a function's code.
    pub(super) fn restore_original(&self, start: u64, bytes: &mut [u8]) {
        for site in &self.sites {
            let Some(at) = site.at.checked_sub(start) else { continue };
            let Ok(at) = usize::try_from(at) else { continue };
            if let Some(found) = bytes.get_mut(at..at + JUMP_BYTES)
                && found == site.jump
            {
                found.copy_from_slice(&site.original);
            }
        }
    }

    pub(super) fn search_new(&mut self, memory: &Memory, mapped: &[Mapping]) {
        let is_code =
            |mapping: &&Mapping| mapping.executable && !mapping.writable && mapping.file.is_some();
        for code in mapped.iter().filter(is_code) {
            let which = (code.range.start, code.file.clone());
            if !self.searched.contains(&which) {
                self.searched.push(which);
                self.sites.retain(|site| !code.range.contains(&site.at));
                self.sites.extend(search(memory, code));
            }
        }
    }

    /// The first site without a notice, and its index.
    pub(super) fn next(&mut self, memory: &Memory) -> Result<Option<(usize, NoticeSite)>, Missed> {
        for (index, site) in self.sites.iter().enumerate() {
            match memory.read_vec(site.at, JUMP_BYTES) {
                Ok(found) if found == site.jump => {}
                Ok(found) if found == site.original => return Ok(Some((index, site.clone()))),
                // Its object was unloaded.
                Err(_) => {}
                Ok(_) => {
                    self.tries += 1;
                    if self.tries >= TRIES {
                        return Err(Missed::Process(
                            "something else rewrites its code too".to_owned(),
                        ));
                    }
                    return Err(Missed::Gone);
                }
            }
        }
        Ok(None)
    }

    /// Records the jump that is to be written at a site.
    pub(super) fn set_jump(&mut self, index: usize, jump: &[u8]) {
        if let Some(site) = self.sites.get_mut(index) {
            site.jump = jump.to_vec();
        }
    }
}

fn search(memory: &Memory, code: &Mapping) -> Vec<NoticeSite> {
    let mut sites = Vec::new();
    let (mut from, end) = (code.range.start, code.range.end);
    if end - from > CODE_MAX {
        return sites;
    }
    // Chunks overlap by the length of a site and its call.
    const OVERLAP: u64 = 8;
    while from + OVERLAP < end {
        let Ok(bytes) = usize::try_from(CHUNK.min(end - from)) else { return sites };
        let Ok(bytes) = memory.read_vec(from, bytes) else { return sites };
        let found = notice_sites(&bytes).filter_map(|at| {
            let original = bytes.get(at..at + JUMP_BYTES)?.to_vec();
            Some(NoticeSite { at: from + u64::try_from(at).ok()?, original, jump: Vec::new() })
        });
        let last = sites.last().map_or(0, |site: &NoticeSite| site.at);
        sites.extend(found.filter(|site| site.at > last));
        from += CHUNK - OVERLAP;
    }
    sites
}
