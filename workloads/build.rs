//! Builds the thesis's micro benchmarks with `-pg`, as the thesis did, so that their functions call
//! `mcount` at their entry.

fn main() {
    println!("cargo::rerun-if-changed=c");
    cc::Build::new()
        .file("c/micro.c")
        .flag("-pg")
        // Always optimized, also in debug builds, because this code is measured. No fused
        // multiply-add, so that the sums are those of the Rust programs.
        .opt_level(2)
        .flag("-ffp-contract=off")
        .warnings(true)
        .extra_warnings(true)
        .compile("elfen_micro");
}
