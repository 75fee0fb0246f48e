//! Tests of the architecture and of the house style.
//!
//! The folder of a crate decides which crates it may depend on. So one rule applies to all crates
//! of a folder, such as a preload library and its tests. The style is checked on the files of the
//! folder. Files that git ignores are left out by name, because a release archive has no git to
//! ask.

mod imports;
mod links;
mod prose;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use imports::{Imports, Module, name};
use serde_json::Value;

/// The layers of a crate's modules, the highest first, with one layer on each line. No layer
/// imports from a higher one.
const LAYERS: [(&str, &str); 5] = [
    ("elfen", "cmd"),
    (
        "elfen_machine",
        "doctor lane_args
        lanes placement
        fence samplers topology
        source systemd
        affinity cgroup hsperf pair pidfd segment
        mapped process
        cpulist",
    ),
    // The lowest layer of Tailor is pure: it uses neither a clock nor the machine.
    (
        "elfen_tailor",
        "cmd
        code_names duty jvm kernel_functions last_minute marks recorder service signals
        account calls causes draw long_code marked neighbours queues rank replay report request \
        runtime segment service_slots stalls timeline trace walk",
    ),
    (
        "experiments",
        "cmd
        profile
        bench faults report expected
        live
        record",
    ),
    (
        "workloads",
        "search
        batch load
        beside
        process text units",
    ),
];

const MAX_LINES: usize = 1000;
const MAX_COLUMNS: usize = 100;
/// The width of a tab, as in editors and in the kernel's style.
const TAB_COLUMNS: usize = 8;

/// Names that do not describe the content of a file.
const NO_NAMES: [&str; 8] =
    ["utils", "common", "types", "manager", "helper", "helpers", "handler", "misc"];

/// Folders of one machine. A file that names such a folder works only there. They are split so that
/// this file does not contain them.
const MACHINE_PATHS: [&str; 2] = [concat!("/wo", "rk/"), concat!("/ro", "ot/")];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace")
}

/// The workspace's own crates, as cargo reads their manifests.
fn crates() -> Vec<Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let arguments = ["metadata", "--format-version", "1", "--no-deps", "--offline"];
    let output = Command::new(cargo).args(arguments).current_dir(root()).output();
    let output = output.expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    metadata["packages"].as_array().expect("a list of packages").clone()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} of {value}"))
}

fn folder_of(package: &Value) -> PathBuf {
    Path::new(text(package, "manifest_path")).parent().expect("a folder").to_owned()
}

/// The top-level folder of a path.
fn top(path: &Path) -> String {
    let inside = path.strip_prefix(root()).unwrap_or_else(|_| panic!("{path:?} is outside"));
    let first = inside.components().next().expect("no crate in the top folder itself");
    first.as_os_str().to_str().expect("UTF-8").to_owned()
}

/// The dependencies of the built crate, without those of its tests.
fn dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    let all = package["dependencies"].as_array().expect("a list of dependencies");
    all.iter().filter(|dependency| dependency["kind"] != "dev")
}

/// The folders of crates and their allowed dependencies, from the table in ARCHITECTURE.md.
fn design() -> BTreeMap<String, BTreeSet<String>> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("a document");
    let (_, table) = text.split_once("| may depend on |\n").expect("a table of crates");
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').collect();
        let [_, folder, _, dependencies, _] = cells[..] else { panic!("{line}") };
        // The table may name a crate with a folder inside of it.
        let names = dependencies.split('`').skip(1).step_by(2);
        let names = names.map(|name| name.split('/').next().unwrap_or(name).to_owned());
        (folder.trim().trim_matches('`').to_owned(), names.collect())
    };
    rows.map(row).collect()
}

