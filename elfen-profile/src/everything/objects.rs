//! The code of one address space: the files that it has mapped, as the cache reads them.

use std::ops::Range;
use std::rc::Rc;

use elfen_instrument::remote::{Mapping, Memory, mappings};
use elfen_stream::Source;

/// An executable mapping of a file, while it existed.
#[derive(Clone, Debug)]
pub(super) struct Image {
    pub(super) range: Range<u64>,
    /// Offset in the file of the first byte.
    pub(super) offset: u64,
    pub(super) path: String,
    bytes: Rc<[u8]>,
    is_gone: bool,
}

/// All images that code was taken from, by their numbers.
#[derive(Debug)]
pub(super) struct Objects {
    process: u32,
    memory: Memory,
    images: Vec<Image>,
}

const VDSO: &str = "[vdso]";

impl Objects {
    pub(super) fn new(process: u32, memory: Memory) -> Self {
        Self { process, memory, images: Vec::new() }
    }

    /// The same images, for a process that has just been forked.
    pub(super) fn copy(&self, process: u32, memory: Memory) -> Self {
        Self { process, memory, images: self.images.clone() }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn images(&self) -> &[Image] {
        &self.images
    }

    pub(super) fn mappings(&self) -> Vec<Mapping> {
        mappings(self.process).unwrap_or_default()
    }

    /// The ranges of images that overlap a range; they are not used any more.
    pub(super) fn retire(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let gone = self.images.iter_mut().filter(|image| {
            !image.is_gone && image.range.start < range.end && range.start < image.range.end
        });
        gone.map(|image| {
            image.is_gone = true;
            image.bytes = Rc::from([]);
            image.range.clone()
        })
        .collect()
    }

    fn find(&mut self, at: u64) -> Option<usize> {
        let holds = |image: &Image| !image.is_gone && image.range.contains(&at);
        if let Some(found) = self.images.iter().position(holds) {
            return Some(found);
        }
        let mapped = self.mappings().into_iter().find(|one| one.range.contains(&at))?;
        let is_code = mapped.executable && !mapped.writable;
        if !is_code || mapped.file.is_none() && mapped.name != VDSO {
            return None;
        }
        let length = usize::try_from(mapped.range.end - mapped.range.start).ok()?;
        // The last page of a file may end before its mapping does.
        let bytes = self.memory.read_vec(mapped.range.start, length).ok()?;
        self.images.push(Image {
            range: mapped.range,
            offset: mapped.offset,
            path: mapped.name,
            bytes: bytes.into(),
            is_gone: false,
        });
        Some(self.images.len() - 1)
    }
}

impl Source for Objects {
    fn code(&mut self, at: u64) -> Option<(u32, &[u8])> {
        let found = self.find(at)?;
        let image = self.images.get(found)?;
        let from = usize::try_from(at - image.range.start).ok()?;
        Some((u32::try_from(found).ok()?, image.bytes.get(from..)?))
    }
}
