//! The integration tests of this crate. They are one program, because they share the compiler, a
//! service and a run (`stage`).

mod function_tags;
mod inspect;
mod library;
mod programs;
mod stage;
mod tasks;
