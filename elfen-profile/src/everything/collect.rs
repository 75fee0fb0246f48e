//! The counts of an address space, by file and offset.

use crate::engine::objects::Places;
use crate::engine::space::Space;
use crate::profile::{BlockCount, Edge, EdgeCount, Profile};

impl Profile {
    /// Adds all counts of an address space in which no thread runs any more.
    pub(super) fn add_space(&mut self, space: &mut Space) {
        if let Some(trace) = &mut space.trace {
            trace.tally.add_to(self, &space.cache, &space.objects);
            self.instructions += space.steps;
            if trace.tally.lost > 0 {
                self.left.push(format!(
                    "blocks between {} stops, because the code there has changed",
                    trace.tally.lost
                ));
            }
            return;
        }
        let counts = space.counts();
        let places = Places::new(self, &space.objects);
        let blocks = space.cache.blocks();
        for (block, &count) in blocks.iter().zip(&counts.blocks) {
            if count == 0 {
                continue;
            }
            let Some(start) = places.of(block, block.start) else { continue };
            let bytes = u32::try_from(block.end - block.start).unwrap_or(u32::MAX);
            let instructions = block.instructions;
            self.add_block(start, BlockCount { bytes, instructions, count, bursts: 0 });
        }
        for edge in &counts.edges {
            let block = usize::try_from(edge.from).ok().and_then(|from| blocks.get(from));
            let Some(block) = block else { continue };
            let last = block.start + block.offsets.last().map_or(0, |&offset| offset.into());
            let led_to = edge.block.and_then(|to| blocks.get(usize::try_from(to).ok()?));
            let to = match led_to {
                Some(to) => places.of(to, to.start),
                None => places.target(block, edge.to),
            };
            if let (Some(from), Some(to)) = (places.of(block, last), to) {
                let count = EdgeCount { count: edge.count, bursts: 0 };
                self.add_edge(Edge { from, to, kind: edge.kind }, count);
            }
        }
        self.instructions += counts.instructions + space.steps;
        self.programs += 1;
    }
}
