//! What really happened, counted for each instruction.

use std::collections::{HashMap, VecDeque};

use crate::instruction::Instruction;
use crate::pipeline::Fetched;
use crate::sample::Kind;
use crate::trace::{BlockNumber, Trace};

/// The instructions of a trace by their addresses: those of overlapping blocks are the same.
#[derive(Debug)]
pub struct Sites {
    /// The site of each instruction.
    of: Vec<u32>,
    sites: Vec<Site>,
}

#[derive(Clone, Copy, Debug)]
pub struct Site {
    pub pc: u64,
    pub block: BlockNumber,
    /// Distance from the start of the block.
    pub inside: u64,
    pub instruction: u32,
}

impl Sites {
    pub fn new(trace: &Trace) -> Self {
        let mut of = vec![0; trace.instructions.len()];
        let mut sites: Vec<Site> = Vec::new();
        let mut known: HashMap<u64, u32> = HashMap::new();
        for (number, block) in (0..).zip(&trace.blocks) {
            let mut pc = block.start;
            for (instruction, one) in block.instructions.clone().zip(trace.code(block)) {
                let site = *known.entry(pc).or_insert_with(|| {
                    let inside = pc - block.start;
                    sites.push(Site { pc, block: number, inside, instruction });
                    u32::try_from(sites.len() - 1).unwrap_or(u32::MAX)
                });
                if let Some(entry) = of.get_mut(instruction as usize) {
                    *entry = site;
                }
                pc += u64::from(one.length);
            }
        }
        Self { of, sites }
    }

    pub fn len(&self) -> usize {
        self.sites.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    /// The site of an instruction, by its number in the trace.
    pub fn of(&self, instruction: u32) -> usize {
        self.of.get(instruction as usize).map_or(0, |&site| site as usize)
    }

    pub fn site(&self, number: usize) -> Option<&Site> {
        self.sites.get(number)
    }
}

/// Which fields the samples of an instruction have.
pub fn kind_of(instruction: &Instruction) -> Kind {
    Kind {
        is_branch: instruction.class.branch().is_some(),
        reads_memory: instruction.reads_memory(),
        has_addresses: instruction.addresses() > 0,
    }
}

/// Counts of one site.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SiteTruth {
    pub retired: u64,
    pub aborted: u64,
    pub dcache_misses: u64,
    pub mispredicted: u64,
    /// Cycles in progress, summed over executions.
    pub in_progress: u64,
    /// Other instructions that issued meanwhile, and later retired.
    pub useful: u64,
}

impl SiteTruth {
    pub fn fetched(&self) -> u64 {
        self.retired + self.aborted
    }

    /// Issue slots that no other useful instruction took while this one was in progress.
    pub fn wasted(&self, issue_width: u32) -> i64 {
        let slots = self.in_progress.saturating_mul(issue_width.into());
        slots.cast_signed().saturating_sub(self.useful.cast_signed())
    }
}

/// Counts instructions as they are fetched.
#[derive(Debug)]
pub struct Truth<'a> {
    sites: &'a Sites,
    pub of: Vec<SiteTruth>,
    /// Useful instructions that issued, by cycle from `base` on; before `summed`, all until then.
    issued: VecDeque<u64>,
    base: u64,
    summed: u64,
    total: u64,
    /// Instructions whose counts are not complete: site, fetch, end, and whether it is useful.
    open: VecDeque<(u32, u64, u64, bool)>,
}

impl<'a> Truth<'a> {
    pub fn new(sites: &'a Sites) -> Self {
        Self {
            sites,
            of: vec![SiteTruth::default(); sites.len()],
            issued: VecDeque::new(),
            base: 0,
            summed: 0,
            total: 0,
            open: VecDeque::new(),
        }
    }

    /// Looks at the next instruction in the order of fetch.
    pub fn see(&mut self, fetched: &Fetched) {
        let site = self.sites.of(fetched.instruction);
        let (now, end) = (fetched.times.fetch, fetched.end());
        let is_useful = fetched.abort.is_none();
        if let Some(one) = self.of.get_mut(site) {
            one.retired += u64::from(is_useful);
            one.aborted += u64::from(!is_useful);
            one.dcache_misses += u64::from(fetched.events.dcache_miss);
            one.mispredicted += u64::from(fetched.events.mispredicted);
            one.in_progress += end - now;
        }
        self.settle(now);
        if is_useful {
            self.note_issue(fetched.times.issue);
        }
        self.open.push_back((u32::try_from(site).unwrap_or(u32::MAX), now, end, is_useful));
    }

    fn note_issue(&mut self, cycle: u64) {
        let at = usize::try_from(cycle - self.base).unwrap_or(0);
        if at >= self.issued.len() {
            self.issued.resize(at + 1, 0);
        }
        self.issued[at] += 1;
    }

    /// Completes the counts of what ended before a cycle in which fetch is: nothing issues there
    /// any more.
    fn settle(&mut self, now: u64) {
        while self.summed < now {
            let at = usize::try_from(self.summed - self.base).unwrap_or(0);
            if at >= self.issued.len() {
                self.issued.resize(at + 1, 0);
            }
            self.total += self.issued[at];
            self.issued[at] = self.total;
            self.summed += 1;
        }
        while let Some(&(site, fetch, end, is_useful)) =
            self.open.front().filter(|one| one.2 <= now)
        {
            self.open.pop_front();
            let useful = self.until(end) - self.until(fetch) - u64::from(is_useful);
            if let Some(one) = self.of.get_mut(site as usize) {
                one.useful += useful;
            }
            // Sums before the oldest open instruction are not needed.
            let oldest = self.open.front().map_or(now, |one| one.1).min(now);
            while self.base + 1 < oldest {
                self.issued.pop_front();
                self.base += 1;
            }
        }
    }

    /// Useful instructions that issued before a cycle.
    fn until(&self, cycle: u64) -> u64 {
        let before = cycle.checked_sub(self.base + 1).and_then(|at| usize::try_from(at).ok());
        before.and_then(|at| self.issued.get(at)).copied().unwrap_or(0)
    }

    /// Completes all counts.
    pub fn finish(mut self) -> Vec<SiteTruth> {
        let last = self.open.iter().map(|one| one.2).max().unwrap_or(0);
        self.settle(last + 1);
        self.of
    }
}
