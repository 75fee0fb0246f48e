//! Goal: Prometheus can read the output of `elfen metrics`, and no client can delay other clients.
//! Method: a strict parser of the text format reads the metrics of a service and a run. Clients
//! send nothing or too much, or close their connections. The dashboard and the alerts use only
//! existing metrics.

mod needs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_rt::service::Service;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A parsed text: the kind of each family, and the value of each sample by its name and labels.
#[derive(Debug, Default)]
struct Exposition {
    kinds: BTreeMap<String, String>,
    values: BTreeMap<String, f64>,
}

impl Exposition {
    /// Parses a text. Panics if it violates the format or the naming conventions.
    fn parse(text: &str) -> Self {
        assert!(text.ends_with('\n'), "the last line ends");
        let mut all = Self::default();
        let (mut helped, mut family) = (String::new(), String::new());
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, words) = help.split_once(' ').expect("a help has words");
                assert!(is_name(name) && words.ends_with('.'), "{line}");
                helped = name.to_owned();
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a type has a kind");
                assert_eq!(name, helped, "help and type stand together");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert!(
                    !["_ns", "_ms", "_us", "_bucket", "_sum"].iter().any(|e| name.ends_with(e))
                );
                assert!(
                    all.kinds.insert(name.to_owned(), kind.to_owned()).is_none(),
                    "{line} twice"
                );
                family = name.to_owned();
            } else {
                all.sample(&family, line);
            }
        }
        all.check_histograms();
        all
    }

    fn sample(&mut self, family: &str, line: &str) {
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let suffix = name.strip_prefix(family).unwrap_or_else(|| panic!("{line} in {family}"));
        let histogram = self.kinds[family] == "histogram";
        assert_eq!(["_bucket", "_sum", "_count"].contains(&suffix), histogram, "{line}");
        assert!(histogram || suffix.is_empty(), "{line}");
        check_labels(labels, line);
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(value.is_finite() && (value >= 0.0 || name.ends_with("_ratio")), "{line}");
        assert!(self.values.insert(series.to_owned(), value).is_none(), "{line} twice");
    }

    /// Asserts that buckets are sorted and cumulative, and that the last bucket equals the count.
    fn check_histograms(&self) {
        let mut buckets: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for (series, &value) in &self.values {
            let at = [",le=\"", "{le=\""].iter().find_map(|label| series.find(label));
            let Some(at) = at else { continue };
            let (rest, le) = (&series[..at], series[at + 5..].trim_end_matches("\"}"));
            let le = if le == "+Inf" { f64::INFINITY } else { le.parse().expect("a number") };
            buckets.entry(rest.to_owned()).or_default().push((le, value));
        }
        for (series, mut of) in buckets {
            of.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(of.len() > 10 && of.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{series}");
            let count = series.replace("_bucket", "_count");
            let count = if count.contains('{') { count + "}" } else { count };
            assert_eq!(of.last(), Some(&(f64::INFINITY, self.values[&count])), "{series}");
        }
    }

    /// The value of a sample of this name with these labels.
    fn value(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let is = |series: &&String| {
            series.split('{').next() == Some(name) && labels.iter().all(|l| series.contains(l))
        };
        self.values.keys().find(is).map(|series| self.values[series])
    }
}

fn is_name(name: &str) -> bool {
    name.starts_with("elfen_") && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
}

