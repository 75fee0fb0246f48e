//! How request lanes idle: an idle lane should leave the core to its sibling, and wake up quickly.

use super::finding::{Finding, Machine};
use crate::source::{Source, SourceError};

const CPU: &str = "/sys/devices/system/cpu";

/// An idle state of one CPU, as cpuidle lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct IdleState {
    name: String,
    exit_latency_us: u64,
}

impl IdleState {
    /// Whether the kernel spins in this state; every other state stops the lane.
    fn polls(&self) -> bool {
        self.name == "POLL"
    }
}

/// The enabled idle states of a CPU; empty if the kernel lists none.
fn states(source: &Source, cpu: u32) -> Result<Vec<IdleState>, SourceError> {
    let mut states = Vec::new();
    for number in 0.. {
        let file =
            |name: &str| source.text(&format!("{CPU}/cpu{cpu}/cpuidle/state{number}/{name}"));
        let Some(name) = file("name")? else { break };
        if file("disable")?.as_deref().unwrap_or("0") != "0" {
            continue;
        }
        let latency = file("latency")?.and_then(|latency| latency.parse().ok());
        states.push(IdleState { name, exit_latency_us: latency.unwrap_or(0) });
    }
    Ok(states)
}

/// A lane that polls while it idles takes half of the core that it should lend.
pub(super) fn yields_core(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    match machine.answers.idle_poll {
        Some(false) => {}
        Some(true) => {
            let why =
                "booted with idle=poll: an idle request lane spins, and slows its batch lane down";
            return Ok(Finding::warn(why, "boot without idle=poll"));
        }
        None => {
            let why = "/proc/cmdline does not say whether the kernel was booted with idle=poll";
            return Ok(Finding::warn(why, "make /proc/cmdline readable for this user"));
        }
    }
    for cpu in machine.request_lanes().iter() {
        let states = states(machine.source, cpu)?;
        if !states.is_empty() && states.iter().all(IdleState::polls) {
            let why = format!(
                "all idle states of CPU {cpu} but POLL are off: an idle request lane spins, and \
                 slows its batch lane down"
            );
            let fix = format!(
                "switch one on (as root: `echo 0 > {CPU}/cpu{cpu}/cpuidle/state1/disable`)"
            );
            return Ok(Finding::warn(why, fix));
        }
    }
    halt_poll(machine)
}

const HALT_POLL: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";

/// A guest may spin before it halts, to avoid the exit to the hypervisor.
fn halt_poll(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let driver = machine.source.text(&format!("{CPU}/cpuidle/current_driver"))?;
    let governor = machine.source.text(&format!("{CPU}/cpuidle/current_governor"))?;
    let limit = machine.source.text(HALT_POLL)?.and_then(|limit| limit.parse::<u64>().ok());
    let haltpoll = [driver, governor].iter().all(|name| name.as_deref() == Some("haltpoll"));
    Ok(match limit {
        Some(limit_ns) if haltpoll && limit_ns > 0 => {
            let why = format!("haltpoll: an idle request lane spins for up to {limit_ns} ns first");
            Finding::warn(why, format!("do without it (as root: `echo 0 > {HALT_POLL}`)"))
        }
        _ => Finding::yes("an idle request lane stops and leaves the core to its sibling"),
    })
}

/// With a longer exit latency, waking a lane takes longer than a short request.
const SLOW_EXIT_US: u64 = 100;

pub(super) fn wakes_fast(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    if machine.answers.idle_poll == Some(true) {
        return Ok(Finding::yes("booted with idle=poll: an idle lane spins and never sleeps"));
    }
    if machine.topology.hypervisor {
        let why = "a virtual machine: an idle lane halts, and how long it takes to wake depends on \
                   the hypervisor";
        let fix = "let the guest idle by itself (in QEMU, `-overcommit cpu-pm=on`), or use the \
                   machine without a hypervisor";
        return Ok(Finding::warn(why, fix));
    }
    let mut slowest: Option<(u32, IdleState)> = None;
    for cpu in machine.request_lanes().iter() {
        for state in states(machine.source, cpu)? {
            let slower =
                |(_, known): &(u32, IdleState)| state.exit_latency_us > known.exit_latency_us;
            if slowest.as_ref().is_none_or(slower) {
                slowest = Some((cpu, state));
            }
        }
    }
    let Some((cpu, IdleState { name, exit_latency_us })) = slowest else {
        return Ok(Finding::yes("the kernel lists no idle states: lanes halt and wake at once"));
    };
    let why = format!("leaving {name} takes CPU {cpu} up to {exit_latency_us} us");
    Ok(if exit_latency_us < SLOW_EXIT_US {
        Finding::yes(why)
    } else {
        let fix = format!(
            "if the first request after a pause is late: switch {name} off on the request lanes \
             (`disable` in {CPU}/cpu{cpu}/cpuidle); while a batch runs next to it the core is awake"
        );
        Finding::warn(why, fix)
    })
}
