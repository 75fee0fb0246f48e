//! What shared the core with the service: one name and one style in every figure.

use super::figure::Style;
use crate::live::plan::scenario_name;
use crate::record::Scenario;

impl Scenario {
    /// As the figures and tables have it.
    pub fn title(self) -> &'static str {
        match self {
            Self::None => "no batch",
            Self::Nice19 => "nice 19",
            Self::SchedIdle => "SCHED_IDLE",
            Self::CoreScheduling => "core scheduling",
            _ => scenario_name(self),
        }
    }

    pub(super) fn style(self) -> Style {
        match self {
            Self::None => Style::Ink,
            Self::Unrestrained => Style::Red,
            Self::Nice19 => Style::Orange,
            Self::SchedIdle => Style::Green,
            Self::CoreScheduling => Style::Grey,
            Self::BorrowIdle => Style::Blue,
            Self::FixedBudget => Style::Aqua,
            Self::RefreshBudget => Style::Ochre,
            Self::DynamicBudget => Style::Violet,
            Self::SloBudget => Style::Pink,
        }
    }
}
