//! The tests of this crate, in one program because they share a stage: the
//! compiler, a service, and a run.

mod function_tags;
mod inspect;
mod library;
mod programs;
mod stage;
mod tasks;
