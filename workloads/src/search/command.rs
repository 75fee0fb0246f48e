//! The command line of `elfen-search`, and what each subcommand does.

use super::bench;
use super::corpus::Corpus;
use super::index::{self, IndexError, SearchIndex, Source};
use super::server::{self, Bounds, Emulated, ServeError, Serving};
use super::tasks::tasks;
use crate::beside::kernel::{self, Lacking};
use crate::beside::{Lanes, Slowdown};
use crate::command;
use crate::load::task_query;
use crate::process::{PinError, allowed_cpus, catch_interrupts, pin};
use crate::units::{Nanos, parse_nanos};
use clap::{Args, Parser, Subcommand};
use elfen_rt::service::{ClaimError, Service};
use elfen_rt::signal::service::OpenError;
use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, str};
use thiserror::Error;

const PROGRAM: &str = "elfen-search";
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
    /// The folder to make
    dir: PathBuf,

    /// Index the first so many articles
    #[arg(long, default_value_t = DEFAULT_DOCS, value_parser = clap::value_parser!(u64).range(1..))]
    docs: u64,

    /// Decides the corpus
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,

    /// Replace an index that stands there, in one step
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct TaskArgs {
    /// As the index was built
    #[arg(long, default_value_t = DEFAULT_DOCS, value_parser = clap::value_parser!(u64).range(1..))]
    docs: u64,

    /// As the index was built
    #[arg(long, default_value_t = DEFAULT_SEED)]
    seed: u64,
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// An index that `elfen-search index` made
    dir: PathBuf,

    #[arg(long, default_value = "127.0.0.1:7007")]
    listen: SocketAddr,

    /// The CPUs of the request lanes, one worker each, as in 0 or 0,2 [default: the last CPU]
    #[arg(long, value_delimiter = ',')]
    lanes: Vec<usize>,

    /// The CPU of the coordinator [default: wherever the kernel puts it]
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

    /// For a request to be whole once it began, and for an answer to be taken
    #[arg(long, value_parser = parse_nanos, default_value = "10s")]
    patience: Nanos,

    /// How long a client may ask nothing
    #[arg(long, value_parser = parse_nanos, default_value = "5m")]
    idle: Nanos,

    /// After SIGTERM, for the answers to be out
    #[arg(long, value_parser = parse_nanos, default_value = "10s")]
    drain: Nanos,

    /// Search for each line of this file before serving: queries, or luceneutil tasks
    #[arg(long, value_name = "FILE")]
    warmup: Option<PathBuf>,

    /// Emulate cores that lanes share: a request takes this many times as long while a batch runs
    /// beside it, 1 to 10, by the kernel's account of the batch
    ///
    /// For CPUs that share no core. Needs the task map: root, or group elfen where elfend runs.
    /// The service also publishes emulated counts: an IPC of 1 alone, and of 1 / FACTOR beside a
    /// batch, for dynamic-budget.
    #[arg(long, value_name = "FACTOR", requires = "beside")]
    beside_slowdown: Option<Slowdown>,

    /// The pairs of lanes that are taken to share cores, as in 0:1 or 0:1,2:3
    #[arg(long, value_name = "LANES", requires = "beside_slowdown")]
    beside: Option<Lanes>,
}

#[derive(Debug, Args)]
struct BenchArgs {
    /// An index that `elfen-search index` made
    dir: PathBuf,

    /// Queries or luceneutil tasks, one a line [default: those of the built-in corpus]
    #[arg(long, value_name = "FILE")]
    tasks: Option<PathBuf>,

    /// Ask the whole set this many times
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,

    /// Decides the order of the queries
    #[arg(long, default_value = "1")]
    seed: u64,

    /// The CPU to run on [default: the last]
    #[arg(long)]
    cpu: Option<usize>,

    #[arg(long)]
    json: bool,
}

