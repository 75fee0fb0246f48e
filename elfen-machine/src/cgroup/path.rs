//! The path of a cgroup.

/// The path of a cgroup from the root of its hierarchy: `/a/b`, and `/` for the root.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
pub struct CgroupPath(String);

impl CgroupPath {
    /// Parses a path that a user typed, with or without slashes at its ends; `None` if it is
    /// invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.trim_matches('/').split('/').collect();
        if parts == [""] {
            return (!text.is_empty()).then(Self::root);
        }
        let fine = |part: &&str| {
            !part.is_empty() && !matches!(*part, "." | "..") && !part.chars().any(char::is_control)
        };
        parts.iter().all(fine).then(|| Self(format!("/{}", parts.join("/"))))
    }

    pub fn root() -> Self {
        Self("/".to_owned())
    }

    pub fn is_root(&self) -> bool {
        self.0 == "/"
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.split('/').filter(|part| !part.is_empty())
    }

    pub fn parent(&self) -> Self {
        let (parent, _) = self.0.rsplit_once('/').unwrap_or_default();
        if parent.is_empty() { Self::root() } else { Self(parent.to_owned()) }
    }

    /// Whether this path is `other`, or is below `other`.
    pub fn is_within(&self, other: &Self) -> bool {
        other.is_root()
            || self
                .0
                .strip_prefix(&other.0)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    pub fn child(&self, name: &str) -> Self {
        Self(format!("{}/{name}", self.0.trim_end_matches('/')))
    }
}

impl std::fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_cgroups_are_accepted() {
        let parsed = |text: &str| CgroupPath::parse(text).map(|path| path.0);
        for text in ["elfen.slice", "/elfen.slice", "/elfen.slice/"] {
            assert_eq!(parsed(text).as_deref(), Some("/elfen.slice"), "{text}");
        }
        assert_eq!(parsed("/").as_deref(), Some("/"));
        assert_eq!(parsed("a/b").as_deref(), Some("/a/b"));
        for text in ["", "..", "a/../b", "a//b", "./a", "a\nb"] {
            assert_eq!(parsed(text), None, "{text:?}");
        }
        let path = |text| CgroupPath::parse(text).unwrap();
        assert_eq!(path("a/b").parent(), path("a"));
        assert_eq!(path("a").parent(), CgroupPath::root());
        assert!(path("a/b").is_within(&path("a")) && path("a").is_within(&path("/")));
        assert!(!path("ab").is_within(&path("a")) && !path("a").is_within(&path("a/b")));
    }
}
