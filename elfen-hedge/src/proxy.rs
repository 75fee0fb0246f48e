//! Accepts clients' connections, and answers their requests.

use std::convert::Infallible;
use std::error::Error;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use elfen_tailor::signals::EndSignals;
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited};
use hyper::Response;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use crate::clients::{Busy, Client, Clients, Stream};
use crate::exchange;
use crate::observation::Observation;
use crate::policy::Server;
use crate::policy_driver::{PolicyDriver, Readable};
use crate::request::{
    LARGE_BODY, MALFORMED_BODY, MAX_HEAD, Origin, Refusal, Request, SLOW_BODY, remove_hop_by_hop,
};
use crate::settings::Settings;
use crate::shared::{Done, Shared};

/// The maximum size of bodies. A request is kept until it is answered, because it may have to be
/// sent again.
const MAX_BODY: usize = 1 << 20;
/// How long the proxy continues to read a connection that it has ended.
const LINGER: Duration = Duration::from_secs(1);
const OTHER_VERSION: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\n\
    connection: close\r\n\r\n";
/// How long the proxy waits without free descriptors, for another connection to end.
const DESCRIPTOR_RETRY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Proxy {
    runtime: tokio::runtime::Runtime,
    listener: TcpListener,
    shared: Arc<Shared>,
    observation: Option<Observation>,
}

impl Proxy {
    pub(crate) fn open(settings: Settings, observation: Option<Observation>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind(settings.listen))?;
        Ok(Self { runtime, listener, shared: Arc::new(Shared::new(settings)), observation })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until a signal arrives.
    pub(crate) fn run(self, ending: &EndSignals) -> io::Result<Done> {
        let Self { runtime, listener, shared, observation } = self;
        runtime.block_on(async {
            let driver = PolicyDriver::new(Arc::clone(&shared), observation)?;
            for server in Server::BOTH {
                tokio::spawn(Arc::clone(&shared).begin(server));
            }
            let clients = Arc::new(Clients::default());
            tokio::select! {
                ended = wait_for_signal(ending) => ended?,
                failed = driver.run() => failed?,
                () = accept(&listener, &shared, &clients) => {}
                () = close_overdue_clients(&shared, &clients) => {}
            }
            Ok(shared.done())
        })
    }
}

async fn wait_for_signal(ending: &EndSignals) -> io::Result<()> {
    let ready = Readable::new(ending)?;
    while ending.take().is_none() {
        ready.next().await?;
    }
    Ok(())
}

async fn close_overdue_clients(shared: &Shared, clients: &Clients) {
    loop {
        tokio::time::sleep(Clients::sweep_interval(&shared.settings)).await;
        let closed = clients.close_overdue(&shared.settings);
        shared.counts.lock().timed_out += closed;
    }
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>, clients: &Arc<Clients>) {
    let mut id = 0;
    loop {
        match listener.accept().await {
            Ok((socket, from)) => {
                let evicted = clients.make_room(shared.settings.max_clients).await;
                shared.counts.lock().evicted += evicted;
                id += 1;
                let client = clients.client();
                let slot = ClientSlot { clients: Arc::clone(clients), id };
                let shared = Arc::clone(shared);
                let serve = serve(shared, Arc::clone(&client), socket, from.ip(), slot);
                clients.add(id, client, tokio::spawn(serve).abort_handle());
            }
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            // No free descriptors.
            Err(_) => {
                let evicted = u64::from(clients.close_oldest());
                shared.counts.lock().evicted += evicted;
                tokio::time::sleep(DESCRIPTOR_RETRY).await;
            }
        }
    }
}

/// The entry of one connection in `clients`. Dropping it removes the entry.
#[derive(Debug)]
struct ClientSlot {
    clients: Arc<Clients>,
    id: u64,
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.clients.remove(self.id);
    }
}

