//! Sends a request to one of the servers. hyper-util's client keeps the connections. Each carries
//! one request at a time.

use std::error::Error;
use std::io;
use std::net::SocketAddr;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use hyper::{Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::request::{MAX_HEAD, Request, is_chunked_only};

/// The maximum number of idle connections to a server. Further connections are closed.
const MAX_IDLE: usize = 256;
/// The maximum size of answers that are read without a client.
const MAX_UNUSED: usize = 1 << 20;

/// Why a server has not answered a request.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The server accepts no connections, so it received nothing of the request.
    Refused(io::Error),
    /// The server ended the connection, perhaps while it processed the request.
    Dropped,
    /// The server sent an invalid answer.
    Invalid,
}

/// The connections to both servers.
#[derive(Clone, Debug)]
pub(crate) struct Upstream(legacy::Client<HttpConnector, Full<Bytes>>);

impl Upstream {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        builder.pool_max_idle_per_host(MAX_IDLE).http1_max_buf_size(MAX_HEAD);
        Self(builder.build(connector))
    }

    /// Sends a request, and waits for the head of the answer.
    pub(crate) async fn send(
        self,
        to: SocketAddr,
        request: Request,
    ) -> Result<Response<Incoming>, Lost> {
        // The server may have closed an idle connection. Yielding lets the runtime poll its
        // sockets, so that such a connection is not used.
        tokio::task::yield_now().await;
        let target = request.target.path_and_query().map_or("/", |target| target.as_str());
        let uri = Uri::builder().scheme("http").authority(to.to_string()).path_and_query(target);
        let mut message = hyper::Request::new(Full::new(request.body));
        *message.method_mut() = request.method;
        *message.uri_mut() = uri.build().expect("a path and an address are a URI");
        *message.headers_mut() = request.fields;
        let response = self.0.request(message).await.map_err(|error| Lost::of(&error))?;
        let fields = response.headers();
        let is_coded = fields.contains_key(TRANSFER_ENCODING);
        let is_unclear = fields.contains_key(CONTENT_LENGTH) || !is_chunked_only(fields);
        // Either the server switched to a protocol that no request asked for, or the body's end is
        // ambiguous.
        let is_invalid = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if is_invalid || is_coded && is_unclear {
            return Err(Lost::Invalid);
        }
        Ok(response)
    }
}

/// Reads an answer that no client receives, so that its connection can be reused. Returns whether
/// the answer was complete.
pub(crate) async fn read_to_end(
    attempt: impl Future<Output = Result<Response<Incoming>, Lost>>,
) -> bool {
    let Ok(response) = attempt.await else { return false };
    Limited::new(response.into_body(), MAX_UNUSED).collect().await.is_ok()
}

impl Lost {
    fn of(error: &legacy::Error) -> Self {
        let mut causes = std::iter::successors(error.source(), |&cause| cause.source());
        if error.is_connect() {
            let why = causes.find_map(|cause| cause.downcast_ref::<io::Error>());
            let code = why.and_then(io::Error::raw_os_error);
            return Self::Refused(code.map_or_else(
                || io::Error::other(error.to_string()),
                io::Error::from_raw_os_error,
            ));
        }
        match causes.find_map(|cause| cause.downcast_ref::<hyper::Error>()) {
            Some(why) if why.is_parse() => Self::Invalid,
            // The connection ended before any part of the request was written.
            Some(why) if why.is_canceled() => Self::Refused(io::ErrorKind::ConnectionReset.into()),
            _ => Self::Dropped,
        }
    }
}
