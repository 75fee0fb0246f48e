//! The command line of `elfen-search`, and what each subcommand does.

use super::bench;
use super::corpus::Corpus;
use super::index::{self, SearchIndex, Source};
use super::server::{self, Bounds, Emulated, Serving};
use super::tasks::tasks;
use crate::beside::kernel;
use crate::beside::{Lanes, Slowdown};
use crate::load::task_query;
use crate::process::{allowed_cpus, catch_interrupts, pin};
use crate::units::{Nanos, parse_nanos};
use clap::{Args, Parser, Subcommand};
use elfen_console::command;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output;
use elfen_rt::service::Service;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEFAULT_DOCS: u64 = 100_000;
const DEFAULT_SEED: u64 = 1;

/// A search service: one coordinator thread, one worker thread on each request lane.
#[derive(Debug, Parser)]
#[command(
    name = "elfen-search",
    version,
    after_help = "Example:\n  elfen-search index --docs 100000 /tmp/index\n  \
                  elfen-search tasks > /tmp/tasks\n  \
                  elfen-search serve --lanes 1 --warmup /tmp/tasks /tmp/index &\n  \
                  elfen-load --queries /tmp/tasks --tasks --template '/search?q={}' \\\n    \
                  http://127.0.0.1:7007"
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Build an index of the built-in corpus
    Index(IndexArgs),
    /// Print a query set of 1141 tasks for the built-in corpus
    Tasks(TaskArgs),
    /// Answer searches over HTTP until SIGTERM
    Serve(ServeArgs),
    /// Measure one worker without a network: demand, queries per second, the cost of publishing
    Bench(BenchArgs),
}

#[derive(Debug, Args)]
struct IndexArgs {
    /// The folder for the index
    dir: PathBuf,

    /// The number of articles to index
    #[arg(long, default_value_t = DEFAULT_DOCS, value_parser = clap::value_parser!(u64).range(1..))]
    docs: u64,

    /// Seed of the corpus
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,

    /// Replace an existing index, in one step
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct TaskArgs {
    /// The --docs of the index
    #[arg(long, default_value_t = DEFAULT_DOCS, value_parser = clap::value_parser!(u64).range(1..))]
    docs: u64,

    /// The --seed of the index
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// A folder from `elfen-search index`
    dir: PathBuf,

    #[arg(long, default_value = "127.0.0.1:7007")]
    listen: SocketAddr,

    /// The CPUs of the request lanes, one worker each, as in 0 or 0,2 [default: the last CPU]
    #[arg(long, value_delimiter = ',')]
    lanes: Vec<usize>,

    /// The CPU of the coordinator [default: any CPU]
    #[arg(long)]
    coordinator_cpu: Option<usize>,

    /// The name under which queue and requests are published; empty to publish nothing
    #[arg(long, default_value = "search")]
    service_name: String,

    /// Searches that may wait; more are refused with 503
    #[arg(long, default_value = "1000", value_parser = clap::value_parser!(u32).range(1..))]
    queue: u32,

    /// Clients that may be connected; more are refused with 503
    #[arg(long, default_value = "10000", value_parser = clap::value_parser!(u32).range(1..))]
    connections: u32,

    /// Disconnect a client that does not accept its answer within this time
    #[arg(long, value_parser = parse_nanos, default_value = "10s")]
    patience: Nanos,

    /// Disconnect a client that does not send its next request within this time
    #[arg(long, value_parser = parse_nanos, default_value = "300s")]
    idle: Nanos,

    /// After SIGTERM, send remaining answers for at most this time
    #[arg(long, value_parser = parse_nanos, default_value = "10s")]
    drain: Nanos,

    /// Search for each line of this file before serving: queries, or luceneutil tasks
    #[arg(long, value_name = "FILE")]
    warmup: Option<PathBuf>,

    /// Emulate cores that lanes share: requests next to a running batch take this many times as
    /// long, 1 to 10, by the kernel's account
    ///
    /// For CPUs that share no core. Needs the task map: root, or group elfen where elfend runs. The
    /// service also publishes emulated counts for dynamic-budget: an IPC of 1 without a batch, and
    /// of 1 / FACTOR next to one.
    #[arg(long, value_name = "FACTOR", requires = "beside")]
    beside_slowdown: Option<Slowdown>,

    /// The pairs of lanes that share an emulated core, as in 0:1 or 0:1,2:3
    #[arg(long, value_name = "LANES", requires = "beside_slowdown")]
    beside: Option<Lanes>,
}

#[derive(Debug, Args)]
struct BenchArgs {
    /// A folder from `elfen-search index`
    dir: PathBuf,

    /// Queries or luceneutil tasks, one per line [default: those of the built-in corpus]
    #[arg(long, value_name = "FILE")]
    tasks: Option<PathBuf>,

    /// Run all queries this many times
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,

    /// Seed of the order of the queries
    #[arg(long, default_value = "1")]
    seed: u64,

    /// The CPU to run on [default: the last]
    #[arg(long)]
    cpu: Option<usize>,