/// The forbidden dependencies of a crate, as messages.
fn forbidden(package: &Value, design: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let (name, folder) = (text(package, "name"), top(&folder_of(package)));
    let Some(allowed) = design.get(&folder) else {
        return vec![format!("{name}: no rule says what crates in {folder}/ may depend on")];
    };
    let check = |dependency: &Value| match dependency["path"].as_str() {
        Some(path) => {
            let to = top(Path::new(path));
            let fine = to == folder || allowed.contains(&to);
            (!fine).then(|| format!("{name}: {folder}/ may not depend on {to}/"))
        }
        None => {
            // The runtime runs inside other programs, so the table also lists its external crates.
            let external = text(dependency, "name");
            let fine = folder != "elfen-rt" || allowed.contains(external);
            (!fine).then(|| format!("{name}: the runtime may not use {external}"))
        }
    };
    dependencies(package).filter_map(check).collect()
}

/// Goal: crates have only the dependencies in ARCHITECTURE.md, and each folder there has crates.
/// Method: compare the manifests, as cargo reads them, with the table.
#[test]
fn dependencies_are_those_of_the_design() {
    let crates = crates();
    let design = design();
    let folders: BTreeSet<String> = crates.iter().map(|package| top(&folder_of(package))).collect();
    let listed: BTreeSet<String> = design.keys().cloned().collect();
    assert!(listed.is_subset(&folders) && folders.contains("elfen-rt"), "{listed:?}, {folders:?}");
    let forbidden: Vec<String> =
        crates.iter().flat_map(|package| forbidden(package, &design)).collect();
    assert!(forbidden.is_empty(), "{}", forbidden.join("\n"));
}

