//! How many duplicates are allowed: each request earns a part of one, and what is earned is saved
//! up to a bound, so that one bad second can't spend the savings of a day.

const WHOLE: u64 = 1_000_000;
/// Duplicates that can be saved: about what is in flight when a busy server stops.
const MOST_SAVED: u64 = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    per_request: u64,
    saved: u64,
}

impl Budget {
    pub(super) fn new(per_million: u64) -> Self {
        // Nothing to begin with: at no time are there more than their share.
        Self { per_request: per_million.min(WHOLE), saved: 0 }
    }

    pub(super) fn earn(&mut self) {
        self.saved = (self.saved + self.per_request).min(MOST_SAVED * WHOLE);
    }

    /// Whether there is enough for one.
    pub(super) fn spend(&mut self) -> bool {
        match self.saved.checked_sub(WHOLE) {
            Some(left) => {
                self.saved = left;
                true
            }
            None => false,
        }
    }

    /// One that was spent for nothing.
    pub(super) fn give_back(&mut self) {
        self.saved = (self.saved + WHOLE).min(MOST_SAVED * WHOLE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twentieth_of_all_and_no_more_than_is_saved() {
        let mut budget = Budget::new(50_000);
        let mut spent = 0;
        for _ in 0..1_000 {
            budget.earn();
            spent += u32::from(budget.spend());
        }
        assert_eq!(spent, 50);
        (0..100_000).for_each(|_| budget.earn());
        assert_eq!((0..100).filter(|_| budget.spend()).count(), 32);
        assert!(!Budget::new(0).spend());
    }
}