    #[arg(long)]
    json: bool,
}

pub fn main() -> ExitCode {
    command::main::<Cli>(
        |_| Ok(()),
        |cli, out| {
            match cli.verb {
                Verb::Index(args) => build(&args, out),
                Verb::Tasks(args) => print_tasks(&args, out),
                Verb::Serve(args) => serve(&args, out),
                Verb::Bench(args) => measure(&args, out),
            }?;
            Ok(ExitCode::SUCCESS)
        },
    )
}

fn build(args: &IndexArgs, out: &mut dyn Write) -> Result<(), Failure> {
    catch_interrupts()?;
    let (articles, source) = (Corpus::new(args.seed), Source::Builtin { seed: args.seed });
    let begin = Instant::now();
    let manifest = index::build(articles, args.docs, source, &args.dir, args.force)?;
    writeln!(
        out,
        "{}: {} documents in {:.1} s, corpus checksum {}",
        args.dir.display(),
        manifest.documents,
        begin.elapsed().as_secs_f64(),
        manifest.corpus_checksum
    )
    .map_err(Failure::output)
}

fn print_tasks(args: &TaskArgs, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "{}", tasks(args.docs, args.seed).join("\n")).map_err(Failure::output)
}

fn serve(args: &ServeArgs, out: &mut dyn Write) -> Result<(), Failure> {
    catch_interrupts()?;
    let lanes = if args.lanes.is_empty() { last_cpu()? } else { args.lanes.clone() };
    let emulated = emulated(args, &lanes)?;
    let index = SearchIndex::open(&args.dir)?;
    let warmup = args.warmup.as_deref().map(read_queries).transpose()?.unwrap_or_default();
    let serving = Serving {
        address: args.listen,
        lanes,
        coordinator_cpu: args.coordinator_cpu,
        page: Some(args.service_name.clone()).filter(|name| !name.is_empty()),
        queue: args.queue as usize,
        bounds: Bounds {
            connections: args.connections as usize,
            patience: Duration::from_nanos(args.patience),
            idle: Duration::from_nanos(args.idle),
            drain: Duration::from_nanos(args.drain),
        },
        warmup,
        emulated,
    };
    let ready = |address| writeln!(out, "serving on {address}").and_then(|()| out.flush());
    server::serve(&index, &serving, ready)
}

/// Sets up the emulation and reports it on stderr, because these latencies are not those of a real
/// core.
fn emulated(args: &ServeArgs, workers: &[usize]) -> Result<Option<Emulated>, Failure> {
    let (Some(slowdown), Some(lanes)) = (args.beside_slowdown, &args.beside) else {
        return Ok(None);
    };
    let has_neighbours =
        |cpu| u32::try_from(cpu).is_ok_and(|cpu| !lanes.batches_of(cpu).is_empty());
    if let Some(cpu) = workers.iter().copied().find(|cpu| !has_neighbours(*cpu)) {
        let why = format!("--beside {lanes} has no batch lane for CPU {cpu}");
        let fix = format!("write it as in {cpu}:BATCH");
        return Err(Failure::new(Status::Usage, "arguments", why, fix));
    }
    let kernel = Arc::new(kernel::open(lanes)?);
    to_stderr(&format!("emulated core: slowdown {slowdown}, lanes {lanes}"));
    Ok(Some(Emulated { slowdown, lanes: lanes.clone(), kernel }))
}

fn measure(args: &BenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let index = SearchIndex::open(&args.dir)?;
    let queries = match &args.tasks {
        Some(path) => read_queries(path)?,
        None => {
            let Source::Builtin { seed } = index.manifest.source;
            let tasks = tasks(index.manifest.documents, seed);
            tasks.iter().filter_map(|task| task_query(task)).map(str::to_owned).collect()
        }
    };
    pin(args.cpu.or(last_cpu()?.first().copied()).unwrap_or(0))?;
    let name = format!("search-bench-{}", std::process::id());
    let failed = |error: &dyn Error| {
        Failure::new(Status::Failed, format!("publishing as `{name}`"), error, "see /dev/shm")
    };
    let service = Service::open(&name, 1).map_err(|error| failed(&error))?;
    let mut worker = service.claim(0, 0).map_err(|error| failed(&error))?;
    let report = bench::run(&index, &queries, args.passes, args.seed, &service, &mut worker);
    drop(worker);
    service.remove().map_err(|error| failed(&error))?;
    let report = report.map_err(|error| failed(&error))?;
    output::print(out, args.json, &report, || report.text())
}

fn last_cpu() -> Result<Vec<usize>, Failure> {
    Ok(allowed_cpus()?.last().copied().into_iter().collect())
}

/// Reads queries, one per line. A luceneutil task contributes its query.
fn read_queries(path: &Path) -> Result<Vec<String>, Failure> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| {
        let fix = "name a readable text file";
        Failure::new(Status::Failed, format!("reading {shown}"), error, fix)
    })?;
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let queries: Vec<String> = lines
        .filter_map(|line| if line.contains(": ") { task_query(line) } else { Some(line) })
        .map(str::to_owned)
        .collect();
    if queries.is_empty() {
        let why = "it contains no query";
        return Err(Failure::new(Status::Failed, shown, why, "write one query per line"));
    }
    Ok(queries)
}
