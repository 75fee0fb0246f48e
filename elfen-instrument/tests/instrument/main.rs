//! The tests of this crate, in one program because they share a stage: the
//! compiler, a service, and a run.

mod inspect;
mod library;
mod programs;
mod said;
mod stage;
mod tasks;
