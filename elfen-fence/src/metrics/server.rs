//! Serves scrapes over HTTP: one short request and one short answer for each connection.
//!
//! Each client has a thread and a deadline, so that no client can delay the next. When there are
//! too many clients, the oldest connection is closed: a client that sends a byte a minute gives way
//! to a client with a request.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The time for a whole request and its answer.
const PATIENCE: Duration = Duration::from_secs(2);
const CLIENTS: usize = 16;
const LONGEST_REQUEST: usize = 8 << 10;

/// The source of the text that is served.
pub trait Scraped: Send + Sync + 'static {
    /// The text of a scrape.
    fn scrape(&self) -> io::Result<String>;
    /// Called about once a second.
    fn observe(&self);
}

/// Serves until the process ends or the listener fails.
pub fn serve(listener: &TcpListener, scraped: &Arc<impl Scraped>) -> io::Error {
    if let Err(error) = listener.set_nonblocking(true) {
        return error;
    }
    let mut clients: VecDeque<TcpStream> = VecDeque::new();
    let mut observed: Option<Instant> = None;
    loop {
        if observed.is_none_or(|at| at.elapsed() >= Duration::from_secs(1)) {
            scraped.observe();
            observed = Some(Instant::now());
        }
        let mut wait = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, PollTimeout::from(1000u16)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return error.into(),
        }
        match listener.accept() {
            Ok((client, _)) => admit(client, &mut clients, scraped),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The client has left already, or this process is out of descriptors: try again.
            Err(_) => {
                clients.pop_front();
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn admit(client: TcpStream, clients: &mut VecDeque<TcpStream>, scraped: &Arc<impl Scraped>) {
    if clients.len() >= CLIENTS {
        // Harmless if that connection has been answered and closed already.
        let _gone = clients.pop_front().map(|oldest| oldest.shutdown(Shutdown::Both));
    }
    let Ok(copy) = client.try_clone() else { return };
    let scraped = scraped.clone();
    let serve_client = move || {
        let _failed = answer(&client, scraped.as_ref());
        // Otherwise the clone in the list would keep the connection open.
        let _gone = client.shutdown(Shutdown::Both);
    };
    if thread::Builder::new().name("elfen-scrape".into()).spawn(serve_client).is_ok() {
        clients.push_back(copy);
    }
}

fn answer(mut client: &TcpStream, scraped: &impl Scraped) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    client.set_nonblocking(false)?;
    let request = read_request(client, deadline)?;
    let response = respond(&request, scraped);
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    client.set_write_timeout(Some(left))?;
    client.write_all(response.as_bytes())
}

/// Reads up to the empty line that ends the head of a request.
fn read_request(mut client: &TcpStream, deadline: Instant) -> io::Result<String> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > LONGEST_REQUEST {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(left))?;
        let n = client.read(&mut buffer)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        request.extend_from_slice(&buffer[..n]);
    }
    Ok(String::from_utf8_lossy(&request).into_owned())
}

fn respond(request: &str, scraped: &impl Scraped) -> String {
    let mut words = request.lines().next().unwrap_or_default().split(' ');
    let method = words.next().unwrap_or_default();
    let target = words.next().unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default();
    let (status, kind, body) = match (method, path) {
        ("GET" | "HEAD", "/metrics") => match scraped.scrape() {
            Ok(text) => ("200 OK", "text/plain; version=0.0.4", text),
            Err(error) => ("500 Internal Server Error", "text/plain", format!("{error}\n")),
        },
        ("GET" | "HEAD", _) => ("404 Not Found", "text/plain", "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed\r\nAllow: GET, HEAD", "text/plain", "use GET\n".to_owned()),
    };
    let length = body.len();
    let body = if method == "HEAD" { String::new() } else { body };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}
