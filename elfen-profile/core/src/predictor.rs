//! Predictions of branches: gshare and bimodal counters with a chooser, a table of targets of
//! computed branches, and a stack of returns.

use crate::machine::PredictorSize;

/// Counters from 0 to 3; from 2 on they say taken, or gshare.
#[derive(Clone, Debug)]
struct Counters(Vec<u8>);

impl Counters {
    fn new(bits: u32) -> Self {
        Self(vec![1; 1 << bits.min(24)])
    }

    fn at(&self, index: u64) -> usize {
        usize::try_from(index).unwrap_or(0) & (self.0.len() - 1)
    }

    fn is_high(&self, index: u64) -> bool {
        self.0.get(self.at(index)).is_some_and(|&counter| counter >= 2)
    }

    fn update(&mut self, index: u64, up: bool) {
        let at = self.at(index);
        if let Some(counter) = self.0.get_mut(at) {
            *counter = if up { (*counter + 1).min(3) } else { counter.saturating_sub(1) };
        }
    }
}

/// The directions of the last conditional branches, the last one in the lowest bit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct History(pub u64);

impl History {
    #[must_use]
    pub fn with(self, taken: bool) -> Self {
        Self(self.0 << 1 | u64::from(taken))
    }

    /// The last directions.
    fn last(self, bits: u32) -> u64 {
        if bits >= 64 { self.0 } else { self.0 & ((1 << bits) - 1) }
    }
}

/// Remembers branches in the order of fetch, and learns at once.
#[derive(Clone, Debug)]
pub struct Predictor {
    gshare: Counters,
    bimodal: Counters,
    chooser: Counters,
    history_bits: u32,
    target_history_bits: u32,
    /// Branch and target.
    targets: Vec<(u64, u64)>,
}

/// Where calls return to.
#[derive(Clone, Debug)]
pub struct ReturnStack {
    returns: Vec<u64>,
    depth: usize,
}

impl Predictor {
    pub fn new(size: &PredictorSize) -> Self {
        Self {
            gshare: Counters::new(size.gshare_bits),
            bimodal: Counters::new(size.bimodal_bits),
            chooser: Counters::new(size.chooser_bits),
            history_bits: size.history_bits,
            target_history_bits: size.target_history_bits,
            targets: vec![(u64::MAX, 0); 1 << size.target_bits.min(24)],
        }
    }

    /// Instructions of x86 begin at any byte: the upper bits also choose.
    fn hash(pc: u64) -> u64 {
        pc ^ pc >> 15
    }

    fn gshare_at(&self, pc: u64, history: History) -> u64 {
        Self::hash(pc) ^ history.last(self.history_bits)
    }

    /// Whether a conditional branch is taken.
    pub fn direction(&self, pc: u64, history: History) -> bool {
        if self.chooser.is_high(Self::hash(pc)) {
            self.gshare.is_high(self.gshare_at(pc, history))
        } else {
            self.bimodal.is_high(Self::hash(pc))
        }
    }

    /// Learns from a conditional branch.
    pub fn learn(&mut self, pc: u64, history: History, taken: bool) {
        let at = self.gshare_at(pc, history);
        let hash = Self::hash(pc);
        let (global, local) = (self.gshare.is_high(at), self.bimodal.is_high(hash));
        if global != local {
            self.chooser.update(hash, global == taken);
        }
        self.gshare.update(at, taken);
        self.bimodal.update(hash, taken);
    }

    fn target_at(&self, pc: u64, history: History) -> usize {
        let hash = Self::hash(pc) ^ history.last(self.target_history_bits);
        usize::try_from(hash).unwrap_or(0) & (self.targets.len() - 1)
    }

    /// Where a computed branch went to last time.
    pub fn target(&self, pc: u64, history: History) -> Option<u64> {
        let &(branch, target) = self.targets.get(self.target_at(pc, history))?;
        (branch == pc).then_some(target)
    }

    pub fn learn_target(&mut self, pc: u64, history: History, target: u64) {
        let at = self.target_at(pc, history);
        if let Some(entry) = self.targets.get_mut(at) {
            *entry = (pc, target);
        }
    }
}

impl ReturnStack {
    pub fn new(entries: u32) -> Self {
        Self { returns: vec![0; entries.max(1) as usize], depth: 0 }
    }

    /// Notes where a call returns to. The oldest of too many is forgotten.
    pub fn call(&mut self, returns_to: u64) {
        self.depth = (self.depth + 1) % self.returns.len();
        if let Some(entry) = self.returns.get_mut(self.depth) {
            *entry = returns_to;
        }
    }

    /// Where the next return goes to.
    pub fn take(&mut self) -> u64 {
        let found = self.returns.get(self.depth).copied().unwrap_or(0);
        self.depth = self.depth.checked_sub(1).unwrap_or(self.returns.len() - 1);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    fn predictor() -> Predictor {
        Predictor::new(&Machine::built_in("21264").unwrap().predictor)
    }

    #[test]
    fn a_pattern_is_learned_from_history() {
        let mut predictor = predictor();
        let mut history = History::default();
        let mut wrong = 0;
        for round in 0..400_u32 {
            let taken = round % 3 == 0;
            wrong += u32::from(round >= 200 && predictor.direction(0x1000, history) != taken);
            predictor.learn(0x1000, history, taken);
            history = history.with(taken);
        }
        assert_eq!(wrong, 0);
    }

    #[test]
    fn returns_are_predicted_in_their_order() {
        let mut returns = ReturnStack::new(32);
        for at in 1..=40 {
            returns.call(at);
        }
        let found: Vec<u64> = (0..33).map(|_| returns.take()).collect();
        // 32 fit; behind them is the last one again.
        assert_eq!(found[..32], (9..=40).rev().collect::<Vec<u64>>());
        assert_eq!(found[32], 40);
    }

    #[test]
    fn a_target_is_that_of_the_same_branch() {
        let mut predictor = predictor();
        let history = History::default();
        assert_eq!(predictor.target(0x1000, history), None);
        predictor.learn_target(0x1000, history, 0x2000);
        assert_eq!(predictor.target(0x1000, history), Some(0x2000));
        assert_eq!(predictor.target(0x1000 + (1 << 9), history), None);
    }
}
