//! Where a program asks the kernel for handlers of signals. The system calls there become jumps to
//! code of ours, so that the program keeps its handlers and never sees ours.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use elfen_instrument::remote::{Mapping, Memory};
use elfen_stream::Cluster;
use iced_x86::{Decoder, DecoderOptions, Instruction, OpKind};
use memchr::memmem;

use crate::engine::region::{EXTRA_BYTES, Region};

/// `mov $13, %eax` (rt_sigaction) and `syscall`: C libraries have it once, and those up to glibc
/// 2.33 once more in their library for threads.
const CALL: [u8; 7] = [0xb8, 13, 0, 0, 0, 0x0f, 0x05];
/// How the names of C libraries begin, and of libraries for threads.
const LIBRARIES: [&str; 3] = ["libc.so", "libc-2", "ld-musl"];
const THREADS: &str = "libpthread";
/// `jmp`, before a distance of four bytes, and what fills the rest of [`CALL`].
const JUMP: u8 = 0xe9;
const FILL: [u8; 2] = [0x66, 0x90];
/// `lea -128(%rsp), %rsp`, which changes no flags, to below the red zone; and back.
const DOWN: [u8; 5] = [0x48, 0x8d, 0x64, 0x24, 0x80];
const UP: [u8; 8] = [0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0];
/// `call *24(%rip)`.
const CALL_FAR: [u8; 6] = [0xff, 0x15, 24, 0, 0, 0];
/// A jump reaches a little further.
const FAR_MAX: i32 = i32::MAX - (1 << 20);
/// Bytes of the code for one site.
const PAD: u64 = 64;
const TARGET: usize = 35;
/// Branches into a site would come from its own function.
const AROUND: usize = 4096;

/// Addresses of the system calls in the C library, or in a program that contains its own. `None` if
/// there is one that makes them in another way.
pub(super) fn find(
    process: u32,
    all: &[Mapping],
    exe: &Path,
    memory: &Memory,
) -> io::Result<Option<Vec<u64>>> {
    let mut sites = Vec::new();
    for one in all.iter().filter(|one| one.executable && one.private && one.file.is_some()) {
        let bytes = if Path::new(&one.name) == exe {
            // Not from its memory: what it has not touched yet would become part of it.
            from_file(process, one)?
        } else if is_library(&one.name) || file_name(&one.name).starts_with(THREADS) {
            let length = usize::try_from(one.range.end - one.range.start).unwrap_or(0);
            memory.read_vec(one.range.start, length)?
        } else {
            continue;
        };
        let found = memmem::find_iter(&bytes, &CALL).filter(|&at| is_only_entered(&bytes, at));
        sites.extend(found.map(|at| one.range.start + at as u64));
    }
    // What the file says may have been changed since.
    sites.retain(|&site| memory.read_vec(site, CALL.len()).is_ok_and(|bytes| bytes == CALL));
    let has_site = |name: &str| {
        let is_in = |site: &u64| all.iter().any(|one| one.name == name && one.range.contains(site));
        sites.iter().any(is_in)
    };
    let mut libraries = all.iter().map(|one| &*one.name).filter(|name| is_library(name));
    let is_known = !sites.is_empty() && libraries.all(has_site);
    Ok(is_known.then_some(sites))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn is_library(path: &str) -> bool {
    LIBRARIES.iter().any(|prefix| file_name(path).starts_with(prefix))
}

fn from_file(process: u32, one: &Mapping) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(one.range.end - one.range.start).unwrap_or(0)];
    let read = File::open(format!("/proc/{process}/exe"))?.read_at(&mut bytes, one.offset)?;
    bytes.truncate(read);
    Ok(bytes)
}

/// Whether nothing around branches into the middle of a site. Decoding begins anywhere before, and
/// falls into step with the instructions within a few of them.
fn is_only_entered(code: &[u8], site: usize) -> bool {
    let (from, to) = (site.saturating_sub(AROUND), (site + AROUND).min(code.len()));
    let middle = site as u64 + 1..(site + CALL.len()) as u64;
    let mut decoder = Decoder::with_ip(64, &code[from..to], from as u64, DecoderOptions::NONE);
    let enters = |one: Instruction| {
        let is_branch = one.op_count() > 0 && one.op0_kind() == OpKind::NearBranch64;
        is_branch && middle.contains(&one.near_branch_target())
    };
    !decoder.iter().any(enters)
}

