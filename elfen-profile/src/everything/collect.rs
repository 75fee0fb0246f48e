//! The counts of an address space, by file and offset.

use elfen_stream::Translated;

use super::space::Space;
use crate::engine::objects::Image;
use crate::profile::{BlockCount, Edge, EdgeCount, Place, Profile};

impl Profile {
    /// Adds all counts of an address space in which no thread runs any more.
    pub(super) fn add_space(&mut self, space: &mut Space) {
        let counts = space.counts();
        let images = space.objects.images();
        let files: Vec<u32> = images.iter().map(|image| self.file(&image.path)).collect();
        let place = |image: usize, at: u64| {
            let Image { range, offset, .. } = images.get(image)?;
            let offset = offset + at.checked_sub(range.start)?;
            Some(Place { file: *files.get(image)?, offset })
        };
        let image_of = |block: &Translated| usize::try_from(block.object).unwrap_or(usize::MAX);
        // A branch mostly stays in its image. After a library was replaced by another, only the
        // image itself tells which of the two an address belongs to.
        let target = |from: usize, at: u64| {
            let holds =
                |image: &usize| images.get(*image).is_some_and(|one| one.range.contains(&at));
            let found = Some(from).filter(holds).or_else(|| (0..images.len()).rev().find(holds))?;
            place(found, at)
        };
        let blocks = space.cache.blocks();
        for (block, &count) in blocks.iter().zip(&counts.blocks) {
            if count == 0 {
                continue;
            }
            let Some(start) = place(image_of(block), block.start) else { continue };
            let bytes = u32::try_from(block.end - block.start).unwrap_or(u32::MAX);
            let instructions = block.instructions;
            self.add_block(start, BlockCount { bytes, instructions, count, bursts: 0 });
        }
        for edge in &counts.edges {
            let block = usize::try_from(edge.from).ok().and_then(|from| blocks.get(from));
            let Some(block) = block else { continue };
            let last = block.start + block.offsets.last().map_or(0, |&offset| offset.into());
            let image = image_of(block);
            let led_to = edge.block.and_then(|to| blocks.get(usize::try_from(to).ok()?));
            let to = match led_to {
                Some(to) => place(image_of(to), to.start),
                None => target(image, edge.to),
            };
            if let (Some(from), Some(to)) = (place(image, last), to) {
                let count = EdgeCount { count: edge.count, bursts: 0 };
                self.add_edge(Edge { from, to, kind: edge.kind }, count);
            }
        }
        self.instructions += counts.instructions + space.steps;
        self.programs += 1;
    }
}
