//! `elfen metrics`: serves metrics of lanes, batches, services and fences to Prometheus.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::warn;
use elfen_fence::metrics::machine::Machine;
use elfen_fence::metrics::server::{self, Scraped};

use super::pause::RunDir;
use super::status;

const EXAMPLES: &str = "\
Examples:
  elfen metrics                                for a Prometheus on this machine
  elfen metrics --once | grep _seconds_total   for a first impression
  curl http://127.0.0.1:9752/metrics

The metrics cover the batches and services of this user; for root, all of the machine. elfend \
serves the same metrics if its settings name an address (`metrics`). While `elfen tailor watch` \
runs, they include the causes of the tail latency of its service.";

/// Serve metrics of lanes, batches and services to Prometheus
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MetricsArgs {
    #[command(flatten)]
    run_dir: RunDir,

    /// The address to serve on; with the default, only this machine can connect
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9752")]
    listen: SocketAddr,

    /// Print the metrics once and end
    #[arg(long, conflicts_with = "listen")]
    once: bool,
}

pub(crate) fn run(args: &MetricsArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    // If this machine cannot have batches, the command fails now and not at each scrape.
    status::batches(&args.run_dir)?;
    let machine = Machine::new(args.run_dir.folder().socket());
    if args.once {
        let text = machine
            .scrape()
            .map_err(|error| Failure::new(Status::Failed, "finding batches", error, "try again"))?;
        out.write_all(text.as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let address = args.listen;
    let what = format!("listening on {address}");
    let listener = TcpListener::bind(address).map_err(|error| {
        Failure::new(Status::Failed, &what, error, "choose another with --listen 127.0.0.1:PORT")
    })?;
    let address = listener.local_addr().unwrap_or(address);
    if !address.ip().is_loopback() {
        warn(&format!("every machine that reaches {address} can see which programs run here"));
    }
    to_stderr(&format!("metrics at http://{address}/metrics"));
    let error = server::serve(&listener, &Arc::new(machine));
    Err(Failure::new(Status::Failed, what, error, "start it again"))
}