#[derive(Debug, Error)]
enum SearchFailure {
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Lacking(#[from] Lacking),
    #[error("--beside {lanes} names no batch lane beside CPU {cpu}; write it as in {cpu}:BATCH")]
    NothingBeside { lanes: Lanes, cpu: usize },
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error("reading {path}: {error}; name a readable text file")]
    Tasks { path: String, error: io::Error },
    #[error("{path} holds no query; write one a line")]
    NoTasks { path: String },
    #[error("opening a service page: {0}")]
    Page(#[from] OpenError),
    #[error("claiming a slot of the service page: {0}")]
    Claim(#[from] ClaimError),
    #[error("installing the handler of Ctrl-C: {0}")]
    Interrupt(#[from] nix::errno::Errno),
    #[error("{0}")]
    Io(#[from] io::Error),
}

pub fn main() -> ExitCode {
    let cli: Cli = match command::parse(PROGRAM) {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let done = match &cli.verb {
        Verb::Index(args) => build(args),
        Verb::Tasks(args) => print_tasks(args),
        Verb::Serve(args) => serve(args),
        Verb::Bench(args) => measure(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(
            error @ (SearchFailure::Index(IndexError::Exists { .. })
            | SearchFailure::NothingBeside { .. }),
        ) => command::usage(PROGRAM, &error.to_string()),
        Err(SearchFailure::Lacking(lacking)) => command::unsupported(PROGRAM, &lacking.to_string()),
        Err(error) => command::failure(PROGRAM, &error.to_string()),
    }
}

fn build(args: &IndexArgs) -> Result<(), SearchFailure> {
    catch_interrupts()?;
    let (articles, source) = (Corpus::new(args.seed), Source::Builtin { seed: args.seed });
    let begin = Instant::now();
    let on_terminal = io::stderr().is_terminal();
    let manifest = index::build(articles, args.docs, source, &args.dir, args.force, |articles| {
        if on_terminal {
            eprint!("\r{articles} articles");
        }
    });
    if on_terminal {
        eprintln!();
    }
    let manifest = manifest?;
    Ok(command::say(&format!(
        "{}: {} documents in {:.1} s, corpus checksum {}\n",
        args.dir.display(),
        manifest.documents,
        begin.elapsed().as_secs_f64(),
        manifest.corpus_checksum
    ))?)
}

fn print_tasks(args: &TaskArgs) -> Result<(), SearchFailure> {
    Ok(command::say(&(tasks(args.docs, args.seed).join("\n") + "\n"))?)
}

fn serve(args: &ServeArgs) -> Result<(), SearchFailure> {
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
    let ready = |address| command::say(&format!("serving on {address}\n"));
    Ok(server::serve(&index, &serving, ready)?)
}

/// What is emulated, with a line that says so: these latencies are not to be taken for a core's.
fn emulated(args: &ServeArgs, workers: &[usize]) -> Result<Option<Emulated>, SearchFailure> {
    let (Some(slowdown), Some(lanes)) = (args.beside_slowdown, &args.beside) else {
        return Ok(None);
    };
    let has_neighbours =
        |cpu| u32::try_from(cpu).is_ok_and(|cpu| !lanes.batches_of(cpu).is_empty());
    if let Some(cpu) = workers.iter().copied().find(|cpu| !has_neighbours(*cpu)) {
        return Err(SearchFailure::NothingBeside { lanes: lanes.clone(), cpu });
    }
    let kernel = Arc::new(kernel::open(lanes)?);
    command::complain(PROGRAM, &format!("emulated core: slowdown {slowdown}, lanes {lanes}"));
    Ok(Some(Emulated { slowdown, lanes: lanes.clone(), kernel }))
}

fn measure(args: &BenchArgs) -> Result<(), SearchFailure> {
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
    let service = Service::open(&name, 1)?;
    let mut worker = service.claim(0, 0)?;
    let report = bench::run(&index, &queries, args.passes, args.seed, &service, &mut worker);
    drop(worker);
    service.remove().map_err(|error| io::Error::other(error.to_string()))?;
    let report = report?;
    let text = match args.json {
        true => serde_json::to_string(&report).map_err(io::Error::from)? + "\n",
        false => report.text(),
    };
    Ok(command::say(&text)?)
}

fn last_cpu() -> Result<Vec<usize>, PinError> {
    Ok(allowed_cpus()?.last().copied().into_iter().collect())
}

/// Queries one a line; of a luceneutil task, its query.
fn read_queries(path: &Path) -> Result<Vec<String>, SearchFailure> {
    let shown = || path.display().to_string();
    let text =
        fs::read_to_string(path).map_err(|error| SearchFailure::Tasks { path: shown(), error })?;
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let queries: Vec<String> = lines
        .filter_map(|line| if line.contains(": ") { task_query(line) } else { Some(line) })
        .map(str::to_owned)
        .collect();
    if queries.is_empty() { Err(SearchFailure::NoTasks { path: shown() }) } else { Ok(queries) }
}
