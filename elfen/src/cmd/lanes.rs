//! `elfen lanes`: prints the machine's pairs of lanes, and why it has no more.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::table;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::lane_args::{LaneArgs, source, topology};
use elfen_machine::lanes::{self, Lanes};
use elfen_machine::pair::Pair;
use elfen_machine::topology::{CoreKind, Topology};
use serde::Serialize;

const HOST_NAME: &str = "/proc/sys/kernel/hostname";

const EXAMPLES: &str = "\
Examples:
  elfen lanes                            the pairs of this machine
  elfen lanes --json                     the same for scripts
  elfen lanes --lanes 0:1,2:3            whether these pairs can be used
  elfen lanes --slurm >>slurm.conf       this machine as a node of Slurm
  elfen lanes --dump-machine > machine   record this machine, for a report";

/// List this machine's pairs of lanes, and what limits them
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LanesArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Print the line of slurm.conf that describes this machine as a node of its batch lanes
    #[arg(long, conflicts_with = "dump_machine")]
    slurm: bool,

    /// Print what was read from sysfs and procfs, one `PATH: CONTENT` a line, instead of the pairs
    #[arg(long, conflicts_with = "json")]
    dump_machine: bool,

    /// Read a machine that --dump-machine recorded instead of this one; for tests and reports
    #[arg(long, value_name = "FILE", env = "ELFEN_MACHINE")]
    machine: Option<PathBuf>,
}

