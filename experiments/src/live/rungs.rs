//! The rungs of the thesis's ladder (section 4.4), each with the cures of the rungs below it; and
//! its causes of slow requests.
//!
//! A new virtual machine loads classes. Then it uses memory for the first time. Once the memory is
//! used up, it collects. So the iterations of a rung have three [`Phase`]s, and each of the
//! [`ROWS`] is expected in one of them.

use serde::Serialize;

/// As in the thesis, there is only one compiler: a second would work in the background of any
/// iteration. The thesis's JDK 9 had no archive of loaded classes, and its Linux used huge pages.
/// The heap has room for all new objects until the last phase.
const OPTIONS: [&str; 7] = [
    "-Xms1152m",
    "-Xmx1152m",
    "-Xmn1g",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseTransparentHugePages",
    "-Xshare:off",
];
/// The last iteration of the second phase. In the fourth iteration new objects are collected for
/// the first time, and that takes longer than all page faults.
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

    /// Its cure, in addition to those of the rungs below.
    pub(crate) fn cure(self) -> &'static str {
        match self {
            Self::AsIs => "nothing",
            Self::Nodelay => "answers do not wait for acknowledgements",
            Self::PreTouch => "the heap is touched before it serves",
            Self::Hedge => "a backup answers while the first restarts or collects",
        }
    }

    /// The maximum of an iteration at the client in the thesis, lowest and highest of 20, in
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

/// The state of a virtual machine's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// It has just started.
    New,
    /// New objects use memory for the first time.
    Filling,
    /// The heap is collected from time to time.
    Collecting,
}

impl Phase {
    pub(crate) const ALL: [Self; 3] = [Self::New, Self::Filling, Self::Collecting];

    /// The phase of iteration number `iteration`, from 1, of `iterations`.
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

/// A cause of the thesis, and the rung and phase where it is expected. The next rung has its cure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CauseRow {
    pub(crate) name: &'static str,
    /// Its name in `elfen tailor`.
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
    fn each_rung_has_the_options_of_those_below() {
        for pair in Rung::ALL.windows(2) {
            let [below, above] = [pair[0], pair[1]].map(Rung::options);
            assert!(above.starts_with(&below), "{below:?}, {above:?}");
        }
        assert_eq!(Rung::Hedge.options().len(), OPTIONS.len() + 2);
    }

    #[test]
    fn phases_depend_on_the_number_of_iterations() {
        let phases = |iterations| {
            let all: Vec<_> = (1..=iterations).map(|at| Phase::of(at, iterations)).collect();
            Phase::ALL.map(|phase| all.iter().filter(|of| **of == phase).count())
        };
        let expected = [[1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 2], [1, 2, 17]];
        assert_eq!([1, 2, 3, 4, 20].map(phases), expected);
    }
}
