//! Pictures of made-up machines, held against files; and what must hold for any of them.

use proptest::{prop_assert, prop_assert_eq, proptest};
use snapbox::assert_data_eq;

use super::*;

fn batch(pid: u32, program: &str, policy: &'static str) -> BatchView {
    BatchView {
        pid,
        program: program.to_owned(),
        policy,
        budget_ns: None,
        borrowed: Some(812),
        overlapped: Some(0),
        reaction_p99_ns: Some(480_000),
        slo: None,
    }
}

fn lane(request: u64, runs: (&str, &str), state: &'static str, shares: (u64, u64)) -> LaneView {
    LaneView {
        request,
        request_runs: runs.0.to_owned(),
        batch: request + 4,
        batch_runs: runs.1.to_owned(),
        state,
        borrowed: Some(shares.0),
        overlapped: Some(shares.1),
    }
}

/// A service under its SLO, one over it, and a batch that has just begun.
fn busy() -> View {
    let slo = |tail_ns| Some(SloView { per_million: 990_000, latency_ns: 100_000_000, tail_ns });
    let service = |lane, alive, p99_ns| ServiceView {
        name: "search".to_owned(),
        lane,
        alive,
        per_second: Some(1_240),
        queue: 3,
        median_ns: Some(4_300_000),
        p99_ns,
    };
    View {
        batches: vec![
            batch(4711, "xz", "borrow-idle"),
            BatchView {
                budget_ns: Some(12_500_000),
                overlapped: Some(34),
                slo: slo(Some(31_000_000)),
                ..batch(40_000, "a-program-with-a-long-name", "slo-budget")
            },
            BatchView {
                slo: slo(Some(140_000_000)),
                ..batch(5_000_000, "lu\u{1b}[31m", "slo-budget")
            },
            BatchView {
                borrowed: None,
                overlapped: None,
                reaction_p99_ns: None,
                slo: slo(None),
                ..batch(9, "new", "slo-budget")
            },
        ],
        lanes: vec![
            lane(0, ("idle", "xz"), "running", (1000, 0)),
            lane(1, ("search-worker", "elfen-guard"), "napping", (250, 34)),
            lane(2, ("?", "?"), "off", (0, 0)),
        ],
        services: vec![service(0, true, Some(31_000_000)), service(1, false, None)],
        tails: Vec::new(),
        selected: 1,
        note: None,
    }
}

fn tails() -> [TailView; 2] {
    let tail = |cause: &str, share, each_ns| TailView {
        service: "redis-server:6379".to_owned(),
        slow: 42,
        threshold_ns: 12_000_000,
        cause: cause.to_owned(),
        share: Some(share),
        each_ns,
    };
    [tail("preempted:a\u{1b}name of many letters", 871, 9_300_000), tail("io:pread64", 129, 1_000)]
}

/// While a watch runs, its service's tail by cause.
#[test]
fn the_tail_by_cause() {
    let mut view = busy();
    view.tails = tails().into();
    let picture = text(&view, 80, 40);
    let expected = "
  TAIL OF                   ABOVE   SLOW BECAUSE OF               SHARE     EACH
  redis-server:6379       12.0 ms     42 preempted:a?name of m~  87.1 %  9.30 ms
  redis-server:6379       12.0 ms     42 io:pread64              12.9 %  1.00 us
";
    assert!(picture.contains(expected), "{picture}");
}

fn text(view: &View, columns: usize, rows: usize) -> String {
    let lines = draw(view, columns, rows);
    lines.iter().map(|line| line.text.trim_end().to_owned() + "\n").collect()
}

#[test]
fn an_old_terminal() {
    assert_data_eq!(text(&busy(), 80, 24), snapbox::file!["80x24.txt"].raw());
}

#[test]
fn a_wide_terminal() {
    assert_data_eq!(text(&busy(), 200, 50), snapbox::file!["200x50.txt"].raw());
}

/// Goal: where not all fits, the selected batch does. Method: many batches on an old
/// terminal, each selected once.
#[test]
fn the_selected_batch_is_always_seen() {
    let mut view = busy();
    view.batches =
        (0..60).map(|n| BatchView { pid: 1000 + n, ..view.batches[1].clone() }).collect();
    for selected in 0..60 {
        view.selected = selected;
        let picture = text(&view, 80, 24);
        assert!(picture.contains(&format!("\n> {} ", 1000 + selected)), "{selected}:\n{picture}");
        assert!(picture.contains(" more\n") && picture.contains("SERVICE "), "{picture}");
    }
}

#[test]
fn what_is_broken_stands_out_and_a_note_is_read() {
    let mut view = busy();
    let broken = |line: &&Line| line.style == Style::Alarm;
    let lines = draw(&view, 80, 24);
    let alarms: Vec<&Line> = lines.iter().filter(broken).collect();
    assert!(matches!(alarms[..], [line] if line.text.contains("BROKEN")), "{alarms:?}");
    view.note = Some("4711 xz: fixed-budget".to_owned());
    assert_eq!(draw(&view, 80, 24).last().unwrap().text, "4711 xz: fixed-budget");
}

proptest! {
    /// Goal: a picture fits its terminal, whatever that is, and holds nothing that a terminal
    /// obeys. Method: any size, any number of everything.
    #[test]
    fn every_picture_fits(
        columns in 0usize..250, rows in 1usize..70, n in 0usize..9, selected in 0usize..9,
    ) {
        let full = busy();
        let some = |n: usize| (0..n).map(|at| at % 3);
        let view = View {
            batches: some(n).map(|at| full.batches[at].clone()).collect(),
            lanes: some(n).map(|at| full.lanes[at].clone()).collect(),
            services: some(n / 2).map(|at| full.services[at % 2].clone()).collect(),
            tails: some(n).map(|at| tails()[at % 2].clone()).collect(),
            selected: selected.min(n.saturating_sub(1)),
            note: None,
        };
        let lines = draw(&view, columns, rows);
        prop_assert_eq!(lines.len(), rows);
        for line in lines {
            prop_assert!(line.text.chars().count() <= columns, "{:?}", line);
            prop_assert!(line.text.chars().all(|c| !c.is_control()), "{:?}", line);
        }
    }
}
