//! Compares pictures of made-up rows with files, and tests properties of all pictures.

use proptest::{prop_assert, prop_assert_eq, proptest};
use snapbox::assert_data_eq;

use super::*;

const BATCHES: [Column; 3] = [("PID", 8, false), ("PROGRAM", 17, false), ("BORROWED", 8, true)];
const LANES: [Column; 3] = [("CPU", 4, true), ("RUNS", 17, false), ("BORROWED", 38, true)];

fn batch(pid: u32, program: &str) -> Row {
    let cells = [pid.to_string(), program.to_owned(), "81.2 %".to_owned()];
    Row { pid: Some(pid), ..Row::new(&BATCHES, cells) }
}

fn slo(share: u64, verdict: &str) -> Row {
    let text = "           p99  31.0 ms of 100 ms  ".to_owned();
    let bar = Bar { parts: vec![('#', share)], rest: 58, after: format!(" {verdict}") };
    Row { style: if share >= 1000 { ALARM } else { PLAIN }, text, bar: Some(bar), pid: None }
}

fn lane(cpu: u32, borrowed: u64, overlapped: u64) -> Row {
    let parts = vec![('#', borrowed), ('+', overlapped)];
    let bar = Bar { parts, rest: 82, after: String::new() };
    let cells = [cpu.to_string(), "search-worker".to_owned(), format!("{borrowed}")];
    Row { bar: Some(bar), ..Row::new(&LANES, cells) }
}

/// A batch that keeps its SLO, a batch that does not, and a batch without an SLO.
fn busy() -> View {
    let batches = vec![
        batch(4711, "xz"),
        batch(40_000, "a-program-with-a-long-name"),
        slo(310, "69.0 % left"),
        batch(5_000_000, "lu\u{1b}[31m"),
        slo(1000, "BROKEN"),
    ];
    let lanes = vec![lane(0, 1000, 0), lane(1, 250, 34), lane(2, 0, 0)];
    let sections = vec![
        Section::new(&BATCHES, batches),
        Section::new(&LANES, lanes),
        Section::new(&LANES, Vec::new()),
    ];
    View { summary: "elfen 0.1.0   3 batches".to_owned(), sections }
}

fn text(view: &View, selected: u32, columns: usize, rows: usize) -> String {
    let lines = draw(view, Some(selected), None, columns, rows);
    lines.iter().map(|line| line.text.trim_end().to_owned() + "\n").collect()
}

#[test]
fn an_old_and_a_wide_terminal() {
    assert_data_eq!(text(&busy(), 40_000, 80, 16), snapbox::file!["80x16.txt"].raw());
    assert_data_eq!(text(&busy(), 4711, 200, 16), snapbox::file!["200x16.txt"].raw());
}

/// Goal: if not all rows fit, the selected batch is visible with its SLO. Method: many batches on a
/// terminal of 80 by 24, each selected once.
#[test]
fn the_selected_batch_is_always_visible() {
    let mut view = busy();
    let of = |n: u32| [batch(1000 + n, "xz"), slo(500 + u64::from(n), &format!("of {n}"))];
    view.sections[0].rows = (0..60).flat_map(of).collect();
    for n in 0..60 {
        let picture = text(&view, 1000 + n, 80, 24);
        assert!(picture.contains(&format!("\n> {} ", 1000 + n)), "{n}:\n{picture}");
        assert!(picture.contains(&format!(" of {n}\n")), "{n}:\n{picture}");
        assert!(picture.contains(" more\n") && picture.contains("CPU RUNS"), "{picture}");
    }
}

#[test]
fn what_is_broken_stands_out_and_a_note_replaces_the_keys() {
    let lines = draw(&busy(), None, None, 80, 24);
    let alarms: Vec<&Line> = lines.iter().filter(|line| line.style == ALARM).collect();
    assert!(matches!(alarms[..], [line] if line.text.contains("BROKEN")), "{alarms:?}");
    assert_eq!(lines.last().unwrap().text, KEYS);
    let lines = draw(&busy(), None, Some("4711 xz: fixed-budget"), 80, 24);
    assert_eq!(lines.last().unwrap().text, "4711 xz: fixed-budget");
}

proptest! {
    /// Goal: a picture fits terminals of any size, and contains no control characters. Method: any
    /// size, any number of rows.
    #[test]
    fn every_picture_fits(
        columns in 0usize..250, rows in 1usize..70, n in 0usize..20, selected in 0usize..20,
    ) {
        let mut view = busy();
        for section in &mut view.sections {
            let full = std::mem::take(&mut section.rows);
            section.rows = full.iter().cycle().take(n).cloned().collect();
        }
        let pid = view.sections[0].rows.get(selected).and_then(|row| row.pid);
        let lines = draw(&view, pid, None, columns, rows);
        prop_assert_eq!(lines.len(), rows);
        for line in lines {
            prop_assert!(line.text.chars().count() <= columns, "{:?}", line);
            prop_assert!(line.text.chars().all(|c| !c.is_control()), "{:?}", line);
        }
    }
}
