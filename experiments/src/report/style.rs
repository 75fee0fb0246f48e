//! How series are told apart: by colour, and without it by dash and marker.
//!
//! The colours stand in `elfen-console/src/page.css`, for light, dark and paper. They were searched
//! for the largest least distance between those that meet in one figure, with full colour vision
//! and with three kinds of colour blindness; `tests/report/colours.rs` holds what was found.

use super::figure::{Mark, Style};

impl Style {
    pub const ALL: [Self; 10] = [
        Self::Ink,
        Self::Blue,
        Self::Red,
        Self::Aqua,
        Self::Orange,
        Self::Violet,
        Self::Ochre,
        Self::Pink,
        Self::Green,
        Self::Grey,
    ];

    /// Its class in the page's style.
    pub(super) fn class(self) -> &'static str {
        match self {
            Self::Ink => "ink",
            Self::Blue => "blue",
            Self::Red => "red",
            Self::Aqua => "aqua",
            Self::Orange => "orange",
            Self::Violet => "violet",
            Self::Ochre => "ochre",
            Self::Pink => "pink",
            Self::Green => "green",
            Self::Grey => "grey",
        }
    }

    /// Lengths of strokes and gaps; a full line is "none".
    pub(super) fn dash(self) -> &'static str {
        match self {
            Self::Ink => "none",
            Self::Blue => "9 3",
            Self::Red => "6 2 2 2",
            Self::Aqua => "2 3",
            Self::Orange => "5 4",
            Self::Violet => "12 3 2 3",
            Self::Ochre => "4 2",
            Self::Pink => "14 4",
            Self::Green => "8 3 2 3 2 3",
            Self::Grey => "1 3",
        }
    }

    /// An outline around its middle, about 8 across.
    pub(super) fn marker(self) -> &'static str {
        match self {
            Self::Ink => "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0Z",
            Self::Blue => "M-3.4 -3.4H3.4V3.4H-3.4Z",
            Self::Red => "M0 -4.6L4.4 3.2H-4.4Z",
            Self::Aqua => "M0 -4.8L4.8 0L0 4.8L-4.8 0Z",
            Self::Orange => "M0 4.6L4.4 -3.2H-4.4Z",
            Self::Violet => "M4.6 0L-3.2 4.4V-4.4Z",
            Self::Ochre => "M-4.6 0L3.2 4.4V-4.4Z",
            Self::Pink => "M-1.6 -4.4H1.6V-1.6H4.4V1.6H1.6V4.4H-1.6V1.6H-4.4V-1.6H-1.6Z",
            Self::Green => "M0 -4.4L4.2 -1.4L2.6 3.6H-2.6L-4.2 -1.4Z",
            Self::Grey => {
                "M-4.2 -2L-2 -4.2L0 -2.2L2 -4.2L4.2 -2L2.2 0L4.2 2L2 4.2L0 2.2L-2 4.2L-4.2 2 \
                 L-2.2 0Z"
            }
        }
    }
}

impl Mark {
    /// What is drawn at each point, as an SVG element's attributes.
    pub(super) fn marker_class(self) -> Option<&'static str> {
        match self {
            Self::Line | Self::Dots => Some("dot"),
            Self::Rings => Some("ring"),
            Self::Curve | Self::Bars | Self::Histogram { .. } => None,
        }
    }
}
