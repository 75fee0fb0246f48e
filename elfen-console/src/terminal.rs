//! Draws on a terminal, and restores the terminal afterwards, even if the drawing process dies.
//!
//! Two processes share the work. The child draws. The parent, which the shell started, only waits.
//! A child that ends normally restores the terminal itself. If the child panics, crashes or is
//! killed, the parent restores it. If the parent is killed, the kernel sends SIGTERM to the child.
//! So a broken process never has to run a handler.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::ExitCode;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal::{
    self, SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTTOU, SIGWINCH,
};
use nix::sys::signal::{SigSet, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices as Special, Termios, tcgetattr, tcsetattr,
};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getppid, read};

/// Switches to the alternate screen and hides the cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
/// Resets colours, shows the cursor, and returns to the previous screen.
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// An action of the user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    Up,
    Down,
    Letter(char),
    /// The size of the terminal has changed.
    Resized,
    /// A signal, or the end of the input, asks the process to end.
    End,
}

/// The roles of this process after [`split`], and how the child ended.
#[derive(Debug)]
pub enum Role {
    Draw(Screen),
    /// The child has ended and has restored the terminal.
    Done(ExitCode),
    /// A signal killed the child, and the terminal is restored.
    Died(Signal),
}

/// Splits this process into a child that draws and a parent that waits. The process must have only
/// one thread.
pub fn split() -> io::Result<Role> {
    let before = tcgetattr(io::stdin())?;
    let ours = SigSet::from_iter([SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGCHLD, SIGWINCH]);
    ours.thread_block()?;
    let parent = nix::unistd::getpid();
    // SAFETY: the process has only one thread, as `split` requires, so the child may call any
    // function.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => wait(child, &ours, &before),
        ForkResult::Child => {
            end_with_parent(parent)?;
            Ok(Role::Draw(Screen::enter(&ours, before)?))
        }
    }
}

/// Makes the kernel send SIGTERM to this process when its parent ends.
fn end_with_parent(parent: Pid) -> io::Result<()> {
    // SAFETY: this prctl takes a number.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The parent may have ended before the call.
    if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

fn wait(child: Pid, ours: &SigSet, before: &Termios) -> io::Result<Role> {
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::Exited(_, code) => {
                return Ok(Role::Done(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))));
            }
            WaitStatus::Signaled(_, signal, _) => {
                restore(before);
                return Ok(Role::Died(signal));
            }
            _ => {}
        }
        match ours.wait()? {
            SIGCHLD | SIGWINCH => {}
            // The terminal has already sent its own signals to the child. Receiving a signal twice
            // does no harm.
            signal => {
                let _gone = kill(child, signal);
            }
        }
    }
}

fn set_attributes(to: &Termios) {
    // If this fails, the terminal is gone, and nothing has to be restored.
    let _gone = tcsetattr(io::stdin(), SetArg::TCSADRAIN, to);
}

fn restore(before: &Termios) {
    // If the shell has taken the terminal back already, writing would stop this process with
    // SIGTTOU.
    let _unchanged = SigSet::from(SIGTTOU).thread_block();
    let mut out = io::stdout();
    let _gone = out.write_all(LEAVE).and_then(|()| out.flush());
    set_attributes(before);
}

/// Whether stdin and stdout are a terminal.
pub fn is_there() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// A terminal in drawing mode.
#[derive(Debug)]
pub struct Screen {
    before: Termios,
    signals: SignalFd,
}

impl Screen {
    fn enter(ours: &SigSet, before: Termios) -> io::Result<Self> {
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let screen = Self { before, signals: SignalFd::with_flags(ours, flags)? };
        let mut raw = screen.before.clone();
        // Deliver keys one by one and without echo. Ctrl-C still sends a signal. Ctrl-Z is
        // disabled, because it would leave the screen half drawn.
        raw.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
        for special in [Special::VSUSP, Special::VMIN, Special::VTIME] {
            raw.control_chars[special as usize] = 0;
        }
        set_attributes(&raw);
        io::stdout().write_all(ENTER)?;
        Ok(screen)
    }

    /// Columns and rows; 80 by 24 if the terminal does not report its size.
    pub fn size() -> (usize, usize) {
        // SAFETY: a winsize consists of numbers, for which zeros are valid.
        let mut size: libc::winsize = unsafe { std::mem::zeroed() };
        // SAFETY: TIOCGWINSZ fills in a winsize, and `size` is a local variable.
        let failed = unsafe { libc::ioctl(io::stdout().as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
        match (failed, usize::from(size.ws_col), usize::from(size.ws_row)) {
            (0, columns, rows) if columns > 0 && rows > 0 => (columns, rows),
            _ => (80, 24),
        }
    }

    /// Shows lines from the top of the screen on. They may contain escapes.
    pub fn show(&self, lines: &[String]) -> io::Result<()> {
        // Clears each line after its text and not before, to avoid flicker.
        let text = lines.join("\x1b[0m\x1b[K\r\n");
        let mut out = io::stdout();
        out.write_all(format!("\x1b[H{text}\x1b[0m\x1b[K").as_bytes())?;
        out.flush()
    }

    /// Waits at most `within` for actions of the user. Returns an empty list if nothing happens.
    pub fn input(&self, within: Duration) -> io::Result<Vec<Input>> {
        let stdin = io::stdin();
        let within = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
        let mut polled = [
            PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut polled, within)?;
        let is_readable = polled[0].any().unwrap_or(false);
        let mut inputs = Vec::new();
        while let Ok(Some(signal)) = self.signals.read_signal() {
            let number = i32::try_from(signal.ssi_signo).unwrap_or(0);
            match Signal::try_from(number) {
                Ok(SIGWINCH) => inputs.push(Input::Resized),
                Ok(SIGCHLD) => {}
                _ => inputs.push(Input::End),
            }
        }
        if is_readable {
            let mut bytes = [0; 64];
            match read(stdin.as_fd(), &mut bytes)? {
                // Readable without data means that the terminal has hung up.
                0 => inputs.push(Input::End),
                n => inputs.extend(keys(&bytes[..n])),
            }
        }
        Ok(inputs)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore(&self.before);
    }
}

/// Parses letters and the keys up and down. Ignores all other keys.
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
