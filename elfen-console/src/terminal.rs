//! A terminal that is drawn on, and that is as it was afterwards, whatever happens to the process
//! that draws.
//!
//! Two processes. The child draws; the parent, which the shell knows, only waits. A child that
//! ends in order puts the terminal back itself; if it panics, crashes or is killed, the parent
//! does; and if the parent is killed, the kernel tells the child to end. No handler has to run
//! inside a process that is broken.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::ExitCode;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getppid, read};

/// The other screen, and no cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
/// Plain letters, the cursor, and the screen that was there.
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// What the user did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    Up,
    Down,
    Letter(char),
    /// The terminal has another size.
    Resized,
    /// A signal asks to end.
    End,
}

/// The parent's part or the child's.
#[derive(Debug)]
pub enum Role {
    Draw(Screen),
    /// The child has ended, and the terminal is as it was.
    Done(ExitCode),
    /// The same, and a signal ended it.
    Died(Signal),
}

/// Splits this process into a child that draws and a parent that waits. Call it while there is one
/// thread.
pub fn split() -> io::Result<Role> {
    let before = attributes()?;
    let mut ours = SigSet::empty();
    for signal in [
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGCHLD,
        Signal::SIGWINCH,
    ] {
        ours.add(signal);
    }
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours), None)?;
    let parent = nix::unistd::getpid();
    // SAFETY: `split` is called while there is one thread, so the child may do
    // whatever this process may.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => wait(child, &ours, &before),
        ForkResult::Child => {
            die_with(parent)?;
            Ok(Role::Draw(Screen::enter(&ours, before)?))
        }
    }
}

/// Ends this process by SIGTERM when its parent ends.
fn die_with(parent: Pid) -> io::Result<()> {
    // SAFETY: this prctl takes a number.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // It may have ended before that was said.
    if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

fn wait(child: Pid, ours: &SigSet, before: &libc::termios) -> io::Result<Role> {
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::Exited(_, code) => {
                return Ok(Role::Done(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))));
            }
            WaitStatus::Signaled(_, signal, _) => {
                put_back(before);
                return Ok(Role::Died(signal));
            }
            _ => {}
        }
        match ours.wait()? {
            Signal::SIGCHLD | Signal::SIGWINCH => {}
            // A signal of the terminal has reached the child already, which can bear it twice.
            signal => {
                let _gone = kill(child, signal);
            }
        }
    }
}

fn attributes() -> io::Result<libc::termios> {
    // SAFETY: a termios is numbers alone, for which zeros are valid; tcgetattr fills it in.
    let mut found: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: `found` is ours.
    let got = unsafe { libc::tcgetattr(io::stdin().as_raw_fd(), &mut found) };
    if got == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

fn set_attributes(to: &libc::termios) {
    // SAFETY: `to` is what tcgetattr gave, with other flags at most. A terminal that is
    // gone needs nothing put back.
    unsafe { libc::tcsetattr(io::stdin().as_raw_fd(), libc::TCSADRAIN, to) };
}

fn put_back(before: &libc::termios) {
    // Also when the shell has the terminal already: then this would stop us instead.
    let mut background = SigSet::empty();
    background.add(Signal::SIGTTOU);
    let _unchanged = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&background), None);
    let mut out = io::stdout();
    let _gone = out.write_all(LEAVE).and_then(|()| out.flush());
    set_attributes(before);
}

/// Whether there is a terminal to draw on and to read keys from.
pub fn is_there() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// The terminal while it is drawn on.
#[derive(Debug)]
pub struct Screen {
    before: libc::termios,
    signals: SignalFd,
}

impl Screen {
    fn enter(ours: &SigSet, before: libc::termios) -> io::Result<Self> {
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let screen = Self { before, signals: SignalFd::with_flags(ours, flags)? };
        let mut raw = before;
        // Keys come one by one and unseen; Ctrl-C is still a signal. Ctrl-Z would
        // leave the screen half drawn.
        raw.c_lflag &= !(libc::ICANON | libc::ECHO);
        raw.c_cc[libc::VSUSP] = 0;
        raw.c_cc[libc::VMIN] = 0;
        raw.c_cc[libc::VTIME] = 0;
        set_attributes(&raw);
        io::stdout().write_all(ENTER)?;
        Ok(screen)
    }

    /// Columns and rows; what terminals had once if this one does not tell.
    pub fn size() -> (usize, usize) {
        // SAFETY: a winsize is numbers alone, for which zeros are valid.
        let mut size: libc::winsize = unsafe { std::mem::zeroed() };
        // SAFETY: TIOCGWINSZ fills in a winsize, and `size` is one of ours.
        let told = unsafe { libc::ioctl(io::stdout().as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
        match (told, usize::from(size.ws_col), usize::from(size.ws_row)) {
            (0, columns, rows) if columns > 0 && rows > 0 => (columns, rows),
            _ => (80, 24),
        }
    }

    /// Shows lines, each with the escapes that it has, from the top.
    pub fn show(&self, lines: &[String]) -> io::Result<()> {
        // Each line is cleared behind its end, not before: nothing flickers.
        let text = lines.join("\x1b[0m\x1b[K\r\n");
        let mut out = io::stdout();
        out.write_all(format!("\x1b[H{text}\x1b[0m\x1b[K").as_bytes())?;
        out.flush()
    }

    /// What the user does within a time; nothing if the time is over.
    pub fn input(&self, within: Duration) -> io::Result<Vec<Input>> {
        let stdin = io::stdin();
        let within = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
        let mut waits = [
            PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut waits, within)?;
        let typed = waits[0].any().unwrap_or(false);
        let mut inputs = Vec::new();
        while let Ok(Some(signal)) = self.signals.read_signal() {
            let number = i32::try_from(signal.ssi_signo).unwrap_or(0);
            match Signal::try_from(number) {
                Ok(Signal::SIGWINCH) => inputs.push(Input::Resized),
                Ok(Signal::SIGCHLD) => {}
                _ => inputs.push(Input::End),
            }
        }
        if typed {
            let mut bytes = [0; 64];
            match read(stdin.as_fd(), &mut bytes)? {
                // Readable, and nothing there: the terminal has hung up.
                0 => inputs.push(Input::End),
                n => inputs.extend(keys(&bytes[..n])),
            }
        }
        Ok(inputs)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        put_back(&self.before);
    }
}

/// Letters and the two arrows; other keys are none of ours.
fn keys(bytes: &[u8]) -> Vec<Input> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let [first, after @ ..] = rest {
        rest = match after {
            [b'[' | b'O', end, after @ ..] if *first == 0x1b => {
                match end {
                    b'A' => keys.push(Input::Up),
                    b'B' => keys.push(Input::Down),
                    _ => {}
                }
                after
            }
            _ => {
                keys.extend(first.is_ascii_graphic().then(|| Input::Letter((*first).into())));
                after
            }
        };
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_letters_and_arrows() {
        use Input::{Down, Letter, Up};
        let cases: [(&[u8], &[Input]); 5] = [
            (b"q", &[Letter('q')]),
            (b"\x1b[A\x1b[B\x1bOA\x1bOB", &[Up, Down, Up, Down]),
            (b"+\x1b[Dp", &[Letter('+'), Letter('p')]),
            (b"\x1b", &[]),
            (b"\x03\xff \x1b[", &[Letter('[')]),
        ];
        for (bytes, expected) in cases {
            assert_eq!(keys(bytes), expected, "{bytes:?}");
        }
    }
}
