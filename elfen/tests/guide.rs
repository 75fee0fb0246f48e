//! Goal: the commands in the documents work. Method: the `sh` blocks of a page form one script. It
//! runs unchanged in its own folder, with the commands of this build. The scripts need root, and
//! the programs that the pages name.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

mod needs;
mod preload;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The `sh` blocks of a page as one script.
fn script(page: &str) -> String {
    let mut script = String::new();
    let mut inside = false;
    for line in page.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if inside => script += &format!("{line}\n"),
            _ => (),
        }
    }
    script
}

fn run_page(page: &str) {
    /// Only one page runs at a time: all pages use the same lanes.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    needs::root();
    needs::idle_lanes();
    let built = Path::new(env!("CARGO_BIN_EXE_elfen")).parent().unwrap();
    let script = script(&fs::read_to_string(root().join(page)).unwrap());
    assert!(!script.is_empty(), "{page} has commands");
    let folder = tempfile::tempdir().unwrap();
    // nginx's workers, which do not run as root, read the served files from this folder.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let tools = folder.path().join("tools");
    fs::create_dir_all(folder.path().join("target")).unwrap();
    symlink(built, folder.path().join("target/release")).unwrap();
    symlink(root().join("workloads"), folder.path().join("workloads")).unwrap();
    fs::create_dir(&tools).unwrap();
    fs::write(tools.join("sudo"), "#!/bin/sh\nexec \"$@\"\n").unwrap();
    fs::set_permissions(tools.join("sudo"), fs::Permissions::from_mode(0o755)).unwrap();
    let usual = std::env::var("PATH").unwrap();
    let path = format!("{}:{}:{usual}:/usr/sbin", built.display(), tools.display());
    // A script that fails ends what it started in the background.
    let script = format!("set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}");
    fs::write(folder.path().join("script"), script).unwrap();
    fs::write(folder.path().join("backup.tar"), vec![7; 3_000_000]).unwrap();
    let output = Command::new("timeout")
        .args(["-k", "5", "300", "bash", "script"])
        .current_dir(folder.path())
        .env("PATH", path)
        .env("ELFEN_LIB", preload::library())
        .env("ELFEN_INCLUDE", root().join("elfen-rt/include"))
        .env("ELFEN_EXAMPLES", root().join("elfen-rt/examples"))
        .env_remove("ELFEN_LANES")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{page}: {}\n{}\n{}", output.status, printed[0], printed[1]);
}

/// Makes a test for each page. The page can then be read from the name of a test that failed.
macro_rules! pages {
    ($($test:ident: $page:literal, $needs:literal;)*) => {
        const PAGES: &[&str] = &[$($page),*];
        $(
            #[test]
            #[ignore = $needs]
            fn $test() {
                run_page($page);
            }
        )*
    };
}

pages! {
    the_readme_works: "README.md", "needs root and two idle CPUs";
    the_quickstart_works: "docs/quickstart.md", "needs root and two idle CPUs";
    the_guide_to_redis_works: "docs/guides/redis.md", "needs root, two idle CPUs and Redis";
    the_guide_to_nginx_works: "docs/guides/nginx.md", "needs root, two idle CPUs and nginx";
    the_guide_to_own_services_works: "docs/guides/own-service.md",
        "needs root, two idle CPUs and a C compiler";
    the_guide_to_java_works: "docs/guides/java.md",
        "needs root, two idle CPUs, Java and Lucene";
    the_guide_to_fences_works: "docs/guides/fences.md", "needs root, two idle CPUs and cgroups";
    the_guide_to_reports_works: "docs/guides/reports.md", "needs root and two idle CPUs";
    the_guide_to_tail_latency_works: "docs/guides/tail-latency.md",
        "needs root, two idle CPUs and Redis";
    the_guide_to_observing_works: "docs/guides/observing.md",
        "needs root, two idle CPUs and a C compiler";
    the_guide_to_profiling_works: "docs/guides/profiling.md",
        "needs root, two idle CPUs and a C compiler";
    the_guide_to_pipelines_works: "docs/guides/pipeline.md", "needs a C compiler and ptrace";
    the_guide_to_hedging_works: "docs/guides/hedge.md", "needs root and two idle CPUs";
}

/// All pages under a folder.
fn pages_under(folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages_under(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

/// Goal: no page is forgotten. Method: every page under docs that has commands, and no test above.
#[test]
#[ignore = "needs root and two idle CPUs"]
fn the_other_pages_work() {
    let mut pages = Vec::new();
    pages_under(&root().join("docs"), &mut pages);
    for page in pages {
        let name = page.strip_prefix(root()).unwrap().to_str().unwrap();
        let has_commands = !script(&fs::read_to_string(&page).unwrap()).is_empty();
        if has_commands && !PAGES.contains(&name) {
            run_page(name);
        }
    }
}

/// Goal: the quickstart installs the tarball as the page about installation does. Method: in each,
/// the first block that unpacks it into /opt.
#[test]
fn the_quickstart_installs_as_the_install_page_does() {
    let block = |document: &str| {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let block = text.split("```").find(|block| block.contains("-C /opt/elfen"));
        block.expect(document).to_owned()
    };
    assert_eq!(block("docs/install.md"), block("docs/quickstart.md"));
}
