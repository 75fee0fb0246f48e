//! Looks after who serves, in a thread of its own: finding processes and their sockets takes some
//! milliseconds, and attaching probes to a JVM tens of them, in which the proxy is to give answers.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use elfen_hedge_policy::Server;
use elfen_rt::clock::monotonic_ns;

use super::serving::{Change, LOOK_NS, Serving};

/// Others serve than did.
#[derive(Debug)]
pub(super) struct Changed {
    pub(super) server: Server,
    pub(super) change: Change,
    pub(super) processes: Vec<u32>,
}

/// The thread ends after this.
#[derive(Debug)]
pub(super) struct Lookout {
    changed: Receiver<Changed>,
    _ends: Sender<()>,
}

impl Lookout {
    /// `prepare` hears of whoever serves before anybody else does.
    pub(super) fn begin(
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

    /// What has changed since this was asked last.
    pub(super) fn take(&self) -> impl Iterator<Item = Changed> + '_ {
        self.changed.try_iter()
    }
}