/// Goal: the operator's program, which root runs, links no HTTP library. Method: the list of crates
/// that cargo builds for it.
#[test]
fn elfen_links_no_http_library() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let tree = |package: &str| {
        let words = ["tree", "--offline", "--edges", "normal", "--prefix", "none", "--package"];
        let mut command = Command::new(cargo.as_str());
        let output = command.args(words).arg(package).current_dir(root()).output();
        let output = output.expect("cargo starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let has =
        |tree: &str, name: &str| tree.lines().any(|line| line.split(' ').next() == Some(name));
    let (elfen, hedge) = (tree("elfen"), tree("elfen-hedge"));
    for name in ["hyper", "tokio"] {
        assert!(has(&hedge, name) && !has(&elfen, name), "{name}");
    }
}

/// Goal: the test of dependencies can fail. Method: manifests that break each rule.
#[test]
fn forbidden_dependencies_are_found() {
    let package = |folder: &str, dependencies: Value| {
        let manifest = root().join(folder).join("Cargo.toml");
        serde_json::json!({
            "name": "it", "manifest_path": manifest, "dependencies": dependencies
        })
    };
    let on = |folder: &str, kind: Value| {
        let path = root().join(folder);
        serde_json::json!([{ "name": "other", "kind": kind, "path": path }])
    };
    let external = |name: &str, kind: Value| serde_json::json!([{ "name": name, "kind": kind }]);
    let cases = [
        (package("workloads", on("experiments", Value::Null)), 1),
        (package("elfen-rt", on("kernel", "build".into())), 1),
        (package("elfen-rt", on("kernel", "dev".into())), 0),
        (package("kernel", on("elfen-rt", Value::Null)), 0),
        (package("elfen-instrument/preload", on("elfen-instrument", Value::Null)), 0),
        (package("elfen-rt", external("serde", Value::Null)), 1),
        (package("elfen-rt", external("libc", Value::Null)), 0),
        (package("elfen-rt", external("proptest", "dev".into())), 0),
        (package("elfen", external("serde", Value::Null)), 0),
        (package("elsewhere", external("serde", Value::Null)), 1),
    ];
    let design = design();
    for (package, mistakes) in cases {
        assert_eq!(forbidden(&package, &design).len(), mistakes, "{package}");
    }
}

/// The root file of each built crate, by the crate's name.
fn roots() -> Vec<(String, PathBuf)> {
    let of_package = |package: &Value| {
        let targets = package["targets"].as_array().expect("a list of targets").clone();
        let built = targets.into_iter().filter(|target| {
            let kinds = target["kind"].as_array().expect("a list of kinds");
            kinds
                .iter()
                .any(|kind| matches!(kind.as_str(), Some("bin" | "lib" | "cdylib" | "rlib")))
        });
        let root = |target: Value| {
            (text(&target, "name").to_owned(), PathBuf::from(text(&target, "src_path")))
        };
        built.map(root).collect::<Vec<_>>()
    };
    crates().iter().flat_map(of_package).collect()
}

/// Goal: imports have no cycles, so a reader can begin at the lowest file. Method: imports between
/// the files of each crate.
#[test]
fn no_imports_go_in_circles() {
    let mut found = Vec::new();
    for (crate_name, root) in roots() {
        let circles = Imports::of(&root).circles().into_iter();
        found.extend(circles.map(|files| format!("{crate_name}: {files}")));
    }
    assert!(found.is_empty(), "files that take from each other:\n{}", found.join("\n"));
}

/// The imports of a crate that lead to a higher layer, as messages.
fn upward(imports: &Imports, layers: &str) -> Vec<String> {
    let layer = |module: &Module| {
        let top = module.first()?;
        let is_in = |layer: &str| layer.split_whitespace().any(|name| name == top);
        Some(layers.lines().position(is_in).unwrap_or(usize::MAX))
    };
    let wrong = |(from, to): (&Module, &Module)| {
        let (below, above) = layer(from).zip(layer(to))?;
        let between = format!("{} takes from {}", name(from), name(to));
        match below.max(above) {
            usize::MAX => Some(format!("{between}: no layer")),
            _ => (below > above).then_some(between),
        }
    };
    imports.arrows().filter_map(wrong).collect()
}

/// Goal: within a crate, a lower layer does not depend on a higher one. Method: compare imports
/// between modules with `LAYERS`.
#[test]
fn no_import_runs_back_up() {
    let roots = roots();
    for (crate_name, layers) in LAYERS {
        let (_, root) =
            roots.iter().find(|(name, _)| *name == crate_name).expect("a crate of ours");
        let upward = upward(&Imports::of(root), layers);
        assert!(upward.is_empty(), "{crate_name}:\n{}", upward.join("\n"));
    }
}

/// Goal: the two tests above can fail, and accept text that only looks like an import. Method:
/// made-up crates with their expected faults.
#[test]
fn circles_and_imports_upward_are_found() {
    let circles = |files: &[(&str, &str)]| imports::made_up(files).circles().into_iter().next();
    let (a, b) = (("a", "use crate::b::{self, C as D};"), ("b", "use super::a; use super::E;"));
    assert_eq!(circles(&[("", "mod a; mod b;"), a, b]).as_deref(), Some("a, b"));
    let (uses, passes_on) = ("mod a; use a::F;", "mod a; pub use self::a::F;");
    for root in [uses, passes_on, "mod a; fn f() { a::f() }"] {
        let taken = [("", root), ("a", "fn f() -> crate::E { x }")];
        assert_eq!(circles(&taken).as_deref(), Some("the root, a"), "{root}");
        assert_eq!(circles(&[("", root), ("a", "use std::io;")]), None, "{root}");
    }
    let three = [
        ("", "mod a; mod b;"),
        ("a", "use crate::b::c::G;"),
        ("b", "mod c; use super::a::H;"),
        ("b::c", "use super::I;"),
    ];
    assert_eq!(circles(&three).as_deref(), Some("a, b, b::c"));
    let innocent = [
        ("", "mod a; mod b; // use b::X;\nconst S: &str = \"use b::X;\";"),
        ("a", "use super::E; #[cfg(test)] mod tests { use crate::b::X; } const Q: char = '\"';"),
        ("b", "use crate::a::X; #[cfg(test)] use crate::a; #[cfg(all(test, loom))] mod model;"),
    ];
    assert_eq!(circles(&innocent), None);
    let layered = imports::made_up(&[("", "mod a; mod b;"), ("a", "use crate::b::X;"), ("b", "")]);
    assert_eq!(upward(&layered, "a\nb"), Vec::<String>::new());
    assert_eq!(upward(&layered, "b\na"), ["a takes from b"]);
    assert_eq!(upward(&layered, "a"), ["a takes from b: no layer"]);
}

/// Every file of the repository, without git's own files and build output.
fn files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the repository can be read") {
            let path = entry.expect("so can its entries").path();
            let kind = fs::symlink_metadata(&path).expect("an entry has a kind");
            let name = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
            // cargo puts this file into its output folder, wherever CARGO_TARGET_DIR is.
            let build_output = name == "target" || path.join("CACHEDIR.TAG").exists();
            // `.git` is a folder, or a file in a work tree.
            if name == ".git" {
                continue;
            }
            if kind.is_dir() && !build_output {
                folders.push(path);
            } else if kind.is_file() {
                files.push(path);
            }
        }
    }
    assert!(files.len() > 20, "{files:?}");
    files
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| extensions.contains(&extension))
}