/// What a site becomes.
#[derive(Debug)]
pub(super) struct Detour {
    pub(super) site: u64,
    /// What the program has there, and what stands in for it.
    pub(super) old: [u8; CALL.len()],
    pub(super) new: [u8; CALL.len()],
    /// Where the code for it goes, and the code.
    pub(super) at: u64,
    pub(super) code: Vec<u8>,
}

/// The detours of all sites to a function of ours; `None` if a site is out of reach.
pub(super) fn detours(sites: &[u64], clusters: &[Cluster], to: u64) -> Option<Vec<Detour>> {
    let rooms = clusters.iter().map(|cluster| Region::extra_at(cluster.hot.start));
    let mut used: Vec<(u64, u64)> = rooms.map(|room| (room, room)).collect();
    sites.iter().map(|&site| detour(site, &mut used, to)).collect()
}

fn detour(site: u64, used: &mut [(u64, u64)], to: u64) -> Option<Detour> {
    let distance = |from: u64, to: u64| i32::try_from(to.wrapping_sub(from).cast_signed()).ok();
    let has_room = |room: &(u64, u64)| room.1 + PAD <= room.0 + EXTRA_BYTES;
    let is_near = |room: &(u64, u64)| distance(site, room.1).is_some_and(|far| far.abs() < FAR_MAX);
    let room = used.iter_mut().find(|room| has_room(room) && is_near(room))?;
    let at = room.1;
    room.1 += PAD;
    let mut code: Vec<u8> = [&DOWN[..], &CALL_FAR, &UP].concat();
    code.push(JUMP);
    let next = at + code.len() as u64 + 4;
    code.extend(distance(next, site + CALL.len() as u64)?.to_le_bytes());
    code.resize(TARGET, 0xcc);
    code.extend(to.to_le_bytes());
    let mut new = [0; CALL.len()];
    new[0] = JUMP;
    new[1..5].copy_from_slice(&distance(site + 5, at)?.to_le_bytes());
    new[5..].copy_from_slice(&FILL);
    Some(Detour { site, old: CALL, new, at, code })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_one_that_nothing_branches_into() {
        let code = |before: &[u8]| [before, &CALL, &[0xc3]].concat();
        assert!(is_only_entered(&code(&[0x90, 0x90]), 2));
        // To its beginning, and to what follows.
        assert!(is_only_entered(&code(&[0xeb, 0]), 2));
        assert!(is_only_entered(&code(&[0x74, 7]), 2));
        assert!(!is_only_entered(&code(&[0x74, 5]), 2));
        assert!(!is_only_entered(&code(&[0xe9, 5, 0, 0, 0]), 5));
        assert!(!is_only_entered(&code(&[0x0f, 0x85, 6, 0, 0, 0]), 6));
    }

    #[test]
    fn a_detour_leads_there_and_back() {
        let at = 0x7000_0000_u64;
        let clusters = [0x1_0000_0000_0000, at].map(|at| Region::cluster(0, at).1);
        let site = at + (100 << 20);
        let found = detours(&[site, site + 50], &clusters, 0x1234).unwrap();
        let [first, second] = &found[..] else { panic!("{found:?}") };
        assert_eq!((first.at, second.at), (Region::extra_at(at), Region::extra_at(at) + PAD));
        let distance = |bytes: &[u8]| i64::from(i32::from_le_bytes(bytes.try_into().unwrap()));
        let jump = (site + 5).checked_add_signed(distance(&first.new[1..5]));
        assert_eq!(jump, Some(first.at));
        let back = DOWN.len() + CALL_FAR.len() + UP.len() + 5;
        let next = first.at + back as u64;
        let to = next.checked_add_signed(distance(&first.code[back - 4..back]));
        assert_eq!(to, Some(site + 7));
        assert_eq!(first.code[TARGET..], 0x1234_u64.to_le_bytes());
        // The call reads its target from there.
        let call = DOWN.len() + CALL_FAR.len();
        assert_eq!(call + usize::from(CALL_FAR[2]), TARGET);
        assert!(detours(&[at + (1 << 33)], &clusters, 0).is_none());
    }
}
