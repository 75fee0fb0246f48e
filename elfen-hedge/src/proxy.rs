//! Accepts clients' connections, and answers their requests.

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use elfen_hedge_policy::Server;
use elfen_tailor::signals::EndSignals;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::Response;
use hyper::body::{Body, Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use crate::answer::{self, Answer};
use crate::clients::{Busy, Client, Clients, Stream};
use crate::exchange;
use crate::policy_driver::Readable;
use crate::policy_driver::{Observation, PolicyDriver};
use crate::request::{LARGE_BODY, MALFORMED_BODY, MAX_HEAD, Origin, Refusal, Request, SLOW_BODY};
use crate::shared::{Done, Plan, Shared};

/// Limit of bodies. A request is kept until it is answered, because it may have to be sent again.
const MAX_BODY: usize = 1 << 20;
/// How long the proxy goes on reading a connection that it has ended.
const LINGER: Duration = Duration::from_secs(1);
const OTHER_VERSION: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\n\
    connection: close\r\n\r\n";
/// Without free descriptors, another connection has to end first.
const DESCRIPTOR_RETRY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Proxy {
    runtime: tokio::runtime::Runtime,
    listener: TcpListener,
    shared: Arc<Shared>,
    observation: Observation,
}

impl Proxy {
    pub(crate) fn open(plan: Plan, observation: Observation) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind(plan.listen))?;
        Ok(Self { runtime, listener, shared: Arc::new(Shared::new(plan)), observation })
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
            let clients = Clients::new(shared.plan.limits);
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
        tokio::time::sleep(clients.sweep_interval()).await;
        let closed = clients.close_overdue();
        shared.counts.with(|counts| counts.timed_out += closed);
    }
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>, clients: &Arc<Clients>) {
    let mut id = 0;
    loop {
        match listener.accept().await {
            Ok((socket, from)) => {
                let evicted = clients.make_room().await;
                shared.counts.with(|counts| counts.evicted += evicted);
                id += 1;
                let client = clients.client();
                let slot = ClientSlot { clients: Arc::clone(clients), id };
                let shared = Arc::clone(shared);
                let serve = serve(shared, Arc::clone(&client), socket, from.ip(), slot);
                clients.add(id, client, tokio::spawn(serve).abort_handle());
            }
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            // No descriptors are left.
            Err(_) => {
                let evicted = u64::from(clients.close_oldest());
                shared.counts.with(|counts| counts.evicted += evicted);
                tokio::time::sleep(DESCRIPTOR_RETRY).await;
            }
        }
    }
}

/// The entry of one connection, removed when this drops.
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
    // Without TCP_NODELAY the kernel only sends later.
    let _slower = socket.set_nodelay(true);
    let stream = TokioIo::new(Stream::new(socket, Arc::clone(&client)));
    let origin = Origin { client: from, trusted: shared.plan.trust_forwarded };
    let conversation = Conversation { shared: Arc::clone(&shared), client, origin };
    let mut connection = builder().serve_connection(stream, conversation);
    let ended = (&mut connection).await;
    let parts = connection.into_parts();
    let mut socket = parts.io.into_inner().into_socket();
    if ended.as_ref().is_err_and(hyper::Error::is_parse) {
        // hyper has already refused it.
        shared.counts.with(|counts| counts.refused += 1);
    }
    let is_version_2 = ended.is_err_and(|error| error.is_parse_version_h2());
    // Closing a socket with unread bytes resets it, and the answer may be lost. So read on for a
    // while: only a client that does not end its side in time loses the answer.
    let _ended = tokio::time::timeout(LINGER, async {
        if is_version_2 {
            socket.write_all(OTHER_VERSION).await?;
        }
        socket.shutdown().await?;
        tokio::io::copy(&mut socket, &mut tokio::io::sink()).await
    })
    .await;
}

/// Limits for reading clients' messages.
pub(crate) fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.half_close(true).max_buf_size(MAX_HEAD).max_header_size(MAX_HEAD);
    builder
}

/// Answers the requests of one connection.
#[derive(Debug)]
struct Conversation {
    shared: Arc<Shared>,
    client: Arc<Client>,
    origin: Origin,
}

impl Service<hyper::Request<Incoming>> for Conversation {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, Infallible>> + Send>>;

    fn call(&self, request: hyper::Request<Incoming>) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let busy = self.client.begin();
        let origin = self.origin;
        Box::pin(async move { Ok(answer_request(&shared, origin, request, busy).await) })
    }
}

/// Receives a whole request, rewritten for servers.
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

async fn answer_request(
    shared: &Arc<Shared>,
    origin: Origin,
    request: hyper::Request<Incoming>,
    busy: Busy,
) -> Response<Answer> {
    let request = match receive(request, origin, shared.plan.limits.body).await {
        Ok(request) => request,
        Err(refusal) => {
            shared.counts.with(|counts| counts.refused += 1);
            return answer::refusal(refusal, busy);
        }
    };
    match exchange::answer(shared, request).await {
        Ok(reply) => answer::of_server(reply, busy),
        Err(refusal) => answer::refusal(refusal, busy),
    }
}

/// Reads a whole body, without trailers.
async fn read_body(body: Incoming, limit: Duration) -> Result<Bytes, Refusal> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    // Refuse before hyper tells the client to continue.
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