/// Asserts that no file breaks a rule. `broken` returns the fault of a file.
fn assert_none(rule: &str, broken: impl Fn(&Path) -> Option<String>) {
    let name = |path: &Path| path.strip_prefix(root()).unwrap_or(path).display().to_string();
    let check = |path: &PathBuf| broken(path).map(|why| format!("{}: {why}", name(path)));
    let broken: Vec<String> = files().iter().filter_map(check).collect();
    assert!(broken.is_empty(), "{rule}:\n{}", broken.join("\n"));
}

/// Goal: a file has one subject and can be read in one go. Method: count its lines.
#[test]
fn no_source_file_is_too_long() {
    assert_none("source files have at most 1000 lines", |path| {
        let source = has_extension(path, &["rs", "c", "h"]);
        let lines = source.then(|| fs::read_to_string(path).expect("UTF-8").lines().count())?;
        (lines > MAX_LINES).then(|| format!("{lines} lines"))
    });
}

/// Asserts that no line of files with these extensions breaks a rule.
fn assert_no_lines(rule: &str, extensions: &[&str], breaks: impl Fn(&str) -> bool) {
    assert_none(rule, |path| {
        let source = has_extension(path, extensions);
        let text = source.then(|| fs::read_to_string(path).expect("UTF-8"))?;
        let lines = (1..).zip(text.lines()).filter(|(_, line)| breaks(line));
        let lines: Vec<String> = lines.map(|(number, _)| number.to_string()).collect();
        (!lines.is_empty()).then(|| format!("lines {}", lines.join(", ")))
    });
}

/// Goal: two files fit side by side on a screen. Method: the columns of every line, including
/// comments, which rustfmt does not wrap.
#[test]
fn no_line_of_source_is_too_long() {
    let columns = |line: &str| {
        line.chars().fold(0, |at, c| match c {
            '\t' => at / TAB_COLUMNS * TAB_COLUMNS + TAB_COLUMNS,
            _ => at + 1,
        })
    };
    let sources = ["rs", "c", "h", "S", "sh", "js"];
    assert_no_lines("lines of source have at most 100 columns", &sources, |line| {
        columns(line) > MAX_COLUMNS
    });
}

/// Goal: a test that lacks something is ignored or fails, but never passes. Method: look for
/// functions and messages of skipped tests in all sources.
#[test]
fn no_test_skips_itself() {
    const WORDS: [&str; 4] = [
        concat!("\"skip", "ped: "),
        concat!(" skip", "ped("),
        concat!(" sk", "ip("),
        concat!("_or_", "skip"),
    ];
    let rule = "tests that lack something are `#[ignore]`d, and panic when asked for";
    assert_no_lines(rule, &["rs"], |line| WORDS.iter().any(|word| line.contains(word)));
}

/// Goal: an example in a doc comment is either run or marked as text. Crates without doc tests
/// (`doctest = false`) must mark fenced blocks as `text`. Method: all fenced blocks outside of
/// elfen-rt.
#[test]
fn examples_in_comments_are_run_or_none() {
    assert_none("a fenced block in a doc comment is ```text, but in elfen-rt", |path| {
        let others = has_extension(path, &["rs"]) && !path.starts_with(root().join("elfen-rt"));
        let text = fs::read_to_string(path).ok().filter(|_| others)?;
        let words = text.lines().map(str::trim_start).filter(|line| line.starts_with("//"));
        let mut fences = words.filter_map(|line| line.get(3..)?.trim_start().strip_prefix("```"));
        let mut wrong = None;
        while let Some(opens) = fences.next() {
            wrong = wrong.or((opens != "text").then(|| format!("```{opens}")));
            fences.next();
        }
        wrong
    });
}

