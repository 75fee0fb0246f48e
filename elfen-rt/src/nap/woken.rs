//! How naps end, all alike.

/// Why a nap ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// The request lane idles, or has since the nap was asked for.
    Idle,
    /// The kernel wants the thread: its time slice has ended, or a signal waits.
    Wanted,
    /// The bound has passed.
    Bound,
    /// There was no nap: the thread is not on a lane that the request lane can wake.
    Elsewhere,
}
