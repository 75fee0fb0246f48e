//! The proxy: takes clients' connections, and has their requests answered.

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use elfen_hedge_policy::Server;
use elfen_recorder::signals::EndSignals;
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
use crate::descriptor::Readable;
use crate::exchange;
use crate::policy_driver::{Sight, Steward};
use crate::request::{LARGE_BODY, MALFORMED_BODY, MAX_HEAD, Origin, Refusal, Request, SLOW_BODY};
use crate::shared::{Done, Plan, Shared};

/// A request is kept until it is answered, since it may have to be sent again.
const MAX_BODY: usize = 1 << 20;
/// How long a connection is read that the proxy has ended.
const LINGER: Duration = Duration::from_secs(1);
const OTHER_VERSION: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\n\
    connection: close\r\n\r\n";
/// Without descriptors, another connection has to end first.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Proxy {
    runtime: tokio::runtime::Runtime,
    listener: TcpListener,
    shared: Arc<Shared>,
    sight: Sight,
}

impl Proxy {
    pub(crate) fn open(plan: Plan, sight: Sight) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind(plan.listen))?;
        Ok(Self { runtime, listener, shared: Arc::new(Shared::new(plan)), sight })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until a signal ends it.
    pub(crate) fn run(self, ending: &EndSignals) -> io::Result<Done> {
        let Self { runtime, listener, shared, sight } = self;
        runtime.block_on(async {
            let steward = Steward::new(Arc::clone(&shared), sight)?;
            for server in Server::BOTH {
                tokio::spawn(Arc::clone(&shared).begin(server));
            }
            let clients = Clients::new(shared.plan.limits);
            tokio::select! {
                ended = end(ending) => ended?,
                failed = steward.run() => failed?,
                () = accept(&listener, &shared, &clients) => {}
                () = sweep(&shared, &clients) => {}
            }
            Ok(shared.done())
        })
    }
}

async fn end(ending: &EndSignals) -> io::Result<()> {
    let ready = Readable::new(ending)?;
    while ending.take().is_none() {
        ready.next().await?;
    }
    Ok(())
}

async fn sweep(shared: &Shared, clients: &Clients) {
    loop {
        tokio::time::sleep(clients.sweep_every()).await;
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
                let place = Place { clients: Arc::clone(clients), id };
                let shared = Arc::clone(shared);
                let serve = serve(shared, Arc::clone(&client), socket, from.ip(), place);
                clients.add(id, client, tokio::spawn(serve).abort_handle());
            }
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            // No descriptors are left.
            Err(_) => {
                let evicted = u64::from(clients.close_oldest());
                shared.counts.with(|counts| counts.evicted += evicted);
                tokio::time::sleep(WITHOUT_DESCRIPTORS).await;
            }
        }
    }
}

/// One connection among all.
#[derive(Debug)]
struct Place {
    clients: Arc<Clients>,
    id: u64,
}

impl Drop for Place {
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
    _place: Place,
) {
    // A kernel that can't send at once sends later.
    let _slower = socket.set_nodelay(true);
    let stream = TokioIo::new(Stream::new(socket, Arc::clone(&client)));
    let origin = Origin { client: from, trusted: shared.plan.trust_forwarded };
    let conversation = Conversation { shared: Arc::clone(&shared), client, origin };
    let mut connection = builder().serve_connection(stream, conversation);
    let ended = (&mut connection).await;
    let parts = connection.into_parts();
    let mut socket = parts.io.into_inner().into_socket();
    if ended.as_ref().is_err_and(hyper::Error::is_parse) {
        // hyper has refused it itself.
        shared.counts.with(|counts| counts.refused += 1);
    }
    let is_version_2 = ended.is_err_and(|error| error.is_parse_version_h2());
    // A socket that is closed with unread bytes in it is reset, and the answer may be lost. Only a
    // client that does not end its side in time loses it.
    let _ended = tokio::time::timeout(LINGER, async {
        if is_version_2 {
            socket.write_all(OTHER_VERSION).await?;
        }
        socket.shutdown().await?;
        tokio::io::copy(&mut socket, &mut tokio::io::sink()).await
    })
    .await;
}

/// How messages of clients are read.
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
        let (shared, busy) = (Arc::clone(&self.shared), self.client.begin());
        let origin = self.origin;
        Box::pin(async move { Ok(converse(&shared, origin, request, busy).await) })
    }
}

/// A whole request, as servers get it.
pub(crate) async fn taken(
    request: hyper::Request<Incoming>,
    origin: Origin,
    limit: Duration,
) -> Result<Request, Refusal> {
    let (head, body) = request.into_parts();
    let mut request = Request::check(head, origin)?;
    request.set_body(read(body, limit).await?);
    Ok(request)
}

async fn converse(
    shared: &Arc<Shared>,
    origin: Origin,
    request: hyper::Request<Incoming>,
    busy: Busy,
) -> Response<Answer> {
    let request = match taken(request, origin, shared.plan.limits.body).await {
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

/// Reads a whole body; trailers are left out.
async fn read(body: Incoming, limit: Duration) -> Result<Bytes, Refusal> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    // Before hyper tells the client to go on with it.
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
