//! The bodies of answers: from a server, passed on as they come, or a line from the proxy itself.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::Response;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};

use crate::clients::Busy;
use crate::pool::{Lease, Reply};
use crate::request::{Refusal, remove_hop_by_hop};

/// hyper asks for the next piece when the client has taken the last ones, and reads no more from
/// the server until then. So a slow client makes the server wait, and does not fill memory.
#[derive(Debug)]
pub(crate) struct Answer {
    source: Source,
    _busy: Busy,
}

#[derive(Debug)]
enum Source {
    Server { body: Incoming, lease: Option<Lease> },
    Own(Option<Bytes>),
}

/// The answer of a server, for a client.
pub(crate) fn of_server(reply: Reply, busy: Busy) -> Response<Answer> {
    let Reply { response, lease } = reply;
    let (mut head, body) = response.into_parts();
    remove_hop_by_hop(&mut head.headers);
    let mut source = Source::Server { body, lease: Some(lease) };
    source.end_lease();
    Response::from_parts(head, Answer { source, _busy: busy })
}

/// An answer from the proxy itself. The connection ends with it.
pub(crate) fn refusal(Refusal(status, why): Refusal, busy: Busy) -> Response<Answer> {
    let text = Bytes::from(format!("elfen-hedge: {why}\n"));
    let mut response = Response::new(Answer { source: Source::Own(Some(text)), _busy: busy });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

impl Source {
    /// Returns the connection as soon as nothing is left to read.
    fn end_lease(&mut self) {
        if let Self::Server { body, lease } = self
            && body.is_end_stream()
            && let Some(lease) = lease.take()
        {
            lease.end();
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let (body, lease) = match &mut self.source {
            Source::Own(text) => return Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Source::Server { body, lease } => (body, lease),
        };
        loop {
            let frame = ready!(Pin::new(&mut *body).poll_frame(context));
            match frame {
                // Trailers concern the connection to the server.
                Some(Ok(frame)) if frame.is_trailers() => {}
                Some(Ok(frame)) => {
                    self.source.end_lease();
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => {
                    // hyper breaks off the client's connection, so the client sees it.
                    *lease = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    if let Some(lease) = lease.take() {
                        lease.end();
                    }
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Server { body, .. } => body.is_end_stream(),
            Source::Own(text) => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Server { body, .. } => body.size_hint(),
            Source::Own(text) => SizeHint::with_exact(text.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}
