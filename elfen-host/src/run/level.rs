//! What keeps a batch on its lanes.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// elfend enforces the guarantees of a cgroup.
    Fence,
    /// The batch's affinity and scheduling class, which the supervisor restores once a second.
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
