//! The coordinator: the one thread that owns the sockets. It receives, queues, and sends answers.
//!
//! Each connection is a task of tokio's current-thread runtime, and one of its requests is under
//! way at a time: what the client sends meanwhile waits here up to the length of a head, then in
//! the kernel, then with the client. So connections, heads, the queue and answers each have a
//! bound, and a client that makes no progress is cut off.

use super::http1::{self, Answer, Ask, CLOSE, Delivery, LONGEST_HEAD, Request};
use super::metrics::Metrics;
use super::queue::Queue;
use super::worker::Job;
use crate::process::interrupted;
use elfen_rt::clock::monotonic_ns;
use http::StatusCode;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, interval, sleep, timeout, timeout_at};

/// How late SIGTERM may be noticed.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A client that gets its last answer has this long to take notice, and may send this much
/// meanwhile.
const LINGER: Duration = Duration::from_secs(2);
const MOST_THROWN_AWAY: usize = 4 * 1024 * 1024;
/// How long a process without free descriptors waits before it accepts the next client.
const ACCEPT_AGAIN: Duration = Duration::from_millis(500);
const READ_BYTES: usize = 4 * 1024;

#[derive(Clone, Copy, Debug)]
pub(in crate::search) struct Bounds {
    pub(in crate::search) connections: usize,
    /// For a request to be whole, and for an answer to be taken.
    pub(in crate::search) patience: Duration,
    /// For a client that asks nothing.
    pub(in crate::search) idle: Duration,
    /// For all answers to be out, once the service is asked to end.
    pub(in crate::search) drain: Duration,
}

pub(super) struct Coordinator {
    pub(super) queue: Arc<Queue<Job>>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) bounds: Bounds,
    /// The number of the last request.
    pub(super) last_request: AtomicU64,
}

impl Coordinator {
    /// Serves until the process is asked to end, then answers what was asked before. True if that
    /// was all answered in time.
    pub(super) async fn run(self: Arc<Self>, listener: TcpListener) -> bool {
        let (drain, draining) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut looks = interval(LOOK_EVERY);
        while !interrupted() {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        if connections.len() >= self.bounds.connections {
                            // Connections whose clients left before this one came end first.
                            yield_now().await;
                            while connections.try_join_next().is_some() {}
                        }
                        self.welcome(stream, &mut connections, &draining);
                    }
                    // The client has gone already.
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                    // No descriptor is left: connected clients are served on meanwhile.
                    Err(_) => sleep(ACCEPT_AGAIN).await,
                },
                Some(_) = connections.join_next() => self.count(&connections),
                _ = looks.tick() => {}
            }
        }
        drop(listener);
        drain.send_replace(true);
        let last = async {
            while connections.join_next().await.is_some() {
                self.count(&connections);
            }
        };
        timeout(self.bounds.drain, last).await.is_ok()
    }

    fn count(&self, connections: &JoinSet<()>) {
        self.metrics.connections.store(connections.len() as u64, Relaxed);
    }

    fn welcome(
        self: &Arc<Self>,
        stream: TcpStream,
        connections: &mut JoinSet<()>,
        draining: &watch::Receiver<bool>,
    ) {
        self.metrics.accepted.fetch_add(1, Relaxed);
        // A client that is gone already shows when it is read.
        let _gone = stream.set_nodelay(true);
        if connections.len() >= self.bounds.connections {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            self.metrics.count_answer(status);
            let answer = Answer::error(status, Some("too many connections"));
            // Best effort: the client is told or cut off, and both are an end.
            let _told = stream.try_write(&answer.bytes(CLOSE));
            return;
        }
        let (coordinator, draining) = (Arc::clone(self), draining.clone());
        let connection = Connection { stream, input: Vec::new(), draining };
        connections.spawn(async move {
            // An error is a client that has reset the connection, most often.
            let _reset = connection.serve(&coordinator).await;
        });
        self.count(connections);
    }

    async fn answer(&self, ask: Ask, delivery: Delivery) -> Vec<u8> {
        let answer = match ask {
            Ask::Health => Answer::json(StatusCode::OK, self.metrics.health()),
            Ask::Metrics => Answer::metrics(self.metrics.text(self.queue.len())),
            Ask::Search { query, limit } => {
                let (reply, answered) = oneshot::channel();
                let id = self.last_request.fetch_add(1, Relaxed) + 1;
                let job = Job { id, arrived_ns: monotonic_ns(), query, limit, delivery, reply };
                if self.queue.push(job).is_ok() {
                    return answered.await.expect("workers answer until the queue is empty");
                }
                Answer::error(StatusCode::SERVICE_UNAVAILABLE, Some("the queue is full"))
            }
        };
        self.metrics.count_answer(answer.status);
        answer.bytes(delivery)
    }
}

