//! The code of one address space: the files that it has mapped, as the cache reads them.

use std::ops::Range;
use std::rc::Rc;

use elfen_instrument::remote::{Mapping, Memory, mappings};
use elfen_stream::{Source, Translated};

use crate::profile::{Place, Profile};

/// An executable mapping of a file, while it existed.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) range: Range<u64>,
    /// Offset in the file of the first byte.
    pub(crate) offset: u64,
    pub(crate) path: String,
    bytes: Rc<[u8]>,
    is_gone: bool,
}

impl Image {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// All images that code was taken from, by their numbers.
#[derive(Debug)]
pub(crate) struct Objects {
    process: u32,
    memory: Memory,
    images: Vec<Image>,
}

const VDSO: &str = "[vdso]";

impl Objects {
    pub(crate) fn new(process: u32, memory: Memory) -> Self {
        Self { process, memory, images: Vec::new() }
    }

    /// The same images, for a process that has just been forked.
    pub(crate) fn copy(&self, process: u32, memory: Memory) -> Self {
        Self { process, memory, images: self.images.clone() }
    }

    /// Goes on with another process, which has the same code or newer one.
    pub(crate) fn move_to(&mut self, process: u32, memory: Memory) {
        self.process = process;
        self.memory = memory;
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn process(&self) -> u32 {
        self.process
    }

    /// The number of the image that holds an address of code.
    pub(crate) fn image_at(&mut self, at: u64) -> Option<usize> {
        self.find(at)
    }

    pub(crate) fn images(&self) -> &[Image] {
        &self.images
    }

    pub(crate) fn mappings(&self) -> Vec<Mapping> {
        mappings(self.process).unwrap_or_default()
    }

    /// The ranges of images that overlap a range; they are not used any more.
    pub(crate) fn retire(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
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

    /// The ranges of images that are mapped no more, or from another file.
    pub(crate) fn gone(&self) -> Vec<Range<u64>> {
        let mapped = self.mappings();
        let is_there = |image: &Image| {
            mapped.iter().any(|one| {
                one.range == image.range && one.offset == image.offset && one.name == image.path
            })
        };
        let images = self.images.iter().filter(|image| !image.is_gone && !is_there(image));
        images.map(|image| image.range.clone()).collect()
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

/// Places of a profile, for addresses of one address space.
pub(crate) struct Places<'a> {
    images: &'a [Image],
    /// The files of the images, in the profile.
    files: Vec<u32>,
}

impl<'a> Places<'a> {
    pub(crate) fn new(profile: &mut Profile, objects: &'a Objects) -> Self {
        let images = objects.images();
        let files = images.iter().map(|image| profile.file(&image.path)).collect();
        Self { images, files }
    }

    /// The place of an address in the image of a block.
    pub(crate) fn of(&self, block: &Translated, at: u64) -> Option<Place> {
        self.in_image(block.object, at)
    }

    /// The place of an address that a block leads to. A branch mostly stays in its image. After a
    /// library was replaced by another, only the image itself tells which of the two an address
    /// belongs to.
    pub(crate) fn target(&self, from: &Translated, at: u64) -> Option<Place> {
        let holds =
            |image: &usize| self.images.get(*image).is_some_and(|one| one.range.contains(&at));
        let own = Some(image_of(from)).filter(holds);
        let image = own.or_else(|| (0..self.images.len()).rev().find(holds))?;
        self.in_image(u32::try_from(image).ok()?, at)
    }

    /// The place of an address in an image.
    pub(crate) fn in_image(&self, image: u32, at: u64) -> Option<Place> {
        let image = usize::try_from(image).ok()?;
        let Image { range, offset, .. } = self.images.get(image)?;
        let offset = offset + at.checked_sub(range.start)?;
        Some(Place { file: *self.files.get(image)?, offset })
    }
}

fn image_of(block: &Translated) -> usize {
    usize::try_from(block.object).unwrap_or(usize::MAX)
}

impl Source for Objects {
    fn code(&mut self, at: u64) -> Option<(u32, &[u8])> {
        let found = self.find(at)?;
        let image = self.images.get(found)?;
        let from = usize::try_from(at - image.range.start).ok()?;
        Some((u32::try_from(found).ok()?, image.bytes.get(from..)?))
    }
}
