//! What the proxy itself takes, where nobody pauses: the same requests straight to a server and
//! through it, by turns. A client that asks again as soon as it has its answer tells what is added
//! to each; many of them, how many requests a second it takes on.

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{PATIENCE, Proxy, ask_for, quantile, server};

/// Clients at once, for the most requests a second.
const MANY: usize = 32;

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub(crate) struct Way {
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) rps: f64,
}

/// Medians over the rounds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Alone {
    pub(crate) direct: Way,
    pub(crate) proxied: Way,
    pub(crate) added_p50_us: f64,
}

/// Each round has four turns of so long: straight and through the proxy, by one and by many.
pub(crate) fn measure(rounds: usize, turn: Duration) -> io::Result<Alone> {
    let (mut direct, mut proxied, mut added_us) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (_first, to) = server("first")?;
        let (_second, backup) = server("second")?;
        let proxy = Proxy::start("none", &to, &backup)?;
        let ways = [way(&to, turn)?, way(&proxy.at, turn)?];
        proxy.end()?;
        added_us.push(ways[1].p50_us - ways[0].p50_us);
        direct.push(ways[0]);
        proxied.push(ways[1]);
    }
    let median = |mut of: Vec<f64>| quantile(&mut of, 500).unwrap_or(0.0);
    let medians = |ways: &[Way]| {
        let of = |part: fn(&Way) -> f64| median(ways.iter().map(part).collect());
        Way { p50_us: of(|w| w.p50_us), p99_us: of(|w| w.p99_us), rps: of(|w| w.rps) }
    };
    let added_p50_us = median(added_us);
    Ok(Alone { direct: medians(&direct), proxied: medians(&proxied), added_p50_us })
}

fn way(at: &str, turn: Duration) -> io::Result<Way> {
    let mut took_us = busy(at, turn)?;
    let (p50, p99) = (quantile(&mut took_us, 500), quantile(&mut took_us, 990));
    let answered = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..MANY).map(|_| scope.spawn(|| busy(at, turn))).collect();
        let mut answered = 0;
        for client in clients {
            let all = client.join().map_err(|_| io::Error::other("a client failed"))??;
            answered += all.len() as u64;
        }
        io::Result::Ok(answered)
    })?;
    let rps = elfen_console::duration::number(answered) / turn.as_secs_f64();
    Ok(Way { p50_us: p50.unwrap_or(0.0), p99_us: p99.unwrap_or(0.0), rps })
}

/// One client that is never idle: how long each of its requests took.
fn busy(at: &str, turn: Duration) -> io::Result<Vec<f64>> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (began, mut took_us) = (Instant::now(), Vec::new());
    while began.elapsed() < turn {
        let asked = Instant::now();
        ask_for(&mut stream, took_us.len(), 0)?;
        took_us.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    Ok(took_us)
}
