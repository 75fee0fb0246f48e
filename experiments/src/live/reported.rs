//! What `elfen run` reports of a batch: read as it was written, and of two runs together.

use std::path::Path;

use elfen_run::figures::Figures;
use elfen_run::latency::Latency;
use elfen_run::report::Report;

use super::LiveError;

pub(crate) fn read_report(file: &Path) -> Result<Report, LiveError> {
    let name = "elfen run".to_owned();
    let text = std::fs::read_to_string(file)
        .map_err(LiveError::io(format!("reading the report {}", file.display())))?;
    serde_json::from_str(&text).map_err(|error| LiveError::Garbled { name, why: error.to_string() })
}

/// Two runs of the program, one after the other: times add up, latencies are those of the run that
/// has more of them, and the rest holds for the last.
pub(super) fn together(before: &Report, after: Report) -> Report {
    let add = |one: Option<u64>, other: Option<u64>| one.zip(other).map(|(a, b)| a + b);
    let more = |one: Latency, other: Latency| if one.n > other.n { one } else { other };
    let (first, last) = (&before.figures, &after.figures);
    Report {
        wall_ns: before.wall_ns + after.wall_ns,
        request_busy_ns: add(before.request_busy_ns, after.request_busy_ns),
        figures: Figures {
            borrowed_ns: add(first.borrowed_ns, last.borrowed_ns),
            overlapped_ns: add(first.overlapped_ns, last.overlapped_ns),
            napped_ns: first.napped_ns + last.napped_ns,
            naps: first.naps + last.naps,
            reaction_ns: more(first.reaction_ns, last.reaction_ns),
            wake_ns: more(first.wake_ns, last.wake_ns),
        },
        ..after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: two runs are one in the sums. Method: by hand; a run without an account has none.
    #[test]
    fn runs_one_after_the_other_add_up() {
        let report = |ran: Option<u64>, n: u64| Report {
            wall_ns: 100,
            request_busy_ns: Some(10),
            figures: Figures {
                borrowed_ns: ran,
                overlapped_ns: ran,
                reaction_ns: Latency { n, median: Some(n), ..Latency::default() },
                ..Figures::default()
            },
            ..Report::default()
        };
        let both = together(&report(Some(40), 9), report(Some(2), 3));
        assert_eq!((both.wall_ns, both.request_busy_ns), (200, Some(20)));
        assert_eq!((both.figures.ran_ns(), both.figures.reaction_ns.n), (Some(84), 9));
        assert_eq!(together(&report(None, 0), report(Some(2), 0)).figures.ran_ns(), None);
    }

    /// Goal: a report that lacks a figure is no report with a zero. Method: one of `elfen run`'s,
    /// whole and with a key of another name.
    #[test]
    fn a_report_without_its_figures_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report.json");
        let text = serde_json::to_string(&Report { wall_ns: 7, ..Report::default() }).unwrap();
        std::fs::write(&file, &text).unwrap();
        assert_eq!(read_report(&file).unwrap().wall_ns, 7);
        std::fs::write(&file, text.replace("overlapped_ns", "overlap_ns")).unwrap();
        let refused = read_report(&file);
        assert!(
            matches!(&refused, Err(LiveError::Garbled { why, .. })
                if why.contains("overlapped_ns")),
            "{refused:?}"
        );
    }
}