pub(crate) fn run(args: &LanesArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let source = source(args.machine.as_deref(), "elfen lanes")?;
    let topology = topology(&source)?;
    if args.dump_machine {
        out.write_all(source.recording().as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let lanes = args.lanes.resolve(&topology)?;
    for warning in &lanes.warnings {
        elfen_console::output::warn(warning);
    }
    if args.slurm {
        let node = SlurmNode::new(&lanes)?;
        elfen_console::output::print(out, args.json, &node, || node.line())?;
        return Ok(ExitCode::SUCCESS);
    }
    let report = LanesReport::new(&topology, lanes, args.lanes.by_hand());
    elfen_console::output::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

/// The content of `--json`. The table has the same content.
#[derive(Serialize)]
struct LanesReport {
    smt: bool,
    pairs: Vec<PairReport>,
    /// Online CPUs that are in no default pair, grouped by the reason.
    unpaired: Vec<UnpairedReport>,
    /// `topology`, or `hand` for lanes given with --lanes or ELFEN_LANES.
    chosen_by: &'static str,
    limits: Vec<String>,
    warnings: Vec<String>,
    /// What the user can do on a machine without pairs.
    fix: Option<String>,
    smt_control: Option<String>,
    virtual_machine: bool,
    cpus_present: CpuSet,
    cpus_offline: CpuSet,
    cpus_usable: CpuSet,
    cpuset: Option<CpuSet>,
    isolated: CpuSet,
    nohz_full: CpuSet,
}

#[derive(Serialize)]
struct PairReport {
    /// The pair in the syntax of `--lanes`.
    lanes: String,
    request: u32,
    batch: CpuSet,
    core: Option<u32>,
    die: Option<u32>,
    package: Option<u32>,
    node: Option<u32>,
    remarks: Vec<String>,
}

#[derive(Serialize)]
struct UnpairedReport {
    cpus: CpuSet,
    reason: &'static str,
}

/// A node of Slurm, with the keys of slurm.conf.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct SlurmNode {
    node_name: String,
    #[serde(rename = "CPUs")]
    cpus: usize,
    features: &'static str,
}

impl SlurmNode {
    fn new(lanes: &Lanes) -> Result<Self, Failure> {
        if lanes.pairs.is_empty() {
            let why = "there is no batch lane for jobs";
            let fix = "name pairs with --lanes; `elfen lanes` lists those of this machine";
            return Err(Failure::new(Status::Unsupported, "a node for Slurm", why, fix));
        }
        let batch: CpuSet = lanes.pairs.iter().flat_map(|pair| pair.batch.iter()).collect();
        let name = std::fs::read_to_string(HOST_NAME)
            .map_err(|error| Failure::new(Status::Failed, HOST_NAME, error, "mount /proc"))?;
        // By default, Slurm names a node by the first part of the host name.
        let name = name.trim().split('.').next().unwrap_or_default();
        Ok(Self { node_name: name.to_owned(), cpus: batch.len(), features: "elfen" })
    }

    fn line(&self) -> String {
        let Self { node_name, cpus, features } = self;
        format!("NodeName={node_name} CPUs={cpus} Features={features} State=UNKNOWN\n")
    }
}

impl LanesReport {
    fn new(topology: &Topology, lanes: Lanes, by_hand: bool) -> Self {
        let unpaired = if by_hand { Vec::new() } else { lanes::unpaired(topology) };
        let unpaired = unpaired.into_iter().map(|(reason, cpus)| UnpairedReport { cpus, reason });
        Self {
            smt: topology.smt(),
            pairs: lanes.pairs.iter().map(|pair| PairReport::new(pair, topology)).collect(),
            unpaired: unpaired.collect(),
            chosen_by: if by_hand { "hand" } else { "topology" },
            limits: lanes::limits(topology),
            warnings: lanes.warnings,
            fix: lanes.pairs.is_empty().then(|| lanes::remedy(topology)),
            smt_control: topology.smt_control.clone(),
            virtual_machine: topology.hypervisor,
            cpus_present: topology.present.clone(),
            cpus_offline: topology.offline.clone(),
            cpus_usable: topology.usable.clone(),
            cpuset: topology.cpuset.clone(),
            isolated: topology.isolated.clone(),
            nohz_full: topology.nohz_full.clone(),
        }
    }

    fn text(&self) -> String {
        let mut text = self.table();
        for UnpairedReport { cpus, reason } in &self.unpaired {
            text += &format!("no pair: {cpus} ({reason})\n");
        }
        if !self.limits.is_empty() {
            text += &format!("limits: {}\n", self.limits.join("; "));
        }
        if let Some(fix) = &self.fix {
            text += &format!("to do: {fix}\n");
        }
        text
    }

    fn table(&self) -> String {
        if self.pairs.is_empty() {
            return "no pairs\n".to_owned();
        }
        // Core numbers repeat in each package. With one package, the column of packages is useless.
        let packages = self.pairs.iter().any(|pair| pair.package != self.pairs[0].package);
        let mut heading = vec!["REQUEST", "BATCH", "PACKAGE", "CORE", "NODE", "REMARKS"];
        let mut rows: Vec<_> = self.pairs.iter().map(PairReport::row).collect();
        if !packages {
            heading.remove(2);
            rows.iter_mut().for_each(|row| drop(row.remove(2)));
        }
        table::lines(&heading, &rows)
    }
}

impl PairReport {
    fn new(pair: &Pair, topology: &Topology) -> Self {
        let core = topology.core_of(pair.request);
        Self {
            lanes: pair.to_string(),
            request: pair.request,
            batch: pair.batch.clone(),
            core: core.and_then(|core| core.core),
            die: core.and_then(|core| core.die),
            package: core.and_then(|core| core.package),
            node: core.and_then(|core| core.node),
            remarks: remarks(pair, topology),
        }
    }

    fn row(&self) -> Vec<String> {
        let number = |n: Option<u32>| n.map_or("-".to_owned(), |n| n.to_string());
        vec![
            self.request.to_string(),
            self.batch.to_string(),
            number(self.package),
            number(self.core),
            number(self.node),
            self.remarks.join(", "),
        ]
    }
}

fn remarks(pair: &Pair, topology: &Topology) -> Vec<String> {
    let kind = topology.core_of(pair.request).and_then(|core| core.kind).map(|kind| match kind {
        CoreKind::Performance => "P core".to_owned(),
        CoreKind::Efficient => "E core".to_owned(),
    });
    let named = [(&topology.isolated, "isolated"), (&topology.nohz_full, "nohz_full")];
    let shares = named.into_iter().filter_map(|(set, name)| {
        let lanes: CpuSet = pair.lanes().filter(|&cpu| set.contains(cpu)).collect();
        match lanes.len() {
            0 => None,
            n if n == pair.batch.len() + 1 => Some(name.to_owned()),
            _ => Some(format!("{lanes} {name}")),
        }
    });
    kind.into_iter().chain(shares).collect()
}
