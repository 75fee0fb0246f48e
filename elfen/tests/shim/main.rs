//! Goal: `elfen shim` observes what programs do, does not disturb them, ends when it should, and
//! refuses what cannot work, with a reason. Method: the real command, on programs with known
//! behaviour that the tests build. Each module has its own goal. Tests that need both lanes for
//! themselves are in `shim_truth`.

#[path = "../alone/mod.rs"]
mod alone;
mod counts;
mod ends;
mod functions;
mod killed;
#[path = "../needs/mod.rs"]
mod needs;
mod numbers;
mod observed;
#[path = "../preload/mod.rs"]
mod preload;
mod refused;
mod share;
mod stage;
mod zoo;
