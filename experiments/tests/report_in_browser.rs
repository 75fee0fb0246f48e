//! Goal: a report is whole by itself in a browser, and can be read in both of its themes. Method:
//! headless Chromium, which says what it complains of, what it would load, and which colours it
//! draws with. It resolves no names, so nothing leaves this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use elfen_rt::signal::event::{Event, Kind, Switch};
use elfen_tailor::trace::{Header, Note, Sink, ThreadName, Writer};
use serde_json::Value;
use tempfile::TempDir;

const BROWSER: &str = "chromium";
const LIGHT: u32 = 1;
const DARK: u32 = 0;

/// A folder with pages, and the browser that looks at them.
struct Stage {
    folder: TempDir,
}

/// What the browser said of one page.
struct Seen {
    /// What it wrote to its console.
    console: Vec<String>,
    /// What pages had it ask for, other than files and data.
    requests: Vec<String>,
    /// The page in the end.
    document: String,
}

impl Stage {
    #[track_caller]
    fn new() -> Self {
        let version = Command::new(BROWSER).arg("--version").output().expect("needs Chromium");
        let stderr = String::from_utf8_lossy(&version.stderr);
        assert!(version.status.success(), "needs Chromium: {stderr}");
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The text of what `elfen lab report` makes of these words.
    fn report(&self, words: &[&str]) -> String {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report_files");
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
        command.arg("report").args(words).arg("--html").arg(self.path("report.html"));
        let output = command.current_dir(results).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::read_to_string(self.path("report.html")).unwrap()
    }

    /// The text of what `elfen tailor report` makes of a service whose CPU somebody else has for
    /// 5 ms, now and then.
    fn tailored(&self) -> String {
        fs::write(self.path("hog.trace"), hogged().unwrap()).unwrap();
        let mut command =
            Command::new(Path::new(env!("CARGO_BIN_EXE_elfen-lab")).with_file_name("elfen"));
        command.args(["tailor", "report", "hog.trace", "--html", "hog.html"]);
        let output = command.current_dir(self.folder.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::read_to_string(self.path("hog.html")).unwrap()
    }

    /// Every page there is, with its name: of the simulator, of live runs, of what a thread did,
    /// and of a trace.
    fn pages(&self) -> [(&'static str, String); 4] {
        let simulated = self.report(&["--requests", "1000", "--naps", "nap.json"]);
        let live = self.report(&["results.jsonl"]);
        let seen = self.report(&["truth.shim"]);
        let tailored = self.tailored();
        [("simulated", simulated), ("live", live), ("seen", seen), ("tailored", tailored)]
    }

    fn look_at(&self, page: &str, theme: u32) -> Seen {
        let home = tempfile::tempdir_in(self.folder.path()).unwrap();
        let (file, log) = (self.path("page.html"), home.path().join("requests.json"));
        fs::write(&file, page).unwrap();
        let mut browser = Command::new(BROWSER);
        browser.args(["--headless", "--disable-gpu", "--disable-background-networking"]);
        browser.args(["--enable-logging=stderr", "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND"]);
        // In its sandbox it refuses to be root. All that it shows are pages of ours.
        browser.args(["--no-sandbox", "--dump-dom", "--window-size=1280,800"]);
        browser.arg(format!("--blink-settings=preferredColorScheme={theme}"));
        browser.arg(format!("--log-net-log={}", log.display()));
        browser.arg(format!("--user-data-dir={}", home.path().join("profile").display()));
        browser.arg(format!("file://{}", file.display())).env("HOME", home.path());
        let output = browser.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let console = said.lines().filter(|line| line.contains(":CONSOLE"));
        Seen {
            console: console.map(str::to_owned).collect(),
            requests: asked_for(&fs::read(log).unwrap()),
            document: String::from_utf8(output.stdout).unwrap(),
        }
    }
}

/// Where pages had the browser ask. What it asks for its own sake has no origin.
fn asked_for(log: &[u8]) -> Vec<String> {
    let log: Value = serde_json::from_slice(log).unwrap();
    let start = &log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"];
    assert!(start.is_u64(), "the log has another form");
    let events = log["events"].as_array().unwrap().iter();
    let started = events.filter(|event| event["type"] == *start).map(|event| &event["params"]);
    let of_pages = started.filter(|request| request["initiator"] != "not an origin");
    let urls = of_pages.filter_map(|request| request["url"].as_str());
    let local = |url: &&str| url.starts_with("file:") || url.starts_with("data:");
    urls.filter(|url| !local(url)).map(str::to_owned).collect()
}

/// Without its policy, which would keep it from running our script, and from loading
/// what it had better not name.
fn unfettered(page: &str) -> String {
    const POLICY: &str = "<meta http-equiv=\"Content-Security-Policy\"";
    let (before, after) = page.split_once(POLICY).expect("the page has a policy");
    let (_, after) = after.split_once("/>\n").unwrap();
    format!("{before}{after}")
}

/// What our script has to say.
fn looks(stage: &Stage, page: &str, theme: u32, script: &str) -> Value {
    let page = page.replace("</body>", &format!("<script>{script}</script></body>"));
    let seen = stage.look_at(&page, theme);
    assert_eq!(seen.console, [""; 0]);
    let (_, said) = seen.document.split_once("<pre id=\"seen\">").expect("the script ran");
    let (said, _) = said.split_once("</pre>").unwrap();
    // The rest of what the browser escapes is in the names of marks.
    serde_json::from_str(&said.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        .unwrap()
}

/// A trace: 200 requests of 0.1 ms to thread 10, of which four wait 5 ms for thread 99.
fn hogged() -> std::io::Result<Vec<u8>> {
    const MS: u64 = 1_000_000;
    let (service, hog, connection) = (10, 99, 1);
    let mut events = Vec::new();
    let mut event = |at_ns, thread, kind| events.push(Event { at_ns, thread, kind }.encode());
    let switch = |previous, preempted| {
        let (state, call) = if preempted { (0, None) } else { (1, Some(232)) };
        let (process, iowait, stolen_ns) = (service, false, 0);
        Kind::Switch(Switch { previous, process, preempted, iowait, state, call, stolen_ns })
    };
    event(2, service, switch(0, false));
    for at in 1..=200 {
        let began_ns = at * 10 * MS;
        event(began_ns, 0, Kind::Ready { connection, bytes: 5 });
        event(began_ns, service, Kind::Received { connection, bytes: 5, peek: false });
        let mut end_ns = began_ns + MS / 10 + at;
        if at % 50 == 0 {
            event(began_ns + 10, hog, switch(service, true));
            end_ns += 5 * MS;
            event(end_ns - 10, service, switch(hog, false));
        }
        event(end_ns, service, Kind::Transmitted { connection, end: 1 });
        event(end_ns + 1, service, Kind::Sent { connection, end: 1 });
    }
    let head =
        Header { cpus: 1, port: 80, began_ns: 1, service: "web".into(), ..Header::default() };
    let mut writer = Writer::new(Vec::new(), head)?;
    writer.add_events(0, &events)?;
    let named =
        |(thread, name): (u32, &str)| ThreadName { thread, at_ns: 1, name: name.to_owned() };
    writer.add_note(Note::Names([(service, "web"), (hog, "backup")].map(named).into()))?;
    writer.add_note(Note::Processes(vec![service]))?;
    writer.end(2_010 * MS)
}

#[test]
#[ignore = "needs Chromium"]
fn it_asks_for_nothing_and_complains_of_nothing() {
    let stage = Stage::new();
    for (name, page) in stage.pages() {
        for page in [&page, &unfettered(&page)] {
            let seen = stage.look_at(page, LIGHT);
            assert_eq!((seen.console, seen.requests), (Vec::new(), Vec::new()), "{name}");
            assert!(seen.document.contains("</svg>"));
        }
    }
}

/// Goal: whoever opens a page of `elfen tailor report` sees the slowest request, what it is charged
/// to, and its picture, and scrolls for none of it. Method: where the browser puts them.
#[test]
#[ignore = "needs Chromium"]
fn the_slowest_request_is_on_the_first_screen() {
    let stage = Stage::new();
    let page = stage.tailored();
    assert!(page.contains("<h2>The slowest: 5.10 ms, preempted:backup 5.10 ms"), "{page}");
    let seen = looks(&stage, &unfettered(&page), LIGHT, include_str!("report_files/screen.js"));
    let number = |key: &str| seen[key].as_f64().expect("a number");
    assert!(0.0 < number("cause") && number("cause") < number("picture"), "{seen}");
    assert!(number("picture") <= number("height"), "{seen}");
    assert!(number("bars") >= 4.0 && number("sideways") <= 0.0, "{seen}");
}

/// Goal: the test above can fail. Method: a page that does what a report does not.
#[test]
#[ignore = "needs Chromium"]
fn what_pages_ask_for_and_complain_of_is_found() {
    let stage = Stage::new();
    let seen = stage.look_at(
        "<!DOCTYPE html><img src=\"http://picture.example/it\"><script>no_such_thing()</script>",
        LIGHT,
    );
    assert_eq!(seen.requests, ["http://picture.example/it"]);
    assert!(seen.console.iter().any(|line| line.contains("no_such_thing")), "{:?}", seen.console);
}

/// Goal: light on dark where the reader wants it, and readable in both. Method: the
/// colours of every text and every mark; text has the contrast that WCAG 2.1 asks for
/// (1.4.3), and so have marks (1.4.11).
#[test]
#[ignore = "needs Chromium"]
fn both_themes_can_be_read() {
    let stage = Stage::new();
    for (name, page) in stage.pages() {
        let (page, script) = (unfettered(&page), include_str!("report_files/look.js"));
        let [light, dark] = [LIGHT, DARK].map(|theme| looks(&stage, &page, theme, script));
        let paper = |seen: &Value| seen["paper"].as_f64().unwrap();
        assert!(paper(&light) > 0.8 && paper(&dark) < 0.1, "{light} and {dark}");
        for seen in [light, dark] {
            assert!(seen["texts"].as_u64() > Some(30), "{name}: {seen}");
            assert!(seen["marks"].as_u64() > Some(4), "{name}: {seen}");
            assert!(seen["text"]["contrast"].as_f64() >= Some(4.5), "{name}: {seen}");
            assert!(seen["mark"]["contrast"].as_f64() >= Some(3.0), "{name}: {seen}");
        }
    }
}
