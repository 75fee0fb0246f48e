//! `elfen shim --live`: shows what ran in the last second, once per second, on a terminal or as
//! text.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use elfen_console::duration::{number, show};
use elfen_console::failure::Failure;
use elfen_console::table;
use elfen_console::terminal::{Input, Screen};

use crate::clock::Clock;
use crate::live::{LiveTotals, SignalTotals};
use crate::recording::{Head, Kind, NO_NAME, Signal};
use crate::symbols::{Layout, Names};
use crate::text::clipped;

const EVERY: Duration = Duration::from_secs(1);
/// The maximum number of rows per signal.
const ROWS: usize = 8;

/// The view: what it shows, and the totals of one second ago.
pub(super) struct LiveView {
    /// The totals of each observer.
    pub(super) lives: Vec<Arc<LiveTotals>>,
    pub(super) signals: Vec<Signal>,
    pub(super) clock: Clock,
    /// The name of the observed process.
    pub(super) program: String,
    pub(super) screen: Option<Screen>,
    names: HashMap<(usize, u64), String>,
    last: Vec<SignalTotals>,
    last_samples: u64,
    began: Instant,
    next: Instant,
}

impl LiveView {
    pub(super) fn of(lives: Vec<Arc<LiveTotals>>, head: &Head, screen: Option<Screen>) -> Self {
        let began = Instant::now();
        Self {
            last: vec![SignalTotals::default(); head.signals.len()],
            lives,
            signals: head.signals.clone(),
            clock: head.clock,
            program: head.program.clone(),
            screen,
            names: HashMap::new(),
            last_samples: 0,
            began,
            next: began + EVERY,
        }
    }

    /// Shows the last second, if it is over.
    pub(super) fn refresh(&mut self, layout: &Layout, out: &mut dyn Write) -> Result<(), Failure> {
        if Instant::now() < self.next {
            return Ok(());
        }
        self.next = Instant::now() + EVERY;
        let text = self.text(layout);
        match &self.screen {
            None => writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Failure::output),
            Some(screen) => {
                let (columns, rows) = Screen::size();
                let cut = |line: &str| line.chars().take(columns).collect();
                let mut lines: Vec<String> = text.lines().map(cut).take(rows - 1).collect();
                // Empty lines erase the rest of the previous picture.
                lines.resize(rows - 1, String::new());
                lines.push("q ends".to_owned());
                screen.show(&lines).map_err(Failure::output)
            }
        }
    }

    /// Waits for input at the terminal. Returns `None` without a terminal, and `Some(Some(SIGINT))`
    /// if the user ends the run.
    pub(super) fn input(&self, within: Duration) -> Option<Option<i32>> {
        let inputs = self.screen.as_ref()?.input(within).unwrap_or_default();
        let ends = |input: &Input| matches!(input, Input::End | Input::Letter('q'));
        Some(inputs.iter().any(ends).then_some(libc::SIGINT))
    }

    fn text(&mut self, layout: &Layout) -> String {
        let seen: Vec<SignalTotals> = self.lives.iter().flat_map(|live| live.totals()).collect();
        let samples = self.lives.iter().map(|live| live.samples.load(Relaxed)).sum();
        let since: Vec<SignalTotals> =
            seen.iter().zip(&self.last).map(|(now, last)| now.since(last)).collect();
        // The longest gaps of any observer. All signals of an observer have the same gaps.
        let gap = since.iter().map(|one| one.gap).max().unwrap_or(0);
        let mut text = format!(
            "{}: {}, {:.2} M samples in the last second, {:.1} % of it in gaps\n",
            clipped(&self.program),
            show(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)),
            number(samples - self.last_samples) / 1e6,
            100.0 * number(self.clock.ns(gap)) / 1e9,
        );
        self.name_all(&since, layout);
        for (at, one) in since.iter().enumerate() {
            text += &self.of_tags(at, one);
        }
        let values = self.signals.iter().zip(&since).filter(|(one, _)| one.kind == Kind::Values);
        let row = |(signal, seen): (&Signal, &SignalTotals)| {
            let now = seen.now.map_or_else(|| "-".to_owned(), |now| signal.number(now).to_string());
            vec![clipped(&signal.name), now, seen.new_values.to_string()]
        };
        let rows: Vec<Vec<String>> = values.map(row).collect();
        if !rows.is_empty() {
            text += "\n";
            text += &table::lines(&["value", "now", "new values"], &rows);
        }
        self.last = seen;
        self.last_samples = samples;
        text
    }

    /// Names all new values. Each file is read at most once.
    fn name_all(&mut self, since: &[SignalTotals], layout: &Layout) {
        let mut names: Option<Names> = None;
        for (at, one) in since.iter().enumerate() {
            let signal = &self.signals[at];
            if signal.kind != Kind::Tags {
                continue;
            }
            for (value, _) in &one.tags {
                let known = self.names.entry((at, *value));
                known.or_insert_with(|| {
                    let given = signal.names.iter().find(|(known, _)| known == value);
                    given.map(|(_, name)| name.clone()).unwrap_or_else(|| {
                        let names =
                            names.get_or_insert_with(|| Names::of(layout.clone(), &self.program));
                        names.value(signal.source, *value)
                    })
                });
            }
        }
    }

    fn of_tags(&self, at: usize, seen: &SignalTotals) -> String {
        let signal = &self.signals[at];
        let mut by_name: HashMap<&str, u64> = HashMap::new();
        for (value, ticks) in &seen.tags {
            let name = self.names.get(&(at, *value)).map_or("?", String::as_str);
            *by_name.entry(name).or_default() += ticks;
        }
        if signal.kind != Kind::Tags || by_name.keys().all(|name| *name == NO_NAME) {
            return String::new();
        }
        let ran: u64 = by_name.values().sum::<u64>() + seen.other;
        let mut all: Vec<(&str, u64)> = by_name.into_iter().filter(|(_, t)| *t > 0).collect();
        all.sort_by_key(|(name, ticks)| (std::cmp::Reverse(*ticks), *name));
        let share = |ticks: u64, of: u64| format!("{:.1} %", percent(ticks, of));
        let mut rows: Vec<Vec<String>> =
            all.iter().take(ROWS).map(|(name, t)| vec![clipped(name), share(*t, ran)]).collect();
        if seen.not_running > 0 {
            let of = ran + seen.not_running;
            rows.push(vec!["(not running, of all)".to_owned(), share(seen.not_running, of)]);
        }
        "\n".to_owned() + &table::lines(&[&signal.name, "share"], &rows)
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * number(part) / number(whole.max(1))
}
