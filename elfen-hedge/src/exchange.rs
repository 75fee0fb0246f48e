//! One request: the servers that receive it, and the answer that the client receives.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use elfen_rt::clock::monotonic_ns;
use hyper::Response;
use hyper::body::Incoming;

use crate::policy::{Hedge, Server};
use crate::request::{NO_SERVER, Refusal, Request, TOO_LATE};
use crate::shared::Shared;
use crate::upstream::{Lost, read_to_end};

type Ended = Result<Response<Incoming>, Lost>;
type Attempt = Pin<Box<dyn Future<Output = Ended> + Send>>;

/// The attempts at each server. Each server receives a request at most once.
#[derive(Default)]
struct Attempts {
    running: [Option<Attempt>; 2],
    failed: [bool; 2],
}

impl Attempts {
    fn begin(&mut self, shared: &Shared, server: Server, request: &Request) {
        let attempt = shared.upstream.clone().send(shared.address(server), request.clone());
        self.running[server.index()] = Some(Box::pin(attempt));
    }

    fn may_begin(&self, server: Server) -> bool {
        self.running[server.index()].is_none() && !self.failed[server.index()]
    }

    /// Waits for the next attempt that ends.
    async fn next(&mut self) -> (Server, Ended) {
        poll_fn(|context| {
            for server in Server::BOTH {
                let running = &mut self.running[server.index()];
                let Some(attempt) = running else { continue };
                if let Poll::Ready(ended) = attempt.as_mut().poll(context) {
                    *running = None;
                    self.failed[server.index()] = ended.is_err();
                    return Poll::Ready((server, ended));
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Sends a request and returns the first server's answer that arrives.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    request: Request,
) -> Result<Response<Incoming>, Refusal> {
    let may_repeat = shared.settings.methods.contains(&request.method);
    let mut flight = shared.flights.begin(may_repeat);
    let mut attempts = Attempts::default();
    let mut is_decided = false;
    let mut second = None;
    attempts.begin(shared, flight.server, &request);
    let give_up = tokio::time::sleep(shared.settings.give_up);
    tokio::pin!(give_up);
    let refusal = loop {
        let (server, ended) = tokio::select! {
            biased;
            ended = attempts.next() => ended,
            decided = &mut flight.duplicate, if !is_decided => {
                is_decided = true;
                match decided {
                    Ok(to) if attempts.may_begin(to) => {
                        attempts.begin(shared, to, &request);
                        second = Some(to);
                    }
                    // The request is there already, or that server has failed.
                    _ => flight.tell(Hedge::not_sent),
                }
                continue;
            }
            () = &mut give_up => break TOO_LATE,
        };
        let lost = match ended {
            Ok(response) => {
                flight.tell(|hedge, id| hedge.answered(id, monotonic_ns(), server));
                shared.replays.lock().record(&request, response.status());
                if let Some(late) = attempts.running.into_iter().flatten().next() {
                    read_late_answer(shared, late);
                }
                return Ok(response);
            }
            Err(lost) => lost,
        };
        let other = server.other();
        if let Lost::Refused(error) = &lost {
            shared.down(server, error);
            if second == Some(server) {
                flight.tell(Hedge::not_sent);
            }
        }
        if attempts.running[other.index()].is_some() {
            continue;
        }
        if !attempts.may_begin(other) {
            break NO_SERVER;
        }
        match lost {
            Lost::Refused(_) => {
                flight.tell(|hedge, id| hedge.moved(id, other));
                shared.counts.lock().moved += 1;
            }
            // The policy has just decided to send the request to the other server.
            Lost::Dropped if !is_decided && flight.duplicate.try_recv().is_ok() => {
                is_decided = true;
                second = Some(other);
            }
            Lost::Dropped if flight.tell(|hedge, id| hedge.retry(id, other)) => {
                second = Some(other)
            }
            Lost::Dropped | Lost::Invalid => break NO_SERVER,
        }
        attempts.begin(shared, other, &request);
    };
    shared.counts.lock().unanswered += 1;
    Err(refusal)
}

/// Reads a second answer to its end, so that its connection can be reused.
fn read_late_answer(shared: &Arc<Shared>, attempt: Attempt) {
    let Ok(permit) = Arc::clone(&shared.late).try_acquire_owned() else { return };
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let read = tokio::time::timeout(shared.settings.give_up, read_to_end(attempt)).await;
        shared.counts.lock().late += u64::from(read == Ok(true));
        drop(permit);
    });
}