/// Goal: names describe the content. Method: each part of each path, without its extension.
#[test]
fn no_file_is_named_after_nothing() {
    assert_none("names are nouns of this field", |path| {
        let inside = path.strip_prefix(root()).unwrap_or(path);
        let empty = inside.iter().find(|part| {
            let stem = Path::new(part).file_stem().and_then(|stem| stem.to_str());
            stem.is_some_and(|stem| NO_NAMES.contains(&stem))
        });
        empty.map(|part| format!("{part:?}"))
    });
}

/// Goal: the repository works in any folder. Method: look for folders of one machine in every file.
#[test]
fn no_file_names_a_folder_of_one_machine() {
    assert_none("no paths of one machine", |path| {
        // Binary files count, too: the line info of a compiled eBPF object names the folder of its
        // build.
        let bytes = fs::read(path).expect("files of the repository can be read");
        let text = String::from_utf8_lossy(&bytes);
        let found = MACHINE_PATHS.iter().find(|machine| text.contains(**machine));
        found.map(|machine| format!("{machine:?}"))
    });
}

/// The texts between backquotes in a document, without blocks of commands.
fn named_in(document: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(document)).expect("a document");
    let prose = text.split("```").step_by(2).collect::<String>();
    prose.split('`').skip(1).step_by(2).map(|name| name.replace('\n', " ")).collect()
}

/// Parses a path of the repository, or the end of one, with its function; `None` for other texts.
fn place(name: &str) -> Option<(&str, Option<&str>)> {
    let (path, function) = match name.split_once(": ") {
        Some((path, function)) => (path, Some(function)),
        None => (name, None),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let is_path = path.contains('/') || has_extension(Path::new(path), &["rs", "c", "h"]);
    let ours = is_path && !path.starts_with(['/', '.', '-']) && path.chars().all(plain);
    ours.then_some((path, function))
}

/// Goal: the documents match the code. Method: every path that they name exists, and defines the
/// named function.
#[test]
fn what_the_documents_name_is_there() {
    let files = files();
    let mut functions = 0;
    let pages = fs::read_dir(root().join("docs/design")).expect("the pages of ARCHITECTURE.md");
    let pages =
        pages.map(|page| format!("docs/design/{}", page.expect("a page").file_name().display()));
    let documents = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(str::to_owned);
    for document in documents.into_iter().chain(pages) {
        for name in named_in(&document) {
            let Some((path, function)) = place(&name) else { continue };
            let is_it = |file: &&PathBuf| file.ancestors().any(|part| part.ends_with(path));
            let file = files.iter().find(is_it);
            let file = file.unwrap_or_else(|| panic!("{document}: there is no {path}"));
            let Some(function) = function else { continue };
            let source = fs::read_to_string(file).expect("UTF-8");
            let defined = ["fn ", "int ", "void "].iter().any(|kind| {
                let before = |end| source.contains(&format!("{kind}{function}{end}"));
                before("(") || before("<")
            });
            assert!(defined, "{document}: {path} has no {function}");
            functions += 1;
        }
    }
    assert!(functions > 10, "ARCHITECTURE.md names the functions that a signal passes");
}

/// Goal: each crate tells its reader what it is. Method: a README, or a header in its root file.
#[test]
fn every_crate_says_what_it_is() {
    for package in crates() {
        let folder = folder_of(&package);
        let root_files = ["README.md", "src/lib.rs", "src/main.rs"].map(|file| folder.join(file));
        let says = |path: &PathBuf| match fs::read_to_string(path) {
            Ok(content) => has_extension(path, &["md"]) || content.starts_with("//!"),
            Err(_) => false,
        };
        assert!(root_files.iter().any(says), "{folder:?}: neither a README nor a header");
    }
}
