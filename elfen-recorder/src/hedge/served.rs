//! A server to be hedged, to try it: it works as long as a request says, and answers with the
//! request's own name and its own.
//!
//! `GET /FORM/US/NAME`: works for so many microseconds of its CPU, one request at a time, and
//! answers in that form: `length`, `chunked`, `close` or `endless`. `GET /count/0/NAME`: how often
//! that name was worked for.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::check::inject::own_cpu_ns;

type Seen = Arc<Mutex<HashMap<String, u32>>>;

/// Serves on a port, or on one of its own, which it prints, until its standard input ends.
pub fn serve(name: &str, port: u16) -> io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    let mut told = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    writeln!(told, "{}", listener.local_addr()?.port())?;
    std::thread::spawn(|| {
        let ended = io::copy(&mut io::stdin(), &mut io::sink());
        // Whoever started us is gone, or wants us to go.
        std::process::exit(i32::from(ended.is_err()));
    });
    let seen = Seen::default();
    for stream in listener.incoming() {
        let (stream, name, seen) = (stream?, name.to_owned(), Arc::clone(&seen));
        stream.set_nodelay(true)?;
        // A client that leaves in the middle is nobody's failure.
        std::thread::spawn(move || drop(converse(stream, &name, &seen)));
    }
    Ok(())
}

struct Asked {
    /// It wants a head and no body.
    head: bool,
    path: String,
    body: Vec<u8>,
}

fn read(from: &mut impl BufRead) -> io::Result<Option<Asked>> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let head = line.starts_with("HEAD ");
    let path = line.split(' ').nth(1).ok_or(io::ErrorKind::InvalidData)?.to_owned();
    let mut length = 0;
    loop {
        line.clear();
        if from.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some((field, value)) = line.trim_end().split_once(": ") else { break };
        if field.eq_ignore_ascii_case("content-length") {
            length = value.parse().map_err(|_| io::ErrorKind::InvalidData)?;
        }
    }
    let mut body = Vec::new();
    from.take(length).read_to_end(&mut body)?;
    Ok(Some(Asked { head, path, body }))
}

fn converse(stream: TcpStream, name: &str, seen: &Seen) -> io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    while let Some(Asked { head, path, body }) = read(&mut from)? {
        let mut parts = path.trim_start_matches('/').splitn(3, '/');
        let (form, us) = (parts.next().unwrap_or(""), parts.next().unwrap_or("0"));
        let asked = parts.next().unwrap_or("").to_owned();
        let us: u64 = us.parse().map_err(|_| io::ErrorKind::InvalidData)?;
        if form == "count" {
            let count = *lock(seen).get(&asked).unwrap_or(&0);
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{count:10}");
            out.write_all(answer.as_bytes())?;
            continue;
        }
        {
            let mut seen = lock(seen);
            *seen.entry(asked.clone()).or_default() += 1;
            let until_ns = own_cpu_ns() + us * 1_000;
            while own_cpu_ns() < until_ns {
                std::hint::spin_loop();
            }
        }
        let text = format!("{asked} {} by {name}\n", body.len());
        match form {
            _ if head => write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", text.len())?,
            "chunked" => {
                let (first, rest) = text.split_at(text.len() / 2);
                write!(
                    out,
                    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{first}\r\n\
                     {:x};more\r\n{rest}\r\n0\r\nEnd: x\r\n\r\n",
                    first.len(),
                    rest.len()
                )?;
            }
            "close" => {
                return write!(out, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{text}");
            }
            "endless" => {
                write!(out, "HTTP/1.1 200 OK\r\n\r\n")?;
                loop {
                    out.write_all(&[b'x'; 4096])?;
                }
            }
            _ => {
                let length = text.len();
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}");
                out.write_all(answer.as_bytes())?;
            }
        }
    }
    Ok(())
}

fn lock(seen: &Seen) -> std::sync::MutexGuard<'_, HashMap<String, u32>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
