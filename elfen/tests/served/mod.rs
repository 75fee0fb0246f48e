//! Clients of a recorded service, and the command that records it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

const CLIENTS: usize = 4;

pub(crate) fn tailor(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.arg("tailor").args(words).stdin(Stdio::null());
    command
}

use crate::process::PATIENCE;

/// Clients that send a request, wait for the whole answer, and pause.
pub(crate) struct Load {
    ends: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    pub(crate) fn start(port: u16, request: &'static [u8], is_whole: fn(&[u8]) -> bool) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let client = |_| {
            let ends = Arc::clone(&ends);
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                // Relaxed: the flag publishes no other data.
                while !ends.load(Relaxed) {
                    stream.write_all(request).unwrap();
                    let (mut bytes, mut answer) = ([0; 4096], Vec::new());
                    while !is_whole(&answer) {
                        let count = stream.read(&mut bytes).unwrap();
                        assert!(count > 0, "the service answers");
                        answer.extend(&bytes[..count]);
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            })
        };
        let clients = (0..CLIENTS).map(client).collect();
        Self { ends, clients }
    }

    pub(crate) fn end(self) {
        self.ends.store(true, Relaxed);
        self.clients.into_iter().for_each(|client| client.join().expect("all were answered"));
    }
}
