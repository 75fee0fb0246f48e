//! What keeps a batch in its place: one word, wherever it is said.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// elfend holds a cgroup's promises.
    Fence,
    /// Its affinity and its class, which are put back once a second.
    Affinity,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Fence => "fence",
            Self::Affinity => "affinity",
        }
    }
}
