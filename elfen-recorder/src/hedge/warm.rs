//! A server that was started anew works for recorded requests first, one after the other, and gets
//! none of a client until it is warm: a JVM has to load its classes and compile.
//!
//! It rests after each as long as it has worked for it: where it shares CPUs with the other server,
//! whose clients wait, half of one is left to that.

use std::collections::VecDeque;
use std::rc::Rc;

use elfen_hedge_policy::Server;

use super::client::Request;

/// The last ones that may be repeated.
const RECORDED: usize = 256;
/// A server answers so many before it is warm: a JVM compiles what was called some hundred times.
const FIRST: usize = 1_000;
const AGAIN_NS: u64 = 50_000_000;

/// What there is to do for a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cold {
    left: usize,
    /// Since when a request is under way.
    asked_ns: Option<u64>,
    try_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Warming {
    recorded: VecDeque<Rc<Request>>,
    cold: [Option<Cold>; 2],
}

impl Warming {
    pub(super) fn record(&mut self, request: &Rc<Request>) {
        // One that ends its connection would end ours.
        if request.closes {
            return;
        }
        if self.recorded.len() == RECORDED {
            self.recorded.pop_front();
        }
        self.recorded.push_back(Rc::clone(request));
    }

    pub(super) fn begin(&mut self, server: Server) {
        self.cold[server.index()] = Some(Cold { left: FIRST, asked_ns: None, try_ns: 0 });
    }

    /// It serves no more, if that is news.
    pub(super) fn died(&mut self, server: Server) {
        if self.cold[server.index()].is_none() {
            self.begin(server);
        }
    }

    pub(super) fn answered(&mut self, server: Server, now_ns: u64) {
        let Some(cold) = &mut self.cold[server.index()] else { return };
        cold.left = cold.left.saturating_sub(1);
        let took_ns = cold.asked_ns.take().map_or(0, |asked_ns| now_ns.saturating_sub(asked_ns));
        cold.try_ns = now_ns.saturating_add(took_ns);
    }

    /// It does not serve yet, or no more.
    pub(super) fn failed(&mut self, server: Server, now_ns: u64) {
        if let Some(cold) = &mut self.cold[server.index()] {
            (cold.asked_ns, cold.try_ns) = (None, now_ns.saturating_add(AGAIN_NS));
        }
    }

    /// The next request for a server, if it is time for one.
    pub(super) fn next(&mut self, server: Server, now_ns: u64) -> Option<Rc<Request>> {
        let cold = self.cold[server.index()].as_mut()?;
        if cold.asked_ns.is_some() || cold.left == 0 || cold.try_ns > now_ns {
            return None;
        }
        let request = self.recorded.get(cold.left % self.recorded.len().max(1))?;
        cold.asked_ns = Some(now_ns);
        Some(Rc::clone(request))
    }

    /// Whether a server has become warm, which is told once; with nothing recorded, there is
    /// nothing to wait for.
    pub(super) fn is_done(&mut self, server: Server) -> bool {
        let nothing = self.recorded.is_empty();
        let cold = &mut self.cold[server.index()];
        cold.take_if(|cold| cold.left == 0 || nothing).is_some()
    }

    /// When a server is asked again that did not serve.
    pub(super) fn due_ns(&self, now_ns: u64) -> Option<u64> {
        let waits =
            self.cold.iter().flatten().filter(|cold| cold.asked_ns.is_none() && cold.left > 0);
        waits.map(|cold| cold.try_ns.max(now_ns)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Server::{Backup, Primary};

    #[test]
    fn a_server_is_warm_once_it_has_answered() {
        let mut warming = Warming::default();
        warming.begin(Backup);
        assert!(warming.is_done(Backup) && !warming.is_done(Backup), "nothing to warm it with");
        let request = |closes| Rc::new(Request { method: "GET".into(), bytes: vec![1], closes });
        warming.record(&request(true));
        assert_eq!(warming.recorded.len(), 0);
        for _ in 0..2 * RECORDED {
            warming.record(&request(false));
        }
        warming.begin(Backup);
        for at in 0..FIRST as u64 {
            let now_ns = at * 10;
            assert!(warming.next(Primary, now_ns).is_none() && !warming.is_done(Backup));
            let next = |warming: &mut Warming, at| warming.next(Backup, at).is_some();
            assert!(next(&mut warming, now_ns) && !next(&mut warming, now_ns));
            warming.answered(Backup, now_ns + 5);
            assert!(!next(&mut warming, now_ns + 9), "it rests as long as it has worked");
        }
        assert!(warming.is_done(Backup) && warming.due_ns(1).is_none());
        warming.died(Primary);
        warming.next(Primary, 1).unwrap();
        warming.failed(Primary, 1);
        warming.died(Primary);
        assert!(warming.next(Primary, 1).is_none() && warming.due_ns(1) == Some(1 + AGAIN_NS));
    }
}
