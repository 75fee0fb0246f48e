//! Goal: a server that is down, restarts or drops connections causes only the unavoidable errors.
//! Requests that are sent again are limited and counted, and contain no client's secrets. Method:
//! servers with these faults, and the requests that reached them.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use nix::sys::signal::Signal;

use crate::rig::{
    Backend, Client, Hedge, Server, ask, count, free_address, require_root, signal, wait_until,
};

/// Goal: the proxy may start before its servers under every policy, as after a boot. Method: both
/// servers start later. Then the first is stopped, which policies that observe servers must notice.
#[test]
fn servers_that_are_down_at_the_start_are_waited_for() {
    assert_waits_for_servers(&["none", "after=5ms", "look"]);
}

#[test]
#[ignore = "needs root and eBPF"]
fn servers_that_are_down_at_the_start_are_waited_for_under_hazard() {
    require_root();
    assert_waits_for_servers(&["hazard"]);
}

fn assert_waits_for_servers(policies: &[&str]) {
    for policy in policies {
        let (to, backup) = (free_address(), free_address());
        let words = ["--policy", policy, "--max-extra", "100%", "--give-up", "1s"];
        let hedge = Hedge::start(to, backup, &words);
        let lines = [hedge.says(), hedge.says()];
        for address in [to, backup] {
            let said = format!("elfen: server {address} takes no connections: ");
            assert!(lines.iter().any(|line| line.starts_with(&said)), "{policy}: {lines:?}");
        }
        assert_eq!(ask(hedge.at, "GET", "/length/0/early").code, 502);
        let first = Server::start_at("first server", to.port());
        assert!(hedge.says().ends_with(&format!("{to} takes connections\n")));
        wait_until("an answer", || ask(hedge.at, "GET", "/length/0/a").code == 200);
        let _second = Server::start_at("second server", backup.port());
        assert!(hedge.says().ends_with(&format!("{backup} takes connections\n")));
        wait_until("the second server's answer", || {
            signal(first.process.id(), Signal::SIGSTOP);
            let answer = ask(hedge.at, "GET", "/length/0/b");
            signal(first.process.id(), Signal::SIGCONT);
            answer.code == 200 && answer.text().contains("second") || *policy == "none"
        });
        let (done, said) = hedge.end();
        assert_eq!(said, "", "{policy}");
        // With `hazard`, new requests go to the other server at once.
        let doubles = matches!(*policy, "after=5ms" | "look");
        assert_eq!(done["duplicates"].as_u64() > Some(0), doubles, "{policy}: {done}");
    }
}

/// Sends 20 requests without credentials, and 20 with credentials.
fn ask_with_and_without_credentials(at: SocketAddr) {
    let mut client = Client::connect(at);
    for number in 0..20 {
        client.send("GET", &format!("/length/0/open-{number}"), "");
        assert_eq!(client.answer("GET").code, 200);
        let field = ["Authorization: Bearer x", "Cookie: a=b", "X-Api-Key: x"][number % 3];
        let head = format!("GET /length/0/secret-{number} HTTP/1.1\r\nHost: a\r\n{field}\r\n\r\n");
        client.write(head.as_bytes());
        assert_eq!(client.answer("GET").code, 200);
    }
}

/// How often a server has worked for names with this prefix.
fn all(at: SocketAddr, name: &str) -> u32 {
    (0..20).map(|number| count(at, &format!("{name}-{number}"))).sum()
}

/// Goal: after a restart, a server gets recorded requests only with `--replay`, in the given
/// number, and none with credentials.
#[test]
fn recorded_requests_are_replayed_only_on_request() {
    for policy in ["look", "none"] {
        for replay in ["0", "50"] {
            let [mut first, second] = Server::pair();
            let words = ["--policy", policy, "--replay", replay];
            let hedge = Hedge::start(first.at, second.at, &words);
            ask_with_and_without_credentials(hedge.at);
            first.end();
            assert_eq!(ask(hedge.at, "GET", "/length/0/other").code, 200);
            let third = Server::start_at("third server", first.at.port());
            let expected: u32 = replay.parse().unwrap();
            let replayed = || all(third.at, "open") + count(third.at, "other");
            wait_until("the replays", || replayed() >= expected);
            // By now the search for new processes has run, which must not replay again.
            std::thread::sleep(std::time::Duration::from_millis(600));
            assert_eq!(replayed(), expected, "{policy}");
            assert_eq!(all(third.at, "secret"), 0, "{policy}");
            let (done, _) = hedge.end();
            assert_eq!(done["replayed"], expected, "{policy}: {done}");
            assert_eq!((&done["requests"], &done["unanswered"]), (&41.into(), &0.into()), "{done}");
        }
    }
}

