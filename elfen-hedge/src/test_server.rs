//! A server for tests of the proxy. It works for as long as a request specifies, on one request at
//! a time. Its answer contains the request's name and its own name.
//!
//! `GET /FORM/US/NAME` works for US microseconds of CPU time, and answers in that form: `length`,
//! `chunked`, `close` or `endless`. `GET /count/0/NAME` answers how often the server worked for
//! that name.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{self, Write};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use elfen_machine::process::own_cpu_ns;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

type WorkCounts = Rc<RefCell<HashMap<String, u32>>>;

/// Serves on a port and prints the port. Port 0 means any free port. The process ends when its
/// standard input ends.
pub(crate) fn serve(name: &str, port: u16) -> io::Result<()> {
    std::thread::spawn(|| {
        let ended = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(i32::from(ended.is_err()));
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&runtime, accept(name, port))
}

async fn accept(name: &str, port: u16) -> io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let mut out = io::stdout();
    writeln!(out, "{}", listener.local_addr()?.port())?;
    out.flush()?;
    let counts = WorkCounts::default();
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let name = name.to_owned();
        let counts = Rc::clone(&counts);
        let answer = service_fn(move |request| answer(request, name.clone(), Rc::clone(&counts)));
        let connection = http1::Builder::new().serve_connection(TokioIo::new(socket), answer);
        // A client may disconnect during its answer.
        tokio::task::spawn_local(async { drop(connection.await) });
    }
}

async fn answer(
    request: Request<Incoming>,
    name: String,
    counts: WorkCounts,
) -> Result<Answer, Infallible> {
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let mut parts = path.splitn(3, '/');
    let (form, us) = (parts.next().unwrap_or(""), parts.next().and_then(|us| us.parse().ok()));
    let (Some(us), Some(name_of_request)) = (us, parts.next()) else {
        let mut response = Response::new(whole("the path is /FORM/US/NAME\n"));
        *response.status_mut() = StatusCode::NOT_FOUND;
        return Ok(response);
    };
    if form == "count" {
        let count = *counts.borrow().get(name_of_request).unwrap_or(&0);
        return Ok(Response::new(whole(count.to_string())));
    }
    // If the client disconnected, the body is incomplete.
    let body = request.into_body().collect().await.map(|body| body.to_bytes().len());
    *counts.borrow_mut().entry(name_of_request.to_owned()).or_default() += 1;
    work(us);
    let text = format!("{name_of_request} {} by {name}\n", body.unwrap_or(0));
    let mut response = Response::new(match form {
        // Without a known length, hyper sends chunks.
        "chunked" => Full::from(text).map_frame(|frame| frame).boxed(),
        "endless" => Endless.boxed(),
        _ => whole(text),
    });
    if form == "close" {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

fn whole(text: impl Into<Bytes>) -> BoxBody<Bytes, Infallible> {
    Full::new(text.into()).boxed()
}

/// Keeps the only thread busy for this much CPU time.
fn work(us: u64) {
    let until_ns = own_cpu_ns() + us * 1_000;
    while own_cpu_ns() < until_ns {
        std::hint::spin_loop();
    }
}

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// A body without an end.
struct Endless;

impl Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 4096])))))
    }
}
