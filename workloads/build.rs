//! Builds the thesis's micro benchmarks with `-pg`, as the thesis did: their functions ask `mcount`
//! at their entry.

fn main() {
    println!("cargo::rerun-if-changed=c");
    cc::Build::new()
        .file("c/micro.c")
        .flag("-pg")
        // Always the code that is measured, and the same sums as in Rust: no fused multiply-add.
        .opt_level(2)
        .flag("-ffp-contract=off")
        .warnings(true)
        .extra_warnings(true)
        .compile("elfen_micro");
}