/// A server that closes each connection instead of answering.
fn drops_all() -> Backend {
    Backend::start(|_, _| false)
}

/// Goal: a request that crashes servers reaches each of them only once, and only within the budget.
#[test]
fn a_dropped_request_is_retried_once() {
    for (extra, expected) in [("100%", [3, 3]), ("5%", [3, 0]), ("0%", [3, 0])] {
        let [first, second] = [drops_all(), drops_all()];
        let words = ["--policy", "none", "--max-extra", extra];
        let hedge = Hedge::start(first.at, second.at, &words);
        for _ in 0..3 {
            assert_eq!(ask(hedge.at, "GET", "/crash").code, 502);
        }
        assert_eq!(ask(hedge.at, "POST", "/crash").code, 502);
        let got = [&first, &second].map(|server| server.requests().len());
        assert_eq!(got, [expected[0] + 1, expected[1]], "a POST is never tried again");
        let (done, said) = hedge.end();
        assert_eq!((said.as_str(), &done["unanswered"]), ("", &4.into()), "{done}");
        assert_eq!((&done["retries"], &done["swaps"]), (&expected[1].into(), &0.into()), "{done}");
    }
}

#[test]
fn a_request_that_one_server_drops_is_answered_by_the_other() {
    let (first, second) = (drops_all(), Backend::echo());
    let words = ["--policy", "none", "--max-extra", "50%"];
    let hedge = Hedge::start(first.at, second.at, &words);
    // Each request adds half of a retry to the budget.
    assert_eq!(ask(hedge.at, "GET", "/a").code, 502);
    assert_eq!(ask(hedge.at, "GET", "/b").text(), "/b");
    let (done, _) = hedge.end();
    assert_eq!((&done["retries"], &done["unanswered"]), (&1.into(), &1.into()), "{done}");
    assert_eq!((&done["refused_by_budget"], &done["duplicates"]), (&1.into(), &0.into()), "{done}");
    assert_eq!([first, second].map(|server| server.requests().len()), [2, 1]);
}

/// Goal: recorded requests that crash a server are not replayed forever. Method: a server that
/// returns and drops every request.
#[test]
fn a_server_that_fails_its_replays_gets_no_more() {
    let dies = Arc::new(AtomicBool::new(false));
    let is_dying = Arc::clone(&dies);
    let first = Backend::start(move |_, stream| {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        !is_dying.load(SeqCst) && stream.write_all(answer).is_ok()
    });
    let (second, at) = (Backend::echo(), first.at);
    let words = ["--policy", "none", "--max-extra", "100%", "--replay", "100"];
    let hedge = Hedge::start(at, second.at, &words);
    for _ in 0..5 {
        assert_eq!(ask(hedge.at, "GET", "/early").code, 200);
    }
    dies.store(true, SeqCst);
    drop(first);
    wait_until("the second server's answer", || {
        ask(hedge.at, "GET", "/later").text() == "/later"
            && std::net::TcpStream::connect(at).is_err()
    });
    assert_eq!(ask(hedge.at, "GET", "/later").text(), "/later");
    assert!(hedge.says().contains(" takes no connections: "));
    let back = Backend::start_at(at.port(), |_, _| false);
    assert!(hedge.says().contains(" takes connections"));
    wait_until("the replays", || back.requests().len() == 3);
    let (done, _) = hedge.end();
    assert_eq!((&done["replayed"], back.requests().len()), (&3.into(), 3), "{done}");
}
