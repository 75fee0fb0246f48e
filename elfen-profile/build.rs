//! Builds the code that bursts need inside a program, with the layout of a thread's words.

#[path = "../elfen-instrument/stream/src/layout.rs"]
#[expect(dead_code, reason = "the C code needs some of the numbers only")]
#[expect(unreachable_pub, reason = "it is a module of a library")]
mod layout;

fn main() {
    println!("cargo::rerun-if-changed=src/bursts/inside.c");
    println!("cargo::rerun-if-changed=../elfen-instrument/stream/src/layout.rs");
    let mut build = cc::Build::new();
    for (name, value) in [
        ("STATE", layout::STATE),
        ("ARMED", layout::ARMED),
        ("RUNS", layout::RUNS),
        ("DONE", layout::DONE),
        ("REFUSED", layout::REFUSED),
        ("EVENTS_GIVEN", layout::EVENTS_GIVEN),
        ("EVENTS_LEFT", layout::EVENTS_LEFT),
        ("BEGAN_AT", layout::BEGAN_AT),
        ("BEGAN_CODE", layout::BEGAN_CODE),
        ("LEFT_AT", layout::LEFT_AT),
        ("BEGAN_TICKS", layout::BEGAN_TICKS),
        ("ENDED_TICKS", layout::ENDED_TICKS),
        ("BEGAN_STACK", layout::BEGAN_STACK),
        ("BEGAN_ADDRESSES", layout::BEGAN_ADDRESSES),
        ("BURST_WORDS", layout::BURST_WORDS),
        ("ADDRESSES_LEFT", layout::ADDRESSES_LEFT),
        ("ADDRESSES_ROOM", layout::ADDRESSES_ROOM),
        ("EVENTS", layout::EVENTS),
        ("KEPT", layout::KEPT),
        ("KEPT_AT", layout::KEPT_AT),
        ("KEPT_BYTES", layout::KEPT_BYTES),
        ("KEPT_MAX", layout::KEPT_MAX),
        ("STACKS", layout::STACKS),
        ("STACK_START", layout::STACK_START),
        ("STACK_LIMIT", layout::STACK_LIMIT),
        ("STACK_BELOW", layout::STACK_BELOW),
        ("STACK_COPY", layout::STACK_COPY),
        ("STACK_COPY_BYTES", layout::STACK_COPY_BYTES),
        ("STACK_BYTES", layout::STACK_BYTES),
        ("THREAD", layout::THREAD),
        ("FEATURES", layout::FEATURES),
        ("FRAME", layout::FRAME),
        ("VECTORS", layout::VECTORS),
        ("VECTORS_BYTES", layout::VECTORS_BYTES),
        ("SAVED_RCX", layout::SAVED_RCX),
    ] {
        build.define(&format!("AT_{name}"), value.to_string().as_str());
    }
    // The section is copied: no call of a library, no canary, no vector registers.
    build
        .file("src/bursts/inside.c")
        .opt_level(2)
        .pic(true)
        .debug(false)
        .flag("-ffreestanding")
        .flag("-fno-builtin")
        .flag("-fno-stack-protector")
        .flag("-fno-asynchronous-unwind-tables")
        .flag("-fcf-protection=none")
        .flag("-mgeneral-regs-only")
        .flag("-fno-jump-tables")
        .compile("elfen_inside");
}
