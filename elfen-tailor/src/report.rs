//! The report of a trace: one object for scripts, and one screen of text.

use std::collections::BTreeSet;
use std::fmt::Write;

use elfen_console::duration::{number, show};
use elfen_console::paragraph::wrap;
use elfen_console::table;
use serde::Serialize;

use crate::account::Account;
use crate::long_code::LongCode;
use crate::neighbours::{self, NeighbourRow};
use crate::rank::{
    NoSuchCause, OffSlot, RankedCause, Ranking, ReplayError, SlowThreshold, middle_requests, rank,
};
use crate::replay::quantile;
use crate::segment::{
    ExplainedRequest, LONG, Segment, SegmentKind, cause_name, describe_cause, is_recording,
    saturating_sum,
};
use crate::trace::{FULL, MARKS_ALONE, Trace};

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TailorReport {
    pub service: String,
    pub port: u16,
    pub detail: String,
    /// Tracepoints of this detail that the kernel did not have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    pub seconds: f64,
    /// The share of that time in which events were recorded.
    pub recorded_share: f64,
    /// All requests that were answered during the recording.
    pub requests: usize,
    /// Requests whose whole time is explained.
    pub complete: usize,
    /// Requests that arrived before the previous answer on their connection.
    pub unclear: u64,
    pub lost_events: u64,
    /// Whether the file is complete. A cut-off file is not.
    pub whole: bool,
    pub slow_threshold_ns: u64,
    pub slow_requests: usize,
    pub latency_ns: Latency,
    pub replay_error: ReplayError,
    pub replay_aside: OffSlot,
    pub replay_valid: bool,
    /// The unexplained share of the time of slow requests.
    pub unknown_share: f64,
    pub causes: Vec<CauseRow>,
    /// By the service's own stage numbers; empty if it reports no stages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageRow>,
    /// What ran on the other lanes of the service's cores, if the cores are known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<NeighbourRow>,
    /// The functions behind `long`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_code: Option<LongCode>,
    /// Mean page faults of a request, with `full` detail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<Faults>,
    /// The prediction without the causes that the user named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without: Option<Without>,
    pub slowest: Vec<SlowRequest>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Faults {
    pub tail: f64,
    pub middle: f64,
}

/// Predicted latencies of the same requests with some causes removed at once.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Without {
    pub causes: Vec<String>,
    /// `None` if the replay is not valid.
    pub latency_ns: Option<Latency>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Latency {
    pub p50: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CauseRow {
    #[serde(flatten)]
    pub row: RankedCause,
    /// The cause in words, for an operator.
    pub words: String,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SlowRequest {
    pub request: usize,
    pub arrived_ns: u64,
    pub latency_ns: u64,
    /// `work` if the largest charge is `long`, and otherwise `noise`.
    pub outlier: &'static str,
    pub complete: bool,
    pub charges: Vec<Charge>,
    /// How long each neighbour on the core ran next to the request's work.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Neighbour>,
    pub segments: Vec<SegmentRow>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Neighbour {
    pub name: String,
    pub ns: u64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Charge {
    pub cause: String,
    pub ns: u64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SegmentRow {
    pub from_ns: u64,
    pub to_ns: u64,
    pub kind: String,
    pub who: String,
    pub cpu: Option<u32>,
    pub tid: u32,
}

/// Why a trace gives no report.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NothingToReport {
    #[error("no request was answered{} during the recording", on(*port))]
    NoRequests { port: u16 },
    #[error("all {0} requests lost events")]
    NoneComplete(usize),
    #[error("{unclear} of {all} requests were sent before the previous answer")]
    Unclear { unclear: u64, all: u64 },
    #[error("no request had the cause {requested:?}: the causes are {}", shortened(available))]
    NoSuchCause { requested: String, available: Vec<String> },
}

fn on(port: u16) -> String {
    if port == 0 { String::new() } else { format!(" on port {port}") }
}

/// The first causes, as many as fit on a line.
fn shortened(causes: &[String]) -> String {
    const MOST: usize = 20;
    let shown = causes[..causes.len().min(MOST)].join(", ");
    match causes.len().checked_sub(MOST) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

fn latency(mut latencies: Vec<u64>) -> Latency {
    latencies.sort_unstable();
    let of = |per_million| quantile(&latencies, per_million);
    let max = latencies.last().copied().unwrap_or(0);
    Latency { p50: of(500_000), p99: of(990_000), p999: of(999_000), max }
}

/// The report of a trace, with its `count` slowest requests in detail. It also has the predicted
/// latencies without the causes in `without`.
pub fn report(
    trace: &Trace,
    slow: SlowThreshold,
    count: usize,
    without: &[String],
) -> Result<TailorReport, NothingToReport> {
    let account = Account::of(trace);
    let Account { explained, incomplete, unclear } = &account;
    let requests = explained.len() + incomplete.len();
    let all = requests as u64 + unclear;
    if *unclear * 2 > all {
        return Err(NothingToReport::Unclear { unclear: *unclear, all });
    }
    if requests == 0 {
        return Err(NothingToReport::NoRequests { port: trace.head.port });
    }
    if explained.is_empty() {
        return Err(NothingToReport::NoneComplete(incomplete.len()));
    }
    let ranking =
        rank(explained, trace, slow, without).map_err(|NoSuchCause { requested, available }| {
            NothingToReport::NoSuchCause { requested, available }
        })?;
    let last_ns = trace.events.iter().filter_map(|events| events.last()).map(|event| event.at_ns);
    let ended_ns = trace.ended_ns.or(last_ns.max()).unwrap_or(trace.head.began_ns);
    let all_ns = ended_ns.saturating_sub(trace.head.began_ns);
    // A gap with count 0 is a pause of the recorder: no events are lost in it.
    let pauses = trace.gaps.iter().filter(|gap| gap.count == 0);
    let paused_ns = saturating_sum(pauses.map(|gap| gap.to_ns.saturating_sub(gap.from_ns)));
    Ok(TailorReport {
        service: trace.head.service.clone(),
        port: trace.head.port,
        detail: trace.head.detail.clone(),
        lacks: trace.head.lacks.clone(),
        seconds: number(all_ns) / 1e9,
        recorded_share: 1.0 - number(paused_ns.min(all_ns)) / number(all_ns.max(1)),
        requests,
        complete: explained.len(),
        unclear: *unclear,
        lost_events: saturating_sum(trace.gaps.iter().map(|gap| gap.count)),
        whole: trace.ended_ns.is_some(),
        slow_threshold_ns: ranking.threshold_ns,
        slow_requests: ranking.slow.len(),
        latency_ns: latency(explained.iter().map(ExplainedRequest::latency_ns).collect()),
        replay_error: ranking.replay_error,
        replay_aside: ranking.replay_aside,
        replay_valid: ranking.replay_aside.is_small(),
        unknown_share: unknown_share(explained, &ranking),
        without: (!without.is_empty()).then(|| Without {
            causes: without.to_vec(),
            latency_ns: ranking.without.clone().map(latency),
        }),
        stages: stage_rows(explained, &ranking.slow),
        faults: (trace.head.detail == FULL).then(|| faults(explained, &ranking.slow)),
        slowest: slowest(explained, trace, &ranking, count),
        long_code: ranking.long_code,
        beside: ranking.beside,
        causes: ranking.rows.into_iter().map(row).collect(),
    })
}

fn faults(explained: &[ExplainedRequest], slow: &[usize]) -> Faults {
    let mean = |of: &[usize]| {
        let sum: u64 = of.iter().map(|&at| explained[at].faults).sum();
        number(sum) / number(of.len() as u64).max(1.0)
    };
    Faults { tail: mean(slow), middle: mean(&middle_requests(explained)) }
}

fn unknown_share(explained: &[ExplainedRequest], ranking: &Ranking) -> f64 {
    let of = |only_unknown: bool| -> u64 {
        let segments = ranking.slow.iter().flat_map(|&at| &explained[at].segments);
        let counted =
            segments.filter(|segment| !only_unknown || segment.kind == SegmentKind::Unknown);
        saturating_sum(counted.map(Segment::ns))
    };
    let all = of(false);
    if all == 0 { 0.0 } else { number(of(true)) / number(all) }
}

fn row(row: RankedCause) -> CauseRow {
    CauseRow { words: describe_cause(&row.cause), row }
}

fn slowest(
    explained: &[ExplainedRequest],
    trace: &Trace,
    ranking: &Ranking,
    count: usize,
) -> Vec<SlowRequest> {
    let one = |(&at, charges): (&usize, &Vec<(String, u64)>)| SlowRequest {
        request: at,
        arrived_ns: explained[at].arrived_ns,
        latency_ns: explained[at].latency_ns(),
        outlier: match charges.first() {
            Some((cause, _)) if cause == LONG => "work",
            _ => "noise",
        },
        complete: true,
        charges: charges
            .iter()
            .map(|(cause, ns)| Charge { cause: cause.clone(), ns: *ns })
            .collect(),
        beside: explained[at]
            .neighbours()
            .into_iter()
            .map(|(name, ns)| Neighbour { name: name.to_owned(), ns })
            .collect(),
        segments: explained[at].segments.iter().map(|segment| shown(segment, trace)).collect(),
    };
    ranking.slow.iter().zip(&ranking.charges).take(count).map(one).collect()
}

fn shown(segment: &Segment, trace: &Trace) -> SegmentRow {
    let name = cause_name(segment.kind, trace);
    let (kind, who) = match (name.split_once(':'), segment.behind) {
        (Some((kind, who)), _) => (kind.to_owned(), who.to_owned()),
        (None, Some(request)) => (name, format!("request {request}")),
        (None, None) => (name, trace.name_of(trace.identify(segment.thread, segment.from_ns))),
    };
    let Segment { from_ns, to_ns, cpu, thread, .. } = *segment;
    SegmentRow { from_ns, to_ns, kind, who, cpu, tid: thread }
}

/// A limit on rows, so that the table fits on a screen.
const STAGES_MAX: usize = 16;

/// The mean time in a stage of the service, for slow requests and for requests in the middle. It
/// includes all time in the stage: work and waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct StageRow {
    pub stage: u16,
    pub tail_ns: u64,
    pub middle_ns: u64,
}

fn stage_rows(explained: &[ExplainedRequest], slow: &[usize]) -> Vec<StageRow> {
    let of = |one: &ExplainedRequest, stage: u16| {
        one.stages.iter().find(|(of, _)| *of == stage).map_or(0, |(_, ns)| *ns)
    };
    let all: BTreeSet<u16> =
        explained.iter().flat_map(|one| &one.stages).map(|(stage, _)| *stage).collect();
    // A service that reports no stages has only the first stage.
    if all.len() < 2 {
        return Vec::new();
    }
    let middle = middle_requests(explained);
    let mean = |of_all: &[usize], stage| {
        let sum = saturating_sum(of_all.iter().map(|&at| of(&explained[at], stage)));
        sum / (of_all.len() as u64).max(1)
    };
    let row = |stage| {
        let tail_ns = mean(slow, stage);
        let middle_ns = mean(&middle, stage);
        StageRow { stage, tail_ns, middle_ns }
    };
    // A service may give each request a stage of its own, so the rows are limited.
    all.into_iter().take(STAGES_MAX).map(row).collect()
}

fn stage_table(stages: &[StageRow]) -> String {
    let row = |row: &StageRow| vec![row.stage.to_string(), show(row.tail_ns), show(row.middle_ns)];
    let rows: Vec<Vec<String>> = stages.iter().map(row).collect();
    table::lines(&["stage", "tail", "middle"], &rows)
}

impl SlowRequest {
    /// What the request's time is charged to, the largest part first, and what ran next to it.
    pub fn charged(&self) -> String {
        let most = self.charges.iter().take(3);
        let mut charges: Vec<String> =
            most.map(|charge| format!("{} {}", charge.cause, show(charge.ns))).collect();
        let beside = self.beside.first();
        charges.extend(beside.map(|one| format!("{} of it next to {}", show(one.ns), one.name)));
        charges.join(", ")
    }
}

impl Without {
    fn text(&self) -> String {
        let text = self.latency_ns.map_or("not known".to_owned(), Latency::text);
        format!("without {}: {text}", self.causes.join(", "))
    }
}

impl Latency {
    fn text(self) -> String {
        let [p50, p99, p999, max] = [self.p50, self.p99, self.p999, self.max].map(show);
        format!("p50 {p50}, p99 {p99}, p99.9 {p999}, max {max}")
    }
}

/// The most causes in the table, so that the slowest requests fit on the same screen.
const MOST_ROWS: usize = 8;
const COLUMNS: usize = 80;
/// With fewer slow requests, one more or less changes the ranking.
const FEW: usize = 100;

impl TailorReport {
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("a string takes everything");
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        for line in self.measured() {
            writeln!(out, "{line}")?;
        }
        let slow = self.slow_requests;
        let threshold = show(self.slow_threshold_ns);
        let Some((share, words)) = self.first() else {
            return writeln!(out, "no request took longer than {threshold}");
        };
        writeln!(
            out,
            "\n{slow} requests took longer than {threshold}. {share} of that is because"
        )?;
        writeln!(out, "  {words}.\n")?;
        if let Some(text) = self.recording() {
            writeln!(out, "{}\n", wrap(&text, COLUMNS).join("\n"))?;
        }
        if !self.replay_valid {
            writeln!(out, "{}\n", wrap(&self.why_no_replay(), COLUMNS).join("\n"))?;
        }
        let shown = self.causes.iter().filter(|cause| cause.row.share >= 0.001).take(MOST_ROWS);
        let rows: Vec<Vec<String>> = shown.map(|cause| self.row(cause)).collect();
        out.push_str(&table::lines(self.heading(), &rows));
        if !self.stages.is_empty() {
            write!(out, "\n{}", stage_table(&self.stages))?;
        }
        if !self.beside.is_empty() {
            write!(out, "\n{}", neighbours::table(&self.beside))?;
        }
        if let Some(text) = self.long_code() {
            writeln!(out, "\n{}", wrap(&text, COLUMNS).join("\n"))?;
        }
        if let Some(Faults { tail, middle }) = self.faults.filter(|faults| faults.tail >= 1.0) {
            writeln!(
                out,
                "\npage faults of a request: {tail:.1} in the tail, {middle:.1} in the middle"
            )?;
        }
        if let Some(without) = &self.without {
            writeln!(out, "\n{}", without.text())?;
        }
        if slow < FEW {
            writeln!(out, "\n{}", self.few())?;
        }
        writeln!(out, "\nthe slowest:")?;
        for one in &self.slowest {
            writeln!(out, "  {:8}  {}", show(one.latency_ns), one.charged())?;
        }
        Ok(())
    }

    /// The text of the page before its first picture, one paragraph each.
    pub fn summary(&self) -> Vec<String> {
        let slow = match self.first() {
            None => format!("No request took longer than {}.", show(self.slow_threshold_ns)),
            Some((share, words)) => format!(
                "{} requests took longer than {}. {share} of that is because {words}.",
                self.slow_requests,
                show(self.slow_threshold_ns)
            ),
        };
        let mut all = vec![slow, self.measured().join("; ")];
        if self.first().is_some() {
            all.extend(self.recording());
            all.extend((!self.replay_valid).then(|| self.why_no_replay()));
            all.extend(self.long_code());
            all.extend(self.without.as_ref().map(Without::text));
            all.extend((self.slow_requests < FEW).then(|| self.few()));
        }
        all
    }

    fn measured(&self) -> Vec<String> {
        let lost = match (self.lost_events, self.requests - self.complete) {
            (0, 0) => "nothing lost".to_owned(),
            (0, requests) => format!("nothing lost, {requests} requests left out"),
            (events, requests) => {
                format!("{events} events lost; {requests} requests left out because of that")
            }
        };
        let Self { service, requests, seconds, unclear, .. } = self;
        let by = match self.port {
            0 => "by its marks".to_owned(),
            port => format!("port {port}"),
        };
        let mut lines =
            vec![format!("{service}, {by}: {requests} requests in {seconds:.1} s, {lost}")];
        if self.detail == MARKS_ALONE {
            lines.push("no kernel events: all time before a request began is queue".to_owned());
        }
        if !self.lacks.is_empty() {
            lines.push(format!("the kernel has no tracepoints {}", self.lacks.join(", ")));
        }
        if self.recorded_share < 1.0 {
            let percent = self.recorded_share * 100.0;
            lines.push(format!("recorded for {percent:.0} % of that time, because of --duty"));
        }
        if !self.whole {
            lines.push("the recording is truncated: this report covers its beginning".to_owned());
        }
        if *unclear > 0 {
            lines.push(format!("left out: {unclear} requests that overlapped on their connection"));
        }
        lines.push(format!("latency: {}", self.latency_ns.text()));
        lines
    }

    /// The largest cause: its share, and its description.
    fn first(&self) -> Option<(String, &str)> {
        let first = self.causes.first().filter(|_| self.slow_requests > 0)?;
        Some((format!("{:.0} %", first.row.share * 100.0), &first.words))
    }

    /// Advice if the recording itself caused a part of the tail, and what caused the rest.
    fn recording(&self) -> Option<String> {
        const LEAST: f64 = 0.05;
        let of_recording = |cause: &&CauseRow| is_recording(&cause.row.cause);
        let own = self.causes.iter().find(of_recording)?.row.share;
        if own < LEAST || self.slow_requests == 0 {
            return None;
        }
        let share = |share: f64| format!("{:.0} %", share * 100.0);
        let other = self.causes.iter().find(|cause| !of_recording(cause)).map(|other| {
            let of_rest = other.row.share / (1.0 - own).max(f64::EPSILON);
            let words = &other.words;
            format!(" Of the rest, {} is because {words}.", share(of_rest.min(1.0)))
        });
        Some(format!(
            "The recorder caused {} of it: the service and its clients leave no CPU to spare, so \
             recording takes theirs. Give the recorder another CPU (`taskset -c N elfen tailor \
             record ..`), or record a part of the time (`--duty 10%`).{}",
            share(own),
            other.unwrap_or_default()
        ))
    }

    /// The functions behind `long`, if it matters.
    fn long_code(&self) -> Option<String> {
        const LEAST: f64 = 0.05;
        let long = self.causes.iter().find(|cause| cause.row.cause == LONG)?;
        let code = self.long_code.as_ref().filter(|_| long.row.share >= LEAST)?;
        Some(code.text())
    }

    fn why_no_replay(&self) -> String {
        let OffSlot { all, tail } = self.replay_aside;
        let (share, of) = if tail > all { (tail, "the slow") } else { (all, "the") };
        format!(
            "Shares refer to time, and there is no prediction of the tail without a cause: the \
             service works on several requests at once. {:.0} % of its work for {of} requests was \
             done between the work for other requests, so the requests do not form a queue.",
            share * 100.0
        )
    }

    fn few(&self) -> String {
        format!("only {} slow requests: the intervals are wide", self.slow_requests)
    }

    /// The cells of a cause's row in the table.
    pub fn row(&self, CauseRow { row, .. }: &CauseRow) -> Vec<String> {
        let (low, high) = row.share_ci95;
        let mut cells = vec![
            row.cause.clone(),
            format!("{:.1} %", row.share * 100.0),
            format!("{:.0}-{:.0} %", low * 100.0, high * 100.0),
            row.requests.to_string(),
            show(row.tail_ns),
            show(row.middle_ns),
        ];
        if self.replay_valid {
            cells.push(row.whatif_p99_ns.map_or_else(|| "-".to_owned(), show));
        }
        cells
    }

    pub fn heading(&self) -> &'static [&'static str] {
        const ALL: &[&str] = &["cause", "share", "95 %", "slow", "tail", "middle", "p99 without"];
        &ALL[..ALL.len() - usize::from(!self.replay_valid)]
    }
}
