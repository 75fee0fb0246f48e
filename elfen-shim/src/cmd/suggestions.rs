//! Suggestions at the end of the summary: what else could be observed of this program. They are
//! printed only if the user named no signals.

use elfen_console::shell;

use super::args::ObserveArgs;
use crate::summary::Summary;
use crate::symbols::{FunctionReporting, GlobalKind, Symbols};

/// Names of a program's own writable globals, from its symbols.
pub(super) fn own_globals(symbols: Option<&Symbols>) -> Vec<String> {
    let all = symbols.map_or(&[][..], |symbols| &symbols.globals);
    // Globals of the C library that the linker copies into programs.
    const NOT_ITS_OWN: [&str; 8] =
        ["stdin", "stdout", "stderr", "environ", "optarg", "optind", "opterr", "optopt"];
    let own = |name: &str| !name.starts_with('_') && !name.contains(['@', '.']);
    let own = |name: &str| own(name) && !NOT_ITS_OWN.contains(&name);
    let fits = |size| crate::signal_spec::Width::of_size(size).is_some();
    let writable = all.iter().filter(|one| one.kind == GlobalKind::Writable && fits(one.size));
    writable.map(|one| one.name.clone()).filter(|name| own(name)).collect()
}

/// The suggestions for this run. `no_map` is the reason why the task map is missing.
pub(super) fn suggestions(
    args: &ObserveArgs,
    summary: &Summary,
    no_map: Option<&str>,
    reporting: Option<FunctionReporting>,
    globals: &[String],
) -> Vec<String> {
    let mut more = Vec::new();
    if !args.watch.is_empty() {
        return more;
    }
    if let Some(why) = no_map {
        more.push(format!(
            "the running task in every sample, not every 100 us: as root, or in group elfen if \
             elfend runs (now: {why})"
        ));
    }
    let Some(program) = args.program.first() else {
        return more;
    };
    let program = shell::word(&program.to_string_lossy());
    more.push(match globals {
        [] => format!(
            "globals of its libraries, and its own if its symbols are installed, without a \
             rebuild: `elfen shim signals {program}` lists them"
        ),
        [first, rest @ ..] => format!(
            "its globals, without a rebuild, as in --watch {first}: `elfen shim signals {program}` \
             lists {}",
            match rest.len() {
                0 => "more of its libraries".to_owned(),
                n => format!("{n} more, and its libraries'"),
            }
        ),
    });
    if reporting.is_none() {
        more.push(
            "its functions: build it with gcc's -fpatchable-function-entry=43 and \
             -mfunction-return=thunk-extern, and link it with libelfen_return.a"
                .to_owned(),
        );
    }
    if summary.tags.iter().all(|tag| tag.signal != "tag") {
        more.push(
            "phases that you name in its source: elfen_tag(\"parse\") of elfen_tag.h in C, \
             elfen_rt::tag!(\"parse\") in Rust"
                .to_owned(),
        );
    }
    if !args.live {
        let arguments = if args.program.len() > 1 { " .." } else { "" };
        more.push(format!(
            "the same every second: `elfen shim --live -- {program}{arguments}`; each run and its \
             time: -o run.shim, and then `elfen lab report run.shim --html run.html`"
        ));
    }
    more
}
