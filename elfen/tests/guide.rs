//! Goal: the commands in the documents work. Method: the `sh` blocks of each section form one
//! script. It runs unchanged in its own folder, with the commands of this build. The scripts need
//! root, and the programs that the documents name.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

mod needs;
mod preload;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

struct Section {
    title: String,
    script: String,
}

/// The `sh` blocks of a document, by their headings.
fn sections(document: &str) -> Vec<Section> {
    let mut sections = vec![Section { title: "the beginning".to_owned(), script: String::new() }];
    let mut inside = false;
    for line in document.lines() {
        let last = sections.last_mut().unwrap();
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if inside => last.script += &format!("{line}\n"),
            _ => {
                if let Some(title) = line.strip_prefix("## ") {
                    sections.push(Section { title: title.to_owned(), script: String::new() });
                }
            }
        }
    }
    sections.retain(|section| !section.script.is_empty());
    sections
}

fn run_document(document: &str) {
    needs::root();
    needs::idle_lanes();
    let built = Path::new(env!("CARGO_BIN_EXE_elfen")).parent().unwrap();
    let text = fs::read_to_string(root().join(document)).unwrap();
    let sections = sections(&text);
    assert!(!sections.is_empty(), "{document} has commands");
    for Section { title, script } in sections {
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
        let name = format!("{document}, {title}");
        fs::write(folder.path().join("script"), format!("set -eu\n{script}")).unwrap();
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
        assert!(
            output.status.success(),
            "{name}: {}\n{}\n{}",
            output.status,
            printed[0],
            printed[1]
        );
    }
}

/// Goal: README and guide describe the same installation. Method: in each, the first block that
/// calls apt.
#[test]
fn the_guide_installs_as_the_readme_does() {
    let block = |document: &str| {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let block = text.split("```").find(|block| block.contains("apt install"));
        block.expect(document).to_owned()
    };
    assert_eq!(block("README.md"), block("docs/guide.md"));
}

#[test]
#[ignore = "needs root, two idle CPUs, nginx, Redis, Java and Lucene"]
fn the_commands_of_the_guide_work() {
    run_document("docs/guide.md");
}

#[test]
#[ignore = "needs root, two idle CPUs, nginx, Redis, Java and Lucene"]
fn the_commands_of_the_readme_work() {
    run_document("README.md");
}