/// Serves one client's connection to its end.
async fn serve(
    shared: Arc<Shared>,
    client: Arc<Client>,
    socket: TcpStream,
    from: IpAddr,
    _slot: ClientSlot,
) {
    // Without TCP_NODELAY, the kernel only sends later.
    let _slower = socket.set_nodelay(true);
    let stream = TokioIo::new(Stream { socket, client: Arc::clone(&client) });
    let origin = Origin { client: from, trusted: shared.settings.trust_forwarded };
    let answer = service_fn(|request| {
        let (shared, busy) = (Arc::clone(&shared), client.begin());
        async move { Ok::<_, Infallible>(answer(&shared, origin, request, busy).await) }
    });
    let mut connection = builder().serve_connection(stream, answer);
    let ended = (&mut connection).await;
    let parts = connection.into_parts();
    let mut socket = parts.io.into_inner().socket;
    if ended.as_ref().is_err_and(hyper::Error::is_parse) {
        // hyper has already refused the request.
        shared.counts.lock().refused += 1;
    }
    let is_version_2 = ended.is_err_and(|error| error.is_parse_version_h2());
    // Closing a socket with unread bytes resets it, and the answer may be lost. So the proxy
    // continues to read for a while. A client loses the answer only if it does not end its side in
    // time.
    let _ended = tokio::time::timeout(LINGER, async {
        if is_version_2 {
            socket.write_all(OTHER_VERSION).await?;
        }
        socket.shutdown().await?;
        tokio::io::copy(&mut socket, &mut tokio::io::sink()).await
    })
    .await;
}

/// The settings for reading clients' messages, with their limits.
pub(crate) fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.half_close(true).max_buf_size(MAX_HEAD).max_header_size(MAX_HEAD);
    builder
}

/// Receives a complete request, rewritten for servers.
pub(crate) async fn receive(
    request: hyper::Request<Incoming>,
    origin: Origin,
    limit: Duration,
) -> Result<Request, Refusal> {
    let (head, body) = request.into_parts();
    let mut request = Request::check(head, origin)?;
    request.set_body(read_body(body, limit).await?);
    Ok(request)
}

/// The answer to a request: a server's answer, or a refusal, which also ends the connection.
async fn answer(
    shared: &Arc<Shared>,
    origin: Origin,
    request: hyper::Request<Incoming>,
    busy: Busy,
) -> Response<Answer> {
    let answered = match receive(request, origin, shared.settings.body_timeout).await {
        Ok(request) => exchange::answer(shared, request).await,
        Err(refusal) => {
            shared.counts.lock().refused += 1;
            Err(refusal)
        }
    };
    match answered {
        Ok(response) => {
            let (mut head, body) = response.into_parts();
            remove_hop_by_hop(&mut head.headers);
            Response::from_parts(head, Answer { body: Either::Left(body), _busy: busy })
        }
        Err(Refusal(status, why)) => {
            let text = Full::from(format!("elfen-hedge: {why}\n"));
            let mut response = Response::new(Answer { body: Either::Right(text), _busy: busy });
            *response.status_mut() = status;
            let fields = response.headers_mut();
            fields.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
            fields.insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
    }
}

/// The body of an answer: from a server, or a line from the proxy itself.
///
/// hyper requests the next piece only when the client has accepted the previous ones, and reads no
/// more from the server until then. So a slow client makes the server wait, and does not fill
/// memory. hyper sends no trailers, because the Trailer field, which concerns the connection to the
/// server, is removed.
#[derive(Debug)]
struct Answer {
    body: Either<Incoming, Full<Bytes>>,
    _busy: Busy,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Reads a complete body, without trailers.
async fn read_body(body: Incoming, limit: Duration) -> Result<Bytes, Refusal> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    // Refuses the body before hyper tells the client to continue.
    if body.size_hint().lower() > MAX_BODY as u64 {
        return Err(LARGE_BODY);
    }
    let whole = Limited::new(body, MAX_BODY).collect();
    match tokio::time::timeout(limit, whole).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(LARGE_BODY),
        Ok(Err(_)) => Err(MALFORMED_BODY),
        Err(_) => Err(SLOW_BODY),
    }
}