struct Connection {
    stream: TcpStream,
    /// What the client sent and was not looked at.
    input: Vec<u8>,
    draining: watch::Receiver<bool>,
}

impl Connection {
    async fn serve(mut self, coordinator: &Coordinator) -> io::Result<()> {
        let bounds = coordinator.bounds;
        loop {
            let mut draining = self.draining.clone();
            let request = tokio::select! {
                biased;
                request = self.next_request(bounds) => request?,
                // Clients that are owed no answer, whatever they have sent of a request.
                _ = draining.wait_for(|draining| *draining) => None,
            };
            let Some(Request { ask, mut delivery }) = request else { return Ok(()) };
            // Once the service ends, each connection ends with its answer.
            delivery.keep_alive &= !*self.draining.borrow();
            let bytes = match ask {
                Ok(ask) => coordinator.answer(ask, delivery).await,
                Err(status) => {
                    coordinator.metrics.count_answer(status);
                    Answer::error(status, None).bytes(delivery)
                }
            };
            timeout(bounds.patience, self.stream.write_all(&bytes)).await??;
            if !delivery.keep_alive || *self.draining.borrow() {
                return self.linger().await;
            }
        }
    }

    /// `None` when the client asks no more.
    async fn next_request(&mut self, bounds: Bounds) -> io::Result<Option<Request>> {
        let mut until = Instant::now() + bounds.patience;
        loop {
            if let Some((length, request)) = http1::parse(&self.input) {
                self.input.drain(..length);
                return Ok(Some(request));
            }
            let was_idle = self.input.is_empty();
            if was_idle {
                // Ten thousand idle clients shall not hold ten thousand buffers.
                self.input = Vec::new();
                until = Instant::now() + bounds.idle;
            }
            match timeout_at(until, self.stream.readable()).await {
                Ok(ready) => ready?,
                Err(_) if was_idle => return Ok(None),
                Err(_) => return Ok(Some(Request::refused(StatusCode::REQUEST_TIMEOUT))),
            }
            if self.read()? == Some(0) {
                return Ok(None);
            }
            if was_idle {
                until = Instant::now() + bounds.patience;
            }
        }
    }

    /// Reads what there is, up to a whole head's worth; `Some(0)` is the end.
    fn read(&mut self) -> io::Result<Option<usize>> {
        let mut buffer = [0; READ_BYTES];
        let room = READ_BYTES.min(LONGEST_HEAD - self.input.len());
        match self.stream.try_read(&mut buffer[..room]) {
            Ok(got) => {
                self.input.extend_from_slice(&buffer[..got]);
                Ok(Some(got))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Says goodbye. What the client still sends is thrown away, so that it gets to see the answer.
    async fn linger(mut self) -> io::Result<()> {
        self.stream.shutdown().await?;
        let mut draining = self.draining.clone();
        let until_it_ends = async {
            let mut thrown_away = 0;
            while thrown_away < MOST_THROWN_AWAY {
                self.stream.readable().await?;
                self.input.clear();
                match self.read()? {
                    Some(0) => break,
                    got => thrown_away += got.unwrap_or(0),
                }
            }
            Ok(())
        };
        tokio::select! {
            ended = timeout(LINGER, until_it_ends) => ended.unwrap_or(Ok(())),
            _ = draining.wait_for(|draining| *draining) => Ok(()),
        }
    }
}
