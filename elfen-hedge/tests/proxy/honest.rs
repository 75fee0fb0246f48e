//! Goal: each client of `elfen-hedge` gets exactly one answer, which is its own, whatever happens
//! to the servers. No request is sent twice that must not be. Method: two servers in separate
//! processes, which are stopped alternately, killed, or answer in every form. Each answer names its
//! request.

use std::io::{BufRead, Write};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::rig::{Backend, Client, Hedge, Server, ask, free_address, hedge, require_root, signal};
use nix::sys::signal::Signal;

/// Sends the requests of one client, with every method and form. Returns the number of POST
/// requests.
fn converse(at: std::net::SocketAddr, client: usize, requests: usize) -> usize {
    let mut posts = 0;
    let mut connection = Client::connect(at);
    for number in 0..requests {
        let form = ["length", "chunked", "close"][(number + client) % 3];
        let method = ["GET", "GET", "HEAD", "GET", "POST"][number % 5];
        posts += usize::from(method == "POST");
        let (name, body) =
            (format!("{client}-{number}"), if method == "POST" { "abc" } else { "" });
        connection.send(method, &format!("/{form}/50/{name}"), body);
        let answer = connection.answer(method);
        assert_eq!(answer.code, 200, "{name}: {answer:?}");
        let own = format!("{name} {} by ", body.len());
        let text = answer.text();
        assert!(text.starts_with(&own) || method == "HEAD", "{name}: {text}");
        assert!(text.ends_with("server\n") || method == "HEAD", "{name}: {text}");
        let has_length = answer.head.contains("content-length: ");
        assert_eq!(has_length, form != "chunked", "{name}: {}", answer.head);
    }
    posts
}

/// Stops the servers alternately, sometimes both at once, until `ends` is set.
fn stop_by_turns(servers: [u32; 2], ends: &AtomicBool) {
    let nap = |ms| std::thread::sleep(Duration::from_millis(ms));
    for turn in 0_usize.. {
        if ends.load(Relaxed) {
            return;
        }
        let stopped = if turn % 5 == 4 { &servers[..] } else { &servers[turn % 2..=turn % 2] };
        stopped.iter().for_each(|server| signal(*server, Signal::SIGSTOP));
        nap([10, 20, 100][turn % 3]);
        stopped.iter().for_each(|server| signal(*server, Signal::SIGCONT));
        nap(30);
    }
}

/// The number of requests of each client. HEDGE_REQUESTS sets it, for runs with a million requests.
fn requests() -> usize {
    std::env::var("HEDGE_REQUESTS").map_or(400, |count| count.parse().expect("a number"))
}

#[test]
fn each_client_gets_its_own_answer_once() {
    assert_own_answers(&["look", "after=2ms"]);
}

#[test]
#[ignore = "needs root and eBPF"]
fn each_client_gets_its_own_answer_once_under_hazard() {
    require_root();
    assert_own_answers(&["hazard"]);
}

fn assert_own_answers(policies: &[&str]) {
    const CLIENTS: usize = 8;
    for policy in policies {
        let servers = Server::pair();
        let words = ["--policy", policy, "--max-extra", "30%"];
        let hedge = Hedge::start(servers[0].at, servers[1].at, &words);
        let (at, ends) = (hedge.at, Arc::new(AtomicBool::new(false)));
        let (over, ids) = (Arc::clone(&ends), servers.each_ref().map(|one| one.process.id()));
        let stopper = std::thread::spawn(move || stop_by_turns(ids, &over));
        let client = |client| std::thread::spawn(move || converse(at, client, requests()));
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        let posts: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        ends.store(true, Relaxed);
        stopper.join().unwrap();
        let (done, said) = hedge.end();
        let number = |key: &str| done[key].as_u64().expect("a number");
        assert_eq!(said, "", "{policy}");
        assert_eq!(number("requests"), (CLIENTS * requests()) as u64, "{done}");
        assert!(0 < number("duplicates"), "{policy}: {done}");
        let again = number("duplicates") + number("retries");
        assert!(again * 10 <= number("requests") * 3, "{policy}: {done}");
        assert_eq!((number("unanswered"), number("moved")), (0, 0), "{policy}: {done}");
        assert_eq!((number("replayed"), number("retries")), (0, 0), "{policy}: {done}");
        assert!(posts > 0);
        // Checks the last requests, for which most may have gone wrong.
        for name in (0..CLIENTS).flat_map(|client| {
            let last = requests() - 1;
            (last.saturating_sub(99)..=last)
                .filter(|number| number % 5 == 4)
                .map(move |number| format!("{client}-{number}"))
        }) {
            let counts: u32 = servers.iter().map(|server| server.count(&name)).sum();
            assert_eq!(counts, 1, "POST {name} was worked for once");
        }
    }
}