/// Asserts the syntax `a="b",c="d"}`, with its three escapes and no others.
fn check_labels(labels: &str, line: &str) {
    let mut rest = labels;
    while rest != "}" {
        let (name, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
        assert!(
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "{line}"
        );
        let mut escaped = false;
        let end = after.char_indices().find(|&(_, c)| {
            assert!(!escaped || ['\\', '"', 'n'].contains(&c), "{line}");
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let (end, _) = end.unwrap_or_else(|| panic!("{line}"));
        rest = &after[end + 1..];
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
}

fn elfen(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.env("ELFEN_CONFIG", "/dev/null").env_remove("ELFEN_LANES").args(words);
    command
}

fn once() -> Exposition {
    let output = elfen(&["metrics", "--once"]).output().expect("elfen starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Exposition::parse(&String::from_utf8(output.stdout).expect("UTF-8"))
}

/// `elfen metrics` on a free port. It is killed when this drops.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn start() -> Self {
        let mut command = elfen(&["metrics", "--listen", "127.0.0.1:0"]);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("elfen starts");
        let mut line = String::new();
        let stderr = child.stderr.take().expect("piped");
        BufReader::new(stderr).read_line(&mut line).expect("it says where it listens");
        let address = line.trim().strip_prefix("elfen: metrics at http://").expect("an address");
        let address =
            address.strip_suffix("/metrics").expect("a path").parse().expect("an address");
        Self { child, address }
    }

    fn connect(&self) -> TcpStream {
        let client = TcpStream::connect(self.address).expect("it listens");
        client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        client
    }

    /// Sends a request. Returns head and body of the answer.
    fn ask(&self, request: &str) -> (String, String) {
        let mut client = self.connect();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
        (head.to_owned(), body.to_owned())
    }

    fn scrape(&self) -> Exposition {
        let (head, body) = self.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        Exposition::parse(&body)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
fn metrics_of_a_service_and_a_run_are_served() {
    needs::two_cpus();
    let name = format!("metrics-{}", std::process::id());
    let service = Service::open(&name, 1).expect("a page");
    let mut worker = service.claim(0, 0).expect("the lane is free");
    let server = Server::start();
    let options = ["run", "--lanes", "0:1", "--source", "service", "--service", &name];
    let slo = ["--policy", "slo-budget", "--slo", "p99=100s", "--", "sleep", "60"];
    let mut batch = elfen(&[&options[..], &slo].concat()).stderr(Stdio::null()).spawn().unwrap();
    let (of_service, mut pid) = (format!("service=\"{name}\""), None);
    let start = Instant::now();
    let lane_of = |seen: &Exposition, pid: u32| {
        seen.value("elfen_batch_slo_seconds", &[&format!("pid=\"{pid}\""), "program=\"sleep\""])
    };
    while pid.is_none() && start.elapsed() < Duration::from_secs(20) {
        // The pid of a run is the pid of its program, a descendant of the launcher.
        let seen = server.scrape();
        pid = descendants(batch.id()).into_iter().find(|pid| lane_of(&seen, *pid).is_some());
    }
    let pid = format!("pid=\"{}\"", pid.expect("the run shows up"));
    (1..=5).for_each(|request| {
        worker.begin(request);
        worker.end();
    });
    service.set_queue_len(0, 3);
    worker.begin(6);
    let seen = server.scrape();
    // The launcher passes SIGTERM on. SIGKILL would leave the batch behind.
    let launcher = Pid::from_raw(i32::try_from(batch.id()).expect("a pid"));
    kill(launcher, Signal::SIGTERM).expect("it is ours");
    batch.wait().ok();
    let is =
        |name: &str, labels: &[&str]| seen.value(name, labels).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(is("elfen_service_requests_total", &[&of_service]), 5.0);
    assert_eq!(is("elfen_service_latency_seconds_count", &[&of_service]), 5.0);
    assert_eq!(is("elfen_service_queue_length", &[&of_service]), 3.0);
    assert_eq!(is("elfen_service_running_requests", &[&of_service, "request_lane=\"0\""]), 1.0);
    assert_eq!(is("elfen_batch_slo_seconds", &[&pid, "quantile=\"0.99\""]), 100.0);
    assert_eq!(is("elfen_batch_info", &[&pid, "policy=\"slo-budget\""]), 1.0);
    let headroom = is("elfen_batch_slo_headroom_ratio", &[&pid]);
    assert!(headroom > 0.5 && headroom < 1.0, "five requests of no length: {headroom}");
    let lane = [pid.as_str(), "lane=\"1\"", "request_lane=\"0\""];
    let states = ["off", "running", "napping", "held"].map(|state| format!("state=\"{state}\""));
    let states = states.map(|s| is("elfen_lane_state", &[&lane[..], &[s.as_str()]].concat()));
    assert_eq!(states.iter().sum::<f64>(), 1.0, "{states:?}");
    assert!(is("elfen_lane_reaction_seconds_count", &lane) >= 0.0);
    drop(worker);
    service.remove().ok();
}

/// All descendants of a process.
fn descendants(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = list.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.flat_map(|pid| [vec![pid], descendants(pid)].concat()).collect()
}

/// Goal: clients that misbehave do not delay others. Method: more clients of every kind than the
/// server accepts at once, and then a regular scrape.
#[test]
fn misbehaving_clients_do_not_delay_others() {
    let server = Server::start();
    let silent: Vec<TcpStream> = (0..40).map(|_| server.connect()).collect();
    let mut endless = server.connect();
    let flood = "GET /metrics HTTP/1.1\r\n".to_owned() + &"X: y\r\n".repeat(10_000);
    // The server may close the connection during this write.
    endless.write_all(flood.as_bytes()).ok();
    for _ in 0..10 {
        drop(server.connect());
    }
    for _ in 0..3 {
        assert!(server.scrape().value("elfen_build_info", &[]).is_some());
    }
    drop(silent);
    let answers = [
        ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "),
        ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 "),
        ("\r\n\r\n", "HTTP/1.1 405 "),
        ("GET /metrics?x=y HTTP/1.0\r\n\r\n", "HTTP/1.1 200 "),
    ];
    for (request, expected) in answers {
        let (head, _) = server.ask(request);
        assert!(head.starts_with(expected), "{request:?}: {head}");
    }
    let (head, body) = server.ask("HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.contains("200 OK") && !head.contains("Content-Length: 0") && body.is_empty());
}

#[test]
fn a_taken_port_is_a_failure() {
    let server = Server::start();
    let output = elfen(&["metrics", "--listen", &server.address.to_string()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.starts_with("elfen: listening on 127.0.0.1:") && stderr.contains("--listen"));
}

/// The expressions in the file of the alerts.
fn alerts() -> Vec<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = file.join("../packaging/prometheus/elfen.rules.yml");
    let text = fs::read_to_string(file).unwrap();
    let mut found: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in text.lines().map(str::trim) {
        match (line.strip_prefix("expr: "), found.last_mut()) {
            (Some(expression), _) => {
                found.push(expression.trim_start_matches(">-").to_owned());
                goes_on = expression == ">-";
            }
            (None, Some(last)) if goes_on && !line.contains(": ") => *last += line,
            _ => goes_on = false,
        }
    }
    assert_eq!(found.len(), text.matches("- alert: ").count());
    assert!(found.iter().all(|expression| expression.len() > 10), "{found:?}");
    found
}

/// Goal: panels and alerts use only families that `elfen metrics` serves, and nearly all of them.
/// Method: compare every name in every expression with the served families.
#[test]
fn the_dashboard_and_alerts_use_existing_metrics() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/grafana/elfen.json");
    let dashboard: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(file).unwrap()).expect("JSON");
    let families = once().kinds;
    let served: BTreeSet<String> = families
        .iter()
        .flat_map(|(name, kind)| match kind.as_str() {
            "histogram" => ["_bucket", "_sum", "_count"].map(|s| format!("{name}{s}")).to_vec(),
            _ => vec![name.clone()],
        })
        .collect();
    let mut expressions = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{}", panel["title"]);
        expressions.extend(targets.iter().map(|t| t["expr"].as_str().expect("an expression")));
    }
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    expressions.extend(variables.iter().filter_map(|v| v["query"]["query"].as_str()));
    assert_eq!(expressions.len(), 22, "no query is overlooked");
    let alerts = alerts();
    expressions.extend(alerts.iter().map(String::as_str));
    let mut asked = BTreeSet::new();
    for expression in expressions {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let names: Vec<&str> = words.filter(|word| word.starts_with("elfen_")).collect();
        assert!(!names.is_empty(), "{expression}");
        for name in names {
            assert!(served.contains(name), "{name} in {expression}");
            // A graph of a counter without a rate is useless.
            let kind = families.get(name).map(String::as_str);
            let is_of_time = ["rate(", "increase("].iter().any(|of| expression.contains(of));
            assert!(kind != Some("counter") || is_of_time, "{expression}");
            asked.insert(name.to_owned());
        }
    }
    let napped = "elfen_lane_napped_seconds_total";
    let shown = |name: &String| asked.iter().any(|a| a.starts_with(name.as_str()));
    let forgotten: Vec<&String> = families.keys().filter(|name| !shown(name)).collect();
    let left_out = [
        "elfen_build_info",
        "elfen_confinement",
        "elfen_fence_processes",
        "elfen_lane_state",
        "elfen_service_up",
        napped,
    ];
    assert!(forgotten.iter().all(|name| left_out.contains(&name.as_str())), "{forgotten:?}");
}
