//! Finds the processes that serve, in a thread of its own. Finding processes and their sockets
//! takes some milliseconds, and attaching probes to a JVM tens of them: the proxy can't wait.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use elfen_hedge_policy::Server;
use elfen_rt::clock::monotonic_ns;

use crate::processes::{Change, LOOK_NS, Serving};

/// A server has other processes than before.
#[derive(Debug)]
pub(crate) struct Changed {
    pub(crate) server: Server,
    pub(crate) change: Change,
    pub(crate) processes: Vec<u32>,
}

/// The thread ends after this.
#[derive(Debug)]
pub(crate) struct Lookout {
    changed: Receiver<Changed>,
    _ends: Sender<()>,
}

impl Lookout {
    /// `prepare` is called with the processes of both servers before a change is passed on.
    pub(crate) fn begin(
        mut serving: [Serving; 2],
        mut prepare: impl FnMut([&[u32]; 2]) + Send + 'static,
    ) -> Self {
        let (tell, changed) = channel();
        let (ends, over) = channel::<()>();
        std::thread::spawn(move || {
            while over.recv_timeout(Duration::from_nanos(LOOK_NS)) == Err(RecvTimeoutError::Timeout)
            {
                let now_ns = monotonic_ns();
                let changes = serving.each_mut().map(|serving| serving.look(now_ns));
                if changes == [None; 2] {
                    continue;
                }
                prepare(serving.each_ref().map(Serving::processes));
                for (server, change) in Server::BOTH.into_iter().zip(changes) {
                    let Some(change) = change else { continue };
                    let processes = serving[server.index()].processes().to_vec();
                    if tell.send(Changed { server, change, processes }).is_err() {
                        return;
                    }
                }
            }
        });
        Self { changed, _ends: ends }
    }

    /// What has changed since the last call.
    pub(crate) fn take(&self) -> impl Iterator<Item = Changed> + '_ {
        self.changed.try_iter()
    }
}
