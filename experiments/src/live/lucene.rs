//! Runs the search service of `workloads/lucene` in Java. The sources are in this executable and
//! are compiled once. Each server is one start of the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::LiveError;
use super::os::{ChildSetup, Rank};
use super::process::Process;
use super::scratch::Scratch;

const SOURCES: [(&str, &str); 4] = [
    ("build", include_str!("../../../workloads/lucene/build")),
    ("java/Corpus.java", include_str!("../../../workloads/lucene/java/Corpus.java")),
    ("java/Marks.java", include_str!("../../../workloads/lucene/java/Marks.java")),
    ("java/Search.java", include_str!("../../../workloads/lucene/java/Search.java")),
];
const MAIN: &str = "elfen.Search";
const WORKERS: &str = "1";
/// The time limit for compiling on a busy machine.
const BUILD_TIMEOUT: Duration = Duration::from_secs(120);
/// The time limit for indexing the articles.
const SERVE_TIMEOUT: Duration = Duration::from_secs(120);
/// The value of `elfen-load --template`.
pub(crate) const TEMPLATE: &str = "/search?q={}";

#[derive(Debug)]
pub(crate) struct Lucene {
    class_path: String,
    pub(crate) questions: PathBuf,
}

/// One running virtual machine.
#[derive(Debug)]
pub(crate) struct Java {
    process: Process,
    pub(crate) port: u16,
}

impl Lucene {
    /// Compiles the service into the folder of this run, and makes it generate questions.
    pub(crate) fn build(scratch: &Scratch, questions: u32) -> Result<Self, LiveError> {
        let (sources, classes) = (scratch.path("lucene"), scratch.path("classes"));
        let write = |path: &Path, text: &str| {
            fs::write(path, text).map_err(LiveError::io(format!("writing {}", path.display())))
        };
        for folder in [&sources.join("java"), &classes] {
            fs::create_dir_all(folder)
                .map_err(LiveError::io(format!("making {}", folder.display())))?;
        }
        for (name, text) in SOURCES {
            write(&sources.join(name), text)?;
        }
        let mut command = Command::new("bash");
        command.arg(sources.join("build")).arg(&classes);
        let mut build = Process::start_anywhere("workloads/lucene", command, scratch)?;
        let output = build.finish(None, BUILD_TIMEOUT)?;
        let class_path = class_path(&output).ok_or_else(|| LiveError::Garbled {
            name: "workloads/lucene/build".to_owned(),
            why: format!("{output:?} has no class path"),
        })?;
        let lucene = Self { class_path, questions: scratch.path("questions") };
        let mut command = lucene.java(&[]);
        command.args(["questions", &questions.to_string()]);
        let mut asks = Process::start_anywhere("java", command, scratch)?;
        write(&lucene.questions, &asks.finish(None, SERVE_TIMEOUT)?)?;
        Ok(lucene)
    }

    fn java(&self, options: &[String]) -> Command {
        let mut command = Command::new("java");
        command.args(options).args(["-cp", &self.class_path, MAIN]);
        command
    }

    /// Starts a virtual machine on this port, or on a free one, and waits until it serves.
    pub(crate) fn serve(
        &self,
        options: &[String],
        articles: u32,
        port: Option<u16>,
        scratch: &Scratch,
    ) -> Result<Java, LiveError> {
        let chosen = port.map(|port| format!("-Delfen.port={port}"));
        let told = "-Delfen.told=true".to_owned();
        let options: Vec<String> = options.iter().cloned().chain([told]).chain(chosen).collect();
        let mut command = self.java(&options);
        command.args(["serve", &articles.to_string(), WORKERS]);
        let setup = ChildSetup { takes_input: true, ..ChildSetup::anywhere(Rank::Normal) };
        let mut process = Process::start("java", command, &setup, scratch)?;
        let port = process.wait_for(SERVE_TIMEOUT, |process| {
            process.stdout_text().strip_suffix('\n')?.parse().ok()
        })?;
        Ok(Java { process, port })
    }
}

impl Java {
    pub(crate) fn check_alive(&mut self) -> Result<(), LiveError> {
        self.process.check_alive()
    }

    /// Asks the virtual machine to collect its whole heap. It does so shortly afterwards.
    pub(crate) fn collect(&self) -> Result<(), LiveError> {
        self.process.write_line("collect")
    }

    /// Returns the number of minor page faults so far.
    pub(crate) fn page_faults(&self) -> Option<u64> {
        let line = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).ok()?;
        // The process's name, in parentheses, may contain any characters. minflt is the 10th field
        // of proc(5).
        line.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
    }
}

/// Returns the class path in the last line of the script's output, which is the command of the
/// service.
fn class_path(output: &str) -> Option<String> {
    let line = output.lines().last()?.strip_prefix("java -cp ")?;
    Some(line.rsplit_once(&format!(" {MAIN} "))?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_prints_the_class_path() {
        let output = "Note: x\njava -cp /tmp/a b:/usr/c.jar elfen.Search serve 20000 1\n";
        assert_eq!(class_path(output).as_deref(), Some("/tmp/a b:/usr/c.jar"));
        assert_eq!(class_path("javac: no"), None);
    }
}
