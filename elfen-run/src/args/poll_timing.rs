//! The options for how often guards poll, for `run` and the benchmarks.

use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};

use crate::poll_timing::PollTiming;

#[derive(clap::Args, Clone, Copy, Debug)]
pub struct PollTimingArgs {
    /// How often a guard polls its request lane: the longest reaction while the lane is in use
    #[arg(help_heading = "Expert", long, value_name = "TIME", default_value = "500us",
        value_parser = duration::parse,
        env = "ELFEN_POLL_INTERVAL")]
    poll_interval: Duration,

    /// How much later a poll may come on a lane that idles, to share an
    /// interrupt with the kernel's tick
    ///
    /// At most this, and at most a sixty-fourth of how long the lane has idled; 0us for never.
    #[arg(help_heading = "Expert", long, value_name = "TIME", default_value = "4ms",
        value_parser = duration::parse,
        env = "ELFEN_TIMER_SLACK")]
    timer_slack: Duration,
}

impl PollTimingArgs {
    pub fn timing(self) -> Result<PollTiming, Failure> {
        if self.poll_interval.is_zero() {
            let (why, fix) = (
                "the guard would never sleep",
                "give it 50us or more, as in --poll-interval 500us",
            );
            return Err(Failure::new(Status::Usage, "--poll-interval 0", why, fix));
        }
        Ok(PollTiming { interval: self.poll_interval, slack: self.timer_slack })
    }

    /// Whether these are the defaults.
    pub fn is_usual(self) -> bool {
        self.poll_interval == Duration::from_micros(500)
            && self.timer_slack == Duration::from_millis(4)
    }

    /// The options that give this poll timing.
    pub fn words(self) -> [String; 4] {
        let time = |time: Duration| format!("{}ns", time.as_nanos());
        let [interval, slack] = [self.poll_interval, self.timer_slack].map(time);
        ["--poll-interval".to_owned(), interval, "--timer-slack".to_owned(), slack]
    }
}
