//! The queue between the coordinator and the workers: bounded, first come first served.
//!
//! All request lanes share one queue. With a queue for each lane, a request could wait behind a
//! long one while another lane idles. The length is published while the queue is locked, so that
//! lengths appear in the correct order.

use elfen_rt::service::Service;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;

pub(super) struct Queue<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
    longest: usize,
    page: Option<Page>,
}

/// The page on which the length is published.
#[derive(Clone)]
pub(super) struct Page {
    pub(super) service: &'static Service,
    pub(super) lanes: u32,
}

struct State<T> {
    waiting: VecDeque<T>,
    closed: bool,
}

impl<T> Queue<T> {
    pub(super) fn new(longest: usize, page: Option<Page>) -> Self {
        let state = State { waiting: VecDeque::with_capacity(longest), closed: false };
        Self { state: Mutex::new(state), filled: Condvar::new(), longest, page }
    }

    /// Returns the item as an error if the queue is full.
    pub(super) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.state.lock();
        if state.waiting.len() >= self.longest {
            return Err(item);
        }
        state.waiting.push_back(item);
        self.publish(&state);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// Waits for the next item. Returns `None` once the queue is closed and empty.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.waiting.pop_front() {
                self.publish(&state);
                return Some(item);
            }
            if state.closed {
                return None;
            }
            self.filled.wait(&mut state);
        }
    }

    /// Closes the queue. The workers end when it is empty.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.filled.notify_all();
    }

    pub(super) fn len(&self) -> usize {
        self.state.lock().waiting.len()
    }

    fn publish(&self, state: &State<T>) {
        let Some(page) = &self.page else { return };
        for lane in 0..page.lanes {
            page.service.set_queue_len(lane, state.waiting.len() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Goal: the length is bounded, the order is kept, and a closed queue still returns its items.
    /// Method: one thread.
    #[test]
    fn the_queue_is_bounded_and_fair() {
        let queue = Queue::new(2, None);
        assert_eq!((queue.push(1), queue.push(2), queue.push(3)), (Ok(()), Ok(()), Err(3)));
        assert_eq!((queue.len(), queue.pop()), (2, Some(1)));
        assert_eq!(queue.push(4), Ok(()));
        queue.close();
        assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(2), Some(4), None));
    }

    /// Goal: every item is taken exactly once. Method: two takers, one giver, many items.
    #[test]
    fn takers_share_the_work() {
        let queue = Queue::new(10_000, None);
        let taken: Vec<u32> = thread::scope(|scope| {
            let takers: Vec<_> = (0..2)
                .map(|_| scope.spawn(|| std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>()))
                .collect();
            (0..10_000).for_each(|item| queue.push(item).expect("there is room"));
            queue.close();
            takers.into_iter().flat_map(|taker| taker.join().expect("no panic")).collect()
        });
        let mut sorted = taken;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..10_000));
    }
}
