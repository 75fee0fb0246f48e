//! The rungs of the thesis's ladder (section 4.4), each with the cures of those below it; and its
//! causes, each of which acts at some time.
//!
//! A virtual machine that is new loads classes; then it takes memory that nobody has touched; and
//! only where that is at its end it collects. So the iterations of a rung are of three [`Phase`]s,
//! and each of the [`ROWS`] is looked for in one.

use serde::Serialize;

/// As in the thesis, one compiler: what a second one does in the background befalls any iteration.
/// Its JDK 9 had no archive of loaded classes, and its Linux gave memory in huge pages. New objects
/// have room until the last phase.
const OPTIONS: [&str; 7] = [
    "-Xms1152m",
    "-Xmx1152m",
    "-Xmn1g",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseTransparentHugePages",
    "-Xshare:off",
];
/// What the room for new objects is enough for, beside those of the index: in the fourth iteration
/// they are collected for the first time, for longer than all faults took.
const MOST_FILLING: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rung {
    AsIs,
    Nodelay,
    PreTouch,
    Hedge,
}

impl Rung {
    pub(crate) const ALL: [Self; 4] = [Self::AsIs, Self::Nodelay, Self::PreTouch, Self::Hedge];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AsIs => "as is",
            Self::Nodelay => "nodelay",
            Self::PreTouch => "pre-touch",
            Self::Hedge => "hedge",
        }
    }

    /// What it has besides those below it.
    pub(crate) fn cure(self) -> &'static str {
        match self {
            Self::AsIs => "nothing",
            Self::Nodelay => "answers do not wait for acknowledgements",
            Self::PreTouch => "the heap is touched before it serves",
            Self::Hedge => "a backup answers while the first restarts or collects",
        }
    }

    /// The thesis's maximum of an iteration as its client saw it, lowest and highest of 20, in
    /// milliseconds (section 4.4, Figures 4.11 to 4.14).
    pub(crate) fn thesis_max_ms(self) -> (f64, f64) {
        match self {
            Self::AsIs => (40.0, 46.0),
            Self::Nodelay => (3.0, 40.0),
            Self::PreTouch => (2.5, 41.0),
            Self::Hedge => (3.0, 5.0),
        }
    }

    pub(crate) fn options(self) -> Vec<String> {
        let nodelay = (self >= Self::Nodelay).then_some("-Dsun.net.httpserver.nodelay=true");
        let touched = (self >= Self::PreTouch).then_some("-XX:+AlwaysPreTouch");
        OPTIONS.into_iter().chain(nodelay).chain(touched).map(str::to_owned).collect()
    }
}

/// What a virtual machine's memory is at.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// It has just begun to serve.
    New,
    /// New objects lie where none lay before.
    Filling,
    /// The heap is collected now and then.
    Collecting,
}

impl Phase {
    pub(crate) const ALL: [Self; 3] = [Self::New, Self::Filling, Self::Collecting];

    /// Of an iteration, by its number from 1, of so many.
    pub(crate) fn of(iteration: u32, iterations: u32) -> Self {
        match iteration {
            ..=1 => Self::New,
            number if number <= MOST_FILLING.min(iterations.div_ceil(2)) => Self::Filling,
            _ => Self::Collecting,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Filling => "filling",
            Self::Collecting => "collecting",
        }
    }
}

/// A cause of the thesis, and where it is looked for: its cure is the next rung.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CauseRow {
    pub(crate) name: &'static str,
    /// As `elfen tailor` calls it.
    pub(crate) cause: &'static str,
    pub(crate) rung: Rung,
    pub(crate) next: Rung,
    pub(crate) phase: Phase,
}

pub(crate) const ROWS: [CauseRow; 4] = [
    CauseRow {
        name: "Nagle and delayed ACK",
        cause: "tcp-out",
        rung: Rung::AsIs,
        next: Rung::Nodelay,
        phase: Phase::Filling,
    },
    CauseRow {
        name: "page faults",
        cause: "fault",
        rung: Rung::Nodelay,
        next: Rung::PreTouch,
        phase: Phase::Filling,
    },
    CauseRow {
        name: "class loading",
        cause: "classload",
        rung: Rung::PreTouch,
        next: Rung::Hedge,
        phase: Phase::New,
    },
    CauseRow {
        name: "garbage collection",
        cause: "gc",
        rung: Rung::PreTouch,
        next: Rung::Hedge,
        phase: Phase::Collecting,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rung_stands_on_those_below() {
        for pair in Rung::ALL.windows(2) {
            let [below, above] = [pair[0], pair[1]].map(Rung::options);
            assert!(above.starts_with(&below), "{below:?}, {above:?}");
        }
        assert_eq!(Rung::Hedge.options().len(), OPTIONS.len() + 2);
    }

    #[test]
    fn a_ladder_has_its_phases() {
        let phases = |iterations| {
            let all: Vec<_> = (1..=iterations).map(|at| Phase::of(at, iterations)).collect();
            Phase::ALL.map(|phase| all.iter().filter(|of| **of == phase).count())
        };
        let expected = [[1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 2], [1, 2, 17]];
        assert_eq!([1, 2, 3, 4, 20].map(phases), expected);
    }
}
