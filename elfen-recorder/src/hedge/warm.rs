//! A server that was started anew works for recorded requests first, one after the other, and gets
//! none of a client until it is warm: a JVM has to load its classes and compile.

use std::collections::VecDeque;
use std::rc::Rc;

use elfen_tailor::hedge::Server;

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
    /// A request is under way.
    asked: bool,
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
        self.cold[server.index()] = Some(Cold { left: FIRST, asked: false, try_ns: 0 });
    }

    pub(super) fn answered(&mut self, server: Server) {
        if let Some(cold) = &mut self.cold[server.index()] {
            (cold.left, cold.asked) = (cold.left.saturating_sub(1), false);
        }
    }

    /// It does not serve yet, or no more.
    pub(super) fn failed(&mut self, server: Server) {
        if let Some(cold) = &mut self.cold[server.index()] {
            cold.asked = false;
            cold.try_ns = elfen_rt::clock::monotonic_ns().saturating_add(AGAIN_NS);
        }
    }

    /// The next request for a server, if it is time for one.
    pub(super) fn next(&mut self, server: Server, now_ns: u64) -> Option<Rc<Request>> {
        let cold = self.cold[server.index()].as_mut()?;
        if cold.asked || cold.left == 0 || cold.try_ns > now_ns {
            return None;
        }
        let request = self.recorded.get(cold.left % self.recorded.len().max(1))?;
        cold.asked = true;
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
        let waits = self.cold.iter().flatten().filter(|cold| !cold.asked && cold.left > 0);
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
        for _ in 0..FIRST {
            assert!(warming.next(Primary, 1).is_none() && !warming.is_done(Backup));
            assert!(warming.next(Backup, 1).is_some() && warming.next(Backup, 1).is_none());
            warming.answered(Backup);
        }
        assert!(warming.is_done(Backup) && warming.due_ns(1).is_none());
        warming.begin(Primary);
        warming.next(Primary, 1).unwrap();
        warming.failed(Primary);
        assert!(warming.next(Primary, 1).is_none() && warming.due_ns(1) > Some(AGAIN_NS));
    }
}
