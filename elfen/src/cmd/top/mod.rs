//! `elfen top`: shows lanes, what runs on them, what batches borrow, tails compared with SLOs, and
//! what recordings of profiles cost.
//! Keys change policies and budgets.

mod keys;
mod picture;
mod watch;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_console::terminal::{self, Input, Role, Screen};

use super::pause::RunDir;
use keys::Keys;
use picture::draw;
use watch::Watch;

const EXAMPLES: &str = "\
Examples:
  elfen top              until q or Ctrl-C
  elfen top --once       once, for scripts
  sudo elfen top         with the batches of all users, and what their lanes run

Keys: up and down select a batch; p selects its next policy; + and - change its budget; q ends. \
Shares refer to the time since the last refresh, tail latencies to the last ten seconds.";

/// Watch lanes and batches, and change their policies
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    run_dir: RunDir,

    /// Print it once and end
    #[arg(long)]
    once: bool,

    /// Time between two refreshes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::parse)]
    every: Duration,
}

/// The size of a picture without a terminal: columns and rows.
const OFF_TERMINAL: (usize, usize) = (120, 200);
const SHORTEST: Duration = Duration::from_millis(50);

pub(crate) fn run(args: &TopArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    super::status::batches(&args.run_dir)?;
    if args.every < SHORTEST {
        let why = "a refresh takes some time itself";
        let fix = format!("use {} ms or more", SHORTEST.as_millis());
        return Err(Failure::new(Status::Usage, "--every", why, fix));
    }
    if args.once || !terminal::is_there() {
        return print(args, out);
    }
    let failed = |error| Failure::new(Status::Failed, "the terminal", error, "use --once");
    match terminal::split().map_err(failed)? {
        Role::Draw(screen) => watch(args, &screen).map_err(failed),
        Role::Done(code) => Ok(code),
        Role::Died(signal) => {
            let why = format!("the process that draws was ended by {signal}");
            Err(Failure::new(Status::Failed, "the terminal", why, "use --once, and report this"))
        }
    }
}

/// Prints pictures as text, if stdout is not a terminal: once or repeatedly.
fn print(args: &TopArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut watch = Watch::new(args.run_dir.folder().socket());
    loop {
        let view = watch
            .read()
            .map_err(|error| Failure::new(Status::Failed, "finding batches", error, "try again"))?;
        let (columns, rows) = OFF_TERMINAL;
        let mut lines = draw(&view, None, None, columns, rows);
        // The last line lists the keys, which do not work here.
        lines.pop();
        let text: Vec<&str> = lines.iter().map(|line| line.text.trim_end()).collect();
        let text = text.join("\n");
        writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()).map_err(Failure::output)?;
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(args.every);
    }
}

fn watch(args: &TopArgs, screen: &Screen) -> io::Result<ExitCode> {
    let mut watch = Watch::new(args.run_dir.folder().socket());
    let mut keys = Keys::default();
    let colours = elfen_console::output::colours();
    let mut view = watch.read()?;
    let mut next = Instant::now() + args.every;
    loop {
        let (columns, rows) = Screen::size();
        let lines = draw(&view, keys.selected(&watch), keys.note(), columns, rows);
        let lines = lines.into_iter().map(|line| match colours {
            true => format!("\x1b[{}m{}", line.style, line.text),
            false => line.text,
        });
        screen.show(&lines.collect::<Vec<_>>())?;
        for input in screen.input(next.saturating_duration_since(Instant::now()))? {
            match input {
                Input::End | Input::Letter('q') => return Ok(ExitCode::SUCCESS),
                Input::Up | Input::Letter('k') => keys.select_previous(&watch),
                Input::Down | Input::Letter('j') => keys.select_next(&watch),
                Input::Letter('p') => keys.change_policy(&watch),
                Input::Letter('+' | '=') => keys.change_budget(&watch, true),
                Input::Letter('-') => keys.change_budget(&watch, false),
                Input::Letter(_) | Input::Resized => {}
            }
        }
        if Instant::now() >= next {
            view = watch.read()?;
            next = Instant::now() + args.every;
            keys.age_note();
        }
    }
}
