//! Goal: a client that is slow, silent or beyond the limit is disconnected soon, and affects no
//! other client. Method: such clients, and short limits.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use crate::rig::{Backend, Client, Hedge, ask, wait_until};

fn nap() {
    std::thread::sleep(Duration::from_millis(20));
}

/// Sends single bytes until the proxy disconnects.
fn dribble(client: &mut Client) {
    client.stream.get_mut().set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    wait_until("the end of a client that dribbles", || {
        nap();
        client.stream.get_mut().write_all(b"x").is_err() || client.is_over()
    });
}

#[test]
fn a_head_must_be_complete_in_time() {
    let (backend, other) = (Backend::echo(), Backend::echo());
    let words = ["--policy", "none", "--head-timeout", "300ms"];
    let hedge = Hedge::start(backend.at, other.at, &words);
    let mut silent = Client::connect(hedge.at);
    silent.write(b"GET / HTTP/1.1\r\nHost: a\r\nA: ");
    assert!(silent.is_over());
    let mut dribbles = Client::connect(hedge.at);
    dribbles.write(b"GET / HTTP/1.1\r\nHost: a\r\nA: ");
    dribble(&mut dribbles);
    // The next head on a connection has its own limit.
    let mut second = Client::connect(hedge.at);
    second.send("GET", "/a", "");
    assert_eq!(second.answer("GET").text(), "/a");
    second.write(b"GET / HTTP/1.1\r\n");
    assert!(second.is_over());
    let (done, _) = hedge.end();
    assert_eq!((&done["timed_out"], &done["requests"]), (&3.into(), &1.into()), "{done}");
}

#[test]
fn an_idle_client_is_disconnected_and_a_busy_one_is_not() {
    let backend = Backend::start(|_, stream| {
        std::thread::sleep(Duration::from_millis(1500));
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").is_ok()
    });
    let other = Backend::echo();
    let words = ["--policy", "none", "--head-timeout", "300ms", "--idle-timeout", "300ms"];
    let hedge = Hedge::start(backend.at, other.at, &words);
    let mut silent = Client::connect(hedge.at);
    let mut kept = Client::connect(hedge.at);
    kept.send("GET", "/a", "");
    assert_eq!(kept.answer("GET").text(), "ok", "an answer may take longer");
    assert!(silent.is_over() && kept.is_over());
    let (done, _) = hedge.end();
    assert_eq!(done["timed_out"], 2, "{done}");
}

#[test]
fn a_body_must_arrive_in_time() {
    let (backend, other) = (Backend::echo(), Backend::echo());
    let words = ["--policy", "none", "--body-timeout", "300ms"];
    let hedge = Hedge::start(backend.at, other.at, &words);
    let mut client = Client::connect(hedge.at);
    client.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc");
    assert_eq!(client.answer("POST").code, 408);
    assert!(client.is_over());
    assert_eq!(ask(hedge.at, "GET", "/a").code, 200);
    let (done, _) = hedge.end();
    assert_eq!((&done["refused"], &done["requests"]), (&1.into(), &1.into()), "{done}");
    assert_eq!(backend.requests().len(), 1);
}

/// Goal: a client that accepts nothing of its answer is disconnected after a while, which frees its
/// server. Method: a server that writes as long as it can.
#[test]
fn a_client_that_reads_nothing_is_disconnected() {
    let gone = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&gone);
    let backend = Backend::start(move |_, stream| {
        let head = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while head.is_ok() && stream.write_all(&[b'x'; 4096]).is_ok() {}
        ended.store(true, SeqCst);
        false
    });
    let other = Backend::echo();
    let words = ["--policy", "none", "--idle-timeout", "500ms"];
    let hedge = Hedge::start(backend.at, other.at, &words);
    let mut client = Client::connect(hedge.at);
    client.send("GET", "/a", "");
    wait_until("the end of the answer", || gone.load(SeqCst));
    let (done, _) = hedge.end();
    assert_eq!(done["timed_out"], 1, "{done}");
}

#[test]
fn a_further_client_replaces_the_one_that_waited_longest() {
    let (backend, other) = (Backend::echo(), Backend::echo());
    let hedge = Hedge::start(backend.at, other.at, &["--policy", "none", "--max-clients", "2"]);
    let mut first = Client::connect(hedge.at);
    first.send("GET", "/first", "");
    assert_eq!(first.answer("GET").code, 200);
    let mut second = Client::connect(hedge.at);
    // A client with an incomplete head counts as waiting.
    second.write(b"GET /second HTTP/1.1\r\n");
    assert_eq!(ask(hedge.at, "GET", "/third").text(), "/third");
    assert!(first.is_over());
    assert_eq!(ask(hedge.at, "GET", "/fourth").text(), "/fourth");
    let (done, _) = hedge.end();
    assert!(done["evicted"].as_u64() >= Some(1), "{done}");
    assert_eq!((&done["requests"], &done["unanswered"]), (&3.into(), &0.into()), "{done}");
}

/// Goal: a client with a request in progress is not disconnected in favour of a new client. The new
/// client waits.
#[test]
fn a_busy_client_is_not_disconnected() {
    let (asked, may_answer) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, may) = (Arc::clone(&asked), Arc::clone(&may_answer));
    let backend = Backend::start(move |_, stream| {
        count.fetch_add(1, SeqCst);
        while !may.load(SeqCst) {
            nap();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").is_ok()
    });
    let other = Backend::echo();
    let hedge = Hedge::start(backend.at, other.at, &["--policy", "none", "--max-clients", "1"]);
    let mut busy = Client::connect(hedge.at);
    busy.send("GET", "/a", "");
    wait_until("the first request", || asked.load(SeqCst) == 1);
    let mut waits = Client::connect(hedge.at);
    waits.send("GET", "/b", "");
    (0..10).for_each(|_| nap());
    assert_eq!(asked.load(SeqCst), 1, "the second client has no place yet");
    may_answer.store(true, SeqCst);
    assert_eq!((busy.answer("GET").code, waits.answer("GET").code), (200, 200));
    let (done, _) = hedge.end();
    assert_eq!(done["requests"], 2, "{done}");
}