#[test]
fn dead_servers_are_left_and_reported_at_once() {
    let [mut first, mut second] = Server::pair();
    let hedge = Hedge::start(first.at, second.at, &["--policy", "none"]);
    let (at, mut kept) = (hedge.at, Client::connect(hedge.at));
    let mut by = |method: &str| {
        kept.send(method, "/length/0/a", "");
        let answer = kept.answer(method);
        (answer.code, String::from_utf8(answer.body).unwrap())
    };
    assert_eq!(by("GET"), (200, "a 0 by first server\n".to_owned()));
    first.end();
    // The idle connection is closed, and a new one is refused, so nothing was sent.
    assert_eq!(by("POST"), (200, "a 0 by second server\n".to_owned()));
    assert_eq!(by("GET"), (200, "a 0 by second server\n".to_owned()));
    second.end();
    assert_eq!(by("GET").0, 502);
    for method in ["GET", "POST"] {
        let answer = ask(at, method, "/length/0/b");
        assert_eq!(
            (answer.code, answer.text()),
            (502, "elfen-hedge: no server answered this request\n")
        );
    }
    let (done, said) = hedge.end();
    assert_eq!((&done["swaps"], &done["duplicates"]), (&1.into(), &0.into()), "{done}");
    assert_eq!((&done["unanswered"], &done["retries"]), (&3.into(), &0.into()), "{done}");
    let lines = said.lines().filter(|line| line.contains(" takes no connections: "));
    assert_eq!(lines.count(), 2, "one line each: {said}");
}

/// Both servers stand still. So nothing is sent twice, and a client that waits too long gets status
/// 504.
#[test]
fn with_both_servers_paused_nothing_is_sent_twice() {
    let servers = Server::pair();
    let (to, backup) = (servers[0].at, servers[1].at);
    let hedge = Hedge::start(to, backup, &["--give-up", "5s", "--max-extra", "100%"]);
    assert_eq!(ask(hedge.at, "GET", "/length/0/a").code, 200);
    for server in &servers {
        signal(server.process.id(), Signal::SIGSTOP);
        while !server.is_stopped() {
            std::thread::yield_now();
        }
    }
    assert_eq!(ask(hedge.at, "GET", "/length/0/b").code, 504);
    servers.iter().for_each(|server| signal(server.process.id(), Signal::SIGCONT));
    assert_eq!(ask(hedge.at, "GET", "/length/0/c").code, 200);
    let (done, _) = hedge.end();
    assert_eq!((&done["requests"], &done["unanswered"]), (&3.into(), &1.into()), "{done}");
    let counts: u32 = servers.iter().map(|server| server.count("b")).sum();
    assert!(counts <= 1, "{done}");
}

