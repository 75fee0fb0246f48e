//! Word from the midst of a search: a beat every so many matches.
//!
//! A request is to be slowed while it runs and not only after its search is done, and what is
//! published of it has to move while it runs. A search is one call, so the beats come from its
//! collector.

use parking_lot::Mutex;
use std::sync::Arc;
use tantivy::collector::{Collector, SegmentCollector};
use tantivy::{DocId, Score, SegmentOrdinal, SegmentReader};

pub(crate) trait Beat: Send {
    fn beat(&mut self);
}

/// Of long queries, ten microseconds: one of the demo's meets 20,000 in 360. What a beat costs has
/// to be little beside that, as it is more where a batch has accounts and naps to be read: after
/// each 64 matches, requests took longer beside a batch that was never there with them.
const MATCHES: u32 = 512;

/// Collects nothing.
pub(crate) struct Beats<B>(pub(crate) Arc<Mutex<B>>);

impl<B: Beat + 'static> Collector for Beats<B> {
    type Fruit = ();
    type Child = SegmentBeats<B>;

    fn for_segment(&self, _: SegmentOrdinal, _: &SegmentReader) -> tantivy::Result<Self::Child> {
        Ok(SegmentBeats { hears: self.0.clone(), left: MATCHES })
    }

    fn requires_scoring(&self) -> bool {
        false
    }

    fn merge_fruits(&self, _: Vec<()>) -> tantivy::Result<()> {
        Ok(())
    }
}

pub(crate) struct SegmentBeats<B> {
    hears: Arc<Mutex<B>>,
    left: u32,
}

impl<B: Beat + 'static> SegmentCollector for SegmentBeats<B> {
    type Fruit = ();

    fn collect(&mut self, _: DocId, _: Score) {
        self.left -= 1;
        if self.left == 0 {
            self.left = MATCHES;
            self.hears.lock().beat();
        }
    }

    fn harvest(self) {}
}
