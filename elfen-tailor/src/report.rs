//! What a tale tells: for scripts as one object, for people as a screen.

use std::collections::BTreeMap;
use std::fmt::Write;

use elfen_console::duration::{number, show};
use elfen_console::table;
use serde::Serialize;

use crate::rank::{Explained, Ranking, ReplayError, Row, Slow, rank};
use crate::replay::quantile;
use crate::request::{Request, Requests};
use crate::segment::{Kind, LONG, Segment, cause, total, words};
use crate::tale::Tale;
use crate::timeline::Timeline;
use crate::walk::Walk;

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    pub service: String,
    pub port: u16,
    pub detail: String,
    pub seconds: f64,
    /// All that were answered while it was recorded.
    pub requests: usize,
    /// Of those, all of whose time is accounted for.
    pub complete: usize,
    /// Clients asked again before they had their answer.
    pub unclear: u64,
    pub lost_events: u64,
    /// The recording ended as it should.
    pub whole: bool,
    pub slow_threshold_ns: u64,
    pub slow_requests: usize,
    pub latency_ns: Latency,
    pub replay_error: Errors,
    pub replay_valid: bool,
    /// Of the time of slow requests, what nothing is known of.
    pub unknown_share: f64,
    pub causes: Vec<CauseRow>,
    pub slowest: Vec<SlowRequest>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Latency {
    pub p50: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Errors {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CauseRow {
    #[serde(flatten)]
    pub row: Row,
    /// What an operator would call it.
    pub words: String,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SlowRequest {
    pub request: usize,
    pub arrived_ns: u64,
    pub latency_ns: u64,
    /// `work` or `noise`.
    pub outlier: &'static str,
    pub complete: bool,
    pub charges: Vec<Charge>,
    pub segments: Vec<SegmentRow>,
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

/// All requests of a tale, with what became of each.
#[derive(Debug)]
pub struct Account {
    /// Complete ones, by arrival.
    pub explained: Vec<Explained>,
    /// Latencies of those that lost events.
    pub incomplete: Vec<u64>,
    pub unclear: u64,
}

impl Account {
    pub fn of(tale: &Tale) -> Self {
        let (timeline, requests) = (Timeline::of(tale), Requests::of(tale));
        let walk = Walk::new(tale, &timeline, &requests);
        let is_over_gap = |request: &Request| {
            request.arrived_ns < tale.head.began_ns
                || tale
                    .gaps
                    .iter()
                    .any(|gap| gap.from_ns <= request.ended_ns && request.arrived_ns <= gap.to_ns)
        };
        let (over, complete): (Vec<&Request>, Vec<&Request>) =
            requests.all.iter().partition(|request| is_over_gap(request));
        let explain = |request: &&Request| {
            let segments = walk.explain(request);
            Explained {
                connection: request.connection,
                arrived_ns: request.arrived_ns,
                ended_ns: request.ended_ns,
                server: server(&segments).unwrap_or(request.sender),
                segments,
            }
        };
        Self {
            explained: complete.iter().map(explain).collect(),
            incomplete: over.iter().map(|request| request.latency_ns()).collect(),
            unclear: requests.unclear,
        }
    }
}

/// The thread that did most of the work.
fn server(segments: &[Segment]) -> Option<u32> {
    let mut work: BTreeMap<u32, u64> = BTreeMap::new();
    for segment in segments.iter().filter(|segment| segment.kind == Kind::Work) {
        let ns = work.entry(segment.thread).or_default();
        *ns = total([*ns, segment.ns()].into_iter());
    }
    work.into_iter().max_by_key(|(_, ns)| *ns).map(|(thread, _)| thread)
}

/// What a request's time went to, the most first.
pub fn charges(one: &Explained, tale: &Tale) -> Vec<(String, u64)> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for segment in &one.segments {
        let ns = sums.entry(cause(segment.kind, tale)).or_default();
        *ns = total([*ns, segment.ns()].into_iter());
    }
    let mut sums: Vec<(String, u64)> = sums.into_iter().collect();
    sums.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    sums
}

/// Why there is nothing to report.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Nothing {
    #[error("no request was answered on port {port} while it was recorded")]
    NoRequests { port: u16 },
    #[error("each of its {0} requests lost events")]
    NoneComplete(usize),
    #[error("{unclear} of its {all} requests were asked before the one before was answered")]
    Unclear { unclear: u64, all: u64 },
}

fn latency(mut latencies: Vec<u64>) -> Latency {
    latencies.sort_unstable();
    let of = |per_million| quantile(&latencies, per_million);
    let max = latencies.last().copied().unwrap_or(0);
    Latency { p50: of(500_000), p99: of(990_000), p999: of(999_000), max }
}

/// The report of a tale, with so many of its slowest requests one by one.
pub fn report(tale: &Tale, slow: Slow, count: usize) -> Result<Report, Nothing> {
    let account = Account::of(tale);
    let Account { explained, incomplete, unclear } = &account;
    let requests = explained.len() + incomplete.len();
    let all = requests as u64 + unclear;
    if *unclear * 2 > all {
        return Err(Nothing::Unclear { unclear: *unclear, all });
    }
    if requests == 0 {
        return Err(Nothing::NoRequests { port: tale.head.port });
    }
    if explained.is_empty() {
        return Err(Nothing::NoneComplete(incomplete.len()));
    }
    let ranking = rank(explained, tale, slow);
    let ReplayError { p50, p99, p999 } = ranking.replay_error;
    let last_ns = tale.events.iter().filter_map(|events| events.last()).map(|event| event.at_ns);
    let ended_ns = tale.ended_ns.or(last_ns.max()).unwrap_or(tale.head.began_ns);
    Ok(Report {
        service: tale.head.service.clone(),
        port: tale.head.port,
        detail: tale.head.detail.clone(),
        seconds: number(ended_ns.saturating_sub(tale.head.began_ns)) / 1e9,
        requests,
        complete: explained.len(),
        unclear: *unclear,
        lost_events: total(tale.gaps.iter().map(|gap| gap.count)),
        whole: tale.ended_ns.is_some(),
        slow_threshold_ns: ranking.threshold_ns,
        slow_requests: ranking.slow.len(),
        latency_ns: latency(explained.iter().map(Explained::latency_ns).collect()),
        replay_error: Errors { p50, p99, p999 },
        replay_valid: ranking.replay_error.is_small(),
        unknown_share: unknown_share(explained, &ranking),
        slowest: slowest(explained, tale, &ranking, count),
        causes: ranking.rows.into_iter().map(row).collect(),
    })
}

fn unknown_share(explained: &[Explained], ranking: &Ranking) -> f64 {
    let of = |only_unknown: bool| -> u64 {
        let segments = ranking.slow.iter().flat_map(|&at| &explained[at].segments);
        let counted = segments.filter(|segment| !only_unknown || segment.kind == Kind::Unknown);
        total(counted.map(Segment::ns))
    };
    let all = of(false);
    if all == 0 { 0.0 } else { number(of(true)) / number(all) }
}

fn row(row: Row) -> CauseRow {
    CauseRow { words: words(&row.cause), row }
}

fn slowest(
    explained: &[Explained],
    tale: &Tale,
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
        segments: explained[at].segments.iter().map(|segment| shown(segment, tale)).collect(),
    };
    ranking.slow.iter().zip(&ranking.charges).take(count).map(one).collect()
}

fn shown(segment: &Segment, tale: &Tale) -> SegmentRow {
    let name = cause(segment.kind, tale);
    let (kind, who) = match name.split_once(':') {
        Some((kind, who)) => (kind.to_owned(), who.to_owned()),
        None => (name, tale.name_of(tale.who(segment.thread, segment.from_ns))),
    };
    let Segment { from_ns, to_ns, cpu, thread, .. } = *segment;
    SegmentRow { from_ns, to_ns, kind, who, cpu, tid: thread }
}

/// A screen has room for the slowest requests below.
const MOST_ROWS: usize = 8;

impl Report {
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("a string takes everything");
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Latency { p50, p99, p999, max } = self.latency_ns;
        let lost = match (self.lost_events, self.requests - self.complete) {
            (0, 0) => "nothing lost".to_owned(),
            (events, requests) => {
                format!("{events} events lost; {requests} requests left out for it")
            }
        };
        let Self { service, port, requests, seconds, .. } = self;
        writeln!(out, "{service}, port {port}: {requests} requests in {seconds:.1} s, {lost}")?;
        if !self.whole {
            writeln!(out, "the recording was cut off: this is what it had by then")?;
        }
        if self.unclear > 0 {
            let unclear = self.unclear;
            writeln!(out, "left out: {unclear} requests that overlapped on their connection")?;
        }
        let [p50, p99, p999, max] = [p50, p99, p999, max].map(show);
        writeln!(out, "latency: p50 {p50}, p99 {p99}, p99.9 {p999}, max {max}")?;
        let (slow, threshold) = (self.slow_requests, show(self.slow_threshold_ns));
        let Some(first) = self.causes.first().filter(|_| slow > 0) else {
            return writeln!(out, "no request took longer than {threshold} for a cause");
        };
        writeln!(
            out,
            "\n{slow} requests took longer than {threshold}. {:.0} % of that is because\n  {}.\n",
            first.row.share * 100.0,
            first.words
        )?;
        if !self.replay_valid {
            writeln!(
                out,
                "Shares are of time: this service is no queue that could be replayed (off by \
                 {:.0} %\nat p99), so what the tail would be without a cause is not known.\n",
                self.replay_error.p99 * 100.0
            )?;
        }
        out.push_str(&self.table());
        if slow < 100 {
            writeln!(out, "\n{slow} slow requests are few: look at the intervals")?;
        }
        writeln!(out, "\nthe slowest:")?;
        for one in &self.slowest {
            let charges: Vec<String> = one
                .charges
                .iter()
                .take(3)
                .map(|charge| format!("{} {}", charge.cause, show(charge.ns)))
                .collect();
            writeln!(out, "  {:8}  {}", show(one.latency_ns), charges.join(", "))?;
        }
        Ok(())
    }

    fn table(&self) -> String {
        let optional = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), show);
        let row = |CauseRow { row, .. }: &CauseRow| {
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
                cells.push(optional(row.whatif_p99_ns));
            }
            cells
        };
        let shown = self.causes.iter().filter(|cause| cause.row.share >= 0.001).take(MOST_ROWS);
        let rows: Vec<Vec<String>> = shown.map(row).collect();
        let heading = ["cause", "share", "95 %", "slow", "tail", "middle", "p99 without"];
        table::lines(&heading[..heading.len() - usize::from(!self.replay_valid)], &rows)
    }
}