/// Goal: pipelined requests are answered in order. A client may close its side, or disconnect
/// during an answer. Other clients are served meanwhile.
#[test]
fn pipelining_and_half_closed_clients_are_served() {
    let servers = Server::pair();
    let hedge = Hedge::start(servers[0].at, servers[1].at, &[]);
    let mut client = Client::connect(hedge.at);
    for name in ["a", "b", "c", "d", "e"] {
        client.send("GET", &format!("/chunked/0/{name}"), "");
    }
    client.half_close();
    for name in ["a", "b", "c", "d", "e"] {
        assert!(client.answer("GET").text().starts_with(&format!("{name} 0 by")));
    }
    assert!(client.is_over());
    let mut client = Client::connect(hedge.at);
    client.send("GET", "/endless/0/c", "");
    assert_eq!(client.line(), "HTTP/1.1 200 OK\r\n");
    client.bytes(1 << 20);
    let reader = std::thread::spawn(move || {
        client.bytes(64 << 20);
        drop(client);
    });
    assert_eq!(ask(hedge.at, "GET", "/length/0/e").code, 200);
    reader.join().unwrap();
    assert_eq!(ask(hedge.at, "GET", "/length/0/d").code, 200);
    let mut old = Client::connect(hedge.at);
    old.write(b"GET /length/0/old HTTP/1.0\r\n\r\n");
    assert!(old.answer("GET").text().starts_with("old 0 by"));
    assert!(old.is_over());
    let mut waits = Client::connect(hedge.at);
    waits.write(
        b"POST /length/0/waits HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\
          Expect: 100-continue\r\n\r\n",
    );
    assert_eq!(waits.line(), "HTTP/1.1 100 Continue\r\n");
    assert_eq!(waits.line(), "\r\n");
    waits.write(b"abc");
    assert!(waits.answer("POST").text().starts_with("waits 3 by"));
    let (done, _) = hedge.end();
    assert_eq!((&done["unanswered"], &done["refused"]), (&0.into(), &0.into()), "{done}");
}

/// Goal: a client that does not read its answer makes the server wait, and does not fill the
/// proxy's memory. Method: an endless answer, and the proxy's resident memory.
#[test]
fn a_slow_reader_fills_no_memory() {
    let servers = Server::pair();
    let hedge = Hedge::start(servers[0].at, servers[1].at, &["--policy", "none"]);
    let resident = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", hedge.process.id()));
        let status = status.unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    };
    let mut slow = Client::connect(hedge.at);
    slow.send("GET", "/endless/0/slow", "");
    assert_eq!(slow.line(), "HTTP/1.1 200 OK\r\n");
    let before = resident();
    // Another client reads 100 MB, which is enough time for the proxy's memory to fill.
    let mut fast = Client::connect(hedge.at);
    fast.send("GET", "/endless/0/fast", "");
    fast.bytes(100 << 20);
    let after = resident();
    assert!(after < before + (16 << 20), "{before} to {after} bytes");
}

/// Goal: answers of every form arrive completely, and a client can detect a truncated answer.
/// Method: a server that writes raw bytes.
#[test]
fn answers_are_framed_again() {
    let backend = Backend::start(|request, stream| {
        let answer: &[u8] = match request.split(' ').nth(1).unwrap() {
            "/until-close" => b"HTTP/1.1 200 OK\r\n\r\nto the end",
            "/hints" => {
                b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n\
                HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
            }
            "/none" => b"HTTP/1.1 204 No Content\r\n\r\n",
            "/same" => b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
            "/trailers" => {
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: End\r\n\r\n\
                2;ext=1\r\nok\r\n0\r\nEnd: x\r\n\r\n"
            }
            "/hop" => {
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-Own\r\nX-Own: 1\r\n\
                Keep-Alive: timeout=5\r\nProxy-Authenticate: x\r\nX-Kept: 1\r\n\r\nok"
            }
            "/short" => b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
            "/both" => {
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n\
                2\r\nok\r\n0\r\n\r\n"
            }
            "/switch" => b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
            _ => b"SSH-2.0-OpenSSH\r\n\r\n",
        };
        stream.write_all(answer).unwrap();
        matches!(request.split(' ').nth(1), Some("/hints" | "/none" | "/same" | "/trailers"))
    });
    let other = Backend::echo();
    let hedge = Hedge::start(backend.at, other.at, &["--policy", "none"]);
    let get = |path: &str| ask(hedge.at, "GET", path);
    assert_eq!(get("/until-close").body, b"to the end");
    assert_eq!((get("/hints").code, get("/none").code, get("/same").code), (200, 204, 304));
    let trailers = get("/trailers");
    assert_eq!(trailers.body, b"ok");
    assert!(!trailers.head.contains("trailer"), "{}", trailers.head);
    let hop = get("/hop");
    assert!(hop.head.contains("x-kept: 1\r\n"), "{}", hop.head);
    for gone in ["x-own", "keep-alive", "proxy-"] {
        assert!(!hop.head.contains(gone), "{gone}: {}", hop.head);
    }
    let mut short = Client::connect(hedge.at);
    short.send("GET", "/short", "");
    while short.line() != "\r\n" {}
    assert_eq!(short.bytes(2), b"ok");
    assert!(short.is_over());
    for wrong in ["/both", "/switch", "/other"] {
        assert_eq!(get(wrong).code, 502, "{wrong}");
    }
    assert_eq!(other.requests().len(), 0, "an invalid answer is not asked for again");
    let (done, _) = hedge.end();
    assert_eq!((&done["unanswered"], &done["retries"]), (&3.into(), &0.into()), "{done}");
}

