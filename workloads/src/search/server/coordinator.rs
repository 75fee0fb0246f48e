//! The coordinator: the only thread that uses the sockets. It receives, queues, and sends answers.
//!
//! Each connection is a task of tokio's current-thread runtime, in which hyper handles HTTP. A
//! connection has one request under way at a time. Further bytes wait here up to the length of a
//! head, then in the kernel, then in the client. So connections, heads, the queue and answers have
//! bounds. A client that makes no progress is disconnected.

use super::answer::{self, Answer, Ask};
use super::metrics::Metrics;
use super::queue::Queue;
use super::worker::Job;
use crate::process::interrupted;
use elfen_rt::clock::monotonic_ns;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpUserTimeout;
use std::convert::Infallible;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{interval, sleep, timeout};

/// The maximum time until SIGTERM is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a process without free descriptors waits before it accepts another client.
const ACCEPT_AGAIN: Duration = Duration::from_millis(500);
/// Room for a percent-encoded query of 4 KB.
const LONGEST_HEAD: usize = 16 * 1024;

#[derive(Clone, Copy, Debug)]
pub(in crate::search) struct Bounds {
    pub(in crate::search) connections: usize,
    /// How long a client may take to accept its answer.
    pub(in crate::search) patience: Duration,
    /// How long a client may take to send its next request.
    pub(in crate::search) idle: Duration,
    /// How long sending the remaining answers may take after SIGTERM.
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
    /// Serves until SIGTERM or SIGINT, then answers the requests under way. Returns whether all
    /// were answered in time.
    pub(super) async fn run(self: Arc<Self>, listener: TcpListener) -> bool {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.bounds.idle).half_close(true);
        http.max_buf_size(LONGEST_HEAD).max_header_size(LONGEST_HEAD);
        let clients = GracefulShutdown::new();
        let mut looks = interval(LOOK_EVERY);
        while !interrupted() {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => self.welcome(stream, &http, &clients),
                    // The client has closed the connection already.
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                    // The process has no free descriptor. Connected clients are still served.
                    Err(_) => sleep(ACCEPT_AGAIN).await,
                },
                _ = looks.tick() => {}
            }
        }
        drop(listener);
        timeout(self.bounds.drain, clients.shutdown()).await.is_ok()
    }

    fn welcome(self: &Arc<Self>, stream: TcpStream, http: &http1::Builder, to: &GracefulShutdown) {
        self.metrics.accepted.fetch_add(1, Relaxed);
        if to.count() >= self.bounds.connections {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            self.metrics.count_answer(status);
            // Best effort: the client gets this answer or is just disconnected.
            let _told = stream.try_write(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\
                  Content-Length: 21\r\n\r\ntoo many connections\n",
            );
            return;
        }
        // If the client has disconnected already, reading reports it. The kernel disconnects a
        // client that accepts nothing of its answer.
        let _gone = stream.set_nodelay(true);
        let patience_ms = u32::try_from(self.bounds.patience.as_millis()).unwrap_or(u32::MAX);
        let _gone = setsockopt(&stream, TcpUserTimeout, &patience_ms);
        let coordinator = Arc::clone(self);
        let answer = service_fn(move |request| {
            let coordinator = Arc::clone(&coordinator);
            async move { Ok::<_, Infallible>(coordinator.answer(request).await) }
        });
        let connection = to.watch(http.serve_connection(TokioIo::new(stream), answer));
        let metrics = Arc::clone(&self.metrics);
        metrics.connections.fetch_add(1, Relaxed);
        tokio::spawn(async move {
            // Most errors are connections that the client reset.
            let _reset = connection.await;
            metrics.connections.fetch_sub(1, Relaxed);
        });
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let answer = match answer::understand(&request) {
            Ok(Ask::Health) => answer::json(StatusCode::OK, self.metrics.health()),
            Ok(Ask::Metrics) => answer::metrics(self.metrics.text(self.queue.len())),
            Ok(Ask::Search { query, limit }) => {
                let (reply, answered) = oneshot::channel();
                let id = self.last_request.fetch_add(1, Relaxed) + 1;
                let job = Job { id, arrived_ns: monotonic_ns(), query, limit, reply };
                if self.queue.push(job).is_ok() {
                    return answered.await.expect("workers answer until the queue is empty");
                }
                answer::error(StatusCode::SERVICE_UNAVAILABLE, "the queue is full")
            }
            Err(status) => {
                // The rest of the stream may be a body, which is not read.
                let close = status != StatusCode::NOT_FOUND && status != StatusCode::BAD_REQUEST;
                let mut answer = answer::error(status, "");
                if close {
                    let fields = answer.headers_mut();
                    fields.insert(CONNECTION, HeaderValue::from_static("close"));
                }
                answer
            }
        };
        self.metrics.count_answer(answer.status());
        answer
    }
}
