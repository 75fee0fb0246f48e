//! Things by their place in a list, which others know them by. A place that became free is given
//! again only in a later turn, so that what is told of who had it meets nobody.

#[derive(Debug)]
pub(super) struct Places<T> {
    all: Vec<Option<T>>,
    free: Vec<usize>,
    freed: Vec<usize>,
    count: usize,
}

impl<T> Places<T> {
    pub(super) fn new() -> Self {
        Self { all: Vec::new(), free: Vec::new(), freed: Vec::new(), count: 0 }
    }

    /// The place that the next one gets.
    pub(super) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.all.len())
    }

    pub(super) fn add(&mut self, one: T) -> usize {
        self.count += 1;
        match self.free.pop() {
            Some(at) => {
                self.all[at] = Some(one);
                at
            }
            None => {
                self.all.push(Some(one));
                self.all.len() - 1
            }
        }
    }

    pub(super) fn get(&mut self, at: usize) -> Option<&mut T> {
        self.all.get_mut(at)?.as_mut()
    }

    pub(super) fn remove(&mut self, at: usize) -> Option<T> {
        let one = self.all.get_mut(at)?.take()?;
        self.count -= 1;
        self.freed.push(at);
        Some(one)
    }

    /// A turn is over: nothing is left to be told of those that were removed in it.
    pub(super) fn turn(&mut self) {
        self.free.append(&mut self.freed);
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_given_again_in_another_turn() {
        let mut places = Places::new();
        assert_eq!([places.add("a"), places.add("b")], [0, 1]);
        assert_eq!(places.remove(0), Some("a"));
        assert_eq!((places.remove(0), places.next(), places.add("c")), (None, 2, 2));
        places.turn();
        assert_eq!((places.next(), places.add("d"), places.count()), (0, 0, 3));
        assert_eq!(places.get(0), Some(&mut "d"));
    }
}