#[test]
fn wrong_arguments_are_rejected() {
    let (a, b) = (free_address().to_string(), free_address().to_string());
    let words = |listen: &str, to: &str, backup: &str, more: &[&str]| -> Output {
        let fixed = ["--listen", listen, "--to", to, "--backup", backup];
        hedge(&[&fixed[..], more].concat()).output().unwrap()
    };
    let none = ["--policy", "none"];
    let cases = [
        (words(&a, &b, &b, &none), 2, "--to and --backup are the same"),
        (words(&a, &a, &b, &none), 2, "it would send requests to itself"),
        (words("0.0.0.0:7", &b, "127.0.0.1:7", &none), 2, "it would send requests to itself"),
        (words("0.0.0.0:0", &a, &b, &none), 2, "other machines may reach 0.0.0.0; listen on 127"),
        (words("[::]:0", &a, &b, &none), 2, "add --public if this is intended"),
        (words("192.0.2.1:0", &a, &b, &none), 2, "other machines may reach 192.0.2.1"),
        (words("127.0.0.1:0", &a, &b, &["--methods", "GET,POST"]), 2, "invalid value 'POST'"),
        (words("127.0.0.1:0", &a, &b, &["--policy", "halt"]), 2, "invalid value 'halt'"),
        (words("127.0.0.1:0", &a, &b, &["--max-extra", "5"]), 2, "invalid value '5'"),
        (words("127.0.0.1:0", &a, &b, &["--head-timeout", "0s"]), 2, "a time must not be 0"),
        (words("127.0.0.1:0", &a, "192.0.2.1:80", &[]), 2, "one is not on this machine"),
        (words("localhost", &a, &b, &[]), 2, "it must be an IP address and a port"),
        (hedge(&[]).output().unwrap(), 2, "--listen <ADDRESS>"),
        (hedge(&["--listen", ":0"]).output().unwrap(), 2, "--to <ADDRESS>"),
    ];
    for (output, status, why) in cases {
        let said = std::str::from_utf8(&output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{why}: {said}");
        assert!(said.lines().count() == 1 && said.contains(why), "{why}: {said}");
    }
    let help = hedge(&["--help"]).output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.status.success() && text.contains("Examples:\n  elfen-hedge "), "{text}");
    assert!(!text.contains("Commands:") && !text.contains("[COMMAND]"), "{text}");
    let version = hedge(&["--version"]).output().unwrap();
    assert!(version.stdout.starts_with(b"elfen-hedge 0."));
}

/// Goal: completions for packages offer what the help shows, and no more.
#[test]
fn completions_offer_what_help_shows() {
    let folder = tempfile::tempdir().unwrap();
    let output = hedge(&["completions", folder.path().to_str().unwrap()]).output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(listed.lines().count(), 3, "{listed}");
    for path in listed.lines() {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("poll-interval") && !text.contains("completions"), "{path}");
    }
    let nowhere = hedge(&["completions", "/nonexistent"]).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(nowhere.stderr.starts_with(b"elfen: writing into \"/nonexistent\": No such file"));
}

/// Goal: with `--public`, the proxy accepts an address that other machines may reach.
#[test]
fn a_public_address_is_allowed() {
    let servers = Server::pair();
    let addresses = servers.each_ref().map(|server| server.at.to_string());
    let [to, backup] = addresses.each_ref().map(String::as_str);
    let words = ["--listen", "0.0.0.0:0", "--public", "--to", to, "--backup", backup];
    let mut command = hedge(&words);
    let mut process = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufReader::new(process.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("elfen: listening on 0.0.0.0:"), "{line}");
    process.kill().unwrap();
    process.wait().unwrap();
}
