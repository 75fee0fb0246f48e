//! Productions of HPS: rules that say which executed instructions are profiled, and when.
//!
//! ```text
//! P1: T.OPCLASS == proc_call && !overflow_1 -> null, inc_1
//! ^   ^ pattern                 ^ condition    ^     ^ control
//! name                                         replacement
//! ```
//!
//! A [`RuleSet`] is what a file of rules says. An [`Engine`] applies it to executed instructions,
//! one after the other, and calls a handler where a production replaces one. This module has no I/O
//! and knows nothing of processes: `engine/rule_tally.rs` feeds it.
//!
//! The grammar and the decisions that the paper leaves open are in `docs/design/rules.md`.

mod engine;
mod expression;
mod kinds;
mod parse;
mod production;

pub(crate) use engine::{Engine, Executed};
pub use expression::Expression;
pub use kinds::{Kind, Kinds};
pub use parse::{FILE_BYTES_MAX, RuleError, parse, parse_pattern};
pub use production::{Handler, PRODUCTIONS_MAX, Production, Register, RuleSet};
