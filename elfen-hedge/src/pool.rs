//! The connections to one server, and sending a request on one of them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::header::{CONTENT_LENGTH, HOST, HeaderValue, TRANSFER_ENCODING};
use hyper::{Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::lock::Lock;
use crate::request::{MAX_HEAD, Request, is_chunked_only};

/// Limit of idle connections. Further ones are closed.
const MAX_IDLE: usize = 256;
/// Limit of answers that are read without a client.
const MAX_UNUSED: usize = 1 << 20;

/// A connection that can take one request after the other.
pub(crate) type Connection = SendRequest<Full<Bytes>>;

#[derive(Debug)]
pub(crate) struct Pool {
    address: SocketAddr,
    idle: Lock<Vec<Connection>>,
}

/// The head of an answer. The connection is in use until the body is read.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) response: Response<Incoming>,
    pub(crate) lease: Lease,
}

/// A connection that belongs to one request.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Arc<Pool>,
    connection: Connection,
}

/// Why a server has not answered a request.
#[derive(Debug)]
pub(crate) enum Lost {
    /// It accepts no connections, so it got nothing of the request.
    Refused(io::Error),
    /// It ended the connection, perhaps during its work.
    Dropped,
    /// It sent something that is not a valid answer.
    Invalid,
}

impl Pool {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, idle: Lock::default() }
    }

    pub(crate) async fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let mut builder = Builder::new();
        builder.max_buf_size(MAX_HEAD).max_header_size(MAX_HEAD);
        let (connection, worker) =
            builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        // The request on the connection learns how it ended.
        tokio::spawn(async { drop(worker.await) });
        Ok(connection)
    }

    /// Keeps a connection for the next request.
    pub(crate) fn keep(&self, connection: Connection) {
        self.idle.with(|idle| {
            if idle.len() < MAX_IDLE && !connection.is_closed() {
                idle.push(connection);
            }
        });
    }

    fn next_idle(&self) -> Option<Connection> {
        self.idle.with(|idle| {
            while let Some(connection) = idle.pop() {
                if connection.is_ready() {
                    return Some(connection);
                }
            }
            None
        })
    }

    fn has_idle(&self) -> bool {
        self.idle.with(|idle| !idle.is_empty())
    }

    /// Sends a request, and waits for the head of the answer.
    pub(crate) async fn send(self: Arc<Self>, request: Arc<Request>) -> Result<Reply, Lost> {
        if self.has_idle() {
            // The server may have closed an idle connection. Yielding lets the runtime poll its
            // sockets, so that such a connection is not used.
            tokio::task::yield_now().await;
        }
        let mut message = self.message(&request);
        while let Some(mut connection) = self.next_idle() {
            match connection.try_send_request(message).await {
                Ok(response) => return self.reply(response, connection),
                Err(mut lost) => match lost.take_message() {
                    Some(unsent) => message = unsent,
                    None => return Err(Lost::of(lost.error())),
                },
            }
        }
        let mut connection = self.connect().await.map_err(Lost::Refused)?;
        match connection.try_send_request(message).await {
            Ok(response) => self.reply(response, connection),
            Err(lost) if lost.message().is_some() => {
                Err(Lost::Refused(io::ErrorKind::ConnectionReset.into()))
            }
            Err(lost) => Err(Lost::of(lost.error())),
        }
    }

    fn message(&self, request: &Request) -> hyper::Request<Full<Bytes>> {
        let mut message = hyper::Request::new(Full::new(request.body.clone()));
        *message.method_mut() = request.method.clone();
        *message.uri_mut() = Uri::clone(&request.target);
        *message.headers_mut() = request.fields.clone();
        if !request.fields.contains_key(HOST) {
            let host = HeaderValue::from_str(&self.address.to_string());
            message.headers_mut().insert(HOST, host.expect("an address is visible ASCII"));
        }
        message
    }

    fn reply(
        self: Arc<Self>,
        response: Response<Incoming>,
        connection: Connection,
    ) -> Result<Reply, Lost> {
        let fields = response.headers();
        let is_coded = fields.contains_key(TRANSFER_ENCODING);
        let is_unclear = fields.contains_key(CONTENT_LENGTH) || !is_chunked_only(fields);
        // A protocol that no request asked for, or a body with an ambiguous end.
        let is_invalid = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if is_invalid || is_coded && is_unclear {
            return Err(Lost::Invalid);
        }
        Ok(Reply { response, lease: Lease { pool: self, connection } })
    }
}

impl Reply {
    /// Reads an answer that no client gets, so that its connection can be used again. Returns
    /// whether it was complete.
    pub(crate) async fn read_to_end(self) -> bool {
        let Self { response, lease } = self;
        if Limited::new(response.into_body(), MAX_UNUSED).collect().await.is_err() {
            return false;
        }
        lease.end();
        true
    }
}

impl Lease {
    /// The answer was read to its end: the connection is free.
    pub(crate) fn end(self) {
        self.pool.keep(self.connection);
    }
}

impl Lost {
    fn of(error: &hyper::Error) -> Self {
        if error.is_parse() { Self::Invalid } else { Self::Dropped }
    }
}
